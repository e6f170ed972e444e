"""Attention maps reproduce the operator's output."""

from __future__ import annotations

import pytest
import torch

from megatron_deberta.ops import RelativePositions, disentangled_attention
from megatron_deberta.ops.arguments import P2CIndex
from megatron_deberta.ops.maps import attention_maps


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p2c_index", ["microsoft", "paper"])
@pytest.mark.parametrize("tables", ["c2p+p2c", "c2p", "p2c", ""])
def test_maps_give_the_output_of_the_operator(
    tables: str, p2c_index: P2CIndex, *, causal: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    positions = RelativePositions(32, 4)
    q, k, v = torch.randn(3, 2, 3, 17, 8, generator=generator)
    pos_key, pos_query = torch.randn(2, 3, 2 * positions.span, 8, generator=generator)
    given = pos_key if "c2p" in tables else None, pos_query if "p2c" in tables else None
    maps = attention_maps(q, k, *given, positions, causal=causal, p2c_index=p2c_index)
    output = disentangled_attention(
        q, k, v, *given, positions, causal=causal, p2c_index=p2c_index, backend="reference"
    )
    assert list(maps.terms) == ["c2c", *filter(None, tables.split("+"))]
    torch.testing.assert_close(maps.probabilities @ v, output, atol=1e-5, rtol=0)
    summed = sum(maps.terms.values(), torch.zeros(()))
    if causal:
        summed = summed.masked_fill(torch.ones(17, 17).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(summed.softmax(-1), maps.probabilities, atol=1e-6, rtol=0)
    # Each term is the score that the operator computes from that term alone.
    for name in maps.terms.keys() - {"c2c"}:
        alone = (given[0], None) if name == "c2p" else (None, given[1])
        other = attention_maps(q, k, *alone, positions, p2c_index=p2c_index).terms[name]
        scale = (2 / (1 + len(maps.terms) - 1)) ** 0.5
        torch.testing.assert_close(maps.terms[name], other * scale, atol=1e-5, rtol=0)
