"""Counter-based dropout.

The random bits are a function of run seed, step, dropout site, global sample, position and feature
(``ops.dropout_bits``), so they do not depend on the parallel layout, recomputation or resumption.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_deberta.model.fused import PendingResidual, compiled
from megatron_deberta.model.weight_init import draw_seed, standard_normal
from megatron_deberta.ops.dropout_bits import keep_mask, keep_scale, mix_seed


@dataclass(frozen=True)
class DropoutSeeds:
    """Dropout keys of one forward pass.

    Attributes:
        samples: int64 ``[B]``: global sample index of each row of the batch.
        decoder_pass: 0 in the encoder; 1, 2, ... in the passes of the mask decoder.
    """

    run_seed: int
    step: int
    samples: Tensor
    decoder_pass: int = 0

    @staticmethod
    def draw(batch_size: int, device: torch.device) -> DropoutSeeds:
        """Draw the key of one forward pass from torch's default generator.

        It is drawn before the layers run, so that activation recomputation sees the same bits.
        """
        return DropoutSeeds(draw_seed(), 0, torch.arange(batch_size, device=device))

    def at_pass(self, decoder_pass: int) -> DropoutSeeds:
        """Return the keys of a pass of the mask decoder, counted from 1."""
        return replace(self, decoder_pass=decoder_pass)

    def per_row(self, site: int) -> Tensor:
        """Return the seeds of a dropout site, int64 ``[B]``, one per row of the batch."""
        return mix_seed(self.run_seed, self.step, site, self.decoder_pass, self.samples)

    def standard_normal(self, site: int, positions: Tensor, size: int) -> Tensor:
        """Return N(0, 1) values of a site, fp64 ``[B, R, size]``, by row, position and feature."""
        features = torch.arange(size, device=positions.device)
        index = positions.unsqueeze(-1) * size + features
        return standard_normal(mix_seed(self.per_row(site)[:, None, None], index))

    def shared(self, site: int) -> Tensor:
        """Return the seed of a site without samples (the position table), int64 ``[1]``."""
        return mix_seed(self.run_seed, self.step, site, self.samples.new_zeros(1))


def site_id(name: str) -> int:
    """Return the 32-bit id of a dropout site, a hash of its canonical name."""
    return zlib.crc32(name.encode())


class Dropout(nn.Module):
    """Dropout of hidden states ``[B, R, D]``, or of one table ``[S, D]``.

    Args:
        probability: fraction of elements set to zero, in steps of 1/256 (``ops.dropout_bits``).
        site: canonical name of the site, e.g. ``encoder.layers.3.ffn``.
    """

    def __init__(self, probability: float, site: str) -> None:
        super().__init__()
        self.probability = probability
        self.site = site_id(site)
        # Set by the model
        self.execution = DropoutExecution()

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        seeds: DropoutSeeds | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Apply dropout, then add ``residual`` if given.

        Args:
            hidden: ``[B, R, D]`` or a table ``[S, D]``.
            positions: ``[B, R]`` (``[S]`` for a table); part of the key.
            seeds: dropout keys; None: no dropout.
            residual: same shape as ``hidden``.
        """
        if seeds is None or self.probability == 0.0:
            return hidden if residual is None else residual + hidden
        seed = seeds.per_row(self.site) if hidden.dim() == 3 else seeds.shared(self.site)
        out = _Drop.apply(hidden, residual, seed, positions, self.probability, self.execution)
        return cast(Tensor, out)

    def before_norm(
        self, hidden: Tensor, positions: Tensor, seeds: DropoutSeeds | None, residual: Tensor
    ) -> Tensor | PendingResidual:
        """Return the input of the following `LayerNorm`, with the addition deferred if fused.

        Args:
            hidden: ``[B, R, D]``.
            positions: ``[B, R]``; part of the key.
            seeds: dropout keys; None: no dropout.
            residual: same shape as ``hidden``.
        """
        if not self.execution.fuse or seeds is None or self.probability == 0.0:
            out: Tensor = self(hidden, positions, seeds, residual)
            return out
        seed = seeds.per_row(self.site)
        return PendingResidual(hidden, residual, seed, positions, self.probability)


@dataclass(frozen=True)
class DropoutExecution:
    """Options for computing dropout; they do not change which elements are dropped.

    Attributes:
        keep_masks: save each mask for backward (one byte per element) instead of recomputing it.
        fuse: compile element-wise operations with torch.compile; masks are recomputed in backward.
    """

    keep_masks: bool = True
    fuse: bool = False


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
        execution: DropoutExecution,
    ) -> Tensor:
        ctx.probability, ctx.execution = probability, execution
        ctx.has_residual = residual is not None
        if execution.fuse:
            ctx.save_for_backward(seed, positions)
            dropped = compiled(_hash_and_apply)
            return cast(Tensor, dropped(x, residual, seed, positions, probability))
        keep = keep_mask(seed, positions, x.size(-1), probability).view(x.shape)
        ctx.save_for_backward(*((keep,) if execution.keep_masks else (seed, positions)))
        return _apply(x, residual, keep, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.execution.fuse:
            d_x = compiled(_hash_and_apply)(grad, None, *ctx.saved_tensors, ctx.probability)
        else:
            if ctx.execution.keep_masks:
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
