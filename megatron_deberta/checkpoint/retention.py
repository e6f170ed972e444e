"""Which checkpoints stay, and how the others go.

Owns the rules and deletions. Refuses the newest one and the one that a run in trouble would go back
to, whatever the rules say.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_deberta.checkpoint.layout import DELETING_PREFIX, committed_steps, step_dir

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """What to keep."""

    keep_last: int = 0
    """The newest so many; 0 keeps all."""
    keep_every: int = 0
    """Those of steps that this divides, for good; 0: none."""
    last_good_step: float = math.inf
    """The newest one up to this step stays: a run in trouble may go back to it."""

    def doomed(self, steps: list[int]) -> list[int]:
        """Which of the steps with a checkpoint (ascending) go."""
        if not self.keep_last:
            return []
        good = [step for step in steps if step <= self.last_good_step]
        kept = {*steps[-self.keep_last :], *good[-1:]}
        if self.keep_every:
            kept.update(step for step in steps if step % self.keep_every == 0)
        return [step for step in steps if step not in kept]


def delete_oldest(run_dir: str | os.PathLike[str], step: int, retention: Retention) -> None:
    """Delete what need not stay, up to a step; later ones are of a future that comes again."""
    try:
        doomed = retention.doomed([known for known in committed_steps(run_dir) if known <= step])
    except OSError as error:
        # The checkpoint after which this is called is safe, and the next one tries again.
        logger.warning("cannot delete old checkpoints of %s: %s", run_dir, error)
        return
    for old in doomed:
        try:
            delete(step_dir(run_dir, old))
        except OSError as error:
            logger.warning("cannot delete %s: %s", step_dir(run_dir, old), error)


def delete_after(run_dir: str | os.PathLike[str], step: int) -> None:
    """Delete the checkpoints of later steps, the newest first, so that a kill leaves no gap.

    Raises:
        OSError: one cannot be deleted.
    """
    for later in reversed([known for known in committed_steps(run_dir) if known > step]):
        delete(step_dir(run_dir, later))


def delete(path: Path) -> None:
    """Delete a checkpoint such that no part of it is ever taken for one."""
    doomed = path.with_name(DELETING_PREFIX + path.name)
    path.rename(doomed)
    shutil.rmtree(doomed)
