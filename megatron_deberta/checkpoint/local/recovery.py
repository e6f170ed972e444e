"""Recovery of the newest complete local checkpoint at a start.

The ranks list the parts that their nodes hold. The newest save of which every part is on a node,
as an original or as a replica, and whose files have their SHA-256, is copied into the run folder
and committed there like any checkpoint, from which the run resumes on any layout.

``local_checkpoints.json`` in the run folder says which local saves belong to the present run. Each
start and each rollback begins a generation at a step. A save of an earlier generation is valid up
to the lowest step at which a later generation began; after it, training took another path.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_deberta.checkpoint import writer
from megatron_deberta.checkpoint.layout import part_index_file, part_index_json, state_kinds
from megatron_deberta.checkpoint.local.parts import (
    LISTING_SECONDS,
    SLOWEST_BYTES_PER_SECOND,
    PartManifest,
    SaveId,
    held_parts,
    is_intact,
    part_dir,
    within,
)
from megatron_deberta.checkpoint.local.saver import Nodes
from megatron_deberta.checkpoint.writer import Fence
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import CheckpointError
from megatron_deberta.files import adopt_mode, fsync_path, write_atomically, write_durably
from megatron_deberta.parsing import Count, dump_json, parse_json, read_json

logger = logging.getLogger(__name__)

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


class _Candidate(NamedTuple):
    """A save that some nodes hold parts of; ordered by step."""

    step: int
    generation: int
    world_size: int
    digest: str

    @classmethod
    def of(cls, part: PartManifest) -> _Candidate:
        return cls(part.save.step, part.save.generation, part.world_size, part.digest)


@dataclass(frozen=True, slots=True)
class LocalRecovery:
    """Copies local checkpoints into the run folder.

    Attributes:
        run_dir: folder of the run.
        folder: folder of the run on this node.
        groups: the rank grid.
        nodes: the nodes.
        fence: lock of the run folder.
    """

    run_dir: str | os.PathLike[str]
    folder: Path
    groups: ProcessGroups
    nodes: Nodes
    fence: Fence

    def recover(self, history: History, newest: int) -> Path | None:
        """Commit the newest complete local save to the run folder. Collective over all ranks.

        Args:
            history: generations of the run.
            newest: step of the newest checkpoint in the run folder; -1: there is none.

        Returns:
            The committed checkpoint; None: no local save is complete and newer.

        Raises:
            CheckpointError: it cannot be written to the run folder.
        """
        held: list[PartManifest] = within(LISTING_SECONDS, lambda: held_parts(self.folder), [])
        # Several ranks of a node list the same folder.
        present = self._gather([_Candidate.of(part) for part in held], held)
        wanted = {
            candidate
            for candidate in present
            if candidate.step > newest
            and history.is_valid(SaveId(candidate.generation, candidate.step))
        }
        lacking = []
        for candidate in sorted(wanted, reverse=True):
            missing = set(range(candidate.world_size)) - set(present[candidate])
            if not missing:
                path = self._take(candidate, held)
                if path is not None:
                    return path
                lacking.append(f"step {candidate.step} is damaged")
            else:
                ranks = ", ".join(map(str, sorted(missing)))
                lacking.append(f"step {candidate.step} lacks the parts of ranks {ranks}")
        self._say_unused(lacking, newest)
        return None

    def _say_unused(self, lacking: list[str], newest: int) -> None:
        source = f"the checkpoint of step {newest} in the run folder is used"
        if newest < 0:
            source = "there is no checkpoint in the run folder either"
        reason = "; ".join(lacking) or "none is newer"
        logger.info("no local checkpoint is used (%s): %s", reason, source)

    def _gather(
        self, candidates: list[_Candidate], parts: Iterable[PartManifest]
    ) -> dict[_Candidate, dict[int, list[int]]]:
        """Return the ranks that see each part of each save. Collective over all ranks."""
        own = [[*one, part.rank] for one, part in zip(candidates, parts, strict=True)]
        found: dict[_Candidate, dict[int, list[int]]] = {}
        for holder, content in enumerate(self.nodes.gather(json.dumps(own).encode())):
            for *fields, rank in json.loads(content):
                found.setdefault(_Candidate(*fields), {}).setdefault(rank, []).append(holder)
        return found

    def _take(self, candidate: _Candidate, held: list[PartManifest]) -> Path | None:
        """Verify and copy a save; None: it is damaged. Collective over all ranks."""
        own_ranks = self.nodes.own_ranks
        parts = {part.rank: part for part in held if _Candidate.of(part) == candidate}
        # The ranks of a node divide the verification of its parts.
        intact = [
            parts[rank]
            for number, rank in enumerate(sorted(parts))
            if own_ranks[number % len(own_ranks)] == self.groups.rank
            and self._is_intact(parts[rank])
        ]
        holders = self._gather([candidate] * len(intact), intact).get(candidate, {})
        if len(holders) < candidate.world_size:
            return None
        # The original where it is intact: a rank holds its own part if the layout is the same.
        chosen = {
            rank: next((r for r in ranks if self._is_original(rank, r)), ranks[0])
            for rank, ranks in holders.items()
        }
        mine = [part for part in intact if chosen[part.rank] == self.groups.rank]
        path = self._commit(candidate, mine)
        replicas = sorted(rank for rank, r in chosen.items() if not self._is_original(rank, r))
        which = ", ".join(f"{rank} from {self.nodes.names[chosen[rank]]}" for rank in replicas)
        logger.info(
            "the local checkpoint of step %d is complete and copied to %s (replicas of ranks: %s)",
            candidate.step,
            path,
            which or "none",
        )
        return path

    def _is_intact(self, part: PartManifest) -> bool:
        """Return whether a part has its SHA-256; a disk that hangs counts as damaged."""
        size = sum(entry.size for entry in part.files)
        seconds = LISTING_SECONDS + size / SLOWEST_BYTES_PER_SECOND
        return within(seconds, lambda: is_intact(self.folder, part), False)

    def _is_original(self, rank: int, holder: int) -> bool:
        names = self.nodes.names
        return rank < len(names) and names[rank] == names[holder]

    def _commit(self, candidate: _Candidate, mine: list[PartManifest]) -> Path:
        """Copy this rank's share into the run folder and commit. Collective over all ranks."""
        first = next((part.to_json() for part in mine), b"")
        content = next(content for content in self.nodes.gather(first) if content)
        manifest = PartManifest.from_json(content, self.folder)
        staged = writer.StagedCheckpoint(
            self.run_dir, manifest.metadata, state_kinds(manifest.metadata.config),
            manifest.parameters, self.groups, self.fence, candidate.world_size,
        )  # fmt: skip

        def copy() -> None:
            for part in mine:
                _copy(part, part_dir(self.folder, part.save, part.rank), staged.staging)

        return writer.save(staged, copy)


def _copy(part: PartManifest, source: Path, staging: Path) -> None:
    for entry in part.files:
        target = staging / entry.name
        shutil.copyfile(source / entry.name, target)
        adopt_mode(target)
        fsync_path(target)
    write_durably(staging / part_index_file(part.rank), part_index_json(part.files, part.fragments))
