"""The reference backend against an independent, element-wise implementation of the definition."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_deberta.ops import RelativePositions, disentangled_attention
from megatron_deberta.ops.arguments import P2CIndex
from megatron_deberta.ops.dropout_bits import gathered_bytes, pairs, row_keys
from megatron_deberta.ops.reference import attention_maps
from tests.support.tolerances import FP64

LENGTH, SIZE, K = 9, 3, 4


def elementwise(
    row: int, head: int, x: dict[str, Tensor], at: int, p2c_index: str, options: dict[str, Any]
) -> tuple[Tensor, float]:
    """Return output and log-sum-exp of one query."""

    def delta(distance: int) -> int:
        return min(max(distance + K, 0), 2 * K - 1)

    q = x["q"][row, head, options["place"]]
    weights = {}
    for j in range(LENGTH):
        padding, documents = options["attention_mask"], options["document_ids"]
        hidden = [
            at < 0,
            padding is not None and not padding[row, j],
            documents is not None and documents[row, j] != documents[row, at],
            options["causal"] and j > at,
        ]
        if any(hidden):
            continue
        k = x["k"][row, head, j]
        from_key = at - j if p2c_index == "microsoft" else j - at
        score = q @ k + q @ x["pos_key"][head, delta(at - j)]
        score += k @ x["pos_query"][head, delta(from_key)]
        weights[j] = math.exp(float(score) / math.sqrt(3 * SIZE))
    total = sum(weights.values())
    output = torch.zeros(SIZE, dtype=torch.float64)
    query = torch.tensor([at])
    rows = row_keys(torch.tensor([40 + row]), pairs(query), 1, 5 + head)
    for j, weight in weights.items():
        if gathered_bytes(rows, query, LENGTH)[0, 0, 0, j] >= 64:  # a quarter is dropped
            output += weight / total / 0.75 * x["v"][row, head, j]
    return output, math.log(total) if weights else -math.inf


@pytest.mark.parametrize("p2c_index", ["microsoft", "paper"])
@pytest.mark.parametrize(
    ("padding", "documents", "causal", "gathered"),
    list(itertools.product([False, True], repeat=4)),
)
def test_reference_is_the_definition(
    p2c_index: str, padding: bool, documents: bool, causal: bool, gathered: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    places = [[0, 8, -1], [4, 4, 2]] if gathered else [list(range(LENGTH))] * 2
    shapes = {
        "q": (2, 2, len(places[0]), SIZE),
        "k": (2, 2, LENGTH, SIZE),
        "v": (2, 2, LENGTH, SIZE),
        "pos_key": (2, 2 * K, SIZE),
        "pos_query": (2, 2 * K, SIZE),
    }
    x = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    options: dict[str, Any] = {
        "attention_mask": torch.arange(LENGTH) < torch.tensor([[7], [3]]) if padding else None,
        "document_ids": torch.tensor([[0] * 5 + [1] * 4, list(range(9))]) if documents else None,
        "causal": causal,
    }
    output, lse = disentangled_attention(
        **x,
        positions=RelativePositions(K, 0),
        q_positions=torch.tensor(places) if gathered else None,
        **options,
        dropout_p=0.25,
        seed=40,
        head_offset=5,
        p2c_index=p2c_index,  # type: ignore[arg-type]
        return_lse=True,
        backend="reference",
    )
    for row, head, place in itertools.product(range(2), range(2), range(len(places[0]))):
        at = places[row][place]
        expected, value = elementwise(row, head, x, at, p2c_index, {**options, "place": place})
        torch.testing.assert_close(output[row, head, place], expected, **FP64)
        assert float(lse[row, head, place]) == pytest.approx(value, rel=1e-6)


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
