"""Time, memory and breakdown of whole optimizer steps, measured in the same way for every side.

In 16-bit formats the model holds 16-bit weights and AdamW fp32 master weights, as in pretraining.
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
    """Torch's fused AdamW, with fp32 master weights for 16-bit models."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = self.weights
        if self.weights[0].dtype != torch.float32:
            self.masters = [nn.Parameter(p.detach().float()) for p in self.weights]
        self.adamw = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)

    def step(self) -> None:
        """Update the weights and clear the gradients."""
        if self.masters is self.weights:
            self.adamw.step()
        else:
            # Weights that do not contribute to the loss have no gradient.
            for master, weight in zip(self.masters, self.weights, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
            self.adamw.step()
            with torch.no_grad():
                torch._foreach_copy_(self.weights, self.masters)
        self.adamw.zero_grad(set_to_none=True)


class Contender:
    """A side in training: its model, optimizer, micro batches and step count."""

    def __init__(self, side: Side, batch: StepBatch) -> None:
        self.side = side
        self.batch = batch
        self.device = batch.input_ids.device
        self.optimizer = Optimizer(side.model)
        self.parts = [batch]
        self.steps = 0

    def step(self) -> float:
        """Take one step; return its seconds. Halves the micro batch size when out of memory.

        Raises:
            torch.OutOfMemoryError: single rows do not fit.
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
        # Outside the except clause, which keeps the failed step's tensors alive.
        self.side.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        self.step()
        return self.step()

    def accumulate(self, after_each: Callable[[], None] = lambda: None) -> None:
        """Run forward and backward of all micro batches."""
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
    """Measurements of one side.

    Attributes:
        peak_bytes: on CUDA the memory that the side adds; 0 on a CPU.
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
    """Time ``repeats`` steps of each side, in turns because a machine's load changes.

    Args:
        builds: constructors of the sides by name.
        batch: input of all sides.
        repeats: timed steps per side.
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
    """Build a side, take two warm-up steps, and on CUDA measure the memory of a third."""
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


# Part of a step by a module's class name; the outermost match counts.
PARTS = (
    ("embeddings", r"Embeddings$|RelativePositionTable$"),
    ("attention", r"(Self)?Attention$"),
    ("ffn", r"(FeedForward|MLP|Intermediate|Output)$"),
    ("convolution", r"^Conv"),
    ("head", r"(Head|Sequential|TokenLoss|CrossEntropyLoss)$"),
)


def breakdown(contender: Contender, repeats: int) -> dict[str, float]:
    """Return median seconds of one step by part, forward and backward together.

    Measured with module hooks, on the GPU with events in its stream; time outside of these modules
    is ``rest``. Hooks need uncompiled code, so the parts of a compiled side add up to more than its
    step.

    Returns:
        Seconds by part; empty if the uncompiled step does not fit into the GPU's memory.
    """
    clock = _Clock(contender.device)
    handles = [
        handle
        for module, part in _parts_of(contender.side.model)
        for handle in clock.attach(module, part)
    ]
    try:
        with contender.side.eager(), warnings.catch_warnings():
            # Of embeddings, whose backward ends with that of the micro batch: `_Clock.attach`.
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
    """Measures the time in modules with hooks."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._open: list[tuple[str, Any]] = []
        self._backward: dict[nn.Module, tuple[str, Any]] = {}
        self.spans: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        """Return the current time: an event in the stream, or seconds."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def attach(self, module: nn.Module, part: str) -> list[Any]:
        """Measure a module's forward and backward as ``part``."""

        def enter_forward(_: nn.Module, inputs: Any) -> None:
            self._open.append((part, self.now()))

        def leave_forward(_: nn.Module, inputs: Any, output: Any) -> None:
            self.spans.append((*self._open.pop(), self.now()))

        def enter_backward(_: nn.Module, gradients: Any) -> None:
            self._backward[module] = (part, self.now())

        def leave_backward(_: nn.Module, inputs: Any, gradients: Any) -> None:
            # Inputs of the first module need no gradient: its backward ends with the step's.
            if any(isinstance(gradient, Tensor) for gradient in inputs):
                self.spans.append((*self._backward.pop(module), self.now()))

        return [
            module.register_forward_pre_hook(enter_forward),
            module.register_forward_hook(leave_forward),
            module.register_full_backward_pre_hook(enter_backward),
            module.register_full_backward_hook(leave_backward),
        ]

    def finish(self) -> None:
        """End all open backward spans at the end of a backward pass."""
        for part, start in self._backward.values():
            self.spans.append((part, start, self.now()))
        self._backward.clear()

    def sums(self, begin: Any, backward_end: Any, end: Any) -> dict[str, float]:
        """Return the seconds by part of a step from its begin, end of backward and end."""
        wait(self._device)
        total = {name: 0.0 for name, _ in PARTS}
        reached = dict.fromkeys(total, 0.0)
        times = [
            (self._between(begin, start), self._between(begin, stop), part)
            for part, start, stop in self.spans
        ]
        # Modules of the same part may be nested, such as a head's loss.
        for start, stop, part in sorted(times):
            total[part] += max(0.0, stop - max(start, reached[part]))
            reached[part] = max(reached[part], stop)
        total["rest"] = self._between(begin, backward_end) - sum(total.values())
        total["optimizer"] = self._between(backward_end, end)
        return total

    def _between(self, start: Any, stop: Any) -> float:
        return float(start.elapsed_time(stop) / 1e3 if self._cuda else stop - start)
