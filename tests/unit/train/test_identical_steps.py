"""Consecutive steps dispatch the same operators with the same numbers.

What changes from step to step (the step's number, seeds, the learning rate, the loss scale) is on
the device, so that a recorded step (a CUDA graph) can be replayed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from megatron_deberta.config.schema import (
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.data.batch import Batch
from megatron_deberta.engine import deepspeed_patches
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.train.setup import DTYPES
from tests.support.selection import every
from tests.unit.train.test_host_waits import MODEL
from tests.unit.train.test_step import start

# Steps in which buffers and the optimizer's state are allocated
WARM_UP = 2


class Recorder(TorchDispatchMode):
    """Records each operator with its arguments; of tensors, shape and dtype.

    Attributes:
        calls: one text per operator. The number that ``fill_`` or ``full`` writes to a scalar on
            the device is left out, because that is how numbers get there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name()
        is_scalar = isinstance(args[0], Tensor) and args[0].dim() == 0
        if (name == "aten::fill_.Scalar" and is_scalar) or (name == "aten::full" and not args[0]):
            self.calls.append(name)
        elif func.namespace != "profiler":
            self.calls.append(f"{name}{tree_map(describe, (args, kwargs))}")
        return func(*args, **kwargs)


def describe(value: Any) -> Any:
    """Return what is recorded of an argument."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    return type(value) if isinstance(value, torch.ScriptObject) else value


def micro_batches(step: int) -> list[Batch]:
    """Return two micro batches of a step, of other tokens and samples in each."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for number in range(2):
        ids = torch.randint(4, 131, (2, 16), generator=generator)
        positions = torch.tensor([[1, 4, 9], [2, 3, 11]])
        samples = torch.tensor([4 * step + 2 * number, 4 * step + 2 * number + 1])
        labels = ids.gather(1, positions)
        batches.append(Batch(ModelInputs(ids), positions, labels, samples))
    return batches


def is_number(call: str) -> bool:
    """Whether a call brings a number to the device, or is DeepSpeed's unscaled norm.

    DeepSpeed divides the norm by the loss scale for a report that is not used, after it was read.
    """
    return call == "aten::fill_.Scalar" or call.startswith("aten::div.Tensor((((), torch.float")


CASES = [
    ("plain", "fp32", 0),
    ("deepspeed", "fp32", 0),
    ("deepspeed", "fp32", 1),
    ("deepspeed", "bf16", 1),
    ("deepspeed", "bf16", 2),
    ("deepspeed", "fp16", 2),
    ("deepspeed", "fp16", 3),
]
FEW = [("plain", "fp32", 0), ("deepspeed", "fp16", 2), ("deepspeed", "bf16", 1)]
"""Each engine and both 16-bit formats."""


@pytest.mark.parametrize(
    ("engine_name", "dtype", "stage"),
    [
        *every(3, FEW),
        *(pytest.param(*x, marks=pytest.mark.nightly) for x in CASES if x not in FEW),
    ],
)
def test_steps_dispatch_the_same(
    engine_name: Any, dtype: Any, stage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While learning rate, loss scale and norm change; with the clipping of GPUs, if there is."""
    monkeypatch.setattr(deepspeed_patches, "can_fold", lambda *_: True)
    # Stage 0 and the plain engine, which train on no GPU in 16 bits, clip by a number of the host.
    clip = 1e-3 if stage else 0.0
    config = RunConfig(
        model=replace(MODEL, hidden_dropout=0.1, attention_dropout=0.1),
        parallel=ParallelConfig(
            engine=engine_name, zero_stage=stage, attention_backend="chunked"
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=6, clip_grad_norm=clip),
        precision=PrecisionConfig(
            dtype=dtype, loss_scale_window=1, initial_loss_scale_power=8
        ),
        train=TrainConfig(steps=9, micro_batch_size=2, global_batch_size=4),
    )  # fmt: skip
    _, engine, step = start(config, DTYPES[dtype])
    recorded, rates, scales, norms = list[list[str]](), set(), set(), set()
    for number in range(WARM_UP + 3):
        batches = micro_batches(number)
        with Recorder() as recorder:
            result = step(number, batches)
        if number < WARM_UP:
            continue
        assert not result.outcome.skipped
        recorded.append(recorder.calls)
        rates.add(result.learning_rate)
        scales.add(result.outcome.loss_scale)
        norms.add(result.outcome.grad_norm)
    engine.destroy()
    assert len(rates) == len(norms) == 3
    assert len(scales) > 1 or dtype != "fp16"
    # The scale is copied to the device only where it changes.
    first, *others = ([call for call in calls if not is_number(call)] for calls in recorded)
    for other in others:
        assert other == first
    assert any("_fused_adamw_" in call for call in first)
