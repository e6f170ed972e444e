"""FLOPs, collectives and predicted time of an optimizer step of one rank.

FLOPs are those of the matrix products, by the formula of ``model.flops`` divided over
tensor-parallel ranks; a multiply and an add are two. Not counted: the next-sentence head, and what
an attention backend recomputes by itself. Collectives are those of ``distributed.parallelize`` and
of DeepSpeed's stages, without scalars (norms, losses, flags); ``num_bytes`` is the size of the
tensor that is reduced, gathered (all parts), scattered or exchanged. Matrix products run at a share
of the data sheet's rate, collectives at a share of their link's. Data loading, checkpoints,
validation, stragglers and restarts take no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from megatron_deberta.config.phases import Segment, segments
from megatron_deberta.config.rules import batch_arithmetic, single_forms
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.parallelize.plan import vocabulary_rows
from megatron_deberta.engine.deepspeed_engine import LIVE_ELEMENTS, PERSISTENCE_THRESHOLD
from megatron_deberta.engine.optimizer import decays
from megatron_deberta.model.flops import (
    BACKWARD_FACTOR,
    forward_flops,
    is_task_head,
    num_position_terms,
    num_used_slots,
    reads_first_token,
    recomputed_flops,
)
from megatron_deberta.model.replaced_tokens import single_models
from megatron_deberta.ops.cross_entropy import chunk_rows
from megatron_deberta.planning.machine import (
    CALL_SECONDS,
    CHUNKED_BYTES,
    EFFICIENT_BYTES,
    LINK_EFFICIENCY,
    MEASURED,
    Device,
    Machine,
)
from megatron_deberta.planning.memory import (
    ELEMENT_BYTES,
    has_causal,
    local_sizes,
    masked_tokens,
    micro_batch_rows,
    trained_sizes,
)

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all"]
Group = Literal["tensor", "data"]
_ADAM_BYTES = 28
"""Memory traffic per fp32 master weight: four values read, three written."""
_BACKWARD_SHARE = 2 / 3
"""Share of a micro batch's time that hides the reduction of gradients."""


class RankFlops(NamedTuple):
    """FLOPs of one rank and micro batch: forward only, forward and backward, and recomputed."""

    forward: float
    training: float
    recomputed: float
    """Recomputed in backward under ``parallel.recompute=full``."""


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
    parts = forward_flops(model, length, rows, masked / tokens, causal=has_causal(config))
    whole, replicated = tokens * parts.total, masked * 2.0 * model.hidden_size**2
    if is_task_head(model):
        replicated = tokens * parts.head
    forward = (whole - replicated) / tp_size + replicated
    again = tokens * recomputed_flops(model, length, rows, config.parallel.recompute) / tp_size
    return RankFlops(forward, BACKWARD_FACTOR * forward, again)


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
    stage, element = config.parallel.zero_stage, ELEMENT_BYTES[config.precision.dtype]
    sizes, trained = local_sizes(config), trained_sizes(config)
    # DeepSpeed pads each group of parameters to a multiple of twice the ranks.
    groups = [
        sum(size for name, size in trained.items() if decays(name) is on) for on in (True, False)
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
    total, reduced = sum(each.values()), sum(each[name] for name in trained)
    yield Traffic("reduce-scatter", "data", "gradients", micro_batches, micro_batches * 4 * reduced)
    kept = sum(each[name] for name, size in sizes.items() if size <= PERSISTENCE_THRESHOLD)
    yield Traffic("all-gather", "data", "small weights", 1, element * kept)
    gathered = total - kept
    again = max(0, gathered - LIVE_ELEMENTS // 2)
    volume = micro_batches * element * (gathered + again)
    yield Traffic("all-gather", "data", "weights", micro_batches * (2 if again else 1), volume)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class StepTime(NamedTuple):
    """Seconds of an optimizer step by part.

    Of tensor-parallel collectives, the reduction of gradients and the gathering of weights only the
    exposed (blocking) time.
    """

    compute: float
    """Matrix products, including recomputation, and what runs between them."""
    attention: float
    """Memory traffic of attention without fused kernels, on devices before sm_80."""
    tensor_parallel: float
    gradients: float
    weights: float
    optimizer: float
    """Adam, bound by memory bandwidth."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self)


class LinkVolume(NamedTuple):
    """Traffic of an optimizer step, and its bytes on each kind of link."""

    traffic: Traffic
    wire_bytes: float
    """Sent per rank."""
    nvlink_bytes: float
    """Sent per rank inside its node."""
    network_bytes: float
    """Sent per node to other nodes."""


def link_volume(part: Traffic, config: RunConfig, machine: Machine, dp_size: int) -> LinkVolume:
    """Divide traffic over NVLink and network; tensor parallelism stays inside a node.

    Args:
        part: one kind of traffic of a step.
        config: the run.
        machine: devices and links of the cluster.
        dp_size: number of data-parallel ranks.
    """
    tp_size, between_replicas = config.parallel.tensor_parallel_size, part.group == "data"
    wire = part.wire_bytes(dp_size if between_replicas else tp_size)
    on_nvlink = not between_replicas or machine.ranks_per_node > tp_size
    across = between_replicas and dp_size * tp_size > machine.ranks_per_node
    # A ring leaves each node once; a node is part of one ring per tensor-parallel rank.
    return LinkVolume(part, wire, wire if on_nvlink else 0.0, wire * tp_size if across else 0.0)


def link_seconds(
    traffic: Iterable[Traffic], config: RunConfig, machine: Machine, dp_size: int
) -> float:
    """Return the seconds of consecutive collectives, each on the slower of its links.

    As many rings share a node's adapters as there are tensor-parallel ranks.

    Args:
        traffic: of the collectives.
        config: the run.
        machine: devices and links of the cluster.
        dp_size: number of data-parallel ranks.
    """
    seconds = 0.0
    for part in traffic:
        volume = link_volume(part, config, machine, dp_size)
        rates = []
        if volume.nvlink_bytes:
            rates.append(machine.device.link_gb_per_second)
        if volume.network_bytes:
            rates.append(machine.network_gb_per_second / config.parallel.tensor_parallel_size)
        rate = 1e9 * LINK_EFFICIENCY * min(rates, default=machine.device.link_gb_per_second)
        seconds += volume.wire_bytes / rate + part.calls * CALL_SECONDS
    return seconds


def step_time(config: RunConfig, machine: Machine, dp_size: int) -> StepTime:
    """Predict the seconds of an optimizer step, by part.

    Args:
        config: the run.
        machine: devices and links of the cluster.
        dp_size: number of data-parallel ranks.

    Raises:
        ConfigError: the batch does not divide over ``dp_size`` data-parallel ranks.
    """
    micro_batches = batch_arithmetic(config, dp_size).accumulation_steps
    device, stage = machine.device, config.parallel.zero_stage
    flops = rank_flops(config)
    rate = device.achieved * device.flops_per_second(config.precision.dtype)
    one = (flops.training + flops.recomputed) / rate
    traffic = step_traffic(config, dp_size)

    def seconds(group: str, *purposes: str) -> float:
        chosen = [
            part
            for part in traffic
            if part.group == group and (not purposes or part.purpose in purposes)
        ]
        return link_seconds(chosen, config, machine, dp_size)

    gradients, small = seconds("data", "gradients"), seconds("data", "small weights")
    weights = seconds("data", "weights")
    # Stages 0 and 1 reduce during the backward pass of the last micro batch, the others of each.
    hidden = (1 if stage < 2 else micro_batches) * _BACKWARD_SHARE * one
    if stage == 3:
        # Weights are prefetched during forward and backward.
        exposed = max(0.0, gradients + weights - micro_batches * one)
        gradients, weights = 0.0, exposed + small
    else:
        gradients = max(0.0, gradients - hidden)
    count = sum(trained_sizes(config).values())
    updated = count / dp_size if stage else count
    return StepTime(
        compute=micro_batches * one,
        attention=micro_batches
        * attention_bytes(config, device)
        / (1e9 * device.memory_gb_per_second),
        tensor_parallel=seconds("tensor"),
        gradients=gradients,
        weights=weights,
        optimizer=updated * _ADAM_BYTES / (1e9 * device.memory_gb_per_second),
    )


def attention_bytes(config: RunConfig, device: Device) -> float:
    """Return the memory traffic of attention per rank and micro batch, besides matrix products.

    The mask decoder's further passes are left out: they have few queries.
    """
    scores, length = 0.0, config.data.sequence_length
    for model in single_models(config.model):
        heads = model.num_heads / config.parallel.tensor_parallel_size
        # Each position term has a score of its own, besides that of the contents.
        terms = (1 + num_position_terms(model)) / 3
        scores += model.num_layers * heads * micro_batch_rows(config) * length**2 * terms
    again = 4 / 3 if config.parallel.recompute == "full" else 1.0
    per_score = bytes_per_score(config, device)
    return scores * again * per_score * ELEMENT_BYTES[config.precision.dtype] / 2


def bytes_per_score(config: RunConfig, device: Device) -> float:
    """Return the memory traffic of attention per score; 0: included in the share of the rate."""
    counted = {"chunked": CHUNKED_BYTES, "efficient": EFFICIENT_BYTES}
    if device.achieved_source == MEASURED:
        return device.attention_bytes
    return counted.get(config.parallel.attention_backend, device.attention_bytes)


def run_seconds(
    config: RunConfig, machine: Machine, dp_size: int, row_tokens: int | None = None
) -> float:
    """Predict the seconds to the last step, including phases and the steps with shorter rows.

    Args:
        config: the run.
        machine: devices and links of the cluster.
        dp_size: number of data-parallel ranks.
        row_tokens: length of rows, if they are shorter than in the config; None: as there.
    """
    if row_tokens is not None and row_tokens < config.data.sequence_length:
        config = replace(config, data=replace(config.data, sequence_length=row_tokens))
    return sum(segment_seconds(part, machine, dp_size) for part in segments(config))


def segment_seconds(part: Segment, machine: Machine, dp_size: int) -> float:
    """Predict the seconds of a segment.

    Args:
        part: the segment.
        machine: devices and links of the cluster.
        dp_size: number of data-parallel ranks.
    """
    return part.steps * step_time(part.config, machine, dp_size).total
