"""Which local checkpoints belong to the present run: ``local_checkpoints.json`` in the run folder.

Each start and each rollback begins a generation at a step. A save of an earlier generation is
valid up to the lowest step at which a later generation began; after it, training took another path.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_deberta.checkpoint.local.parts import SaveId
from megatron_deberta.errors import CheckpointError
from megatron_deberta.files import write_atomically
from megatron_deberta.parsing import Count, dump_json, parse_json, read_json

FILE_NAME = "local_checkpoints.json"
_WHAT = "a history of local checkpoints"
_REMEDY = "delete it to resume from the checkpoints in the run folder"


@dataclass(frozen=True, slots=True)
class History:
    """Generations of a run.

    Attributes:
        run: random identity of the run.
        starts: generation and step of its start, both increasing; ends with the present one.
    """

    run: str
    starts: tuple[tuple[Count, Count], ...] = ()

    @classmethod
    def new(cls) -> History:
        """Return the history of a new run."""
        return cls(secrets.token_hex(16))

    @classmethod
    def of_run(cls, run_dir: str | os.PathLike[str]) -> History | None:
        """Read the history of a run; None: it has none.

        Raises:
            CheckpointError: the file is damaged.
        """
        path = Path(run_dir) / FILE_NAME
        try:
            return read_json(path, cls, _WHAT, error=CheckpointError, remedy=_REMEDY)
        except FileNotFoundError:
            return None

    @classmethod
    def from_json(cls, content: str) -> History:
        """Return the history from ``to_json``."""
        return parse_json(content, cls, FILE_NAME, _WHAT, error=CheckpointError, remedy=_REMEDY)

    def to_json(self) -> bytes:
        """Return the content of the file."""
        return dump_json(self)

    @property
    def generation(self) -> int:
        """The present generation; 0: none has begun."""
        return self.starts[-1][0] if self.starts else 0

    def began(self, step: int) -> History:
        """Return the history with one more generation, which starts at ``step``."""
        # An earlier start at a later step sets no limit that the new one does not set.
        kept = tuple(start for start in self.starts if start[1] < step)
        return History(self.run, (*kept, (self.generation + 1, step)))

    def is_valid(self, save: SaveId) -> bool:
        """Return whether training has not left the path on which a save was made."""
        later = (step for generation, step in self.starts if generation > save.generation)
        return save.step <= min(later, default=save.step)

    def write(self, run_dir: str | os.PathLike[str], check: Callable[[], None]) -> None:
        """Write the file after a check of the run folder's lock.

        Raises:
            OSError: the disk is full or not writable.
        """
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        check()
        write_atomically(Path(run_dir) / FILE_NAME, self.to_json())
