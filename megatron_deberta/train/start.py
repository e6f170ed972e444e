"""Starting point of a run: initial weights, another checkpoint's weights, or its own checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from megatron_deberta.checkpoint import store
from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.checkpoint.reader import CheckpointReader, StoredRun
from megatron_deberta.checkpoint.resume import (
    Identity,
    check_continuation,
    check_resume,
    check_same_architecture,
)
from megatron_deberta.checkpoint.views import ExtendedPositions, TaskHead, open_part
from megatron_deberta.config import config_from_dict
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.control import broadcast_from_rank_zero, raise_on_all_ranks
from megatron_deberta.distributed.parallelize.plan import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.train.stability.guard import GuardState
from megatron_deberta.train.stability.rollback import guard_state, resumed_position
from megatron_deberta.train.state import TrainState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """Starting point of a run.

    Attributes:
        reader: checkpoint to load; None keeps the initial weights.
        weights_only: load only the weights, for a new run.
        other_dtype: the checkpoint has another ``precision.dtype``, so its loss scale is not
            loaded.
        encoder: weights for a new run with the head of a labelled task.
    """

    state: TrainState
    guard: GuardState = field(default_factory=GuardState)
    reader: StoredRun | None = None
    weights_only: bool = False
    other_dtype: bool = False
    encoder: TaskHead | None = None


# Opens weights for another head, from a folder that is no checkpoint.
OpenWeights = Callable[[Path, RunConfig], TaskHead]


def choose_start(
    config: RunConfig,
    groups: ProcessGroups,
    identity: Identity,
    allow_config_change: bool,
    open_weights: OpenWeights | None = None,
) -> Start:
    """Choose the starting point. Collective over all ranks.

    Args:
        config: the run.
        groups: the rank grid.
        identity: tokenizer and data of the run.
        allow_config_change: resume with other optimizer settings.
        open_weights: opens ``checkpoint.load_from`` if it is no checkpoint.

    Raises:
        ConfigError: ``checkpoint.resume=never`` and the run folder has checkpoints.
        CheckpointError: ``checkpoint.resume=must`` and it has none, all are damaged, or config,
            tokenizer or data of the newest one differ.
    """
    run_dir, resume = config.train.run_dir, config.checkpoint.resume
    used = committed_steps(run_dir) if groups.rank == 0 else []
    if resume == "never" and broadcast_from_rank_zero(len(used), groups):
        raise ConfigError(
            f"checkpoint.resume=never but train.run_dir={run_dir} has checkpoints; use another "
            "folder or checkpoint.resume=auto"
        )
    reader = store.choose_intact(run_dir, groups, hashes=config.checkpoint.verify)
    if reader is not None:
        changed = check_resume(reader, config, identity, allow_change=allow_config_change)
        logger.info("resuming from %s", reader.path)
        return _continued(config, reader, changed, *resumed_position(config, groups, reader))
    if resume == "must":
        raise CheckpointError(
            f"checkpoint.resume=must but train.run_dir={run_dir} has no committed checkpoint; "
            "use checkpoint.resume=auto to start a new run"
        )
    if config.checkpoint.continue_from:
        return _continue(config, groups, identity)
    if config.finetune.task and config.checkpoint.load_from:
        path = Path(config.checkpoint.load_from)
        if open_weights is None or store.find_checkpoint(path) is not None:
            reader = _open_weights(config, groups, identity)
            saved = config_from_dict(reader.metadata.config, str(reader.path))
            own, weights = open_part(reader, saved.model, "discriminator")
            return Start(TrainState(0, 0), encoder=TaskHead(weights, own, config.model))
        with raise_on_all_ranks(groups):
            encoder = open_weights(path, config)
        return Start(TrainState(0, 0), encoder=encoder)
    if config.checkpoint.load_from:
        stored: StoredRun = _extended(_open_weights(config, groups, identity), config)
        return Start(TrainState(0, 0), reader=stored, weights_only=True)
    return Start(TrainState(0, 0))


def _extended(reader: CheckpointReader, config: RunConfig) -> StoredRun:
    """Return the weights with as many positions as the run's model has."""
    rows, rule = config.model.max_position_embeddings, config.checkpoint.extend_positions
    if rule == "none" or rows == reader.metadata.config["model"]["max_position_embeddings"]:
        return reader
    logger.info("position tables are extended to %d rows: %s", rows, rule)
    return ExtendedPositions(reader, rows, rule)


def _continue(config: RunConfig, groups: ProcessGroups, identity: Identity) -> Start:
    """Open ``checkpoint.continue_from`` as the state of a new run."""
    given = Path(config.checkpoint.continue_from or "")
    path = store.find_newest_checkpoint(given) or given
    reader = store.open_intact(path, groups, hashes=config.checkpoint.verify)
    changed = check_continuation(reader, config, identity)
    logger.info("continuing %s", path)
    state = TrainState(reader.metadata.step, reader.metadata.consumed_samples)
    return _continued(config, reader, changed, state, guard_state(reader))


def _continued(
    config: RunConfig,
    reader: CheckpointReader,
    changed: Iterable[str],
    state: TrainState,
    guard: GuardState,
) -> Start:
    """Return the start from a checkpoint with its optimizer state, and log what has changed."""
    for change in changed:
        logger.info("changed since then: %s", change)
    dtype = reader.metadata.config["precision"]["dtype"]
    # Unresolved, ``auto`` is fp32.
    used = {"fp32" if name == "auto" else name for name in (dtype, config.precision.dtype)}
    return Start(state, guard, reader, other_dtype=len(used) > 1)


def load_start(
    start: Start,
    engine: Engine,
    specs: Mapping[str, ParameterSpec],
    initial: Callable[[ParameterSpec], Tensor] | None = None,
) -> None:
    """Load the starting point into a new engine. Collective over all ranks.

    Args:
        start: the starting point.
        engine: a new engine.
        specs: this rank's part of every parameter.
        initial: returns the initial weights of this rank's part of a parameter, fp32
            ``[*spec.local_shape]``; needed for a head or a decoder that the weights lack.

    Raises:
        CheckpointError: the checkpoint is of another model or damaged.
    """
    if start.encoder is not None:
        assert initial is not None
        new = store.load_initial(start.encoder, engine, specs, initial)
        logger.info("%s", start.encoder.describe(new))
    if start.reader is None:
        return
    fresh, source = engine.state_dict(), start.reader.path
    new, unused = store.load(
        start.reader, engine, specs, weights_only=start.weights_only,
        initial=initial if start.weights_only else None,
    )  # fmt: skip
    if new:
        logger.info("%s lacks these; they start from new weights: %s", source, ", ".join(new))
    if unused:
        logger.info("not loaded from %s: %s", source, ", ".join(unused))
    if start.other_dtype:
        saved = start.reader.metadata.scalars.items()
        engine.load_state_dict(fresh | {k: v for k, v in saved if k.endswith("adam_step")})


def _open_weights(config: RunConfig, groups: ProcessGroups, identity: Identity) -> CheckpointReader:
    """Open ``checkpoint.load_from``: a checkpoint, or the newest one of a run folder."""
    given = Path(config.checkpoint.load_from or "")
    path = store.find_checkpoint(given) or given
    reader = store.open_intact(path, groups, hashes=config.checkpoint.verify)
    check_same_architecture(reader, config)
    if reader.metadata.tokenizer_fingerprint != identity.tokenizer_fingerprint:
        logger.warning(
            "%s was trained with another tokenizer than %s; its embeddings belong to other tokens",
            path,
            identity.tokenizer_path,
        )
    logger.info("initializing with the weights of %s", path)
    return reader
