"""Runs of RetroMAE on gloo ranks, to be compared with one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_deberta.config.schema import ObjectiveConfig
from megatron_deberta.data.batch import Batch, DecoderRows
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL
from tests.support.layout_matrix import (
    Layout,
    run_steps,
)

MASK = 3


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


def run_retromae(
    rank: int, layout: Layout | None, steps: int, objective: ObjectiveConfig
) -> dict[str, Any]:
    """Return losses, norms and moments of a run with dropout on this rank."""
    return run_steps(
        layout,
        steps,
        configure=lambda config: replace(config, objective=objective),
        change=lambda _, batch: with_decoder(batch),
        losses=("reconstruction_loss",),
    )
