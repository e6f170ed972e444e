"""Finding and loading of checkpoints, for any parallel layout, and weights as a checkpoint."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from megatron_deberta.checkpoint import writer
from megatron_deberta.checkpoint.layout import (
    COMMITTED_FILE,
    KINDS,
    WEIGHT,
    CheckpointMetadata,
    checkpoints_dir,
    committed_steps,
    find_best,
    state_kinds,
    step_dir,
)
from megatron_deberta.checkpoint.reader import (
    CheckpointReader,
    Slice,
    StoredRun,
    WeightSource,
)
from megatron_deberta.distributed.control import all_reduce_any, broadcast_from_rank_zero
from megatron_deberta.distributed.parallelize.plan import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups, single_process_groups
from megatron_deberta.engine.base import Engine, ParameterState
from megatron_deberta.errors import CheckpointError
from megatron_deberta.model.low_rank import HEAD_PREFIXES, is_adapter

logger = logging.getLogger(__name__)

TRAINING_PREFIXES = ("row_decoder.",)
"""Parameters that serve the training of a pretraining model alone, so that a new run may start from
weights without them, or leave them out."""


def save_weights(
    run_dir: str | os.PathLike[str],
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    metadata: CheckpointMetadata,
) -> Path:
    """Save a checkpoint without optimizer state, such as an imported model, from one process.

    Args:
        run_dir: folder in which ``checkpoints`` is created.
        weights: canonical name and tensor of every parameter, ``[*shapes[name]]``; stored as fp32.
        shapes: logical shapes, in the model's order.
        metadata: metadata of the checkpoint.

    Returns:
        The committed folder.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    specs = {
        name: ParameterSpec(name, shape, None, 0, shape[0], shape) for name, shape in shapes.items()
    }
    states = ((specs[name], {WEIGHT: tensor.float()}) for name, tensor in weights)
    groups = single_process_groups(torch.device("cpu"))
    staged = writer.StagedCheckpoint(run_dir, metadata, (WEIGHT,), shapes, groups)
    return writer.save(staged, functools.partial(writer.write, staged, states))


def find_newest(run_dir: str | os.PathLike[str]) -> Path | None:
    """Return the newest committed checkpoint of a run, unverified; None if there is none."""
    steps = committed_steps(run_dir)
    return step_dir(run_dir, steps[-1]) if steps else None


def find_newest_checkpoint(path: Path) -> Path | None:
    """Return a checkpoint, or the newest one of a run folder, unverified; None: there is none."""
    return path if (path / COMMITTED_FILE).exists() else find_newest(path)


def find_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint that a path given by the user means, unverified; None: there is none.

    Args:
        path: folder of a checkpoint, or of a run: the best checkpoint, or else the newest one.
    """
    if (path / COMMITTED_FILE).exists():
        return path
    return find_best(path) or find_newest(path)


def choose_intact(
    run_dir: str | os.PathLike[str],
    groups: ProcessGroups,
    *,
    hashes: bool = True,
    up_to: float = math.inf,
) -> CheckpointReader | None:
    """Open the newest committed checkpoint that is not damaged. Collective: all ranks.

    Rank 0 lists the checkpoints; verification is divided among the ranks.

    Args:
        run_dir: folder of the run.
        groups: the rank grid.
        hashes: verify SHA-256; otherwise only file sizes and the manifest's hash.
        up_to: latest step considered.

    Returns:
        The same checkpoint on every rank; None if there is no committed checkpoint.

    Raises:
        CheckpointError: all committed checkpoints are damaged.
    """
    committed = committed_steps(run_dir) if groups.rank == 0 else []
    steps = [step for step in committed if step <= up_to]
    num_steps = broadcast_from_rank_zero(len(steps), groups)
    for number in range(num_steps):
        step = broadcast_from_rank_zero(steps[-1 - number] if groups.rank == 0 else 0, groups)
        try:
            return open_intact(step_dir(run_dir, step), groups, hashes=hashes)
        except CheckpointError as error:
            logger.warning("%s; trying the checkpoint before it", error)
    if num_steps:
        raise CheckpointError(
            f"all {num_steps} checkpoints in {checkpoints_dir(run_dir)} are damaged; restore one, "
            "or start a new train.run_dir"
        )
    return None


def open_intact(path: Path, groups: ProcessGroups, *, hashes: bool = True) -> CheckpointReader:
    """Open a checkpoint and verify its files, divided among the ranks. Collective: all ranks.

    Args:
        path: folder of one step.
        groups: process groups.
        hashes: compare SHA-256, which reads the files; sizes are always compared.

    Raises:
        CheckpointError: it is not committed, or any rank found it damaged.
    """
    if not hashes and groups.rank == 0:
        logger.warning("%s: SHA-256 of tensor files is NOT verified", path)
    failure: CheckpointError | None = None
    try:
        reader = CheckpointReader(path)
        reader.verify(hashes=hashes, share=groups.rank, num_shares=groups.world_size)
    except CheckpointError as error:
        failure = error
    if all_reduce_any(failure is not None, groups):
        raise failure or CheckpointError(f"{path} is damaged, as reported by another rank")
    return reader


def load_initial(
    source: WeightSource,
    engine: Engine,
    specs: Mapping[str, ParameterSpec],
    initial: Callable[[ParameterSpec], Tensor],
) -> list[str]:
    """Load an encoder into a new engine of a model with another head. Collective: all ranks.

    Args:
        source: the weights; those that the model lacks are ignored.
        engine: a new engine.
        specs: this rank's part of every parameter.
        initial: returns this rank's part of a new parameter, fp32 ``[*spec.local_shape]``.

    Returns:
        Names of the parameters of the head that start from new weights; low-rank adapters do, too.

    Raises:
        CheckpointError: a parameter of the encoder is missing or has another shape.
    """
    new = [name for name, spec in specs.items() if source.shapes.get(name) != spec.logical_shape]
    for name in new:
        if not name.startswith(HEAD_PREFIXES) and not is_adapter(name):
            raise CheckpointError(
                f"{source.path} is of another model: {name} has shape {source.shapes.get(name)} "
                f"there and {specs[name].logical_shape} in this config"
            )

    def fetch(name: str) -> ParameterState:
        spec = specs[name]
        weight = initial(spec) if name in new else _local_part(source, spec, WEIGHT)
        zeros = torch.zeros(spec.local_shape)
        return ParameterState(weight, zeros, zeros.clone())

    engine.load_states(fetch)
    return [name for name in new if not is_adapter(name)]


def load(
    reader: StoredRun,
    engine: Engine,
    specs: Mapping[str, ParameterSpec],
    *,
    weights_only: bool = False,
    initial: Callable[[ParameterSpec], Tensor] | None = None,
) -> tuple[list[str], list[str]]:
    """Load a checkpoint of any layout into an engine. Collective: all ranks.

    Args:
        reader: the checkpoint.
        engine: a new engine.
        specs: this rank's part of every parameter.
        weights_only: for a new run: set moments to zero and leave the engine's scalars unchanged.
        initial: for a new run: returns this rank's part of the initial weights of a parameter of
            ``TRAINING_PREFIXES`` that the checkpoint lacks, fp32 ``[*spec.local_shape]``.

    Returns:
        Names of the parameters that start from initial weights, and of those that are left out.

    Raises:
        CheckpointError: it is of another model, lacks optimizer state, or is damaged.
    """
    new, unused = [], []
    if initial is not None:
        new, unused = _only_in(specs, reader.shapes), _only_in(reader.shapes, specs)
    _check_shapes(reader, specs, {*new, *unused})
    kinds = (WEIGHT,) if weights_only else state_kinds(reader.metadata.config)

    def fetch(name: str) -> ParameterState:
        spec = specs[name]
        moments = {kind: torch.zeros(spec.local_shape) for kind in KINDS if kind not in kinds}
        if initial is not None and name in new:
            return ParameterState(**moments, weight=initial(spec))
        return ParameterState(
            **moments, **{kind: _local_part(reader, spec, kind) for kind in kinds}
        )

    engine.load_states(fetch)
    if not weights_only:
        engine.load_state_dict(reader.metadata.scalars)
    return new, unused


def _only_in(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Return the names of ``TRAINING_PREFIXES`` that are not among ``others``."""
    return [name for name in names if name.startswith(TRAINING_PREFIXES) and name not in others]


def local_part(whole: Tensor, spec: ParameterSpec) -> Tensor:
    """Return this rank's part of a whole parameter, zero-padded to its local shape.

    Args:
        whole: the parameter, ``[*spec.logical_shape]``.
        spec: this rank's part.

    Returns:
        ``[*spec.local_shape]``; a view of ``whole`` where there is no padding.
    """
    return _padded(whole.narrow(spec.split_dim, spec.offset, spec.length), spec)


def _local_part(reader: WeightSource, spec: ParameterSpec, kind: str) -> Tensor:
    """Read this rank's part of a parameter, zero-padded to its local shape."""
    indices = Slice(spec.split_dim, spec.offset, spec.offset + spec.length)
    return _padded(reader.tensor(spec.name, kind, indices), spec)


def _padded(part: Tensor, spec: ParameterSpec) -> Tensor:
    if part.shape == spec.local_shape:
        return part
    padded = torch.zeros(spec.local_shape)
    spec.true_part(padded).copy_(part)
    return padded


def _check_shapes(
    reader: WeightSource, specs: Mapping[str, ParameterSpec], ignored: Collection[str]
) -> None:
    shapes = {name: spec.logical_shape for name, spec in specs.items()}
    for name in (*shapes, *reader.shapes):
        if name not in ignored and shapes.get(name) != reader.shapes.get(name):
            raise CheckpointError(
                f"{reader.path} is of another model: {name} has shape {reader.shapes.get(name)} "
                f"there and {shapes.get(name)} in this config; use the config it was trained with"
            )
