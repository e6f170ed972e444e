"""Count the operators that one micro batch dispatches, per layer and for the whole model.

On the meta device, which computes nothing, with ``parallel.fuse``. Views are not counted, the
attention operator, each compiled function and the calls of the cross-entropy's kernels count as
one, and so do their backward passes. An
operator costs the host a launch, which bounds small models on fast GPUs.

    python -m benchmarks.step.operators --output operators.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lib.provenance import provenance
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import ModelConfig, ParallelConfig, RunConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.model import DropoutSeeds, ModelInputs, dropout, fused
from megatron_deberta.ops import cross_entropy, dispatch

MODELS = {"DeBERTa-base": "configs/models/base.yaml", "1.5B": "configs/models/1.5b.yaml"}
ROWS, LENGTH, TARGETS = 2, 512, 77
DEPTHS = (3, 4)
# Imported at the first use, and only where there is Triton
KERNELS = "megatron_deberta.ops.triton.cross_entropy"
OperatorCountT = TypeVar("OperatorCountT", bound="OperatorCount")


class OperatorCount(TorchDispatchMode):
    """Counts dispatched operators other than views.

    Attributes:
        counts: by operator name.
        paused: operators inside a compiled function are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count an operator and run it."""
        if not (self.paused or func.is_view):
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))

    def compiled(self, function: Callable[..., Any], *_: Any) -> Callable[..., Any]:
        """Return ``function`` counted as one operator; stands for ``fused.compiled``."""

        def counted(*args: Any) -> Any:
            self.counts[f"compiled::{function.__name__}"] += not self.paused
            before, self.paused = self.paused, True
            try:
                return function(*args)
            finally:
                self.paused = before

        return counted


@contextmanager
def module_replaced(name: str, module: ModuleType) -> Iterator[None]:
    """Replace a module in ``sys.modules`` within the context."""
    # mock.patch.dict would also remove the modules that are imported within the context.
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


@contextmanager
def counting(count: OperatorCountT) -> Iterator[OperatorCountT]:
    """Count the operators of the context as on a GPU, on tensors of the meta device."""
    kernels = ModuleType("cross_entropy")
    for function in (row_statistics, write_gradient_):
        setattr(kernels, function.__name__, count.compiled(function))
    with (
        mock.patch.object(fused, "compiled", count.compiled),
        mock.patch.object(dropout, "compiled", count.compiled),
        mock.patch.object(dispatch, "choose_backend", return_value="triton"),
        mock.patch.object(cross_entropy, "runs_kernels", return_value=True),
        module_replaced(KERNELS, kernels),
        count,
    ):
        yield count


def row_statistics(logits: Tensor, labels: Tensor, *_: int) -> Tensor:
    """Stand for the function of ``ops.triton.cross_entropy``, without its values."""
    return logits.new_empty((4, len(labels)), dtype=torch.float32)


def write_gradient_(
    logits: Tensor, labels: Tensor, top: Tensor, total: Tensor, d_bias: Tensor, *_: float
) -> Tensor:
    """Stand for the function of ``ops.triton.cross_entropy``, without its values."""
    return logits


def micro_batch(rows: int = ROWS) -> tuple[Batch, DropoutSeeds]:
    """Return rows without padding and their dropout keys, without values."""
    ids = torch.zeros(rows, LENGTH, dtype=torch.int64, device="meta")
    targets = ids[:, :TARGETS]
    batch = Batch(ModelInputs(ids), targets, targets, ids[:, 0])
    return batch, DropoutSeeds(1, 2, batch.dropout_keys)


def count_pass(model: ModelConfig, depth: int) -> dict[str, Counter[str]]:
    """Return the operators of the forward and the backward pass of a model of ``depth`` layers."""
    groups = replace(single_process_groups(torch.device("cpu")), device=torch.device("meta"))
    config = RunConfig(model=replace(model, num_layers=depth), parallel=ParallelConfig(fuse=True))
    module = build_model(config, groups, torch.bfloat16).module.train()
    batch, seeds = micro_batch()
    with counting(OperatorCount()) as forward:
        loss = module(batch, seeds).losses["masked"].loss
    with counting(OperatorCount()) as backward:
        loss.backward()
    return {"forward": forward.counts, "backward": backward.counts}


def measure(path: str) -> dict[str, Any]:
    """Return the counts of a model: by layer, and of a micro batch at its full depth."""
    model = load_config(path).model
    shallow, deep = (count_pass(model, depth) for depth in DEPTHS)
    layer = {name: deep[name] - shallow[name] for name in deep}
    total = {
        name: shallow[name].total() + (model.num_layers - DEPTHS[0]) * layer[name].total()
        for name in deep
    }
    return {
        "layers": model.num_layers,
        "by_layer": {name: count.total() for name, count in layer.items()},
        "micro_batch": total,
        "operators": {name: dict(count.most_common()) for name, count in layer.items()},
    }


def main() -> None:
    """Count and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--before", type=Path, help="result of an older revision to add")
    args = parser.parse_args()
    models = {name: measure(path) for name, path in MODELS.items()}
    record = {"rows": ROWS, "length": LENGTH, "models": models, "provenance": provenance()}
    if args.before:
        record["before"] = json.loads(args.before.read_text())
    print(json.dumps(record, indent=1))
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
