"""Models with fast attention under ``DistributedDataParallel`` on two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_deberta.hf import use_fast_attention
from tests.support.ranks import RankPool
from tests.support.stock_models import build, inputs, labelled, results


def run_rank(rank: int) -> dict[str, float]:
    """Return the largest difference of each output and gradient, relative to stock's value."""
    model = build("v2", "ForMaskedLM")
    batch = labelled("ForMaskedLM", inputs(3, 9, seed=rank))
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    stock = results(wrapped, batch)
    with use_fast_attention(wrapped):
        ours = results(wrapped, batch)
    assert ours.keys() == stock.keys()
    alone = results(model, batch)
    name = "deberta.encoder.layer.0.attention.self.query_proj.weight"
    assert not torch.allclose(alone[name], ours[f"module.{name}"]), "gradients are not averaged"
    return {
        name: float((ours[name] - value).abs().max() / value.abs().max().clamp(min=1.0))
        for name, value in stock.items()
    }


@pytest.mark.slow
def test_gradients_of_two_ranks_are_those_of_stock(two_ranks: RankPool) -> None:
    for differences in two_ranks.run(run_rank):
        assert max(differences.values()) <= 1e-5
