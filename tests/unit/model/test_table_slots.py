"""Task models project only the position-table rows that a row of tokens reaches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_deberta.config.schema import ModelConfig, with_task_head
from megatron_deberta.model import DropoutSeeds
from megatron_deberta.model.flops import num_used_slots
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.model.task_models import DebertaForSpans
from megatron_deberta.ops import RelativePositions
from tests.support.labelled import SMALL

ROWS, LENGTH = 3, 6
LOG = replace(SMALL, position_buckets=16)
MODELS = {
    "shared projections": LOG,
    "paper's p2c": replace(LOG, p2c_index="paper"),
    "own projections, clipped": replace(
        SMALL, position_buckets=0, share_position_projections=False
    ),
    "c2p": replace(LOG, position_terms="c2p"),
}


def run(config: ModelConfig, *, narrow: bool) -> tuple[Tensor, dict[str, Any], int]:
    """Return logits, gradients, and the FLOPs of forward."""
    model = DebertaForSpans(with_task_head(config, "spans"), seed=1)
    if not narrow:
        model._table_slots = lambda length: None  # type: ignore[method-assign]
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) + 5
    with FlopCounterMode(display=False) as counter:
        logits = model.logits(ModelInputs(ids), DropoutSeeds(1, 2, torch.arange(ROWS)))
    logits.square().sum().backward()
    return logits, {n: p.grad for n, p in model.named_parameters()}, counter.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_the_rest_of_the_table_changes_nothing(name: str) -> None:
    config = MODELS[name]
    logits, gradients, flops = run(config, narrow=True)
    expected, expected_gradients, more = run(config, narrow=False)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-5)
    positions = RelativePositions(config.max_relative_positions, config.position_buckets or 0)
    used = num_used_slots(with_task_head(config, "spans"), LENGTH)
    assert used == 2 * LENGTH - 1 < 2 * positions.span
    terms = 1 if config.position_terms == "c2p" else 2
    saved = 2 * positions.span - used
    assert more - flops == config.num_layers * terms * 2 * saved * config.hidden_size**2


def test_slots_of_a_length() -> None:
    positions = RelativePositions(512, 256)
    assert positions.slots_of_length(1) == range(256, 257)
    assert positions.slots_of_length(13) == range(244, 269)
    assert len(positions.slots_of_length(10_000)) == 512
    assert RelativePositions(4, 0).slots_of_length(100) == range(8)
