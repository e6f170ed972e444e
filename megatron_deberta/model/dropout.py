"""Dropout whose bits are a function of place, never of a generator.

Owns how a dropout site of the model is turned into the seed of ``ops.dropout_bits``. Since the
bits depend on run seed, step, site, global sample, position and feature only, no layout, no
recomputation and no resume changes them.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

from torch import Tensor, nn

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

    def forward(self, hidden: Tensor, positions: Tensor, seeds: DropoutSeeds | None) -> Tensor:
        """Drop and rescale; ``positions`` ``[B, R]`` (or ``[S]`` for a table) key the bits."""
        if seeds is None or self.probability == 0.0:
            return hidden
        seed = seeds.per_row(self.site) if hidden.dim() == 3 else seeds.shared(self.site)
        keep = keep_mask(seed, positions, hidden.size(-1), self.probability)
        return hidden.masked_fill(~keep.view(hidden.shape), 0.0) * keep_scale(self.probability)
