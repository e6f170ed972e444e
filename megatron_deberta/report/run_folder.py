"""Reads a run folder for a report; what is damaged is left out and named.

Other commands refuse damaged files. A report shows what is there, so each line of a JSON Lines
file is read on its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, committed_steps, step_dir
from megatron_deberta.config.loader import new_name
from megatron_deberta.config.yaml_reader import read_yaml
from megatron_deberta.errors import ConfigError
from megatron_deberta.files import MAX_RECORD_BYTES, read_regular

METRICS = "metrics.jsonl"
HISTORY = "chain.jsonl"
BAD_NODES = "bad_nodes.jsonl"
TIMELINE = "timeline.jsonl"
SAMPLES = "samples.jsonl"
CLASS_SCORES = "class_scores.jsonl"
_LONGEST_LINE = 1 << 24
_MOST_NAMED = 5
_LARGEST = 1e300
"""Largest number of a record, as in ``parsing.Number``."""
_LIMITS = {"step": 1 << 53, "time": 1e11}
"""Largest values of keys, as in ``parsing.Count`` and ``parsing.Seconds``; none is below 0."""

Record = dict[str, Any]
KeyTypes = Mapping[str, "type | tuple[type, ...]"]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """What a run folder holds.

    Attributes:
        path: the folder.
        name: short name, unique in the report.
        config: resolved configuration by ``section.key``.
        metrics: records of ``metrics.jsonl``.
        history: events of ``chain.jsonl``, under ``launch`` and ``submit``.
        bad_nodes: records of ``bad_nodes.jsonl``.
        timeline: records of ``timeline.jsonl``.
        samples: records of ``samples.jsonl``.
        class_scores: records of ``class_scores.jsonl``, of fine-tuning runs.
        checkpoints: time in seconds since the epoch by step, of committed checkpoints.
        finetuned: content of ``finetuned/*/curve.json``.
        problems: one line per damaged file or group of lines.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    metrics: Sequence[Record]
    history: Sequence[Record]
    bad_nodes: Sequence[Record]
    timeline: Sequence[Record]
    samples: Sequence[Record]
    class_scores: Sequence[Record]
    checkpoints: Mapping[int, float]
    finetuned: Sequence[Record]
    problems: Sequence[str]

    def of_kind(self, kind: str) -> list[Record]:
        """Return the metrics of a kind, such as ``train``, that have a step."""
        return [record for record in self.metrics if record.get("kind") == kind]


@dataclass(slots=True)
class _Reader:
    """Reads files of a folder and collects problems."""

    folder: Path
    problems: list[str] = field(default_factory=list)

    def json_lines(self, name: str, required: KeyTypes) -> list[Record]:
        """Return the lines that are objects with the required keys; the file may be missing."""
        content = self._content(name)
        *lines, rest = content.split(b"\n")
        records, damaged = [], []
        for number, line in enumerate(lines, start=1):
            record = _parse_object(line)
            if record is not None and _has(record, required):
                records.append(record)
            else:
                damaged.append(number)
        if damaged:
            more = ", ..." if len(damaged) > _MOST_NAMED else ""
            shown = ", ".join(map(str, damaged[:_MOST_NAMED])) + more
            what = "line is" if len(damaged) == 1 else "lines are"
            self.problems.append(f"{name}: {len(damaged)} damaged {what} left out (line {shown})")
        if rest:
            self.problems.append(f"{name}: the last line is incomplete and left out")
        return records

    def json_file(self, path: Path, required: KeyTypes) -> list[Record]:
        """Return the object of a file, or nothing."""
        name = str(path.relative_to(self.folder))
        content = self._content(name)
        record = _parse_object(content)
        if record is not None and _has(record, required):
            return [record]
        self.problems.append(f"{name}: damaged and left out")
        return []

    def config(self) -> dict[str, Any]:
        """Return the values of ``config.yaml`` by ``section.key``."""
        path = self.folder / "config.yaml"
        if not path.exists():
            self.problems.append("config.yaml: missing")
            return {}
        try:
            return {new_name(key): value for key, value in flatten(read_yaml(path))}
        except (ConfigError, OSError, UnicodeDecodeError) as error:
            text = " ".join(str(error).replace(f"{path}", "").split()).lstrip(": ")
            self.problems.append(f"config.yaml: damaged and left out ({text})")
            return {}

    def checkpoints(self) -> dict[int, float]:
        """Return when each committed checkpoint was written."""
        try:
            files = {
                step: step_dir(self.folder, step) / COMMITTED_FILE
                for step in committed_steps(self.folder)
            }
            return {step: path.stat().st_mtime for step, path in files.items()}
        except OSError as error:
            self.problems.append(f"checkpoints: {error.strerror}")
            return {}

    def _content(self, name: str) -> bytes:
        try:
            return read_regular(self.folder / name, MAX_RECORD_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self.problems.append(f"{name}: {error.strerror}")
            return b""


def read_run(folder: Path, name: str) -> RunFolder:
    """Read a run folder.

    Args:
        folder: the folder.
        name: shown in the report.

    Raises:
        ConfigError: it does not exist, or holds no ``metrics.jsonl``.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give run folders (train.run_dir)")
    if not (folder / METRICS).is_file():
        raise ConfigError(f"{folder}: no {METRICS} here; give a run that has trained")
    reader = _Reader(folder)
    number = (int, float)
    metrics = reader.json_lines(METRICS, {"step": int, "kind": str})
    if not metrics:
        reader.problems.append(f"{METRICS}: no record")
    return RunFolder(
        path=folder,
        name=name,
        config=reader.config(),
        metrics=metrics,
        history=reader.json_lines(HISTORY, {"event": str, "time": number}),
        bad_nodes=reader.json_lines(BAD_NODES, {"node": str, "time": number}),
        timeline=reader.json_lines(TIMELINE, {"event": str, "time": number, "step": int}),
        samples=reader.json_lines(SAMPLES, {"step": int, "samples": list}),
        class_scores=reader.json_lines(
            CLASS_SCORES, {"step": int, "unit": str, "classes": list, "confusion": list}
        ),
        checkpoints=reader.checkpoints(),
        finetuned=[
            curve
            for path in sorted(folder.glob("finetuned/*/curve.json"))
            for curve in reader.json_file(path, {"task": str, "metric": str, "points": list})
        ],
        problems=reader.problems,
    )


def run_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that differ from each other.

    Raises:
        ConfigError: a folder is given twice.
    """
    paths = [folder.resolve() for folder in folders]
    for path, folder in zip(paths, folders, strict=True):
        if paths.count(path) > 1:
            raise ConfigError(f"{folder} is given twice; give each run once")
    length = 1
    while len(names := {"/".join(path.parts[-length:]) for path in paths}) < len(paths):
        length += 1
    assert len(names) == len(paths)
    return ["/".join(path.parts[-length:]) for path in paths]


def is_number(value: object) -> bool:
    """Return whether a JSON value is a number; JSON has no NaN and no infinity."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def points(records: Iterable[Record], key: str, scale: float = 1.0) -> list[tuple[float, float]]:
    """Return the curve of a metric.

    Args:
        records: of a run.
        key: of the metric.
        scale: factor on the values.

    Returns:
        Pairs of step and value, where both are numbers.
    """
    return [
        (record["step"], record[key] * scale)
        for record in records
        if is_number(record.get(key)) and is_number(record.get("step"))
    ]


def flatten(sections: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values by ``section.key``."""
    if not isinstance(sections, dict):
        yield prefix, sections
        return
    for key, value in sections.items():
        yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))


def _parse_object(line: bytes) -> Record | None:
    if len(line) > _LONGEST_LINE:
        return None
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _has(record: Record, required: KeyTypes) -> bool:
    """Return whether a record has the keys, and only numbers that can be drawn and added up."""
    if not all(isinstance(record.get(key), kind) for key, kind in required.items()):
        return False
    limits = {name: limit for name, limit in _LIMITS.items() if name in required}
    if not all(
        is_number(record[name]) and 0 <= record[name] <= most for name, most in limits.items()
    ):
        return False
    nested = (value.values() for value in record.values() if isinstance(value, dict))
    values = itertools.chain(record.values(), *nested)
    return all(abs(value) <= _LARGEST for value in values if is_number(value))
