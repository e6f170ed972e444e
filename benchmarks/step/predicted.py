"""Predict the time of a micro batch by kind of kernel, from bytes and FLOPs at data-sheet rates.

The model runs on the meta device, which computes nothing. Each dispatched operator takes the longer
of its FLOPs at the matrix rate and the bytes of its operands and results at the memory's rate;
fused functions count once. Measured times are longer: the ratio shows which kernel to look at. The
kinds are those of ``benchmarks.gpu.one_step``, so that a profile can be held against them.

H100 in bf16 with ``parallel.fuse`` and the Triton kernels; V100 in fp16 with neither.

    python -m benchmarks.step.predicted --output benchmarks/results/offline/predicted.json
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu.one_step import part_of
from benchmarks.lib.provenance import provenance
from benchmarks.step.launches import LAUNCHES
from benchmarks.step.operators import DEPTHS, LENGTH, OperatorCount, counting, micro_batch
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import ModelConfig, ParallelConfig, RunConfig
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.model.flops import training_flops_per_token
from megatron_deberta.ops import batched, chunked, dispatch
from megatron_deberta.planning.machine import Device, find_device

MODELS = {
    "DeBERTa-base": ("configs/models/base.yaml", 32),
    "1.5B": ("configs/models/1.5b.yaml", 16),
}
"""Configs, and rows per micro batch as in ``configs/runs/*_h100.yaml``."""
OPTIMIZER_BYTES = 46
"""Per parameter and step: AdamW 28 (planning.step), 16-bit weights 2, clearing, norm and a sum of
16-bit gradients in fp32 16."""
_ALLOCATIONS = ("empty", "new_empty", "_unsafe_view", "detach", "alias", "lift_fresh")


class Cost(NamedTuple):
    """One call of an operator."""

    flops: float
    bytes: float

    def seconds(self, device: Device) -> float:
        """Return the time at the device's data-sheet rates."""
        matrix = self.flops / device.flops_per_second("bf16")
        return max(matrix, self.bytes / (1e9 * device.memory_gb_per_second))


class CostCount(OperatorCount):
    """Counts operators with their FLOPs and bytes.

    Attributes:
        costs: of each call, by operator name.
        prefix: before operator names.
    """

    def __init__(self, max_distance: int) -> None:
        super().__init__()
        self.costs: defaultdict[str, list[Cost]] = defaultdict(list)
        self.prefix = ""
        self._max_distance = max_distance

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count an operator and run it."""
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.name()
        short = name.split("::")[1].split(".")[0]
        if self.paused or func.is_view or short in _ALLOCATIONS:
            return out
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        moved = _size_of(results) + (
            _size_of(results) if short in ("embedding", "index_select", "gather", "index")
            else 0 if short in ("zeros", "zero_", "fill_", "ones", "full", "arange")
            else _size_of(tensors)
        )  # fmt: skip
        cost = Cost(0.0, moved)
        if name.startswith("megatron_deberta::disentangled_attention"):
            cost = self._attention(tensors, moved, "backward" in short)
        elif func._overloadpacket in flop_registry:
            formula = flop_registry[func._overloadpacket]
            cost = Cost(formula(*args, **(kwargs or {}), out_val=out), moved)
        self.costs[self.prefix + name].append(cost)
        return out

    def compiled(self, function: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        """Return ``function`` counted as one operator."""
        counted = super().compiled(function)

        def costed(*args: Any) -> Any:
            out = counted(*args)
            tensors = [x for x in tree_leaves((args, out)) if isinstance(x, Tensor)]
            self.costs[f"compiled::{function.__name__}"].append(Cost(0.0, _size_of(tensors)))
            return out

        return costed

    def _attention(self, tensors: list[Tensor], moved: float, backward: bool) -> Cost:
        """Return the cost of the fused operator: 64-bit products and a band of score gradients.

        Forward multiplies queries with keys, probabilities with values and each term with at most
        as many table rows as keys; backward repeats the scores and has four products and two per
        term. The band is written once and read three times.
        """
        q, k = [x for x in tensors if x.dim() == 4][-3:-1]
        tables = [x for x in tensors if x.dim() == 3 and x.dtype == q.dtype]
        batch, heads, queries, size = q.shape
        pairs = batch * heads * queries
        terms = sum(min(x.shape[1], k.shape[2]) for x in tables)
        products = 5 * k.shape[2] + 3 * terms if backward else 2 * k.shape[2] + terms
        band = pairs * min(k.shape[2], 2 * self._max_distance) * q.element_size()
        return Cost(2.0 * pairs * size * products, moved + 4 * band * backward)


def _size_of(tensors: list[Tensor]) -> int:
    """Return the bytes of tensors; an expanded one is as large as its storage."""
    return sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in tensors)


@dataclass(frozen=True)
class Side:
    """One device and the way that the model runs on it."""

    title: str
    device: str
    dtype: torch.dtype
    fused: bool

    def counting(self, count: CostCount) -> AbstractContextManager[CostCount]:
        """Count the operators of the context."""
        if self.fused:
            return counting(count)
        return _unfused(count)


@contextmanager
def _unfused(count: CostCount) -> Iterator[CostCount]:
    """Count the operators of the chunked backend, as on a GPU without the kernels."""
    operator = chunked._ChunkedAttention

    def inside(function: Callable[..., Any]) -> Any:
        def attend(*args: Any) -> Any:
            count.prefix = "attention "
            try:
                return function(*args)
            finally:
                count.prefix = ""

        return staticmethod(attend)

    def product_(
        out: Tensor, a: Tensor, b: Tensor, *, beta: float = 0.0, alpha: float = 1.0
    ) -> Tensor:
        """Count a product; ``batched.product_`` computes nothing on the meta device."""
        moved = _size_of([a, b, out, *([out] if beta else [])])
        count.costs["attention aten::baddbmm"].append(Cost(2.0 * a.numel() * b.shape[-1], moved))
        return out

    with (
        mock.patch.object(batched, "product_", product_),
        mock.patch.object(operator, "forward", inside(operator.forward)),
        mock.patch.object(operator, "backward", inside(operator.backward)),
        mock.patch.object(dispatch, "choose_backend", return_value="chunked"),
        count,
    ):
        yield count


SIDES = (
    Side("H100, bf16, fused", "H100-80GB", torch.bfloat16, fused=True),
    Side("V100, fp16, eager", "V100-32GB", torch.float16, fused=False),
)


def costs(model: ModelConfig, rows: int, depth: int, side: Side) -> dict[str, list[Cost]]:
    """Return the costs of forward and backward of a model of ``depth`` layers, by operator."""
    groups = replace(single_process_groups(torch.device("cpu")), device=torch.device("meta"))
    config = RunConfig(
        model=replace(model, num_layers=depth), parallel=ParallelConfig(fuse=side.fused)
    )
    module = build_model(config, groups, side.dtype).module.train()
    batch, seeds = micro_batch(rows)
    with side.counting(CostCount(model.max_relative_positions)) as count:
        loss = module(batch, seeds).losses["masked"].loss
        loss.backward()
    return count.costs


def predict(model: ModelConfig, rows: int, side: Side) -> dict[str, Any]:
    """Return calls, kernels, FLOPs, bytes and seconds of a micro batch by kind of kernel."""
    device = find_device(side.device)
    shallow, deep = (costs(model, rows, depth, side) for depth in DEPTHS)
    kinds: dict[str, dict[str, float]] = {}
    for name in sorted(deep):
        kind = kinds.setdefault(kind_of(name), dict.fromkeys(_KEYS, 0.0))
        first, second = (_sums(name, found.get(name, []), device) for found in (shallow, deep))
        for key in _KEYS:
            layers = model.num_layers - DEPTHS[0]
            kind[key] += first[key] + layers * (second[key] - first[key])
    parameters = sum(p.numel() for p in _module_on_meta(model).parameters())  # every parameter once
    moved = Cost(0.0, OPTIMIZER_BYTES * parameters)
    kinds["optimizer, per step"] = {
        "calls": 0, "kernels": 0, "flops": 0.0, "bytes": moved.bytes,
        "seconds": moved.seconds(device),
    }  # fmt: skip
    formula = training_flops_per_token(model, LENGTH, rows, mask_probability=77 / LENGTH)
    return {
        "device": side.device,
        "rows": rows,
        "length": LENGTH,
        "parameters": parameters,
        "formula_flops": formula * rows * LENGTH,
        "kinds": dict(sorted(kinds.items(), key=lambda pair: -pair[1]["seconds"])),
    }


_KEYS = ("calls", "kernels", "flops", "bytes", "seconds")


def _sums(name: str, found: list[Cost], device: Device) -> dict[str, float]:
    return {
        "calls": len(found),
        "kernels": len(found) * LAUNCHES.get(name, 1),
        "flops": sum(cost.flops for cost in found),
        "bytes": sum(cost.bytes for cost in found),
        "seconds": sum(cost.seconds(device) for cost in found),
    }


def kind_of(name: str) -> str:
    """Return the kind of an operator, as the GPU suite's profile names it."""
    if name.endswith(("row_statistics", "write_gradient_")):
        return "loss"
    return part_of(name.removeprefix("compiled::"))


def _module_on_meta(model: ModelConfig) -> torch.nn.Module:
    groups = replace(single_process_groups(torch.device("cpu")), device=torch.device("meta"))
    return build_model(RunConfig(model=model), groups, torch.bfloat16).module


def main() -> None:
    """Predict and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    record: dict[str, Any] = {"provenance": provenance(), "devices": {}, "models": {}}
    for side in SIDES:
        device = find_device(side.device)
        record["devices"][side.title] = {
            "flops_per_second": device.flops_per_second("bf16"),
            "bytes_per_second": 1e9 * device.memory_gb_per_second,
        }
        for name, (path, rows) in MODELS.items():
            found = predict(load_config(path).model, rows, side)
            record["models"].setdefault(name, {})[side.title] = found
    print(json.dumps(record, indent=1))
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
