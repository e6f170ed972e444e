"""Sizes of a micro batch, and peak device memory of a training step, by formula.

Activations are the tensors that autograd keeps, in the order of ``model``. The peak is at one of
four moments: the loss (all activations, and a chunk of logits), the backward pass of the last
encoder layer's FFN or of its attention, or the end, where the gradients of the embedding and of the
vocabulary projection are summed. ``tests/unit/planning/test_memory.py`` compares with allocations.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_deberta.config.rules import causal_fraction, decoder_masking
from megatron_deberta.config.schema import FinetuneConfig, ModelConfig, RunConfig
from megatron_deberta.distributed.parallelize.plan import shard_spec, vocabulary_rows
from megatron_deberta.engine.deepspeed_engine import LIVE_ELEMENTS, REDUCE_BUCKET_ELEMENTS
from megatron_deberta.model import parameter_shapes
from megatron_deberta.model.flops import (
    is_task_head,
    num_position_slots,
    num_position_terms,
    reads_first_token,
)
from megatron_deberta.model.low_rank import adapter_shapes, is_trained
from megatron_deberta.model.replaced_tokens import single_models
from megatron_deberta.ops.batched import block_size, strip_size
from megatron_deberta.ops.cross_entropy import chunk_rows
from megatron_deberta.tasks.task import EXAMPLE_HEADS, load_task, run_task_name

ELEMENT_BYTES = {"auto": 4, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes by ``precision.dtype``; ``auto`` that nothing has resolved is fp32."""
_STATISTICS = 8
"""Bytes per token that LayerNorm keeps: mean and deviation in fp32."""


def rows_per_sample(config: RunConfig) -> int:
    """Return the number of rows per sample: the task's choices, passages, or texts of a pair.

    Without ``max_passages`` of the task, the number of passages is unknown, and 1 is returned.
    """
    if config.model.head not in EXAMPLE_HEADS:
        return 1
    name = run_task_name(config.finetune.task or "", Path(config.train.run_dir))
    task = load_task(name)
    if task.head == "embed":
        return 2 + ("negative" in task.columns)
    return max(1, task.max_passages if task.head == "rerank" else len(task.labels))


def micro_batch_rows(config: RunConfig) -> int:
    """Return the number of rows per forward pass."""
    return config.train.micro_batch_size * rows_per_sample(config)


def micro_batch_tokens(config: RunConfig) -> tuple[int, int]:
    """Return the tokens of a micro batch and the global batch, by which phases are compared."""
    length, train = config.data.sequence_length, config.train
    return train.micro_batch_size * length, train.global_batch_size


def masked_tokens(config: RunConfig) -> int:
    """Return the number of tokens per micro batch that mask decoder and vocabulary head compute.

    Of an autoregressive micro batch if the objective has any, which takes the most memory.
    """
    if is_task_head(config.model):
        return 0
    length = config.data.sequence_length
    masked = round(config.objective.mask_probability * length)
    return config.train.micro_batch_size * (length - 1 if has_causal(config) else masked)


def reconstructed_tokens(config: RunConfig) -> int:
    """Return the number of tokens per micro batch that a decoder beside the encoder predicts."""
    decoder = decoder_masking(config.objective)
    share = 0.0 if decoder is None else decoder.mask_probability
    return config.train.micro_batch_size * round(share * config.data.sequence_length)


def has_causal(config: RunConfig) -> bool:
    """Return whether batches may be autoregressive."""
    return causal_fraction(config.objective) > 0


class MemoryEstimate(NamedTuple):
    """Bytes on one device by purpose."""

    weights: int
    gradients: int
    optimizer: int
    """Master weights, both moments and the moving average, unless offloaded."""
    communication: int
    """Buckets of gradient reduction and, in ZeRO-3, gathered weights."""
    activations: int
    """Tensors kept between forward and backward."""
    vocabulary: int
    """Gradient of the vocabulary projection, and a chunk of logits or the embedding's gradient."""
    workspace: int
    kernels: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self)


def estimate_memory(
    config: RunConfig,
    dp_size: int,
    *,
    attention: Literal["triton", "chunked"],
    device_type: str = "cuda",
) -> MemoryEstimate:
    """Estimate the peak memory of a rank in a training step with gradient accumulation.

    Args:
        config: the run.
        dp_size: data-parallel ranks.
        attention: attention backend.
        device_type: ``cuda`` or ``cpu``; chunks of logits and scores differ in size.
    """
    # The vocabulary is that of the first model, which comes first in forward and last in backward.
    first, *later = (replace(config, model=model) for model in single_models(config.model))
    kept, element = _activations(first, device_type), ELEMENT_BYTES[config.precision.dtype]
    columns = vocabulary_rows(config.model.vocab_size, config.parallel.tensor_parallel_size)
    table = columns * config.model.hidden_size
    # Summed in fp32; each chunk's product is in the format of the weights.
    wide = table * (4 if element == 4 else 4 + element)
    reconstructed = reconstructed_tokens(config)
    chunk = chunk_rows(max(masked_tokens(config), reconstructed), columns, device_type) * columns
    chunk_bytes = chunk * (4 if element == 4 else 4 + 2 * element)
    kernels = _kernel_bytes(first, attention, device_type)
    in_loss = wide * (1 + bool(reconstructed)) + chunk_bytes
    in_layers, at_end = table * element, 2 * table * element
    if is_task_head(config.model):
        # Nothing is multiplied with the vocabulary; only the embedding has a gradient, unless
        # adapters are trained.
        in_loss, in_layers = 0, 0
        at_end = 0 if config.finetune.lora_rank else table * element
    moments = [  # activations, vocabulary, workspace, kernels
        (kept.encoder + kept.decoder, in_loss, 0, 0),
        (kept.encoder, in_layers, kept.ffn, 0),
        (kept.encoder, in_layers, kept.attention, kernels),
        (0, at_end, 0, 0),
    ]
    is_joint = config.rtd.update == "joint"
    for other in later:
        above = _activations(other, device_type)
        # With alternating updates, those of the first model are freed before.
        both = above.encoder + is_joint * (kept.encoder + kept.decoder)
        of_loss = is_joint * wide
        moments += [
            (both + above.decoder, of_loss, 0, 0),
            (both, of_loss, above.ffn, 0),
            (both, of_loss, above.attention, kernels),
        ]
    return MemoryEstimate(*_states(config, dp_size), *max(moments, key=sum))


def largest_micro_batch(
    config: RunConfig,
    dp_size: int,
    capacity_bytes: float,
    *,
    attention: Literal["triton", "chunked"],
) -> int:
    """Return the largest micro batch that fits, 0 if none does.

    Args:
        config: the run; its micro batch is ignored.
        dp_size: data-parallel ranks.
        capacity_bytes: device memory for tensors, without the driver, the communication library
            and fragmentation.
        attention: attention backend.
    """

    def fits(rows: int) -> bool:
        candidate = replace(config, train=replace(config.train, micro_batch_size=rows))
        return estimate_memory(candidate, dp_size, attention=attention).total <= capacity_bytes

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _Kept(NamedTuple):
    """Bytes of activations, and of temporary tensors in the backward pass of a layer's parts."""

    encoder: int
    decoder: int
    """Activations of the mask decoder and the head."""
    ffn: int
    attention: int
    """The same of a layer's attention, less the activations that its FFN has freed."""


def _activations(config: RunConfig, device_type: str) -> _Kept:
    model, parallel = config.model, config.parallel
    element, tp = ELEMENT_BYTES[config.precision.dtype], parallel.tensor_parallel_size
    width, inner = model.hidden_size, model.ffn_hidden_size
    decoded = model.mask_decoder_passes > 0 or reads_first_token(model)
    tokens = micro_batch_rows(config) * config.data.sequence_length
    token_shards = tp if parallel.sequence_parallel else 1
    own = tokens // token_shards
    full, repeated = parallel.recompute == "full", parallel.recompute == "selective"
    # Per element: dropout masks that are kept.
    mask_bytes = int(not repeated and parallel.fuse is not True and model.hidden_dropout > 0)
    residual = width * (element + mask_bytes) + _STATISTICS  # dropout and LayerNorm
    ffn = (1 if repeated else 2) * inner // tp * element
    # What a layer keeps of the position table: projections, copy after dropout, mask.
    slots, terms = num_position_slots(model), num_position_terms(model)
    position_table = terms * slots * width // tp * element
    if terms and model.hidden_dropout:
        position_table += slots * width * (element + mask_bytes)

    # Input, Q, K, V and output of attention; input of and inside the FFN; two residual joins.
    layer = tokens * (2 * width * element + 4 * width // tp * element + ffn)
    layer += 2 * own * residual + position_table
    kept = own * width * element if full else layer
    encoder = (model.num_layers - decoded) * kept + own * residual
    if model.conv_kernel_size:
        encoder += own * (2 * width * element + width * mask_bytes + _STATISTICS)
        if device_type != "cpu":
            # The shifted tokens of all taps, for one matrix product.
            encoder += tokens * model.conv_kernel_size * width * element
    if model.position_terms != "none":
        encoder += slots * width * element
    # Gradients inside the FFN (GELU's output is freed before unless it is recomputed here), and of
    # the residual stream.
    streams = own * 2 * width * element + (layer if full else 0)
    before_ffn = tokens * (1 + repeated) * inner // tp * element + streams
    freed = tokens * (width * element + ffn) + own * residual
    # Gradients of attention's output, Q, K and V; with sequence parallelism, a gathered one.
    gathered = tokens * width * element * (token_shards > 1)
    before_attention = tokens * 4 * width // tp * element + gathered + streams - freed

    # States that the head reads, and inside it: of masked tokens, or of all for a discriminator.
    masked, reconstructed = masked_tokens(config), reconstructed_tokens(config)
    read = tokens if model.head == "discriminator" else masked + reconstructed
    decoder = tokens * width * element + read * 4 * width * element
    if model.head in ("spans", "tokens", "embed"):
        decoder = 0
    # Keys, values and positions of a decoding layer; its queries, per token.
    keys = tokens * 2 * width // tp * element + position_table
    one = width * element + 2 * width // tp * element + ffn + width * element + 2 * residual
    if decoded:
        decoder += keys + model.mask_decoder_passes * masked * one
    if reconstructed:
        # Its embeddings and input, and the states of the encoder that are pooled.
        decoder += keys + reconstructed * one + own * residual + tokens * width * element
        pooled = tokens if config.objective.retromae_pooling == "mean" else 0
        decoder += pooled * (one * decoded + width * element)
    return _Kept(encoder, decoder, before_ffn, before_attention)


def _kernel_bytes(config: RunConfig, attention: str, device_type: str) -> int:
    """Return the peak of the attention backend's backward pass on a GPU."""
    if device_type == "cpu":
        return 0
    model, tp = config.model, config.parallel.tensor_parallel_size
    length, sequences = config.data.sequence_length, micro_batch_rows(config)
    element = ELEMENT_BYTES[config.precision.dtype]
    if attention == "triton":
        # Backward writes the gradient of scores for distances with a slot of their own.
        near = min(length, 2 * model.max_relative_positions)
        return sequences * length * near * model.num_heads // tp * element
    width, heads, terms = model.hidden_size // tp, model.num_heads // tp, num_position_terms(model)
    rows, queries = block_size(heads, sequences, length, length)
    vectors = rows * heads
    # Probabilities and their gradient, fp32; the gradient again as an operand; the dropout mask.
    scores = vectors * queries * length * (4 + 4 + element + 1)
    # A strip of each term's products, kept, and one of the queries' gradient.
    strip = sum(
        min(strip_size(size), count) * (size + min(strip_size(size), count))
        for count, size in ((queries, length), (length, queries))[:terms]
    )
    # Each term's table by distance and its gradient.
    tables = terms * 2 * length * width * (element + 4)
    # Queries, keys, values and the output's gradient by head; sums of the gradients of the first
    # three, whose results are counted with the layer's.
    copies = rows * length * width * (4 * element + 3 * 4)
    return scores + vectors * strip * element + tables + copies


@cache
def _sizes(
    model: ModelConfig, finetune: FinetuneConfig, tp_size: int
) -> tuple[tuple[str, int], ...]:
    shapes = parameter_shapes(model)
    shapes = {**shapes, **adapter_shapes(shapes, finetune)}
    return tuple(
        (name, math.prod(shard_spec(name, shape, 0, tp_size).local_shape))
        for name, shape in shapes.items()
    )


def local_sizes(config: RunConfig) -> dict[str, int]:
    """Return the size of each parameter on a rank before ZeRO, including padding.

    A decoder beside the encoder counts as one more layer of it.
    """
    model = config.model
    if decoder_masking(config.objective):
        model = replace(model, num_layers=model.num_layers + 1)
    return dict(_sizes(model, config.finetune, config.parallel.tensor_parallel_size))


def trained_sizes(config: RunConfig) -> dict[str, int]:
    """Return those of `local_sizes` that the run trains: with low-rank adapters not all."""
    rank = config.finetune.lora_rank
    return {name: n for name, n in local_sizes(config).items() if is_trained(name, rank)}


def local_parameters(config: RunConfig) -> int:
    """Return the number of parameters on a rank before ZeRO, including padding."""
    return sum(local_sizes(config).values())


def _states(config: RunConfig, dp_size: int) -> tuple[int, int, int, int]:
    """Return bytes of weights, gradients, optimizer state and buckets."""
    parallel = config.parallel
    count = sum(trained_sizes(config).values())
    frozen = local_parameters(config) - count
    element, stage = ELEMENT_BYTES[config.precision.dtype], parallel.zero_stage
    share = -(-count // dp_size) if stage else count
    weights = element * (share if stage == 3 else count)
    weights += element * (-(-frozen // dp_size) if stage == 3 else frozen)
    gradients = 4 * (share if stage >= 2 else count)
    # At stage 0 in fp32 the weights are their own masters.
    per_parameter = (12 if stage else 8) + (4 if config.optimizer.ema_decay else 0)
    optimizer = 0 if parallel.offload_optimizer else per_parameter * share
    buckets = 2 * 4 * min(REDUCE_BUCKET_ELEMENTS, count) if stage and dp_size > 1 else 0
    if stage == 3:
        # Gathered weights are kept for backward up to this number of elements.
        buckets += element * min(LIVE_ELEMENTS, count + frozen)
    return weights, gradients, optimizer, buckets
