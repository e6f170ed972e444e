"""The attention block compared with Algorithm 1 of the paper, as loops in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.attention import (
    AttentionContext,
    DisentangledSelfAttention,
    PositionTable,
)
from megatron_deberta.model.inputs import ModelInputs, TokenInfo
from tests.support.stock_weights import randomize
from tests.support.tolerances import FP64

CONFIG = ModelConfig(
    hidden_size=16,
    num_heads=2,
    max_relative_positions=3,
    position_buckets=0,
    share_position_projections=False,
    normalize_position_table=False,
    p2c_index="paper",
)


def delta(i: int, j: int, k: int) -> int:
    """Return the relative distance from token i to token j: He et al. 2021, Eq. 3."""
    if i - j <= -k:
        return 0
    if i - j >= k:
        return 2 * k - 1
    return i - j + k


def algorithm_1(block: DisentangledSelfAttention, hidden: Tensor, table: Tensor) -> Tensor:
    """Compute Eq. 4 and Algorithm 1 for one sequence ``[N, D]``; heads are concatenated."""
    length, size = hidden.size(0), block.head_size
    assert block.position_key is not None
    assert block.position_query is not None
    content_q, content_k, content_v = (f(hidden) for f in (block.query, block.key, block.value))
    position_k, position_q = block.position_key(table), block.position_query(table)
    span = CONFIG.max_relative_positions
    heads = []
    for head in range(CONFIG.num_heads):
        cut = slice(head * size, (head + 1) * size)
        scores = torch.zeros(length, length, dtype=hidden.dtype)
        for i in range(length):
            for j in range(length):
                c2c = content_q[i, cut] @ content_k[j, cut]
                c2p = content_q[i, cut] @ position_k[delta(i, j, span), cut]
                p2c = content_k[j, cut] @ position_q[delta(j, i, span), cut]
                scores[i, j] = (c2c + c2p + p2c) / math.sqrt(3 * size)
        heads.append(scores.softmax(-1) @ content_v[:, cut])
    return torch.cat(heads, -1)


def whole(table: Tensor) -> PositionTable:
    return PositionTable(table, range(len(table)), torch.arange(len(table)))


@pytest.mark.parametrize(
    ("index", "backend"),
    [("paper", "reference"), ("paper", "chunked"), ("microsoft", "reference")],
)
def test_paper_index_is_algorithm_1(index: Any, backend: str) -> None:
    """Only ``p2c_index="paper"`` is Eq. 4; the released code differs (docs/model.md)."""
    block = DisentangledSelfAttention(replace(CONFIG, p2c_index=index), 0).double()
    randomize(block)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 9, 16, generator=generator, dtype=torch.float64)
    table = torch.randn(6, 16, generator=generator, dtype=torch.float64)
    context = AttentionContext(whole(table), None, None, None, backend, recompute_cheap=False)
    tokens = TokenInfo.of_sequence(ModelInputs(torch.ones(1, 9).long()))

    attended = algorithm_1(block, hidden[0], table)
    expected = block.norm(hidden + block.output(attended.unsqueeze(0), True), True)
    found = block(hidden, tokens, context)
    assert torch.allclose(found, expected, **FP64) == (index == "paper")
