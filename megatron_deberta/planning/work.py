"""FLOPs of the matrix products of one rank and micro batch.

The formula of ``model.flops``, divided over tensor-parallel ranks. A multiply and an add are two
FLOPs. Not counted: the next-sentence head, and what an attention backend recomputes by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.parallelize.plan import vocabulary_rows
from megatron_deberta.model.flops import BACKWARD_FACTOR, forward_flops, recomputed_flops


class RankFlops(NamedTuple):
    """FLOPs of one rank and micro batch: forward only, forward and backward, and recomputed."""

    forward: float
    training: float
    recomputed: float
    """Recomputed in backward under ``parallel.recompute=full``."""


def masked_tokens(config: RunConfig) -> int:
    """Return the number of tokens per micro batch at which decoder and head run."""
    masked = round(config.objective.mask_probability * config.data.sequence_length)
    return config.train.micro_batch_size * masked


def rank_flops(config: RunConfig) -> RankFlops:
    """Count by formula; every rank of a layer has the same count, padding included.

    Layers, position projections, convolution and vocabulary are split over tensor-parallel ranks;
    the transform before the vocabulary runs on each of them.

    Args:
        config: the run.
    """
    tp_size, length = config.parallel.tensor_parallel_size, config.data.sequence_length
    rows = config.train.micro_batch_size
    tokens, masked = rows * length, masked_tokens(config)
    padded = vocabulary_rows(config.model.vocab_size, tp_size) * tp_size
    model = replace(config.model, vocab_size=padded)
    whole = tokens * forward_flops(model, length, rows, masked / tokens).total
    transform = masked * 2.0 * model.hidden_size**2
    forward = (whole - transform) / tp_size + transform
    again = tokens * recomputed_flops(model, length, rows, config.parallel.recompute) / tp_size
    return RankFlops(forward, BACKWARD_FACTOR * forward, again)
