"""Rollback to the last good checkpoint when too many updates were skipped.

``rollback.json`` in the run folder records the data position after it, so that a run that is killed
before its next checkpoint resumes from the same position.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from megatron_deberta.checkpoint import store
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.retention import delete_after
from megatron_deberta.checkpoint.saver import Saver
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.control import broadcast_from_rank_zero, raise_on_all_ranks
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import CheckpointError, NumericsError
from megatron_deberta.files import write_atomically
from megatron_deberta.parsing import Count, conform, read_json
from megatron_deberta.train.stability.guard import Guard, GuardState
from megatron_deberta.train.state import TrainState

logger = logging.getLogger(__name__)

FILE_NAME = "rollback.json"


@dataclass(frozen=True, slots=True)
class Rollback:
    """The last rollback of a run.

    Attributes:
        step: step of the checkpoint.
        consumed_samples: data position after the rollback: behind all samples used before.
        trouble_step: step at which the rollback started.
        skipped: recently skipped updates.
        rollbacks: rollbacks since the start of the run, this one included.
        vain_rollbacks: consecutive rollbacks without progress, this one included.
    """

    step: Count
    consumed_samples: Count
    trouble_step: Count
    skipped: Count
    rollbacks: Count
    vain_rollbacks: Count


def rollback(
    config: RunConfig, saver: Saver, state: TrainState, guard: Guard
) -> tuple[TrainState, GuardState, Rollback]:
    """Load the last checkpoint before the skipped updates. Collective over all ranks.

    Args:
        config: the run.
        saver: of the run; no save may be in flight. Its engine receives the checkpoint's state.
        state: current position.
        guard: the guard at that position.

    Returns:
        The new position, the new guard state, and the rollback.

    Raises:
        NumericsError: there is no checkpoint from before the skipped updates.
    """
    run_dir, groups, before = config.train.run_dir, saver.groups, guard.state
    reader = store.choose_intact(
        run_dir, groups, hashes=config.checkpoint.verify, up_to=guard.last_good_step
    )
    if reader is None:
        raise NumericsError(
            f"step {state.step}: updates of steps {', '.join(map(str, before.skips))} were "
            f"skipped and {run_dir} has no earlier checkpoint to roll back to; lower "
            "optimizer.learning_rate or checkpoint.save_every"
        )
    done = Rollback(
        step=reader.metadata.step,
        consumed_samples=state.consumed_samples,
        trouble_step=state.step,
        skipped=len(before.skips),
        rollbacks=before.rollbacks + 1,
        vain_rollbacks=before.vain_rollbacks + 1,
    )
    with raise_on_all_ranks(groups):
        if groups.rank == 0:
            saver.fence.check()
            # Delete first: after a kill in between, the run repeats the skipped steps.
            delete_after(run_dir, done.step)
            write_atomically(Path(run_dir) / FILE_NAME, json.dumps(asdict(done)).encode())
    store.load(reader, saver.engine, saver.specs)
    logger.warning(
        "rolling back from step %d to %s; the data in between is skipped", state.step, reader.path
    )
    return TrainState(done.step, done.consumed_samples), _guard_after(reader, done), done


def resumed_position(
    config: RunConfig, groups: ProcessGroups, reader: CheckpointReader
) -> tuple[TrainState, GuardState]:
    """Return the position and guard state from which training resumes. Collective: all ranks.

    They are those of the checkpoint, or of a later rollback to it.

    Args:
        config: the run.
        groups: the rank grid.
        reader: the checkpoint that training resumes from.

    Raises:
        CheckpointError: ``rollback.json`` is damaged.
    """
    saved = reader.metadata
    with raise_on_all_ranks(groups):
        recorded = _read(config.train.run_dir) if groups.rank == 0 else None
    guard = guard_state(reader)
    numbers = [0] * len(fields(Rollback)) if recorded is None else list(asdict(recorded).values())
    last = Rollback(*(broadcast_from_rank_zero(number, groups) for number in numbers))
    if last.step == saved.step and last.rollbacks > guard.rollbacks:
        return TrainState(saved.step, last.consumed_samples), _guard_after(reader, last)
    return TrainState(saved.step, saved.consumed_samples), guard


def _guard_after(reader: CheckpointReader, done: Rollback) -> GuardState:
    return replace(
        guard_state(reader),
        skips=[],
        rollbacks=done.rollbacks,
        vain_rollbacks=done.vain_rollbacks,
        trouble_step=done.trouble_step,
    )


def _read(run_dir: str | os.PathLike[str]) -> Rollback | None:
    path = Path(run_dir) / FILE_NAME
    try:
        return read_json(
            path, Rollback, "a rollback", error=CheckpointError,
            remedy="remove it to repeat the data of the last rollback",
        )  # fmt: skip
    except FileNotFoundError:
        return None


def guard_state(reader: CheckpointReader) -> GuardState:
    """Return the guard's state in a checkpoint; a new one if it has none.

    Raises:
        CheckpointError: it is damaged, or of another release.
    """
    return conform(
        reader.metadata.guard, GuardState, reader.path, "a guard's state", error=CheckpointError,
        remedy="use the release that wrote it",
    )  # fmt: skip
