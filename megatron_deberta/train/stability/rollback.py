"""Going back to the last good checkpoint when skipping updates does not help.

Owns the choice of that checkpoint, what is given up with it, and ``rollback.json`` in the run
folder, which makes a run that is killed afterwards go on from there as if it had not been. Refuses
to decide when (``guard.py``).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from megatron_deberta.checkpoint import store
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.retention import delete_after
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.control import broadcast_from_rank_zero, raise_on_all_ranks
from megatron_deberta.distributed.parallelize.spec import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.protocol import Engine
from megatron_deberta.errors import CheckpointError, NumericsError
from megatron_deberta.files import write_atomically
from megatron_deberta.train.stability.guard import Guard, GuardState
from megatron_deberta.train.state import TrainState

logger = logging.getLogger(__name__)

FILE_NAME = "rollback.json"


@dataclass(frozen=True, slots=True)
class Rollback:
    """The last time a run went back."""

    step: int
    """Of the checkpoint."""
    consumed_samples: int
    """Where the data goes on: behind all that was used before."""
    trouble_step: int
    """Where the run was."""
    skipped: int
    """Updates that were skipped just before."""
    rollbacks: int
    """How often it has gone back, this time included."""
    vain_rollbacks: int
    """The same since it last got beyond the trouble."""


def rollback(
    config: RunConfig,
    groups: ProcessGroups,
    engine: Engine,
    specs: Mapping[str, ParameterSpec],
    state: TrainState,
    guard: Guard,
) -> tuple[TrainState, GuardState, Rollback]:
    """Set the engine back. Collective over all ranks.

    Args:
        config: the run.
        groups: the rank grid.
        engine: gets the checkpoint's state.
        specs: this rank's part of every parameter.
        state: where the run is.
        guard: its memory up to there.

    Returns:
        Where the run goes on, with which memory, and what happened.

    Raises:
        NumericsError: there is no checkpoint from before the trouble.
    """
    run_dir, trouble = config.train.run_dir, guard.state
    reader = store.choose_intact(
        run_dir, groups, hashes=config.checkpoint.verify, up_to=guard.last_good_step
    )
    if reader is None:
        raise NumericsError(
            f"step {state.step}: updates of steps {', '.join(map(str, trouble.skips))} were "
            f"skipped and {run_dir} has no checkpoint from before to go back to; lower "
            "optimizer.learning_rate, or checkpoint.save_every"
        )
    done = Rollback(
        step=reader.metadata.step,
        consumed_samples=state.consumed_samples,
        trouble_step=state.step,
        skipped=len(trouble.skips),
        rollbacks=trouble.rollbacks + 1,
        vain_rollbacks=trouble.vain_rollbacks + 1,
    )
    with raise_on_all_ranks(groups):
        if groups.rank == 0:
            # First what is given up: a kill in between leaves a run that meets the trouble again.
            delete_after(run_dir, done.step)
            write_atomically(Path(run_dir) / FILE_NAME, json.dumps(asdict(done)).encode())
    store.load(reader, engine, specs)
    logger.warning("going back from step %d to %s; data since then is left out",
                   state.step, reader.path)  # fmt: skip
    return TrainState(done.step, done.consumed_samples), _guard_after(reader, done), done


def resumed_position(
    config: RunConfig, groups: ProcessGroups, reader: CheckpointReader
) -> tuple[TrainState, GuardState]:
    """Where a checkpoint continues, a roll-back to it since then included. Collective.

    Raises:
        CheckpointError: ``rollback.json`` is damaged.
    """
    saved = reader.metadata
    with raise_on_all_ranks(groups):
        known = _read(config.train.run_dir) if groups.rank == 0 else None
    numbers = [0] * len(fields(Rollback)) if known is None else list(asdict(known).values())
    last = Rollback(*(broadcast_from_rank_zero(number, groups) for number in numbers))
    if last.step == saved.step and last.rollbacks > saved.guard.get("rollbacks", 0):
        return TrainState(saved.step, last.consumed_samples), _guard_after(reader, last)
    state = TrainState(saved.step, saved.consumed_samples)
    return state, GuardState(**saved.guard)


def _guard_after(reader: CheckpointReader, done: Rollback) -> GuardState:
    return replace(
        GuardState(**reader.metadata.guard),
        skips=[],
        rollbacks=done.rollbacks,
        vain_rollbacks=done.vain_rollbacks,
        trouble_step=done.trouble_step,
    )


def _read(run_dir: str | os.PathLike[str]) -> Rollback | None:
    path = Path(run_dir) / FILE_NAME
    try:
        return Rollback(**{key: int(n) for key, n in json.loads(path.read_bytes()).items()})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); remove it to replay the data of the last roll-back"
        ) from error
