"""How fast a run is: FLOPs of this architecture by formula, the machine's matrix rate, MFU.

Owns the count and the clock. Refuses peak figures from data sheets: the rate that utilization is
measured against is itself measured, on the device and in the format of the run.

A multiply and an add are two FLOPs. Only matrix products count; norms, softmax and dropout do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from megatron_deberta.config.schema import ModelConfig

BACKWARD_FACTOR = 3.0
"""Forward and backward together over forward: each product has two gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardFlops:
    """FLOPs of one forward pass in pretraining, a token of the row, by part."""

    layers: float
    """Encoder layers that run over the whole row."""
    position_projections: float
    """Projections of the position table: once a layer and micro batch, spread over its tokens."""
    convolution: float
    """The convolution beside the first layer."""
    mask_decoder: float
    """The last layer as mask decoder: keys and values once, queries at masked positions."""
    head: float
    """Transform and vocabulary projection at masked positions."""

    @property
    def total(self) -> float:
        """All parts."""
        return (
            self.layers
            + self.position_projections
            + self.convolution
            + self.mask_decoder
            + self.head
        )


def forward_flops(
    model: ModelConfig, sequence_length: int, micro_batch_size: int, mask_probability: float = 0.15
) -> ForwardFlops:
    """Count a forward pass by formula.

    Source: He et al. 2021, arXiv:2006.03654, section 3. A query meets ``sequence_length`` keys by
    content, and by position as many distances as there are keys or slots of the table, whichever
    is fewer (longer distances share a slot, so their products are shared too).

    Args:
        model: the architecture.
        sequence_length: tokens a row.
        micro_batch_size: rows that share one projection of the position table.
        mask_probability: share of tokens at which the mask decoder and the head run.

    Returns:
        FLOPs a token of the row.
    """
    d = model.hidden_size
    terms = {"c2p+p2c": 2, "c2p": 1, "p2c": 1, "none": 0}[model.position_terms]
    slots = 2 * (model.position_buckets or model.max_relative_positions)
    attention = 4 * sequence_length * d + terms * 2 * min(sequence_length, slots) * d
    keys_values = 2 * 2 * d * d
    query_side = 2 * 2 * d * d + attention + 2 * 2 * d * model.ffn_hidden_size

    decoded = model.mask_decoder_passes > 0
    passes = model.mask_decoder_passes * mask_probability
    table_tokens = sequence_length * micro_batch_size
    return ForwardFlops(
        layers=(model.num_layers - decoded) * (keys_values + query_side),
        position_projections=model.num_layers * terms * 2 * d * d * slots / table_tokens,
        convolution=2.0 * model.conv_kernel_size * d * d,
        mask_decoder=decoded * (keys_values + passes * query_side),
        head=mask_probability * (2 * d * d + 2 * d * model.vocab_size),
    )


def training_flops_per_token(
    model: ModelConfig, sequence_length: int, micro_batch_size: int, mask_probability: float = 0.15
) -> float:
    """FLOPs of forward and backward, a token of the row; recomputation is not counted."""
    forward = forward_flops(model, sequence_length, micro_batch_size, mask_probability)
    return BACKWARD_FACTOR * forward.total


def recomputed_flops(
    model: ModelConfig,
    sequence_length: int,
    micro_batch_size: int,
    recompute: Literal["none", "selective", "full"],
) -> float:
    """FLOPs that backward spends on computing activations again, a token of the row.

    Selective recomputation repeats no matrix product, full recomputation every layer before the
    mask decoder. What an attention backend recomputes of its own accord is not counted.

    Args:
        model: the architecture.
        sequence_length: tokens a row.
        micro_batch_size: rows that share one projection of the position table.
        recompute: ``parallel.recompute``.
    """
    if recompute != "full":
        return 0.0
    forward = forward_flops(model, sequence_length, micro_batch_size)
    decoded = model.mask_decoder_passes > 0
    repeated_layers = (model.num_layers - decoded) / model.num_layers
    return forward.layers + repeated_layers * forward.position_projections


def measure_matmul_rate(
    device: torch.device, dtype: torch.dtype, *, limit_seconds: float = 0.25
) -> float:
    """Measure the rate of a large square matrix product; the best of some repeats.

    Args:
        device: where to measure.
        dtype: format of the factors.
        limit_seconds: no further repeat starts after this.

    Returns:
        FLOP/s of this device (on CPU: of this process's threads).
    """
    on_gpu = device.type == "cuda"
    # 16-bit products are slow on processors that lack the instructions.
    size = 8192 if on_gpu else 768 if dtype == torch.float32 else 256
    # Not constants: fewer bits that flip let a GPU clock higher than real data does.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2)
    )
    best = float("inf")
    begin = time.perf_counter()
    for repeat in range(20):
        start = time.perf_counter()
        if repeat > 1 and start - begin > limit_seconds:
            break
        torch.mm(left, right)
        if on_gpu:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return float(2 * size**3 / best)


class Throughput(NamedTuple):
    """Speed over some steps."""

    tokens_per_second: float
    """Tokens of all ranks."""
    utilization: float
    """MFU: model FLOPs, without recomputation, over what the matrix rate allows."""
    hardware_utilization: float
    """The same with recomputation."""
    flops_per_second: float
    """Model FLOP/s of all ranks."""
    seconds_per_step: float
    """Wall time of one optimizer step."""


class StepWork(NamedTuple):
    """What an optimizer step costs."""

    tokens: int
    """Tokens of all ranks."""
    flops_per_token: float
    """From ``training_flops_per_token``."""
    recomputed_per_token: float = 0.0
    """From ``recomputed_flops``."""


class ThroughputMeter:
    """Times steps between records; what is not training can be taken out with ``paused``.

    Args:
        work: of a step.
        matmul_rate: FLOP/s of all ranks together, from ``measure_matmul_rate``.
        first_work: of the next steps, where they are shorter.
        first_steps: how many those are.
        clock: seconds from any origin.
    """

    def __init__(
        self,
        *,
        work: StepWork,
        matmul_rate: float,
        first_work: StepWork | None = None,
        first_steps: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._work = work
        self._first_work = first_work
        self._first_steps = first_steps
        self.matmul_rate = matmul_rate
        self._clock = clock
        self._start = clock()
        self._steps = self._tokens = 0
        self._flops = self._recomputed = 0.0

    def step_done(self) -> None:
        """Count one optimizer step."""
        work = self._work
        if self._first_steps > 0 and self._first_work is not None:
            work = self._first_work
            self._first_steps -= 1
        self._steps += 1
        self._tokens += work.tokens
        self._flops += work.tokens * work.flops_per_token
        self._recomputed += work.tokens * work.recomputed_per_token

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time spent inside, such as a validation or a checkpoint."""
        before = self._clock()
        yield
        self._start += self._clock() - before

    def lap(self) -> Throughput:
        """Give the speed since the last lap and start the next.

        Raises:
            ValueError: no step was counted since the last lap.
        """
        if self._steps == 0:
            raise ValueError("no step since the last lap")
        now = self._clock()
        seconds = max(now - self._start, 1e-9)
        flops = self._flops / seconds
        found = Throughput(
            tokens_per_second=self._tokens / seconds,
            utilization=flops / self.matmul_rate,
            hardware_utilization=(flops + self._recomputed / seconds) / self.matmul_rate,
            flops_per_second=flops,
            seconds_per_step=seconds / self._steps,
        )
        self._start, self._steps, self._tokens = now, 0, 0
        self._flops = self._recomputed = 0.0
        return found
