"""Retention and deletion of checkpoints.

The newest checkpoint, and the one that a rollback would use, are always kept.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_deberta.checkpoint.layout import (
    DELETING_PREFIX,
    STAGING_PREFIX,
    committed_steps,
    leftovers,
    step_dir,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are kept.

    Attributes:
        keep_last: number of newest checkpoints kept; None: all.
        keep_every: keep checkpoints of steps divisible by this; None: none.
        best_step: keep the checkpoint of this step, which has the best validation score.
        last_good_step: keep the newest checkpoint up to this step, as a target for rollbacks.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    last_good_step: float = math.inf
    best_step: int | None = None

    def expired(self, steps: list[int]) -> list[int]:
        """Return the steps whose checkpoints are to be deleted, given all steps (ascending)."""
        if self.keep_last is None:
            return []
        good = [step for step in steps if step <= self.last_good_step]
        kept = {*steps[-self.keep_last :], *good[-1:], self.best_step}
        if self.keep_every is not None:
            kept.update(step for step in steps if step % self.keep_every == 0)
        return [step for step in steps if step not in kept]


def delete_expired(run_dir: str | os.PathLike[str], step: int, retention: Retention) -> None:
    """Delete expired checkpoints up to ``step``; later ones belong to rolled-back steps.

    A folder that cannot be deleted is logged as a warning.

    Args:
        run_dir: the run folder.
        step: newest step whose checkpoint may be deleted.
        retention: which checkpoints are kept.
    """
    try:
        expired = retention.expired([known for known in committed_steps(run_dir) if known <= step])
    except OSError as error:
        # Not fatal: the new checkpoint is committed, and the next save tries again.
        logger.warning("cannot delete old checkpoints of %s: %s", run_dir, error)
        return
    for old in expired:
        try:
            delete(step_dir(run_dir, old))
        except OSError as error:
            logger.warning("cannot delete %s: %s", step_dir(run_dir, old), error)


def delete_after(run_dir: str | os.PathLike[str], step: int) -> None:
    """Delete the checkpoints of later steps, newest first, so that a kill leaves no gap.

    Raises:
        OSError: a checkpoint cannot be deleted.
    """
    for later in reversed([known for known in committed_steps(run_dir) if known > step]):
        delete(step_dir(run_dir, later))


def delete(path: Path) -> None:
    """Delete a checkpoint, renaming it first so that a partial deletion is recognised."""
    hidden = path.with_name(DELETING_PREFIX + path.name.removeprefix(STAGING_PREFIX))
    path.rename(hidden)
    _remove(hidden)


def delete_leftovers(run_dir: str | os.PathLike[str]) -> None:
    """Delete the folders left by killed saves and deletions.

    A process that has lost the run's lock may still rename its folder, so they are listed again.

    Raises:
        OSError: a folder cannot be deleted.
    """
    while found := leftovers(run_dir):
        for path in found:
            logger.info("deleting %s, left by a killed save", path)
            # A step folder is recognised by its content, of which a kill may leave anything, and a
            # staging folder must not be committed any more.
            remove = _remove if path.name.startswith(DELETING_PREFIX) else delete
            with suppress(FileNotFoundError):
                remove(path)


def _remove(path: Path) -> None:
    """Delete a folder, or a symbolic link without the folder that it refers to."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)
