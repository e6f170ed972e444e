"""Dropout whose bits are a function of place, never of a generator.

Owns how a dropout site of the model is turned into the seed of ``ops.dropout_bits``. Since the
bits depend on run seed, step, site, global sample, position and feature only, no layout, no
recomputation and no resume changes them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_deberta.model.fused import PendingResidual, compiled
from megatron_deberta.ops.dropout_bits import keep_mask, keep_scale, mix_seed


@dataclass(frozen=True)
class DropoutSeeds:
    """What all dropout of one forward pass is keyed on; None in its place means no dropout."""

    run_seed: int
    step: int
    samples: Tensor
    """int64 ``[B]``: global sample index of each row of the batch."""
    decoder_pass: int = 0
    """0 in the encoder; 1, 2, ... in the passes of the mask decoder."""

    def at_pass(self, decoder_pass: int) -> DropoutSeeds:
        """The seeds of a pass of the mask decoder, counted from 1."""
        return replace(self, decoder_pass=decoder_pass)

    def per_row(self, site: int) -> Tensor:
        """int64 ``[B]`` seeds of a dropout site, one a row of the batch."""
        return mix_seed(self.run_seed, self.step, site, self.decoder_pass, self.samples)

    def shared(self, site: int) -> Tensor:
        """int64 ``[1]`` seed of a site that has no sample (the position table)."""
        return mix_seed(self.run_seed, self.step, site, self.samples.new_zeros(1))


def site_id(name: str) -> int:
    """A stable 32-bit number for a dropout site's canonical name."""
    return zlib.crc32(name.encode())


class Dropout(nn.Module):
    """Dropout of hidden states ``[B, R, D]``, or of one table ``[S, D]``.

    Args:
        probability: share of elements set to zero, in steps of 1/256 (``ops.dropout_bits``).
        site: canonical name of the place, e.g. ``encoder.layers.3.ffn``.
    """

    def __init__(self, probability: float, site: str) -> None:
        super().__init__()
        self.probability = probability
        self.site = site_id(site)
        self.how = DropoutExecution()
        """Set by the model."""

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        seeds: DropoutSeeds | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Drop and rescale, then add ``residual`` if there is one.

        Args:
            hidden: ``[B, R, D]`` or a table ``[S, D]``.
            positions: ``[B, R]`` (``[S]`` for a table), key the bits.
            seeds: keys of dropout; None turns it off.
            residual: like ``hidden``.
        """
        if seeds is None or self.probability == 0.0:
            return hidden if residual is None else residual + hidden
        seed = seeds.per_row(self.site) if hidden.dim() == 3 else seeds.shared(self.site)
        out = _Drop.apply(hidden, residual, seed, positions, self.probability, self.how)
        return cast(Tensor, out)

    def before_norm(
        self, hidden: Tensor, positions: Tensor, seeds: DropoutSeeds | None, residual: Tensor
    ) -> Tensor | PendingResidual:
        """What a `LayerNorm` is to normalise: the sum, or, where fused, what it is made of.

        Args:
            hidden: ``[B, R, D]``.
            positions: ``[B, R]``, key the bits.
            seeds: keys of dropout; None turns it off.
            residual: like ``hidden``.
        """
        if not self.how.fuse or seeds is None or self.probability == 0.0:
            out: Tensor = self(hidden, positions, seeds, residual)
            return out
        seed = seeds.per_row(self.site)
        return PendingResidual(hidden, residual, seed, positions, self.probability)


@dataclass(frozen=True)
class DropoutExecution:
    """How dropout runs; which elements it drops is always the same."""

    keep_masks: bool = True
    """Keep each mask for backward (a byte an element), or make it again there."""
    fuse: bool = False
    """Compile what is element by element into few kernels, which make masks again for free."""


class _Drop(torch.autograd.Function):
    """y = residual + scale * mask * x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        seed: Tensor,
        positions: Tensor,
        probability: float,
        how: DropoutExecution,
    ) -> Tensor:
        ctx.probability, ctx.how = probability, how
        ctx.has_residual = residual is not None
        if how.fuse:
            ctx.save_for_backward(seed, positions)
            dropped = compiled(_hash_and_apply)
            return cast(Tensor, dropped(x, residual, seed, positions, probability))
        keep = keep_mask(seed, positions, x.size(-1), probability).view(x.shape)
        ctx.save_for_backward(*((keep,) if how.keep_masks else (seed, positions)))
        return _apply(x, residual, keep, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.how.fuse:
            d_x = compiled(_hash_and_apply)(grad, None, *ctx.saved_tensors, ctx.probability)
        else:
            if ctx.how.keep_masks:
                (keep,) = ctx.saved_tensors
            else:
                seed, positions = ctx.saved_tensors
                keep = keep_mask(seed, positions, grad.size(-1), ctx.probability)
            d_x = _apply(grad, None, keep.view(grad.shape), ctx.probability)
        return d_x, grad if ctx.has_residual else None, None, None, None, None


def _apply(x: Tensor, residual: Tensor | None, keep: Tensor, probability: float) -> Tensor:
    dropped = x.masked_fill(~keep, 0.0) * keep_scale(probability)
    return dropped if residual is None else residual + dropped


def _hash_and_apply(
    x: Tensor, residual: Tensor | None, seed: Tensor, positions: Tensor, probability: float
) -> Tensor:
    keep = keep_mask(seed, positions, x.size(-1), probability).view(x.shape)
    return _apply(x, residual, keep, probability)
