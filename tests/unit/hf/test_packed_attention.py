"""Attention of packed rows against the same rows one at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_deberta.hf.packed_attention import PackedRows, packed_attention
from megatron_deberta.ops import RelativePositions, disentangled_attention

POSITIONS = RelativePositions(16, 8)
HEADS, SIZE = 3, 4
LENGTHS = [(5,), (4, 4, 4), (1, 9, 0, 9, 3), (150, 2, 140), (0, 7)]


def tensors(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(tokens, HEADS, SIZE)] * 3 + [(HEADS, 2 * POSITIONS.span, SIZE)] * 2
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [x.requires_grad_() for x in made]


def one_at_a_time(
    x: list[Tensor], lengths: tuple[int, ...], seed: Tensor | None, terms: tuple[bool, bool]
) -> Tensor:
    parts = [part.split(lengths) for part in x[:3]]
    outs = []
    for row, heads in enumerate(zip(*parts, strict=True)):
        q, k, v = (part.transpose(0, 1)[None] for part in heads)
        tables = (x[3] if terms[0] else None, x[4] if terms[1] else None)
        out = disentangled_attention(
            q, k, v, *tables, POSITIONS, scale=0.3, backend="reference",
            dropout_p=0.0 if seed is None else 0.25,
            seed=None if seed is None else seed[row : row + 1],
        )  # fmt: skip
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("terms", [(True, True), (True, False), (False, True)])
def test_equals_rows_one_at_a_time(
    lengths: tuple[int, ...], dropout: bool, terms: tuple[bool, bool]
) -> None:
    x = tensors(sum(lengths))
    seed = torch.arange(len(lengths)) + 11 if dropout else None
    expected = one_at_a_time(x, lengths, seed, terms)
    tables = (x[3] if terms[0] else None, x[4] if terms[1] else None)
    out = packed_attention(
        *x[:3], *tables, POSITIONS, PackedRows(lengths, torch.device("cpu")), dropout_p=0.25,
        seed=seed, scale=0.3,
    )  # fmt: skip
    torch.testing.assert_close(out, expected)
    used = [*x[:3], *(table for table in tables if table is not None)]
    d_out = torch.randn(out.shape, dtype=out.dtype)
    grads = [torch.autograd.grad(each, used, d_out) for each in (out, expected)]
    torch.testing.assert_close(*grads)


def test_other_backends_take_rows_as_documents_and_tokens_beyond_the_rows_give_zeros() -> None:
    lengths = (3, 0, 6)
    x, rows = tensors(11), PackedRows(lengths, torch.device("cpu"))
    outs = [
        packed_attention(*x, POSITIONS, rows, dropout_p=0.0, seed=None, scale=0.3, backend=name)
        for name in ("reference", "chunked")
    ]
    torch.testing.assert_close(*outs)
    assert not outs[0][9:].any()
    grads = [torch.autograd.grad(out.square().sum(), x) for out in outs]
    torch.testing.assert_close(*grads)


def test_groups_hold_every_row_once_and_join_short_rows() -> None:
    rows = PackedRows((3, 400, 0, 4, 390, 5, 3), torch.device("cpu"))
    groups = [group.rows.tolist() for group in rows.groups]
    assert sorted(sum(groups, [])) == [0, 1, 3, 4, 5, 6]
    assert [0, 3, 5, 6] in groups
    assert rows.groups[0].length == 400
