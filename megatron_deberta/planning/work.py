"""FLOPs of the matrix products of one rank and micro batch.

The formula of ``model.flops``, divided over tensor-parallel ranks. A multiply and an add are two
FLOPs. Not counted: the next-sentence head, and what an attention backend recomputes by itself.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron_deberta.config.rules import causal_fraction, single_forms
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.parallelize.plan import vocabulary_rows
from megatron_deberta.model.flops import (
    BACKWARD_FACTOR,
    forward_flops,
    is_task_head,
    recomputed_flops,
)
from megatron_deberta.tasks.task import load_task, run_task_name


class RankFlops(NamedTuple):
    """FLOPs of one rank and micro batch: forward only, forward and backward, and recomputed."""

    forward: float
    training: float
    recomputed: float
    """Recomputed in backward under ``parallel.recompute=full``."""


def rows_per_sample(config: RunConfig) -> int:
    """Return the number of rows per sample: 1, but in multiple choice the task's choices."""
    if config.model.head != "choices":
        return 1
    return max(
        1,
        len(
            load_task(run_task_name(config.finetune.task or "", Path(config.train.run_dir))).labels
        ),
    )


def micro_batch_rows(config: RunConfig) -> int:
    """Return the number of rows per forward pass."""
    return config.train.micro_batch_size * rows_per_sample(config)


def micro_batch_tokens(config: RunConfig) -> tuple[int, int]:
    """Return the tokens of a micro batch and the global batch, by which phases are compared."""
    length, train = config.data.sequence_length, config.train
    return train.micro_batch_size * length, train.global_batch_size


def masked_tokens(config: RunConfig) -> int:
    """Return the number of tokens per micro batch at which mask decoder and vocabulary run.

    Of an autoregressive micro batch if the objective has any, which takes the most memory.
    """
    if is_task_head(config.model):
        return 0
    length = config.data.sequence_length
    masked = round(config.objective.mask_probability * length)
    return config.train.micro_batch_size * (length - 1 if _has_causal(config) else masked)


def _has_causal(config: RunConfig) -> bool:
    return causal_fraction(config.objective) > 0


def rank_flops(config: RunConfig) -> RankFlops:
    """Count by formula; every rank of a layer has the same count, padding included.

    The mean over the forms of an objective's batches.

    Layers, position projections, convolution and vocabulary are split over tensor-parallel ranks;
    the transform before the vocabulary and the heads of labelled tasks run on each of them.

    Args:
        config: the run.
    """
    forms = single_forms(config.objective)
    if len(forms) > 1:
        total = RankFlops(0.0, 0.0, 0.0)
        for fraction, form in forms:
            flops = rank_flops(replace(config, objective=form))
            total = RankFlops(*(a + fraction * b for a, b in zip(total, flops, strict=True)))
        return total
    tp_size, length = config.parallel.tensor_parallel_size, config.data.sequence_length
    rows = micro_batch_rows(config)
    tokens, masked = rows * length, masked_tokens(config)
    padded = vocabulary_rows(config.model.vocab_size, tp_size) * tp_size
    model = replace(config.model, vocab_size=padded)
    parts = forward_flops(model, length, rows, masked / tokens, causal=_has_causal(config))
    whole, replicated = tokens * parts.total, masked * 2.0 * model.hidden_size**2
    if is_task_head(model):
        replicated = tokens * parts.head
    forward = (whole - replicated) / tp_size + replicated
    again = tokens * recomputed_flops(model, length, rows, config.parallel.recompute) / tp_size
    return RankFlops(forward, BACKWARD_FACTOR * forward, again)
