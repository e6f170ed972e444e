"""Runs of replaced-token detection on gloo ranks, to be compared with one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from megatron_deberta.config.schema import ModelConfig, ObjectiveConfig, RTDConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.ops.cross_entropy import CrossEntropy
from tests.support.layout_matrix import (
    MODEL,
    Layout,
    run_steps,
)

Samples = dict[int, list[int]]
RTD = replace(MODEL, head="rtd")
JOINT = RTDConfig()
ALTERNATING = RTDConfig(update="alternating", discriminator_learning_rate=5e-4)


def record_samples(module: nn.Module, drawn: Samples) -> None:
    """Let every pass of the generator fill a table: sample index -> drawn pieces."""

    def record(_: nn.Module, arguments: tuple[Any, ...], result: CrossEntropy) -> None:
        batch: Batch = arguments[0]
        assert result.samples is not None
        rows = result.samples.view(batch.labels.shape)
        for index, positions, pieces in zip(
            batch.sample_index.tolist(),
            batch.masked_positions,
            rows,
            strict=True,
        ):
            drawn[index] = pieces[positions >= 0].tolist()

    module.get_submodule("generator").register_forward_hook(record)


def run_rtd(
    rank: int,
    layout: Layout | None,
    model: ModelConfig,
    steps: int,
    rtd: RTDConfig = JOINT,
) -> dict[str, Any]:
    """Return losses, metrics, samples and moments of a run with dropout on this rank."""
    samples: Samples = {}
    found = run_steps(
        layout,
        steps,
        configure=lambda config: replace(
            config, model=model, objective=ObjectiveConfig(name="rtd"), rtd=rtd
        ),
        watch=lambda module: record_samples(module, samples),
        losses=("discriminator_loss",),
        norms=("discriminator_grad_norm",) if rtd.update == "alternating" else (),
    )
    return found | {"samples": samples}
