"""Device memory of a training step, by formula: what a rank holds at the peak of backward.

Owns the count of bytes for every layout, number format and recomputation policy. Refuses to
measure: ``tests/unit/planning/test_memory.py`` compares with what the real model allocates.

Activations are what autograd keeps, tensor by tensor in the order of ``model``. The peak is one of
four moments: the loss (everything is there, and a chunk of logits), the backward of the last
encoder layer's FFN or of its attention, or the end, where the embedding's gradient meets the
vocabulary projection's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from megatron_deberta.config.schema import ModelConfig, RunConfig
from megatron_deberta.distributed.parallelize.plan import shard_spec, vocabulary_rows
from megatron_deberta.distributed.vocab import chunk_rows
from megatron_deberta.engine.deepspeed_config import LIVE_ELEMENTS, REDUCE_BUCKET_ELEMENTS
from megatron_deberta.model import parameter_shapes
from megatron_deberta.ops.chunked import GPU_BLOCK_ELEMENTS
from megatron_deberta.ops.position_terms import STRIP

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_STATISTICS = 8
"""Bytes a row that LayerNorm keeps: mean and deviation in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes on one device, by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    """Master weights and both moments, where they are not offloaded."""
    communication: int
    """Buckets in which gradients are reduced and, under ZeRO-3, weights gathered."""
    activations: int
    """Kept between forward and backward."""
    vocabulary: int
    """Gradient of the vocabulary projection, and a chunk of logits or the embedding's gradient."""
    workspace: int
    """What a layer's backward needs for itself."""
    kernels: int
    """What the attention kernels need for themselves."""

    @property
    def total(self) -> int:
        """All of it."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.communication
            + self.activations
            + self.vocabulary
            + self.workspace
            + self.kernels
        )


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of a rank's micro batch."""

    config: RunConfig
    tokens: int
    masked: int

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.config.precision.dtype]

    @property
    def tp(self) -> int:
        return self.config.parallel.tensor_parallel_size

    @property
    def token_shards(self) -> int:
        return self.tp if self.config.parallel.sequence_parallel else 1

    @property
    def terms(self) -> int:
        """Position terms."""
        return {"c2p+p2c": 2, "c2p": 1, "p2c": 1, "none": 0}[self.model.position_terms]

    @property
    def table_bytes(self) -> int:
        """What a layer keeps of the position table: its dropped copy, mask and projections."""
        model, terms = self.model, self.terms
        slots = 2 * (model.position_buckets or model.max_relative_positions)
        projected = terms * slots * model.hidden_size // self.tp * self.element
        if not terms or not model.hidden_dropout:
            return projected
        return projected + slots * model.hidden_size * (self.element + self.mask_bytes)

    @property
    def mask_bytes(self) -> int:
        """Bytes an element of a dropout mask that is kept."""
        parallel = self.config.parallel
        remade = parallel.recompute == "selective" or parallel.fuse
        kept = not remade and self.model.hidden_dropout > 0
        return int(kept)


def estimate_memory(
    config: RunConfig,
    dp_size: int,
    *,
    attention: Literal["triton", "chunked"],
    device_type: str = "cuda",
) -> MemoryEstimate:
    """Peak bytes of a rank in a training step with gradient accumulation.

    Args:
        config: the run.
        dp_size: data-parallel ranks.
        attention: backend that runs.
        device_type: ``cuda`` or ``cpu``; they cut logits and scores into chunks of other sizes.
    """
    length, rows = config.data.sequence_length, config.train.micro_batch_size
    shape = _Shape(config, rows * length, rows * round(config.objective.mask_probability * length))
    kept = _activations(shape)
    table = vocabulary_rows(config.model.vocab_size, shape.tp) * config.model.hidden_size
    # Summed in fp32; a chunk's part comes out of its product in the weights' own format.
    wide = table * (4 if shape.element == 4 else 4 + shape.element)
    columns = vocabulary_rows(config.model.vocab_size, shape.tp)
    chunk = chunk_rows(shape.masked, columns, device_type) * columns
    chunk_bytes = chunk * (4 if shape.element == 4 else 4 + 2 * shape.element)
    kernels = _kernel_bytes(shape, attention, device_type)
    moments = {  # kept activations, vocabulary, workspace, kernels
        "loss": (kept.encoder + kept.decoder, wide + chunk_bytes, 0, 0),
        "ffn": (kept.encoder, table * shape.element, kept.ffn, 0),
        "attention": (kept.encoder, table * shape.element, kept.attention, kernels),
        "end": (0, 2 * table * shape.element, 0, 0),
    }
    activations, vocabulary, workspace, kernels = max(moments.values(), key=sum)
    weights, gradients, optimizer, communication = _states(config, dp_size)
    return MemoryEstimate(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        communication=communication,
        activations=activations,
        vocabulary=vocabulary,
        workspace=workspace,
        kernels=kernels,
    )


def largest_micro_batch(
    config: RunConfig,
    dp_size: int,
    capacity_bytes: float,
    *,
    attention: Literal["triton", "chunked"],
) -> int:
    """Most rows a forward pass may have, 0 if not even one fits.

    Args:
        config: the run; its own micro batch does not matter.
        dp_size: data-parallel ranks.
        capacity_bytes: what the device can give to tensors; leave some for the driver, the
            communication library and fragmentation.
        attention: backend that runs.
    """

    def fits(rows: int) -> bool:
        train = replace(config.train, micro_batch_size=rows)
        tried = replace(config, train=train)
        return estimate_memory(tried, dp_size, attention=attention).total <= capacity_bytes

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _Kept(NamedTuple):
    """Bytes that a micro batch needs beside kernels and vocabulary."""

    encoder: int
    """Kept by the encoder."""
    decoder: int
    """Kept by the mask decoder and the head."""
    ffn: int
    """To differentiate a layer's FFN."""
    attention: int
    """To differentiate a layer's attention, less what its FFN has given back."""


def _activations(shape: _Shape) -> _Kept:
    model, element, tp = shape.model, shape.element, shape.tp
    width, inner = model.hidden_size, model.ffn_hidden_size
    decoded = model.mask_decoder_passes > 0
    tokens, own = shape.tokens, shape.tokens // shape.token_shards
    residual = width * (element + shape.mask_bytes) + _STATISTICS  # dropout and LayerNorm
    full = shape.config.parallel.recompute == "full"
    ffn = (1 if shape.config.parallel.recompute == "selective" else 2) * inner // tp * element

    # Input, Q, K, V and output of attention; input of and inside the FFN; two residual joins.
    layer = tokens * (2 * width * element + 4 * width // tp * element + ffn)
    layer += 2 * own * residual + shape.table_bytes
    num_layers = model.num_layers - decoded
    kept = own * width * element if full else layer
    encoder = num_layers * kept + own * residual
    if model.conv_kernel_size:
        encoder += own * (2 * width * element + width * shape.mask_bytes + _STATISTICS)
    if model.position_terms != "none":
        slots = 2 * (model.position_buckets or model.max_relative_positions)
        encoder += slots * width * element
    # Gradients inside the FFN (GELU's output is freed in time unless it is made again here), and
    # of the residual stream.
    repeated = shape.config.parallel.recompute == "selective"
    streams = own * 2 * width * element + (layer if full else 0)
    before_ffn = tokens * (1 + repeated) * inner // tp * element + streams
    freed = tokens * (width * element + ffn) + own * residual
    # Gradients of attention's output, Q, K and V; where tokens are split, one that was gathered.
    gathered = tokens * width * element * (shape.token_shards > 1)
    before_attention = tokens * 4 * width // tp * element + gathered + streams - freed

    decoder = shape.tokens * width * element + shape.masked * 4 * width * element
    if decoded:
        decoder += tokens * 2 * width // tp * element + shape.table_bytes
        one = width * element + 2 * width // tp * element + ffn + width * element + 2 * residual
        decoder += model.mask_decoder_passes * shape.masked * one
    return _Kept(encoder, decoder, before_ffn, before_attention)


def _kernel_bytes(shape: _Shape, attention: Literal["triton", "chunked"], device_type: str) -> int:
    if device_type == "cpu":
        return 0
    model, length = shape.model, shape.config.data.sequence_length
    if attention == "chunked":
        return _chunked_bytes(shape)
    # Backward writes the gradient of scores once, where distances are told apart.
    near = min(length, 2 * model.max_relative_positions)
    return shape.tokens * near * model.num_heads // shape.tp * shape.element


def _chunked_bytes(shape: _Shape) -> int:
    """What the chunked backend's backward has at a time, all of it fp32."""
    length, width = shape.config.data.sequence_length, shape.model.hidden_size // shape.tp
    strip = min(STRIP, length)
    product = strip * (length + strip)
    rows = min(shape.config.train.micro_batch_size, GPU_BLOCK_ELEMENTS // max(length**2, product))
    # Scores, dropout, gradient, a copy; a strip of each term's products and its gradient.
    block = max(rows, 1) * (4 * length**2 + 2 * shape.terms * product)
    # Each term's table by distance and its gradient; sums of the gradients of keys and values.
    tables = 2 * shape.terms * 2 * length * width
    return 4 * (block + tables + 2 * shape.tokens * width)


@cache
def local_sizes(model: ModelConfig, tp_size: int) -> tuple[tuple[str, int], ...]:
    """Name and elements of each parameter as a rank holds it before ZeRO, padding included.

    Args:
        model: the architecture.
        tp_size: ranks a layer is split over.
    """
    shapes = parameter_shapes(model).items()
    return tuple(
        (name, math.prod(shard_spec(name, shape, 0, tp_size).local_shape)) for name, shape in shapes
    )


def local_parameters(model: ModelConfig, tp_size: int) -> int:
    """Elements of all parameters, as ``local_sizes``."""
    return sum(size for _, size in local_sizes(model, tp_size))


def _states(config: RunConfig, dp_size: int) -> tuple[int, int, int, int]:
    """Weights, gradients, optimizer state and buckets of DeepSpeed (of torch at stage 0)."""
    precision = config.precision
    count = local_parameters(config.model, config.parallel.tensor_parallel_size)
    element, stage = ELEMENT_BYTES[precision.dtype], precision.zero_stage
    share = -(-count // dp_size) if stage else count
    weights = element * (share if stage == 3 else count)
    gradients = 4 * (share if stage >= 2 else count)
    alone = dp_size == 1 and not precision.offload_optimizer
    if precision.dtype == "bf16" and stage == 1 and alone:
        # DeepSpeed's optimizer for this case keeps the 16-bit gradients beside the sums.
        gradients += element * count
    # At stage 0 in fp32 the weights are their own masters.
    optimizer = (12 if stage else 8) * share
    if precision.offload_optimizer:
        optimizer = 0
    buckets = 0
    if stage and dp_size > 1:
        buckets = 2 * 4 * min(REDUCE_BUCKET_ELEMENTS, count)
    if stage == 3:
        # Gathered weights stay for backward while there are not more than that.
        buckets += element * min(LIVE_ELEMENTS, count)
    return weights, gradients, optimizer, buckets
