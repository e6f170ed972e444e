"""Fake engine and rank grid for checkpoint tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_deberta.checkpoint import saver, store
from megatron_deberta.checkpoint.layout import KINDS, CheckpointMetadata
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.retention import Retention
from megatron_deberta.checkpoint.saver import Saver
from megatron_deberta.checkpoint.writer import UNLOCKED, Fence
from megatron_deberta.config import RunConfig, config_to_dict
from megatron_deberta.distributed import control
from megatron_deberta.distributed.parallelize.plan import ParameterSpec, shard_spec
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine, FetchState, LocalShard, ParameterState

SHAPES = {
    "embeddings.token.weight": (70, 4),
    "embeddings.norm.weight": (4,),
    "encoder.layers.0.attention.query.weight": (8, 4),
    "encoder.layers.0.attention.output.weight": (4, 8),
    "encoder.layers.0.attention.output.bias": (4,),
    "encoder.conv.conv.weight": (4, 4, 3),
    "head.bias": (70,),
}
"""Split along dimension 0 or 1, replicated, padded, and so small that some ranks have no part."""

SCALARS: dict[str, int | float] = {"adam_step": 7, "loss_scale": 0.1}


def logical_states(seed: int = 0) -> dict[str, dict[str, Tensor]]:
    """Return random values of every kind of every parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: {kind: torch.randn(shape, generator=generator) for kind in KINDS}
        for name, shape in SHAPES.items()
    }


def grid_place(rank: int, tp_size: int, dp_size: int) -> ProcessGroups:
    """Return the process groups of a rank that is a thread; see ``on_threads``."""
    return ProcessGroups(
        rank,
        tp_size * dp_size,
        rank % tp_size,
        tp_size,
        rank // tp_size,
        dp_size,
        None,
        None,
        torch.device("cpu"),
    )


def specs_of(groups: ProcessGroups) -> dict[str, ParameterSpec]:
    return {
        name: shard_spec(name, shape, groups.tp_rank, groups.tp_size)
        for name, shape in SHAPES.items()
    }


class FakeEngine:
    """One rank's part of a state, with the engine methods used by checkpoints."""

    def __init__(
        self,
        specs: Mapping[str, ParameterSpec],
        logical: Mapping[str, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self.states: dict[str, ParameterState] = {}
        self._scalars = dict(SCALARS) if logical is not None else {}
        self._specs = specs
        for name, spec in specs.items() if logical is not None else ():
            assert logical is not None
            self.states[name] = ParameterState(
                *(_pad(_part(logical[name][kind], spec), spec) for kind in KINDS)
            )

    def local_shards(self) -> Iterator[LocalShard]:
        for name, state in self.states.items():
            tensors = (getattr(state, field.name) for field in fields(state))
            yield LocalShard(name, 0, tuple(t.flatten() for t in tensors if t is not None))

    def load_states(self, fetch: FetchState) -> None:
        self.states = {name: fetch(name) for name in self._specs}

    def state_dict(self) -> dict[str, int | float]:
        return self._scalars

    def load_state_dict(self, scalars: Mapping[str, int | float]) -> None:
        self._scalars = dict(scalars)


def _part(logical: Tensor, spec: ParameterSpec) -> Tensor:
    return logical.narrow(spec.split_dim, spec.offset, spec.length)


def _pad(part: Tensor, spec: ParameterSpec) -> Tensor:
    """Pad with NaN, which must not be written to a file."""
    padded = torch.full(spec.local_shape, float("nan"))
    padded.narrow(spec.split_dim, 0, spec.length).copy_(part)
    return padded


def assert_holds(engine: FakeEngine, logical: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Assert that values are bit-identical to the logical ones and that padding is zero."""
    for name, spec in engine._specs.items():
        for kind in KINDS:
            local = getattr(engine.states[name], kind)
            assert local.shape == spec.local_shape
            assert torch.equal(spec.true_part(local), _part(logical[name][kind], spec)), name
            padding = local.narrow(
                spec.split_dim, spec.length, local.size(spec.split_dim) - spec.length
            )
            assert not padding.any(), name


def metadata(step: int, config: RunConfig | None = None) -> CheckpointMetadata:
    return CheckpointMetadata(
        step=step,
        consumed_samples=step * 4,
        config=config_to_dict(config or RunConfig()),
        tokenizer_fingerprint="t" * 64,
        tokenizer_path="/nowhere/tokenizer",
        data_fingerprint="d" * 64,
    )


def on_threads(
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    dp_size: int,
    work: Callable[[ProcessGroups], Any],
) -> list[Any]:
    """Call ``work`` for every rank of a grid, in threads.

    Returns:
        The result or the exception of each rank.
    """
    world_size = tp_size * dp_size
    barrier = threading.Barrier(world_size)
    values, contents = [0] * world_size, [b""] * world_size

    def largest(value: int, rank: int) -> int:
        values[rank] = value
        barrier.wait(10)
        maximum = max(values)
        barrier.wait(10)
        return maximum

    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = work(grid_place(rank, tp_size, dp_size))
        except Exception as error:
            results[rank] = error

    def all_reduce_max(numbers: Tensor, groups: ProcessGroups) -> Tensor:
        return numbers.fill_(largest(int(numbers.item()), groups.rank))

    def gather_bytes(content: bytes, group: None) -> list[bytes]:
        contents[int(threading.current_thread().name)] = content
        barrier.wait(10)
        gathered = list(contents)
        barrier.wait(10)
        return gathered

    with monkeypatch.context() as patch:
        for module in (control, saver):
            patch.setattr(module, "all_reduce_max", all_reduce_max)
        patch.setattr(saver, "gather_bytes", gather_bytes)
        patch.setattr(dist, "new_group", lambda **_: None)
        threads = [
            threading.Thread(target=run, name=str(rank), args=(rank,)) for rank in range(world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    return results


def save_alone(
    run_dir: Path,
    step: int,
    *,
    seed: int = 0,
    keep_last: int | None = None,
    background: bool = False,
) -> Path:
    """Save a random state from a single process."""
    groups = grid_place(0, 1, 1)
    specs = specs_of(groups)
    engine: Any = FakeEngine(specs, logical_states(seed))
    retention = Retention(keep_last=keep_last)
    if not background:
        return save_state(run_dir, engine, specs, groups, metadata(step), retention)
    saver = Saver(run_dir, engine, specs, groups)
    saver.start(metadata(step), retention)
    saved = saver.finish()
    assert saved is not None
    return saved.path


def save_on_grid(
    monkeypatch: pytest.MonkeyPatch,
    tp_size: int,
    dp_size: int,
    run_dir: str | Path,
    saved: CheckpointMetadata,
    average: float | None = None,
) -> list[Any]:
    """Save a random state from every rank of a grid.

    Args:
        monkeypatch: the test's.
        tp_size: tensor-parallel ranks.
        dp_size: data-parallel ranks.
        run_dir: folder of the run.
        saved: metadata of the checkpoint.
        average: difference of the moving average to the weights; None: there is none.

    Returns:
        The folder or the error of each rank.
    """

    def work(groups: ProcessGroups) -> Path:
        specs = specs_of(groups)
        engine: Any = FakeEngine(specs, logical_states())
        if average is not None:
            engine.states = {
                name: replace(state, ema=state.weight + average)
                for name, state in engine.states.items()
            }
        return save_state(run_dir, engine, specs, groups, saved)

    return on_threads(monkeypatch, tp_size, dp_size, work)


def load_on(groups: ProcessGroups, path: Path) -> FakeEngine:
    """Return a fake engine of a rank with the state of a checkpoint."""
    specs = specs_of(groups)
    engine: Any = FakeEngine(specs)
    store.load(CheckpointReader(path), engine, specs)
    return engine  # type: ignore[no-any-return]


def save_state(
    run_dir: str | Path,
    engine: Engine,
    specs: Mapping[str, ParameterSpec],
    groups: ProcessGroups,
    metadata: CheckpointMetadata,
    retention: Retention | None = None,
    fence: Fence = UNLOCKED,
) -> Path:
    """Save and commit the state of an engine; return the folder. Collective: all ranks."""
    return Saver(run_dir, engine, specs, groups, fence).save(metadata, retention).path
