"""Runs with autoregressive batches on gloo ranks, to be compared with one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_deberta.config.schema import ObjectiveConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL
from tests.support.layout_matrix import (
    Layout,
    run_steps,
)


def causal_batch(input_ids: Tensor, attention_mask: Tensor, sample_index: Tensor) -> Batch:
    """Return the rows with every next token as a target."""
    following = attention_mask[:, 1:]
    positions = torch.arange(input_ids.size(1) - 1).expand(len(input_ids), -1)
    return Batch(
        ModelInputs(input_ids, attention_mask, causal=True),
        positions.masked_fill(~following, -1),
        input_ids[:, 1:].masked_fill(~following, IGNORED_LABEL),
        sample_index,
    )


def as_causal(batch: Batch) -> Batch:
    """Return the rows of a batch, as they are, with every next token as a target."""
    return causal_batch(batch.inputs.input_ids, batch.inputs.is_token, batch.sample_index)


def run_two_forms(rank: int, layout: Layout | None, steps: int) -> dict[str, Any]:
    """Return losses and moments of a run of ``mlm+ar`` with dropout; even steps are causal."""
    objective = ObjectiveConfig(name="mlm+ar")
    return run_steps(
        layout,
        steps,
        configure=lambda config: replace(config, objective=objective),
        change=lambda step, batch: batch if step % 2 else as_causal(batch),
    )
