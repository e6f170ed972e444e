"""Dry run of one rank of a large grid, with the real model and engine and a fake process group.

torch's fake process group accepts every collective and does nothing. A dispatch mode records the
tensors of each collective, fills gathered parts with this rank's own values and scattered sums with
zeros, so that values stay finite. On the ``meta`` device tensors have shapes but no values, so the
1.5B model runs on any machine.
"""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from megatron_deberta.config.schema import ModelConfig, RunConfig
from megatron_deberta.data.batch import Batch, TaskBatch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import ProcessGroups, build_grid
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.model import DropoutSeeds, ModelInputs
from megatron_deberta.model.flops import is_task_head, reads_first_token
from megatron_deberta.objectives import ModelLosses
from megatron_deberta.planning.memory import micro_batch_rows
from megatron_deberta.train.setup import DTYPES, build_rank_model

WORLD_SIZE = 256
_KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
}
# Maximum elements of norms, losses and flags, which the plan does not count.
_SCALARS = 8


class Recorder(TorchDispatchMode):
    """Records collectives and fills in the results of the other ranks.

    Args:
        groups: the rank grid.

    Attributes:
        calls: number of calls by group (``tensor``, ``data``) and kind.
        num_bytes: bytes by group and kind.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.num_bytes: Counter[tuple[str, str]] = Counter()

        self._names = {
            group.group_name: name
            for name, group in (("tensor", groups.tp_group), ("data", groups.dp_group))
            if group is not None and group.size() > 1
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            self._note(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        leaves = tree_leaves(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        largest = max(tensors, key=lambda tensor: tensor.numel())
        boxed = next(leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject))
        group = self._names.get(dist.ProcessGroup.unbox(boxed).group_name)
        if group is None or (group == "data" and largest.numel() <= _SCALARS):
            return
        key = (group, _KINDS.get(name, name))
        self.calls[key] += 1
        self.num_bytes[key] += largest.numel() * largest.element_size()
        if name == "_allgather_base_":
            out, own = tensors
            out.view(-1, own.numel()).copy_(own.view(1, -1).expand(out.numel() // own.numel(), -1))
        elif name == "_reduce_scatter_base_":
            tensors[0].zero_()


@dataclass(kw_only=True)
class DryRun:
    """Counts of one rank.

    Attributes:
        parameters: elements on this rank, without ZeRO.
        vocabulary_rows: embedding rows on this rank, without padding.
        flops: of forward and backward, including recomputation.
        collectives: ``group kind`` -> calls and bytes.
    """

    parameters: int
    vocabulary_rows: int
    flops: int = 0
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)


@contextmanager
def fake_grid(rank: int, tp_size: int, device: str) -> Iterator[ProcessGroups]:
    """Provide the rank grid of ``WORLD_SIZE`` ranks as seen by one of them."""
    variables = dict(os.environ)
    # Read by DeepSpeed; no connection is made.
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )  # fmt: skip
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
    try:
        yield build_grid(tp_size, torch.device(device), datetime.timedelta(minutes=1))
    finally:
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(variables)


def micro_batch(config: RunConfig, device: str) -> tuple[Batch | TaskBatch, DropoutSeeds]:
    """Return inputs of a full micro batch: no padding, all masked positions used."""
    if is_task_head(config.model):
        return task_batch(config, device)
    rows, length = config.train.micro_batch_size, config.data.sequence_length
    masked = torch.arange(round(config.objective.mask_probability * length), device=device)
    masked = masked.expand(rows, -1).contiguous()
    ids = torch.full((rows, length), 5, device=device)
    samples = torch.arange(rows, device=device)
    batch = Batch(ModelInputs(ids), masked, torch.full_like(masked, 5), samples)
    return batch, DropoutSeeds(1, 2, samples)


def task_batch(config: RunConfig, device: str) -> tuple[TaskBatch, DropoutSeeds]:
    """Return inputs of a full micro batch of a labelled task."""
    rows, samples = micro_batch_rows(config), config.train.micro_batch_size
    ids = torch.full((rows, config.data.sequence_length), 5, device=device)
    numbers, head = torch.arange(rows, device=device), config.model.head
    batch = TaskBatch(
        ModelInputs(
            ids, torch.ones_like(ids, dtype=torch.bool), token_type_ids=torch.zeros_like(ids)
        ),
        labels=torch.zeros((samples, 2) if head == "spans" else samples, device=device).long(),
        sample_index=numbers[:samples],
        row_index=numbers,
        choice_rows=numbers.view(samples, -1) if head == "choices" else None,
        row_keys=numbers,
    )
    return batch, DropoutSeeds(1, 2, numbers)


def first_loss(module: torch.nn.Module, inputs: Any) -> torch.Tensor:
    """Return the objective's first loss of a micro batch."""
    result: ModelLosses = module(*inputs)
    return next(iter(result.losses.values())).loss


def dry_run(config: RunConfig, rank: int) -> DryRun:
    """Build a rank's model on ``meta`` and run forward and backward of one micro batch.

    Args:
        config: the run; attention uses the reference backend, whose products the counter sees.
        rank: of ``WORLD_SIZE``.
    """
    with fake_grid(rank, config.parallel.tensor_parallel_size, "meta") as groups:
        model = build_model(_with_backend(config, "reference"), groups, _dtype(config))
        counts = DryRun(
            parameters=sum(parameter.numel() for parameter in model.module.parameters()),
            vocabulary_rows=model.specs["embeddings.token.weight"].length,
        )
        module, inputs = model.module.train(), micro_batch(config, "meta")
        with Recorder(groups) as recorder, FlopCounterMode(display=False) as counter:
            first_loss(module, inputs).backward()
        counts.flops = counter.get_total_flops()
        counts.collectives = _collectives(recorder)
    return counts


def peak_bytes(config: RunConfig, rank: int) -> int:
    """Return the peak memory of a micro batch on a rank, without weights and gradients.

    Measured by torch's memory tracker on ``meta``, with the chunked backend.

    Args:
        config: the run.
        rank: of ``WORLD_SIZE``.
    """
    with fake_grid(rank, config.parallel.tensor_parallel_size, "meta") as groups:
        module = build_model(_with_backend(config, "chunked"), groups, _dtype(config)).module
        return _peak_bytes(module.train(), micro_batch(config, "meta"))


def _peak_bytes(module: torch.nn.Module, inputs: dict[str, Any]) -> int:
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)
    tracker = MemTracker()
    tracker.track_external(module)
    with tracker:
        before = _total(tracker, "current")
        first_loss(module, inputs).backward()
        return _total(tracker, "peak") - before


def _total(tracker: MemTracker, moment: str) -> int:
    snapshot = tracker.get_tracker_snapshot(moment)
    return sum(int(devices["Total"]) for devices in snapshot.values())


def engine_step(config: RunConfig, rank: int) -> dict[str, dict[str, int]]:
    """Take two DeepSpeed steps as one rank, with real tensors; return the second's collectives.

    Args:
        config: a run that fits into this machine's memory.
        rank: of ``WORLD_SIZE``.
    """
    with fake_grid(rank, config.parallel.tensor_parallel_size, "cpu") as groups:
        with _without_trace_check(), Recorder(groups):
            model = build_rank_model(config, groups)
            engine = build_engine(config, model.module, model.specs, groups)
            inputs = micro_batch(config, "cpu")
            for _ in range(2):
                with Recorder(groups) as recorder:
                    unit = config.train.micro_batch_size * groups.dp_size
                    for _ in range(config.train.global_batch_size // unit):
                        loss = first_loss(engine.module, inputs)
                        engine.backward(loss / 1e4)
                    outcome = engine.step(1e-4)
                assert not outcome.skipped, "gradients overflowed; nothing was gathered"
            engine.destroy()
    return _collectives(recorder)


@contextmanager
def _without_trace_check() -> Iterator[None]:
    """Prevent ZeRO-3 from comparing its trace with the other ranks, which do not exist."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator

    compare = coordinator.assert_ints_same_as_other_ranks
    coordinator.assert_ints_same_as_other_ranks = lambda *_: None
    try:
        yield
    finally:
        coordinator.assert_ints_same_as_other_ranks = compare


def reference_extra(model: ModelConfig, length: int, masked_share: float) -> tuple[float, float]:
    """Return the FLOPs per token of the reference backend that are not needed.

    Both position terms use every slot of the table, even if a row has fewer distances, and the
    decoder multiplies its keys with the table in each pass.

    Returns:
        FLOPs of the layers over the sequence, and of the decoder.
    """
    slots = 2 * (model.position_buckets or model.max_relative_positions)
    c2p, p2c = "c2p" in model.position_terms, "p2c" in model.position_terms
    needed, done = 2 * min(length, slots) * model.hidden_size, 2 * slots * model.hidden_size
    passes = model.mask_decoder_passes
    if reads_first_token(model):
        passes, masked_share = 1, 1 / length
    layers = model.num_layers - (passes > 0)
    decoder = passes * c2p * masked_share * (done - needed)
    decoder += passes * p2c * (done - masked_share * needed)
    return layers * (c2p + p2c) * (done - needed), decoder


def _collectives(recorder: Recorder) -> dict[str, dict[str, int]]:
    return {
        " ".join(key): {"calls": recorder.calls[key], "bytes": recorder.num_bytes[key]}
        for key in sorted(recorder.calls)
    }


def _with_backend(config: RunConfig, backend: Any) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, attention_backend=backend))


def _dtype(config: RunConfig) -> torch.dtype:
    return DTYPES[config.precision.dtype]
