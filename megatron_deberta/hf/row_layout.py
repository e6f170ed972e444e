"""Layouts of the rows of a batch inside an accelerated encoder: padded, or packed without padding.

transformers computes every padding position, and its attention there is uniform over all
positions of the row. Padding positions enter the encoder as zeros, so without dropout all padding
of a row has the same states in every layer. The packed layout therefore computes one padding
token per row and gives the same states as transformers at every position.

Letters: B rows, N positions per row, T real tokens, P rows with padding, D features, A heads,
H features per head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_deberta.ops import RelativePositions, disentangled_attention
from megatron_deberta.ops.packed_rows import PackedRows, packed_attention


class Heads(NamedTuple):
    """Inputs of one attention layer, by head.

    Attributes:
        query: ``[rows or 1, positions or T + P, A, H]``.
        key: like ``query``.
        value: like ``query``.
        pos_key: ``[A, 2 * span, H]``; None: no content-to-position term.
        pos_query: likewise of the position-to-content term.
        positions: map from distances to rows of the two tables.
        scale: factor on scores.
        dropout_p: dropout of probabilities; 0 in evaluation.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pos_key: Tensor | None
    pos_query: Tensor | None
    positions: RelativePositions
    scale: float
    dropout_p: float

    def seeds(self, rows: int) -> Tensor | None:
        """Draw one dropout seed per row from torch's generator; None without dropout."""
        if self.dropout_p == 0:
            return None
        return torch.randint(2**62, (rows,), device=self.query.device)


@dataclass(frozen=True)
class PaddedLayout:
    """Rows with their padding, ``[B, N, D]``.

    Attributes:
        mask: bool ``[B, N]``, True = token; None: no padding.
        length: N.
    """

    mask: Tensor | None
    length: int

    @property
    def longest(self) -> int:
        """Upper bound of the tokens per row."""
        return self.length

    def pack(self, x: Tensor) -> Tensor:
        """Return ``[B, N, D]`` unchanged."""
        return x

    def unpack(self, x: Tensor) -> Tensor:
        """Return ``[B, N, D]`` unchanged."""
        return x

    def attend(self, heads: Heads) -> Tensor:
        """Return ``[B, N, A * H]``."""
        out = disentangled_attention(
            heads.query.transpose(1, 2),
            heads.key.transpose(1, 2),
            heads.value.transpose(1, 2),
            heads.pos_key,
            heads.pos_query,
            heads.positions,
            attention_mask=self.mask,
            dropout_p=heads.dropout_p,
            seed=heads.seeds(len(heads.query)),
            scale=heads.scale,
        )
        out = out.transpose(1, 2)
        if self.mask is not None:
            uniform = heads.value.mean(1, keepdim=True)
            out = torch.where(self.mask[:, :, None, None], out, uniform)
        return out.flatten(2)


@dataclass(frozen=True)
class PackedLayout:
    """Real tokens of all rows in order, then one padding token per padded row, ``[1, T + P, D]``.

    Attributes:
        rows: lengths of the rows.
        chosen: int64 ``[T + P]``, position of each packed token in the flattened ``[B * N]``.
        origin: int64 ``[B * N]``, packed token of each position.
        uniform: float32 ``[P, T + P]``, weights of the uniform attention of padding.
        shape: B and N.
    """

    rows: PackedRows
    chosen: Tensor
    origin: Tensor
    uniform: Tensor
    shape: tuple[int, int]

    @staticmethod
    def of_mask(mask: Tensor) -> PackedLayout:
        """Return the layout of a mask.

        Args:
            mask: bool ``[B, N]``, True = token; the tokens of each row form one run.

        Raises:
            ValueError: there is padding between tokens.
        """
        batch, length = mask.shape
        counts, gaps = mask.sum(1), (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
        lengths, runs = torch.stack([counts, gaps]).tolist()
        if max(runs) > 1:
            raise ValueError(
                f"attention_mask: got padding between tokens in row {runs.index(max(runs))}, "
                "expected one run of ones per row; remove it, or undo the acceleration"
            )
        padded = torch.nonzero(counts < length)[:, 0]
        first_padding = mask[padded].to(torch.uint8).argmin(1) + padded * length
        tokens = torch.nonzero(mask.flatten())[:, 0]
        origin = torch.empty(batch * length, dtype=torch.long, device=mask.device)
        padding_token = torch.zeros(batch, dtype=torch.long, device=mask.device)
        padding_token[padded] = torch.arange(len(padded), device=mask.device) + len(tokens)
        origin.view(batch, length)[:] = padding_token[:, None]
        origin[tokens] = torch.arange(len(tokens), device=mask.device)
        of_row = torch.cat([tokens // length, padded])
        uniform = (of_row == padded[:, None]).float() / length
        paddings = torch.arange(len(padded), device=mask.device)
        uniform[paddings, len(tokens) + paddings] *= (length - counts[padded]).float()
        return PackedLayout(
            PackedRows(tuple(lengths), mask.device),
            torch.cat([tokens, first_padding]),
            origin,
            uniform,
            (batch, length),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest row, at least 1."""
        return max(1, *self.rows.lengths)

    def pack(self, x: Tensor) -> Tensor:
        """Return the packed tokens of ``[B, N, D]``."""
        return x.flatten(0, 1).index_select(0, self.chosen)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """Return ``[B, N, D]`` of packed tokens."""
        states: Tensor = x[0].index_select(0, self.origin).unflatten(0, self.shape)
        return states

    def attend(self, heads: Heads) -> Tensor:
        """Return ``[1, T + P, A * H]``."""
        value = heads.value[0]
        out = packed_attention(
            heads.query[0],
            heads.key[0],
            value,
            heads.pos_key,
            heads.pos_query,
            heads.positions,
            self.rows,
            dropout_p=heads.dropout_p,
            seed=heads.seeds(len(self.rows.lengths)),
            scale=heads.scale,
        ).flatten(1)
        padding = self.uniform.to(value.dtype) @ value.flatten(1)
        return torch.cat([out[: self.rows.num_tokens], padding])[None]


Layout = PaddedLayout | PackedLayout


def layout_of(mask: Tensor, states: Tensor, *, remove_padding: bool) -> Layout:
    """Choose the layout of a batch.

    Args:
        mask: ``[B, N]``, non-zero = token.
        states: ``[B, N, D]``, input of the first layer.
        remove_padding: pack rows with padding if it is zero, as in transformers' models; not in
            compiled graphs, whose shapes must not depend on the mask's values.

    Raises:
        ValueError: there is padding between the tokens of a row.
    """
    real = mask.bool()
    if torch.compiler.is_compiling():
        return PaddedLayout(real, mask.shape[1])
    if bool(real.all()):
        return PaddedLayout(None, mask.shape[1])
    if remove_padding and not bool(states.detach()[~real].any()):
        return PackedLayout.of_mask(real)
    return PaddedLayout(real, mask.shape[1])
