"""FLOPs of the architecture by formula.

A multiply and an add count as two FLOPs. Only matrix products are counted; normalisation, softmax
and dropout are not.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from megatron_deberta.config.rules import causal_fraction
from megatron_deberta.config.schema import PRETRAINING_HEADS, ModelConfig, ObjectiveConfig
from megatron_deberta.model.heads import num_outputs
from megatron_deberta.model.replaced_tokens import single_models
from megatron_deberta.ops import RelativePositions

# Heads that read the last layer's output at every token
TOKEN_HEADS = ("spans", "tokens", "discriminator", "embed")

# FLOPs of forward and backward together, relative to forward
BACKWARD_FACTOR = 3.0


class ForwardFlops(NamedTuple):
    """FLOPs per token of one forward pass in pretraining, by part of the model.

    Attributes:
        layers: encoder layers that run over the full sequence.
        position_projections: projections of the relative-position table, once per layer and micro
            batch.
        convolution: convolution beside the first layer.
        mask_decoder: mask decoder: keys and values once, queries at masked positions.
        head: transform and vocabulary projection at masked positions.
    """

    layers: float
    position_projections: float
    convolution: float
    mask_decoder: float
    head: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self)


def num_position_terms(model: ModelConfig) -> int:
    """Return the number of position terms in the attention scores."""
    return {"c2p+p2c": 2, "c2p": 1, "p2c": 1, "none": 0}[model.position_terms]


def num_position_slots(model: ModelConfig) -> int:
    """Return the number of rows of the relative-position table."""
    return 2 * (model.position_buckets or model.max_relative_positions)


def num_used_slots(model: ModelConfig, sequence_length: int) -> int:
    """Return the number of rows of the position table that are projected.

    Models of labelled tasks leave out those that a row is too short for.
    """
    if not is_task_head(model):
        return num_position_slots(model)
    positions = RelativePositions(model.max_relative_positions, model.position_buckets or 0)
    return len(positions.slots_of_length(sequence_length))


def is_task_head(model: ModelConfig) -> bool:
    """Return whether the model has the head of a labelled task."""
    return model.head not in (*PRETRAINING_HEADS, "discriminator")


def reads_first_token(model: ModelConfig) -> bool:
    """Return whether the head reads the last layer's output at the first token only."""
    return is_task_head(model) and model.head not in TOKEN_HEADS


def forward_flops(
    model: ModelConfig,
    sequence_length: int,
    micro_batch_size: int,
    mask_probability: float = 0.15,
    *,
    causal: bool = False,
) -> ForwardFlops:
    """Count the FLOPs of a forward pass.

    Source: He et al. 2021, arXiv:2006.03654, section 3. A query is multiplied with
    ``sequence_length`` keys for the content term, and for each position term with the smaller of
    the number of keys and the number of table slots.

    Args:
        model: the architecture.
        sequence_length: tokens per sequence.
        micro_batch_size: sequences that share one projection of the position table.
        mask_probability: fraction of tokens at which the mask decoder and the head run.
        causal: count the scores of visible keys only, (N + 1) / 2 on average.

    Returns:
        FLOPs per token of the batch, of both models for ``head: rtd``.
    """
    if model.head == "rtd":
        both = (
            forward_flops(part, sequence_length, micro_batch_size, mask_probability, causal=causal)
            for part in single_models(model)
        )
        return ForwardFlops(*map(sum, zip(*both, strict=True)))
    d = model.hidden_size
    terms, slots = num_position_terms(model), num_position_slots(model)
    projected = num_used_slots(model, sequence_length)
    attention: float = 4 * sequence_length * d + terms * 2 * min(sequence_length, slots) * d
    if causal:
        attention *= (sequence_length + 1) / (2 * sequence_length)
    keys_values = 2 * 2 * d * d
    query_side = 2 * 2 * d * d + attention + 2 * 2 * d * model.ffn_hidden_size

    decoded = model.mask_decoder_passes > 0
    passes = model.mask_decoder_passes * mask_probability
    table_tokens = sequence_length * micro_batch_size
    if is_task_head(model) or model.head == "discriminator":
        # Heads on rows read the last layer's output at the first token only.
        read = 1 / sequence_length if reads_first_token(model) else 1.0
        dense = d if read < 1 or model.head == "discriminator" else 0
        before_last = (model.num_layers - 1) * (keys_values + query_side)
        layers = before_last + keys_values + read * query_side
        mask_decoder = 0.0
        # The mean of the states is no matrix product.
        head = read * 2 * d * (num_outputs(model) * (model.head != "embed") + dense)
    else:
        layers = (model.num_layers - decoded) * (keys_values + query_side)
        mask_decoder = decoded * (keys_values + passes * query_side)
        head = mask_probability * (2 * d * d + 2 * d * model.vocab_size)
    return ForwardFlops(
        layers=layers,
        position_projections=model.num_layers * terms * 2 * d * d * projected / table_tokens,
        convolution=2.0 * (model.conv_kernel_size or 0) * d * d,
        mask_decoder=mask_decoder,
        head=head,
    )


def training_flops_per_token(
    model: ModelConfig,
    sequence_length: int,
    micro_batch_size: int,
    mask_probability: float = 0.15,
    *,
    causal: bool = False,
) -> float:
    """Count the FLOPs of forward and backward per token, without recomputation.

    Arguments as in `forward_flops`.
    """
    forward = forward_flops(
        model, sequence_length, micro_batch_size, mask_probability, causal=causal
    )
    return BACKWARD_FACTOR * forward.total


def pretraining_flops_per_token(
    model: ModelConfig, objective: ObjectiveConfig, sequence_length: int, micro_batch_size: int
) -> float:
    """Count the FLOPs of forward and backward per token, without recomputation.

    The mean over masked and causal batches.

    Args:
        model: the architecture.
        objective: the training task; sets the fraction of masked tokens and of causal batches.
        sequence_length: tokens per sequence.
        micro_batch_size: sequences that share one projection of the position table.
    """
    masked = training_flops_per_token(
        model, sequence_length, micro_batch_size, objective.mask_probability
    )
    causal = training_flops_per_token(
        model, sequence_length, micro_batch_size, 1 - 1 / sequence_length, causal=True
    )
    fraction = causal_fraction(objective)
    return (1 - fraction) * masked + fraction * causal


def recomputed_flops(
    model: ModelConfig,
    sequence_length: int,
    micro_batch_size: int,
    recompute: Literal["none", "selective", "full"],
) -> float:
    """Count the FLOPs per token that backward spends on recomputing activations.

    Selective recomputation repeats no matrix product; full recomputation repeats every layer
    before the mask decoder. Recomputation inside an attention backend is not counted.

    Args:
        model: the architecture.
        sequence_length: tokens per sequence.
        micro_batch_size: sequences that share one projection of the position table.
        recompute: ``parallel.recompute``.
    """
    if recompute != "full":
        return 0.0
    total = 0.0
    for part in single_models(model):
        forward = forward_flops(part, sequence_length, micro_batch_size)
        decoded = part.mask_decoder_passes > 0 or reads_first_token(part)
        repeated_layers = (part.num_layers - decoded) / part.num_layers
        total += forward.layers + repeated_layers * forward.position_projections
    return total
