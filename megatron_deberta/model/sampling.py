"""Sampling from categorical distributions by Gumbel-max with counter-based noise.

The argmax of ``logits + g`` with independent standard Gumbel noise g is a sample of softmax(logits)
(Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030). The noise of an element is a function of the
row's key and the category, so the maximum can be taken shard by shard and does not depend on how
the categories are split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_deberta.ops.dropout_bits import random_words, row_keys

# Elements of noise that exist at once, by device type: about a CPU core's cache
_BLOCK_ELEMENTS = {"cpu": 2**16, "cuda": 2**26}


@dataclass(frozen=True)
class GumbelMax:
    """Draws categories by Gumbel-max.

    Attributes:
        keys: int32 ``[T]``: key of each draw.
        excluded: categories that are not drawn.
    """

    keys: Tensor
    excluded: tuple[int, ...] = ()

    @staticmethod
    def at(seed: Tensor, positions: Tensor, excluded: tuple[int, ...] = ()) -> GumbelMax:
        """Return the draws of a batch, one at each position.

        Args:
            seed: int64 ``[B]``, of each row.
            positions: integers ``[B, M]``.
            excluded: categories that are not drawn.

        Returns:
            ``B * M`` draws, row after row.
        """
        return GumbelMax(row_keys(seed, positions, 1, 0).flatten(), excluded)

    def __call__(
        self, logits: Tensor, rows: slice = slice(None), first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the maxima of logits plus noise, and their categories.

        Args:
            logits: ``[R, C]`` of categories ``first`` to ``first + C - 1``.
            rows: draws that the rows stand for.
            first: the first category.

        Returns:
            Maxima ``[R]`` in at least fp32, and int64 categories ``[R]``; -inf and ``first`` if
            C = 0.
        """
        num_rows, num_columns = logits.shape
        dtype = torch.promote_types(logits.dtype, torch.float32)
        maxima = torch.full((num_rows,), -torch.inf, dtype=dtype, device=logits.device)
        chosen = torch.full((num_rows,), first, dtype=torch.int64, device=logits.device)
        if num_columns == 0:
            return maxima, chosen
        last = first + num_columns
        excluded = [piece - first for piece in self.excluded if first <= piece < last]
        keys = self.keys[rows]
        limit = _BLOCK_ELEMENTS.get(logits.device.type, _BLOCK_ELEMENTS["cuda"])
        block = max(1, limit // num_columns)
        for start in range(0, num_rows, block):
            part = slice(start, start + block)
            scores = logits[part] - _log_exponential(keys[part], num_columns, first)
            if excluded:
                scores[:, excluded] = -torch.inf
            maxima[part], column = scores.max(dim=1)
            chosen[part] = column + first
        return maxima, chosen


def _log_exponential(keys: Tensor, num_columns: int, first: int) -> Tensor:
    """Return the logarithm of standard exponential noise (minus Gumbel noise), fp32 ``[T, C]``.

    31 bits per element, at the resolution of fp32 for small values, which decide the maximum.
    """
    words = random_words(keys, num_columns, first).bitwise_and_(0x7FFFFFFF)
    uniform = words.float().add_(0.5).mul_(2.0**-31)
    return uniform.neg_().log1p_().neg_().log_()
