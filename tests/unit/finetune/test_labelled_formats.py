"""Fine-tuning in 16 bits and with recomputation, SiFT included, follows the run in fp32."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from megatron_deberta.config.schema import Head, ParallelConfig, PrecisionConfig
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.train.setup import build_rank_model
from megatron_deberta.train.step import TrainStep
from tests.support.labelled import HEADS, labelled_run, labelled_steps


@cache
def losses(head: Head, dtype: Any, recompute: Any = "none") -> list[float]:
    """Return the task's loss and SiFT's of four steps with dropout."""
    groups = single_process_groups(torch.device("cpu"))
    precision = PrecisionConfig(dtype=dtype, initial_loss_scale_power=10)
    parallel = ParallelConfig(engine="plain", recompute=recompute)
    config = labelled_run(head, dropout=0.1, sift=5.0, precision=precision, parallel=parallel)
    config = replace(config, train=replace(config.train, steps=4))
    model = build_rank_model(config, groups)
    model.module.train()
    step = TrainStep(build_engine(config, model.module, model.specs, groups), config, groups)
    found = []
    for number, batches in enumerate(labelled_steps(config, groups)):
        result = step(number, batches)
        assert not result.outcome.skipped
        found += [result.loss, result.metrics["sift_loss"]]
    return found


# Of a whole text, of each token and of parts of a text.
FEW = (("classification", "bf16"), ("tokens", "bf16"), ("spans", "fp16"))


@pytest.mark.parametrize(
    ("head", "dtype"),
    [
        pytest.param(head, dtype, marks=() if (head, dtype) in FEW else pytest.mark.nightly)
        for head in HEADS
        for dtype in ("bf16", "fp16")
    ],
)
def test_sixteen_bits(head: Head, dtype: str) -> None:
    # The divergence of scores is close to 0, where only the absolute error means something.
    assert losses(head, dtype) == pytest.approx(losses(head, "fp32"), rel=2e-2, abs=2e-3)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_nothing(recompute: str) -> None:
    assert losses("tokens", "fp32", recompute) == losses("tokens", "fp32")
