"""Timing, memory and breakdown of whole optimizer steps, the same for every side.

16-bit formats train as the product does: the model holds 16-bit weights, AdamW fp32 masters.
"""

from __future__ import annotations

import gc
import re
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.step.batch import StepBatch
from benchmarks.step.sides import Side


class Optimizer:
    """Torch's fused AdamW; over fp32 master weights where the model holds 16-bit ones."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = self.weights
        if self.weights[0].dtype != torch.float32:
            self.masters = [nn.Parameter(p.detach().float()) for p in self.weights]
        self.adamw = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)

    def step(self) -> None:
        """Update the weights from their gradients, and drop those."""
        if self.masters is self.weights:
            self.adamw.step()
        else:
            # A weight that takes no part in the loss (as in a model without mask decoder).
            for master, weight in zip(self.masters, self.weights, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
            self.adamw.step()
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        self.adamw.zero_grad(set_to_none=True)


class Contender:
    """A side in training: its model, optimizer, batch in micro batches, and step count."""

    def __init__(self, side: Side, batch: StepBatch) -> None:
        self.side = side
        self.batch = batch
        self.device = batch.input_ids.device
        self.optimizer = Optimizer(side.model)
        self.parts = [batch]
        self.steps = 0

    def step(self) -> float:
        """Seconds of one whole step; smaller micro batches from here on if memory asks for it.

        Raises:
            torch.OutOfMemoryError: not even single rows fit.
        """
        self.steps += 1
        wait(self.device)
        start = time.perf_counter()
        try:
            self.accumulate()
        except torch.OutOfMemoryError:
            if len(self.parts) >= self.batch.input_ids.size(0):
                raise
            self.parts = self.batch.split(2 * len(self.parts))
        else:
            self.optimizer.step()
            wait(self.device)
            return time.perf_counter() - start
        # Outside the handler, which keeps the failed step's tensors alive.
        self.side.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.step()
        return self.step()

    def accumulate(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Forward and backward of all micro batches."""
        for part in self.parts:
            (self.side.loss(part, self.steps) / len(self.parts)).backward()
            after_each()


def wait(device: torch.device) -> None:
    """Synchronize with a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


BREAKDOWN_STEPS = {"cpu": 2, "cuda": 5}


@dataclass
class Result:
    """What was measured of one side.

    Attributes:
        peak_bytes: on CUDA what the side adds; on a CPU 0 (a process of its own tells).
        parts: seconds by part, from `breakdown`.
    """

    notes: dict[str, Any]
    parameters: int
    flops_per_token: float
    peak_bytes: int
    micro_batches: int = 1
    seconds: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)


def compete(
    builds: Mapping[str, Callable[[], Side]], batch: StepBatch, repeats: int, *, resident: bool
) -> dict[str, Result]:
    """Time ``repeats`` steps of each side, the sides in turns, because a machine's load changes.

    Args:
        builds: sides by name.
        batch: what all of them take.
        repeats: timed steps a side.
        resident: all sides stay in memory and alternate step by step; otherwise each is built,
            timed and dropped, twice over.
    """
    results: dict[str, Result] = {}
    if resident:
        contenders = {}
        for name, build in builds.items():
            contenders[name], results[name] = enter(build, batch)
        for _ in range(repeats):
            for name, contender in contenders.items():
                results[name].seconds.append(contender.step())
        for name, contender in contenders.items():
            results[name].micro_batches = len(contender.parts)
            results[name].parts = breakdown(contender, BREAKDOWN_STEPS[batch.input_ids.device.type])
        return results
    for _ in range(2):
        for name, build in builds.items():
            contender, result = enter(build, batch)
            result = results.setdefault(name, result)
            result.seconds += [contender.step() for _ in range(repeats)]
            result.micro_batches = len(contender.parts)
            result.parts = breakdown(contender, BREAKDOWN_STEPS[batch.input_ids.device.type])
            del contender
    return results


def enter(build: Callable[[], Side], batch: StepBatch) -> tuple[Contender, Result]:
    """Build a side, take two steps to warm up, and measure its memory with a third on CUDA."""
    device = batch.input_ids.device
    before = 0
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
    contender = Contender(build(), batch)
    contender.step()
    contender.step()
    peak = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        contender.step()
        peak = torch.cuda.max_memory_allocated(device) - before
    parameters = sum(p.numel() for p in contender.side.model.parameters())
    flops = contender.side.flops_per_token(batch)
    return contender, Result(contender.side.notes, parameters, flops, peak)


# Part of a step by the class name of a module; the outermost match counts.
PARTS = (
    ("embeddings", r"Embeddings$|RelativePositionTable$"),
    ("attention", r"(Self)?Attention$"),
    ("ffn", r"(FeedForward|MLP|Intermediate|Output)$"),
    ("convolution", r"^Conv"),
    ("head", r"(Head|Sequential|TokenLoss|CrossEntropyLoss)$"),
)


def breakdown(contender: Contender, repeats: int) -> dict[str, float]:
    """Seconds of one step by part, forward and backward, medians over steps.

    Measured at the borders of modules, on the GPU by events in its stream; what lies between
    them, such as the loss of a model that has no module for it, is ``rest``. Compiled code has no
    such borders, so a side runs uncompiled here, and its parts add up to more than its step.

    Returns:
        Seconds by part; nothing if the uncompiled step does not fit into the GPU's memory.
    """
    clock = _Clock(contender.device)
    handles = [
        handle
        for module, part in _parts_of(contender.side.model)
        for handle in clock.attach(module, part)
    ]
    try:
        with contender.side.eager(), warnings.catch_warnings():
            # Embeddings: their backward ends where the micro batch's does, see `_Clock.attach`.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            rounds = [_clocked_step(contender, clock) for _ in range(repeats)]
    except torch.OutOfMemoryError:
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def _clocked_step(contender: Contender, clock: _Clock) -> dict[str, float]:
    clock.spans = []
    begin = clock.now()
    contender.steps += 1
    contender.accumulate(clock.finish)
    backward_end = clock.now()
    contender.optimizer.step()
    return clock.sums(begin, backward_end, clock.now())


def _parts_of(model: nn.Module) -> list[tuple[nn.Module, str]]:
    found: list[tuple[nn.Module, str]] = []
    for child in model.children():
        name = type(child).__name__
        part = next((part for part, pattern in PARTS if re.search(pattern, name)), None)
        found += [(child, part)] if part else _parts_of(child)
    return found


class _Clock:
    """Times between module borders."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._open: list[tuple[str, Any]] = []
        self._backward: dict[nn.Module, tuple[str, Any]] = {}
        self.spans: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        """A moment: an event in the stream, or seconds."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def attach(self, module: nn.Module, part: str) -> list[Any]:
        """Time a module's forward and backward as ``part``."""

        def enter_forward(_: nn.Module, inputs: Any) -> None:
            self._open.append((part, self.now()))

        def leave_forward(_: nn.Module, inputs: Any, output: Any) -> None:
            self.spans.append((*self._open.pop(), self.now()))

        def enter_backward(_: nn.Module, gradients: Any) -> None:
            self._backward[module] = (part, self.now())

        def leave_backward(_: nn.Module, inputs: Any, gradients: Any) -> None:
            # The first module's inputs need no gradient: its backward ends with the step's.
            if any(isinstance(gradient, Tensor) for gradient in inputs):
                self.spans.append((*self._backward.pop(module), self.now()))

        return [
            module.register_forward_pre_hook(enter_forward),
            module.register_forward_hook(leave_forward),
            module.register_full_backward_pre_hook(enter_backward),
            module.register_full_backward_hook(leave_backward),
        ]

    def finish(self) -> None:
        """Close what is open at the end of a backward pass."""
        for part, start in self._backward.values():
            self.spans.append((part, start, self.now()))
        self._backward.clear()

    def sums(self, begin: Any, backward_end: Any, end: Any) -> dict[str, float]:
        """Seconds by part of a step between three moments."""
        wait(self._device)
        total = {name: 0.0 for name, _ in PARTS}
        reached = dict.fromkeys(total, 0.0)
        times = [
            (self._between(begin, start), self._between(begin, stop), part)
            for part, start, stop in self.spans
        ]
        # A part's module may run inside another of that part, such as a head's loss.
        for start, stop, part in sorted(times):
            total[part] += max(0.0, stop - max(start, reached[part]))
            reached[part] = max(reached[part], stop)
        total["rest"] = self._between(begin, backward_end) - sum(total.values())
        total["optimizer"] = self._between(backward_end, end)
        return total

    def _between(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop) / 1e3 if self._cuda else stop - start)
