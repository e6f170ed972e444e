"""``onnx/`` in an export: the graph, and a report of its parity, speed and accuracy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.hf.heads import GraphKind
from megatron_deberta.hf.loading import build_with_head
from megatron_deberta.hf.onnx.check import OnnxParity, check_graph, time_graph
from megatron_deberta.hf.onnx.graph import OnnxDtype, graph_kind, write_graph
from megatron_deberta.hf.onnx.libraries import OPSET, count_nodes, require_libraries
from megatron_deberta.tokenizer import Tokenizer

FOLDER, MODEL_FILE = "onnx", "model.onnx"


@dataclass(frozen=True)
class Agreement:
    """Decisions of a graph that are those of the fp32 graph.

    Attributes:
        texts: number of texts.
        decisions: number of decisions: of each row, label, token, or end of an answer.
        same: equal ones.
        fp32_layers: layers that an int8 graph keeps in fp32.
    """

    texts: int
    decisions: int
    same: int
    fp32_layers: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """Share of equal decisions."""
        return self.same / self.decisions


@dataclass(frozen=True)
class OnnxReport:
    """Content of ``report.json``.

    Attributes:
        graph: head of the graph.
        dtype: its format.
        opset: operator set.
        nodes: number of nodes.
        libraries: versions of onnx and onnxruntime.
        parity: differences from our fp32 model on real text.
        speed: see `time_graph`; empty: not timed.
        accuracy: see `add_onnx`; empty: not measured.
        agreement: with the fp32 graph's decisions; None: not measured.
    """

    graph: GraphKind
    dtype: OnnxDtype
    opset: int
    nodes: int
    libraries: dict[str, str]
    parity: OnnxParity
    speed: dict[str, Any] = field(default_factory=dict)
    accuracy: dict[str, Any] = field(default_factory=dict)
    agreement: Agreement | None = None


def add_onnx(
    export: Path,
    config: ModelConfig,
    read: Callable[[str], Tensor],
    tokenizer: Tokenizer,
    *,
    dtype: OnnxDtype = "fp32",
    encoder: bool = False,
    timing: bool = True,
    accuracy: Callable[[Path, GraphKind], dict[str, Any]] | None = None,
) -> OnnxReport:
    """Write ``onnx/model.onnx`` and ``onnx/report.json`` into an export, and extend its card.

    Args:
        export: folder of the same model in Hugging Face format.
        config: the architecture.
        read: returns the whole fp32 tensor of a canonical name, of the shape
            ``parameter_shapes(config)[name]``.
        tokenizer: the tokenizer used in training.
        dtype: format of weights and computation.
        encoder: write the graph of the encoder, not of the model's own head.
        timing: compare the speed with transformers.
        accuracy: called with the graph and its kind; returns the task's scores of our fp32 model
            and of the graph. None: the model has no task.

    Raises:
        CheckpointError: the graph computes different values than our model.
        ConfigError: onnx or onnxruntime is not installed.
    """
    require_libraries()
    kind = graph_kind(config, encoder=encoder)
    path = export / FOLDER / MODEL_FILE
    path.parent.mkdir()
    write_graph(path, config, read, kind, dtype)
    parity = check_graph(path, build_with_head(config, read), kind, tokenizer, dtype)
    speed = time_graph(path, export, config, kind, tokenizer) if timing else {}
    scores = accuracy(path, kind) if accuracy else {}
    return write_report(path, kind, dtype, parity, speed=speed, accuracy=scores)


def write_report(
    path: Path, kind: GraphKind, dtype: OnnxDtype, parity: OnnxParity, **measured: Any
) -> OnnxReport:
    """Write the report of a graph beside it, and a section of the card.

    Args:
        path: the graph, ``onnx/model.onnx`` or ``onnx/model_FORM.onnx`` in a folder with a card.
        kind: head of the graph.
        dtype: its format.
        parity: differences from the model.
        measured: further fields of `OnnxReport`.
    """
    report = OnnxReport(
        kind, dtype, OPSET, count_nodes(path), require_libraries(), parity, **measured
    )
    export, file = path.parents[1], path.name
    name = file.replace("model", "report").replace(".onnx", ".json")
    path.with_name(name).write_text(json.dumps(asdict(report), indent=2) + "\n")
    card = export / "README.md"
    lines = "\n".join(f"- {line}" for line in summary(report))
    text = card.read_text(encoding="utf-8")
    title = "" if "\n## ONNX\n" in text else "\n## ONNX\n"
    section = f"{title}\n`{FOLDER}/{file}`, measured when it was written:\n\n{lines}\n"
    card.write_text(text + section, encoding="utf-8")
    return report


def summary(report: OnnxReport) -> list[str]:
    """Return the figures of a report as sentences."""
    parity = report.parity
    sizes = ", ".join(f"{rows}x{length}" for rows, length in parity.cases)
    lines = [
        f"Graph: {report.graph}, {report.dtype}, opset {report.opset}, {report.nodes} nodes.",
        f"Real text, batch x length {sizes}: largest difference {parity.max_error:.1e}, relative "
        f"error {parity.relative_error:.1e}.",
    ]
    if parity.masks:
        lines.append(
            f"The same most probable token as torch at {parity.same_answers} of {parity.masks} "
            "masks."
        )
    if found := report.agreement:
        layers = ", ".join(map(str, found.fp32_layers))
        kept = f"; projections of layers {layers} stay in fp32" if layers else ""
        lines.append(
            f"The same decision as the fp32 graph in {found.same:,} of {found.decisions:,} cases "
            f"({found.share:.2%}; {found.texts:,} texts){kept}."
        )
    for case in report.speed.get("cases", ()):
        seconds = case["seconds"]
        against = [
            f"{seconds[side] / seconds['onnx']:.2f} times {name}"
            for side, name in (
                ("transformers", "transformers in torch"),
                ("transformers_onnx", "torch's export of transformers' model"),
            )
            if side in seconds
        ]
        lines.append(
            f"Speed, batch {case['batch']}, length {case['length']}, {report.speed['threads']} "
            f"threads: {seconds['onnx'] * 1e3:.1f} ms, {', '.join(against)}."
        )
    if "skipped" in report.speed:
        lines.append(f"Not timed: {report.speed['skipped']}.")
    if report.accuracy:
        a = report.accuracy
        lines.append(
            f"{a['task']}, {a['examples']} {a['split']} examples, {a['metric']}: {a['onnx']:.4f} "
            f"({a['torch']:.4f} in torch, fp32)."
        )
    return lines
