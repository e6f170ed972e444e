"""Step time by part of the model, from torch's profiler.

In the forward pass, an operator belongs to the module that runs it; in the backward pass, to the
part whose forward created the autograd node (both have the same sequence number). On CUDA the time
is that of the kernels an operator launched. On a CPU it is the operator's own time plus the time of
Python code between operators, which includes waiting for the attention threads.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType

from megatron_deberta.model import dropout, embeddings, encoder, heads, layers, parallel_layers
from megatron_deberta.model.attention import DisentangledSelfAttention

PARTS: dict[type[nn.Module], str] = {
    embeddings.Embeddings: "embedding",
    embeddings.RelativePositionTable: "embedding",
    DisentangledSelfAttention: "attention projections",
    layers.FeedForward: "FFN",
    layers.ConvolutionBranch: "convolution",
    parallel_layers.LayerNorm: "norms and dropout",
    dropout.Dropout: "norms and dropout",
    encoder.EnhancedMaskDecoder: "mask decoder",
    heads.MaskedLanguageModelHead: "vocabulary head and loss",
}
CORE = "attention core"
OPTIMIZER = "optimizer"
COMMUNICATION = "communication"
ACCUMULATION = "gradient accumulation"
HOST = "host"
# Parts that include the time of parts nested in them.
WHOLE = {"embedding", "convolution", "mask decoder", "vocabulary head and loss", OPTIMIZER}
_LABEL = "part: "
_NODE = "autograd::engine::evaluate_function: "
_COMMUNICATES = re.compile(r"nccl|gloo|c10d::")


class Labels:
    """Context that marks the parts of a model for the profiler.

    Args:
        model: as built by the trainer.
        engine: its ``step`` is the optimizer's part.
    """

    def __init__(self, model: nn.Module, engine: Any) -> None:
        self._model = model
        self._engine = engine
        self._open: list[AbstractContextManager[Any]] = []
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Labels:
        for module in self._model.modules():
            if part := next((name for kind, name in PARTS.items() if isinstance(module, kind)), ""):
                self._watch(module, part)
            if isinstance(module, DisentangledSelfAttention):
                self._wrap(module, "_attend", CORE)
        self._wrap(self._engine, "step", OPTIMIZER)
        return self

    def __exit__(self, *failure: object) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _watch(self, module: nn.Module, part: str) -> None:
        def enter(_: nn.Module, inputs: Any) -> None:
            self._open.append(torch.profiler.record_function(_LABEL + part))
            self._open[-1].__enter__()

        def leave(_: nn.Module, inputs: Any, output: Any) -> None:
            self._open.pop().__exit__(None, None, None)

        self._undo.append(module.register_forward_pre_hook(enter).remove)
        self._undo.append(module.register_forward_hook(leave).remove)

    def _wrap(self, owner: Any, method: str, part: str) -> None:
        original = getattr(owner, method)
        replaced = vars(owner).get(method)

        def labelled(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(_LABEL + part):
                return original(*args, **kwargs)

        def undo() -> None:
            delattr(owner, method)
            if replaced is not None:
                setattr(owner, method, replaced)

        setattr(owner, method, labelled)
        self._undo.append(undo)


def profile_steps(
    take: Callable[[], Any],
    steps: int,
    labels: Labels,
    *,
    on_gpu: bool,
    trace: Path | None = None,
) -> tuple[list[Any], Any]:
    """Profile steps with torch's profiler; return its events and its sums by name.

    ``trace``: file for the profiler's trace, compressed if it ends in ``.gz``.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with labels, torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(steps):
            with torch.profiler.record_function("step"):
                take()
    if trace is not None:
        profile.export_chrome_trace(str(trace))
    return list(profile.events()), profile.key_averages()


def time_by_part(
    events: Iterable[Any], steps: int, *, on_gpu: bool, most: int = 5
) -> dict[str, Any]:
    """Return the seconds of a step by part, and each part's most expensive operators.

    Returns:
        ``seconds`` by part, largest first (on a CPU they add up to the step), and ``operators``:
        seconds of up to ``most`` operators per part, forward and backward separately.
    """
    host_events = [event for event in events if event.device_type == DeviceType.CPU]
    part_by_node = _parts_of_nodes(host_events)
    seconds: dict[str, float] = defaultdict(float)
    operators: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in host_events:
        part, backward = _part(event, part_by_node)
        if not on_gpu and part is None and not any(e.name == "step" for e in _ancestors(event)):
            continue
        duration = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        duration /= 1e6 * steps
        seconds[part or HOST] += duration
        name = event.name.removeprefix(_NODE)
        if name == "step" or name.startswith(_LABEL):
            name = "Python"
        operators[part or HOST][f"{name} (backward)" if backward else name] += duration
    return {
        "seconds": dict(_largest(seconds)),
        "operators": {part: dict(_largest(times)[:most]) for part, times in operators.items()},
    }


def _largest(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(((name, time) for name, time in times.items() if time), key=lambda x: -x[1])


def _ancestors(event: Any) -> Iterable[Any]:
    """Yield an event and the events it is nested in, innermost first."""
    while event is not None:
        yield event
        event = event.cpu_parent


def _parts_of_nodes(events: list[Any]) -> dict[int, str]:
    """Map autograd sequence numbers to the part of the model whose forward pass made the node."""
    last: dict[int, tuple[float, str]] = {}
    for event in events:
        number = event.sequence_nr
        if number < 0 or event.name.startswith(_NODE):
            continue
        part, backward = _part(event, {})
        start = event.time_range.start
        if part is not None and not backward and start >= last.get(number, (0.0, ""))[0]:
            last[number] = start, part
    return {number: part for number, (_, part) in last.items()}


def _part(event: Any, part_by_node: dict[int, str]) -> tuple[str | None, bool]:
    """Return the part of an event, and whether it runs in the backward pass."""
    if _COMMUNICATES.search(event.name):
        return COMMUNICATION, False
    nearest, backward = None, False
    for ancestor in _ancestors(event):
        part = None
        if ancestor.name.startswith(_LABEL):
            part = ancestor.name.removeprefix(_LABEL)
        elif ancestor.name.startswith(_NODE):
            backward = True
            part = part_by_node.get(ancestor.sequence_nr)
            if ancestor.name.endswith("AccumulateGrad"):
                part = ACCUMULATION
        if part in WHOLE:
            nearest = part
        nearest = nearest or part
    return nearest, backward


def part_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return part, seconds, share, and operators of a tenth or more of the part's time."""
    return [
        (
            part,
            f"{seconds:.2f}",
            f"{result['breakdown'][part]:.0%}",
            ", ".join(
                f"`{name}` {time:.2f}"
                for name, time in result["operators_by_part"][part].items()
                if time >= seconds / 10
            ),
        )
        for part, seconds in result["seconds_by_part"].items()
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Plot the parts of a step as bars."""
    from matplotlib.figure import Figure

    parts = list(result["seconds_by_part"].items())[::-1]
    figure = Figure(figsize=(7, 0.35 * len(parts) + 1.2), layout="constrained")
    axes = figure.subplots()
    axes.barh([name for name, _ in parts], [seconds for _, seconds in parts], color="#4477aa")
    axes.set_xlabel("seconds per step")
    axes.set_title(result["name"])
    figure.savefig(path, dpi=110)
