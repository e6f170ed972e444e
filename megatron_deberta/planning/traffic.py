"""Collectives of one rank in an optimizer step, by kind, group and purpose.

Those of ``distributed.parallelize`` and of DeepSpeed's stages, without scalars (norms, losses,
flags). ``num_bytes`` is the size of the tensor that is reduced, gathered (all parts), scattered or
exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from megatron_deberta.config.rules import batch_arithmetic
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.parallelize.plan import vocabulary_rows
from megatron_deberta.engine.deepspeed_config import LIVE_ELEMENTS, PERSISTENCE_THRESHOLD
from megatron_deberta.engine.optimizer import decays
from megatron_deberta.model.flops import is_task_head, num_used_slots, reads_first_token
from megatron_deberta.model.replaced_tokens import single_models
from megatron_deberta.ops.cross_entropy import chunk_rows
from megatron_deberta.planning.memory import ELEMENT_BYTES, local_sizes
from megatron_deberta.planning.work import masked_tokens, micro_batch_rows

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
Group = Literal["tensor", "data"]


class Traffic(NamedTuple):
    """Collectives of one kind and purpose in an optimizer step."""

    kind: Kind
    group: Group
    """``tensor``: inside layers; ``data``: between data-parallel ranks."""
    purpose: str
    calls: int
    """Number of calls; all buckets of DeepSpeed count as one."""
    num_bytes: int

    def wire_bytes(self, group_size: int) -> float:
        """Return the bytes that a rank sends, and receives, with ring algorithms."""
        passes = 2 if self.kind == "all-reduce" else 1
        return passes * self.num_bytes * (group_size - 1) / group_size


def step_traffic(config: RunConfig, dp_size: int) -> list[Traffic]:
    """Return all collectives of an optimizer step.

    Raises:
        ConfigError: the batch does not divide over ``dp_size`` data-parallel ranks.
    """
    micro_batches = batch_arithmetic(config, dp_size).accumulation_steps
    return [
        *tensor_parallel_traffic(config, micro_batches, device_type="cuda"),
        *data_parallel_traffic(config, dp_size, micro_batches),
    ]


def tensor_parallel_traffic(
    config: RunConfig, micro_batches: int, *, device_type: str
) -> Iterator[Traffic]:
    """Yield the tensor-parallel collectives.

    Args:
        config: the run.
        micro_batches: forward passes per rank.
        device_type: ``cuda`` or ``cpu``; chunks of logits differ in size.
    """
    tp_size = config.parallel.tensor_parallel_size
    if tp_size == 1:
        return
    if is_task_head(config.model):
        purposes = [*_layers(config), *_ends(config), *_decoder(config)]
    else:
        purposes = list(_pretraining(config, device_type))
    for kind, purpose, calls, num_bytes in purposes:
        if calls:
            total = num_bytes * micro_batches
            yield Traffic(kind, "tensor", purpose, calls * micro_batches, total)


def _pretraining(config: RunConfig, device_type: str) -> Iterator[_Purpose]:
    """Yield those of one model with a vocabulary loss, or of generator and discriminator."""
    tp_size = config.parallel.tensor_parallel_size
    first, *later = (replace(config, model=model) for model in single_models(config.model))
    yield from (*_layers(first), *_ends(first), *_decoder(first))
    for part in later:
        yield from (*_layers(part), *_ends(part))
    columns = vocabulary_rows(config.model.vocab_size, tp_size)
    masked = masked_tokens(config)
    chunks = -(-masked // chunk_rows(masked, columns, device_type))
    # Per token: the maximum of every rank; then the sum, the label's logit and its correctness.
    yield "all-gather", "loss", chunks, tp_size * masked * 4
    yield "all-reduce", "loss", chunks, 3 * masked * 4
    if later:
        # The maximum of every rank and its piece; the other model's embeddings, and their delta.
        yield "all-gather", "samples", 2 * chunks, tp_size * masked * 12
        kind: Kind = "reduce-scatter" if config.parallel.sequence_parallel else "all-reduce"
        disentangled = config.model.embedding_sharing == "gdes"
        yield kind, "embedding", int(disentangled), disentangled * _hidden_bytes(config)


_Purpose = tuple[Kind, str, int, int]
"""Kind, purpose, calls and bytes per micro batch."""


def _hidden_bytes(config: RunConfig) -> int:
    """Return the size of the hidden states of a micro batch."""
    return micro_batch_rows(config) * config.data.sequence_length * _token_bytes(config)


def _token_bytes(config: RunConfig) -> int:
    """Return the size of one hidden state."""
    return config.model.hidden_size * ELEMENT_BYTES[config.precision.dtype]


def _num_layers(config: RunConfig) -> int:
    """Return the number of layers that run over the token sequence."""
    model = config.model
    return model.num_layers - (model.mask_decoder_passes > 0 or reads_first_token(model))


def _layers(config: RunConfig) -> Iterator[_Purpose]:
    """Yield those of attention, FFN and convolution."""
    hidden, layers = _hidden_bytes(config), _num_layers(config)
    sequence = config.parallel.sequence_parallel
    # Two blocks: forward sums the output of each block, backward the gradient of its input.
    calls = 2 * (3 if config.parallel.recompute == "full" else 2) * layers
    if not sequence:
        yield "all-reduce", "layers", calls, calls * hidden
    else:
        yield "all-gather", "layers", calls, calls * hidden
        yield "reduce-scatter", "layers", calls, calls * hidden
        yield from _part_gradients(config)
    if config.model.conv_kernel_size:
        yield "all-gather", "convolution", 1, hidden
        if sequence:
            yield "reduce-scatter", "convolution", 1, hidden
            split = hidden // config.parallel.tensor_parallel_size
            yield "all-to-all", "convolution", 2, 2 * split
        else:
            yield "all-reduce", "convolution", 1, hidden


def _part_gradients(config: RunConfig) -> Iterator[_Purpose]:
    """Yield those of replicated parameters whose gradients cover a rank's own tokens only."""
    model, row = config.model, _token_bytes(config)
    # A layer has two output biases and two norms of two vectors; the embedding has one norm.
    vectors = 6 * _num_layers(config) + 2 + 2 * (model.conv_kernel_size is not None)
    yield "all-reduce", "norms and biases", vectors, vectors * row
    if model.absolute_positions == "input":
        yield "all-reduce", "position embedding", 1, model.max_position_embeddings * row
    if model.type_vocab_size:
        yield "all-reduce", "token types", 1, model.type_vocab_size * row


def _ends(config: RunConfig) -> Iterator[_Purpose]:
    """Yield those of token embedding, position table and encoder output."""
    model, hidden = config.model, _hidden_bytes(config)
    if config.parallel.sequence_parallel:
        yield "reduce-scatter", "embedding", 1, hidden
        yield "all-gather", "embedding", 1, hidden
        yield "all-gather", "encoder output", 1, hidden
    else:
        yield "all-reduce", "embedding", 1, hidden
    if model.position_terms != "none":
        slots = num_used_slots(model, config.data.sequence_length)
        yield "all-reduce", "position table", 1, slots * _token_bytes(config)


def _decoder(config: RunConfig) -> Iterator[_Purpose]:
    """Yield those of the last layer at some tokens, replicated on every rank, and of the head."""
    model = config.model
    passes, selected = model.mask_decoder_passes, masked_tokens(config)
    if reads_first_token(model):
        passes, selected = 1, micro_batch_rows(config)
    if passes:
        # Two in forward and two in backward per pass; one for the gradient of keys and values.
        num_bytes = 4 * passes * selected * _token_bytes(config) + _hidden_bytes(config)
        name = "last layer" if is_task_head(model) else "mask decoder"
        yield "all-reduce", name, 4 * passes + 1, num_bytes
    if not is_task_head(model):
        yield "all-reduce", "head", 1, selected * _token_bytes(config)


def data_parallel_traffic(config: RunConfig, dp_size: int, micro_batches: int) -> Iterator[Traffic]:
    """Yield DeepSpeed's collectives between data-parallel ranks.

    Gradients are reduced in fp32: once per step in stages 0 and 1, after every micro batch in 2 and
    3. Weights are gathered after the update; in stage 3 large ones are gathered in every forward
    pass and, beyond ``LIVE_ELEMENTS``, again in backward.

    Args:
        config: the run.
        dp_size: data-parallel ranks.
        micro_batches: forward passes per rank.
    """
    if dp_size == 1:
        return
    stage, element = config.precision.zero_stage, ELEMENT_BYTES[config.precision.dtype]
    tp_size = config.parallel.tensor_parallel_size
    sizes = dict(local_sizes(config.model, tp_size))
    # DeepSpeed pads each group of parameters to a multiple of twice the ranks.
    groups = [
        sum(size for name, size in sizes.items() if decays(name) is on) for on in (True, False)
    ]
    padded = sum(_round_up(size, 2 * dp_size) for size in groups)
    if stage < 3:
        reduced = sum(groups)
        times = micro_batches if stage == 2 else 1
        yield Traffic("all-reduce", "data", "gradients", times, times * 4 * reduced)
        if stage:
            yield Traffic("all-gather", "data", "weights", 1, element * padded)
        return
    each = {name: _round_up(size, dp_size) for name, size in sizes.items()}
    total = sum(each.values())
    yield Traffic("reduce-scatter", "data", "gradients", micro_batches, micro_batches * 4 * total)
    kept = sum(each[name] for name, size in sizes.items() if size <= PERSISTENCE_THRESHOLD)
    yield Traffic("all-gather", "data", "small weights", 1, element * kept)
    gathered = total - kept
    again = max(0, gathered - LIVE_ELEMENTS // 2)
    volume = micro_batches * element * (gathered + again)
    yield Traffic("all-gather", "data", "weights", micro_batches * (2 if again else 1), volume)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
