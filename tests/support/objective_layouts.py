"""Runs of other objectives than masked language modelling on gloo ranks, with dropout.

Each run takes a rank, a layout (None: one process) and a number of steps, and returns what
``layout_matrix.compare`` needs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_deberta.config.schema import ModelConfig, ObjectiveConfig, RTDConfig
from megatron_deberta.data.batch import Batch, DecoderRows
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL, CrossEntropy
from tests.support.layout_matrix import MODEL, Layout, run_steps

MASK = 3
Samples = dict[int, list[int]]
RTD = replace(MODEL, head="rtd")
JOINT = RTDConfig()
ALTERNATING = RTDConfig(update="alternating", discriminator_learning_rate=5e-4)


def as_causal(batch: Batch) -> Batch:
    """Return the rows of a batch, as they are, with every next token as a target."""
    ids, is_token = batch.inputs.input_ids, batch.inputs.is_token
    following = is_token[:, 1:]
    positions = torch.arange(ids.size(1) - 1).expand(len(ids), -1)
    return Batch(
        ModelInputs(ids, is_token, causal=True),
        positions.masked_fill(~following, -1),
        ids[:, 1:].masked_fill(~following, IGNORED_LABEL),
        batch.sample_index,
    )


def run_two_forms(rank: int, layout: Layout | None, steps: int) -> dict[str, Any]:
    """Train with ``mlm+ar``; even steps are causal."""
    objective = ObjectiveConfig(name="mlm+ar")
    return run_steps(
        layout,
        steps,
        configure=lambda config: replace(config, objective=objective),
        change=lambda step, batch: batch if step % 2 else as_causal(batch),
    )


def with_decoder(batch: Batch) -> Batch:
    """Return a batch whose decoder predicts every second token; some rows have fewer tokens."""
    ids, is_token = batch.inputs.input_ids, batch.inputs.is_token
    positions = torch.arange(1, ids.size(1), 2).expand(len(ids), -1)
    real = is_token.gather(1, positions)
    labels = ids.gather(1, positions).masked_fill(~real, IGNORED_LABEL)
    every_second = (torch.arange(ids.size(1)) % 2 == 1) & is_token
    rows = DecoderRows(
        ids.masked_fill(every_second, MASK), positions.masked_fill(~real, -1), labels
    )
    return replace(batch, decoder=rows)


def run_retromae(rank: int, layout: Layout | None, steps: int, pooling: Any) -> dict[str, Any]:
    """Train with RetroMAE."""
    objective = ObjectiveConfig(name="retromae", retromae_pooling=pooling)
    return run_steps(
        layout,
        steps,
        configure=lambda config: replace(config, objective=objective),
        change=lambda _, batch: with_decoder(batch),
        losses=("reconstruction_loss",),
    )


def record_samples(module: nn.Module, drawn: Samples) -> None:
    """Let every pass of the generator fill a table: sample index -> drawn pieces."""

    def record(_: nn.Module, arguments: tuple[Any, ...], result: CrossEntropy) -> None:
        batch: Batch = arguments[0]
        assert result.samples is not None
        rows = result.samples.view(batch.labels.shape)
        for index, positions, pieces in zip(
            batch.sample_index.tolist(), batch.masked_positions, rows, strict=True
        ):
            drawn[index] = pieces[positions >= 0].tolist()

    module.get_submodule("generator").register_forward_hook(record)


def run_rtd(
    rank: int, layout: Layout | None, steps: int, model: ModelConfig, rtd: RTDConfig = JOINT
) -> dict[str, Any]:
    """Train with replaced-token detection; the result has the drawn samples, too."""
    samples: Samples = {}
    objective = ObjectiveConfig(name="rtd")
    found = run_steps(
        layout,
        steps,
        configure=lambda config: replace(config, model=model, objective=objective, rtd=rtd),
        watch=lambda module: record_samples(module, samples),
        losses=("discriminator_loss",),
        norms=("discriminator_grad_norm",) if rtd.update == "alternating" else (),
    )
    return found | {"samples": samples}
