"""Counter-based dropout.

The random bits are a function of run seed, step, dropout site, global sample, position and feature
(``ops.dropout_bits``), so they do not depend on the parallel layout, recomputation or resumption.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_deberta.model.fused import PendingResidual, compiled
from megatron_deberta.model.weight_init import draw_seed, standard_normal
from megatron_deberta.ops.dropout_bits import keep_mask, keep_scale, mix_seed
from megatron_deberta.ops.native import backend as native


@dataclass(frozen=True)
class DropoutSeeds:
    """Dropout keys of one forward pass.

    Attributes:
        step: completed optimizer steps; as an int64 scalar on the device it is no constant of the
            recorded operations (CUDA graphs).
        samples: int64 ``[B]``: global sample index of each row of the batch.
        decoder_pass: 0 in the encoder; 1, 2, ... in the passes of the mask decoder.
        rows: seeds ``[B]`` that `of_sites` has computed, by site and pass of the mask decoder.
        tables: the same without samples, ``[1]``, by site. ``replace`` copies neither.
    """

    run_seed: int
    step: int | Tensor
    samples: Tensor
    decoder_pass: int = 0
    rows: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False, repr=False)
    tables: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def draw(batch_size: int, device: torch.device) -> DropoutSeeds:
        """Draw the key of one forward pass from torch's default generator.

        It is drawn before the layers run, so that activation recomputation sees the same bits.
        """
        return DropoutSeeds(draw_seed(), 0, torch.arange(batch_size, device=device))

    def at_pass(self, decoder_pass: int) -> DropoutSeeds:
        """Return the keys of a pass of the mask decoder, counted from 1."""
        keys = replace(self, decoder_pass=decoder_pass)
        keys.rows.update(self.rows)
        keys.tables.update(self.tables)
        return keys

    def of_sites(self, sites: tuple[int, ...], num_passes: int) -> DropoutSeeds:
        """Return these keys with the seeds of many sites, computed in one vectorised hash.

        Args:
            sites: ids of the sites.
            num_passes: passes of the mask decoder.
        """
        device, passes = self.samples.device, tuple(range(num_passes + 1))
        state = mix_seed(self.run_seed, self.step, _constant(sites, device)[:, None])
        tables = mix_seed(self.samples.new_zeros(()), state=state)
        rows = mix_seed(_constant(passes, device)[:, None], self.samples, state=state.unsqueeze(-1))
        keys = replace(self)
        keys.tables.update(zip(sites, tables.unbind(), strict=True))
        names = ((site, decoder_pass) for site in sites for decoder_pass in passes)
        keys.rows.update(zip(names, rows.flatten(0, 1).unbind(), strict=True))
        return keys

    def per_row(self, site: int) -> Tensor:
        """Return the seeds of a dropout site, int64 ``[B]``, one per row of the batch."""
        known = self.rows.get((site, self.decoder_pass))
        if known is not None:
            return known
        return mix_seed(self.run_seed, self.step, site, self.decoder_pass, self.samples)

    def standard_normal(self, site: int, positions: Tensor, size: int) -> Tensor:
        """Return N(0, 1) values of a site, one for each position and feature.

        Args:
            site: id of the dropout site.
            positions: int64 ``[B, R]``.
            size: features.

        Returns:
            fp64 ``[B, R, size]``.
        """
        features = torch.arange(size, device=positions.device)
        index = positions.unsqueeze(-1) * size + features
        return standard_normal(mix_seed(self.per_row(site)[:, None, None], index))

    def shared(self, site: int) -> Tensor:
        """Return the seed of a site without samples (the position table), int64 ``[1]``."""
        if site in self.tables:
            return self.tables[site]
        return mix_seed(self.run_seed, self.step, site, self.samples.new_zeros(1))


def site_id(name: str) -> int:
    """Return the 32-bit id of a dropout site, a hash of its canonical name."""
    return zlib.crc32(name.encode())


@lru_cache(maxsize=64)
def _constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Return integers on a device, copied there once, int64."""
    # The cache may be filled under inference_mode but is used in training as well.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.int64, device=device)


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
        keep_masks: save each mask for backward (one byte per element) instead of recomputing it;
            the compiled CPU kernel always recomputes it.
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
        ctx.keeps_mask = execution.keep_masks and not native.can_drop(x)
        if not ctx.keeps_mask:
            ctx.save_for_backward(seed, positions)
            return _drop(x, residual, seed, positions, probability)
        keep = keep_mask(seed, positions, x.size(-1), probability).view(x.shape)
        ctx.save_for_backward(keep)
        return _apply(x, residual, keep, probability)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.execution.fuse:
            d_x = compiled(_hash_and_apply)(grad, None, *ctx.saved_tensors, ctx.probability)
        elif ctx.keeps_mask:
            (keep,) = ctx.saved_tensors
            d_x = _apply(grad, None, keep.view(grad.shape), ctx.probability)
        else:
            seed, positions = ctx.saved_tensors
            d_x = _drop(grad, None, seed, positions, ctx.probability)
        return d_x, grad if ctx.has_residual else None, None, None, None, None


def _apply(x: Tensor, residual: Tensor | None, keep: Tensor, probability: float) -> Tensor:
    dropped = x.masked_fill(~keep, 0.0) * keep_scale(probability)
    return dropped if residual is None else residual + dropped


def _drop(
    x: Tensor, residual: Tensor | None, seed: Tensor, positions: Tensor, probability: float
) -> Tensor:
    """Apply dropout without keeping its mask."""
    if native.can_drop(x) and (residual is None or residual.dtype == x.dtype):
        return native.drop(x, residual, seed, positions, probability)
    return _hash_and_apply(x, residual, seed, positions, probability)


def _hash_and_apply(
    x: Tensor, residual: Tensor | None, seed: Tensor, positions: Tensor, probability: float
) -> Tensor:
    keep = keep_mask(seed, positions, x.size(-1), probability).view(x.shape)
    return _apply(x, residual, keep, probability)
