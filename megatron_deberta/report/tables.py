"""The tables of a report: overview, events, data, configuration and validation samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from megatron_deberta.data.shards.format import blend_weight
from megatron_deberta.data.shards.manifest import ShardManifest, read_manifest
from megatron_deberta.errors import DataError, MegatronDebertaError
from megatron_deberta.observe.console import format_duration
from megatron_deberta.parsing import Count, Number, conform
from megatron_deberta.report.run_charts import (
    SECTIONS,
    first_time,
    loss_owner,
    part_seconds,
    skipped_updates,
)
from megatron_deberta.report.run_folder import Record, RunFolder, is_number, points

MAX_VALIDATIONS = 10
"""Columns of a table; of more validations, evenly spaced ones."""
MAX_SAMPLES = 4
"""Rows of the validation set shown per run."""
_WORD_START = "▁"
_CLASS_COUNTS = ("labelled", "predicted", "right")
_CLASS_RATES = ("precision", "recall", "f1")
MAX_COLUMNS = 40
"""Classes of a confusion matrix that is shown."""
MAX_EVENTS = 200
"""Restarts and faults listed, and skipped updates, the last ones each."""
_HIDDEN_KEYS = ("train.run_dir", "cluster.notify")
"""Always different, or secret."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table: header, and rows of as many cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def overview(runs: Sequence[RunFolder]) -> Table:
    """Return the main figures of each run, a column per run."""
    columns = [_figures(run) for run in runs]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [[label, *(column.get(label, "-") for column in columns)] for label in labels]
    return Table(["", *(run.name for run in runs)], rows)


def _figures(run: RunFolder) -> dict[str, str]:
    train, validation = run.of_kind("train"), run.of_kind("validation")
    target = run.config.get("train.steps")
    owner = loss_owner(run)
    step = max((record["step"] for record in run.metrics), default=0)
    found = {"step": f"{step:,}" + (f" of {target:,}" if isinstance(target, int) else "")}
    if losses := points(train, "loss"):
        found[f"training loss{owner}"] = f"{losses[-1][1]:.4f}"
    if losses := points(validation, "loss"):
        best = min(losses, key=lambda point: point[1])
        found[f"validation loss{owner}"] = f"{losses[-1][1]:.4f}"
        found[f"best validation loss{owner}"] = f"{best[1]:.4f} at step {best[0]:,}"
    if baseline := points(validation, "unigram_loss"):
        found["unigram baseline"] = f"{baseline[-1][1]:.4f}"
    if accuracies := points(run.of_kind("minimal_pairs"), "accuracy"):
        found["BLiMP"] = f"{accuracies[-1][1]:.1%}"
    if rates := points(train, "tokens_per_second"):
        found["tokens/s, median"] = f"{median(rate for _, rate in rates):,.0f}"
    if shares := points(train, "utilization"):
        found["MFU, median"] = f"{median(share for _, share in shares):.1%}"
    if memory := points(run.timeline, "memory_bytes"):
        found["peak memory of rank 0"] = f"{max(size for _, size in memory) / 2**30:.2f} GiB"
    seconds = [part_seconds(record) for record in run.timeline]
    totals = {part: sum(each[part] for each in seconds) for part in SECTIONS}
    if whole := sum(totals.values()):
        found["time recorded"] = format_duration(whole)
        largest = sorted(totals, key=lambda part: -totals[part])[:3]
        found["time by part"] = ", ".join(
            f"{SECTIONS[part]} {totals[part] / whole:.0%}" for part in largest if totals[part]
        )
    return found | _restarts(run)


def _restarts(run: RunFolder) -> dict[str, str]:
    source = run.timeline or run.history
    starts = sum(record["event"] == "start" for record in source)
    guard = run.of_kind("guard")
    skipped = len(skipped_updates(run))
    rollbacks = sum(record.get("event") == "rollback" for record in guard)
    found = {"starts": str(starts)} if starts else {}
    if skipped or rollbacks:
        found["guard"] = f"{_count(skipped, 'skipped update')}, {_count(rollbacks, 'rollback')}"
    start = first_time(run)
    if start is not None:
        found["first start"] = _clock(start)
    return found


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def events(run: RunFolder) -> Table:
    """Return restarts, ends and faults by time, then rollbacks and skipped updates by step."""
    timed = [
        (record["time"], [_clock(record["time"]), _step(record), text])
        for record in (*run.timeline, *run.history, *run.bad_nodes)
        if (text := _describe_event(record))
    ]
    rollbacks = [record for record in run.of_kind("guard") if record.get("event")]
    guard = [
        (record["step"], ["", _step(record), _describe_guard(record)])
        for record in (*skipped_updates(run), *rollbacks)
    ]
    rows = [*_last(sorted(timed)), *_last(sorted(guard))]
    return Table(["time", "step", "event"], rows)


def _last(rows: Sequence[tuple[float, list[str]]]) -> list[list[str]]:
    """Return the last rows, and how many precede them."""
    cut = len(rows) - MAX_EVENTS
    note = [["", "", f"{cut:,} earlier ones are not listed"]] if cut > 0 else []
    return [*note, *(row for _, row in rows[-MAX_EVENTS:])]


def _step(record: Record) -> str:
    step = record.get("step")
    return f"{step:,}" if isinstance(step, int) else ""


def _describe_event(record: Record) -> str:
    event = record.get("event")
    reason = record.get("reason")
    if "node" in record and "event" not in record:
        return f"node {record['node']} excluded: {reason}"
    if event == "start" and "world_size" in record:
        return f"started with {_count(record['world_size'], 'rank')}"
    if event == "start":
        return f"job attempt {record.get('link', '')} on {record.get('nodes', '')}"
    if event == "end":
        attempt = f"job attempt {record['link']} ended" if "link" in record else "ended"
        return f"{attempt}: {reason}" if reason else attempt
    if event == "slow" and isinstance(record.get("ranks"), list):
        ranks = [each for each in record["ranks"] if isinstance(each, dict)]
        return "slow: " + ", ".join(f"rank {e.get('rank')} on {e.get('host')}" for e in ranks)
    if event == "fault":
        return f"step run again: {record.get('verdict')}"
    if event == "signal":
        return f"signal {record.get('signal', '')}".strip()
    return "cancelled" if event == "cancel" else ""


def _describe_guard(record: Record) -> str:
    if record.get("event") == "rollback":
        return f"rolled back from step {record.get('trouble_step')}"
    if record.get("event") == "rerun":
        where = (
            f", rank {record.get('ranks')} on {record.get('hosts')}" if record.get("ranks") else ""
        )
        return f"run again, {record.get('cause')}: {record.get('verdict')}{where}"
    return f"update skipped: {record.get('skip') or 'unknown reason'}"


@dataclass(frozen=True, slots=True)
class ClassTables:
    """Scores by class of one validation.

    Attributes:
        step: of the validation: the best one, or else the last.
        scores: a row per class.
        confusion: a row per label and a column per prediction; None: not recorded, or too large.
    """

    step: int
    scores: Table
    confusion: Table | None


def class_tables(run: RunFolder) -> ClassTables | None:
    """Return the scores by class of a fine-tuning run's best validation; None without any."""
    records = {record["step"]: record for record in run.class_scores if _is_scored(record)}
    if not records:
        return None
    scores = {step: score for step, score in points(run.of_kind("validation"), "score")}
    step = max(records, key=lambda known: (scores.get(known, -math.inf), known))
    record = records[step]
    names = [each["name"] for each in record["classes"]]
    has_thresholds = all(is_number(each.get("threshold")) for each in record["classes"])
    rows = [
        [
            each["name"],
            *(f"{each[key]:,}" for key in _CLASS_COUNTS),
            *(f"{each[key]:.4f}" for key in _CLASS_RATES),
            *([f"{each['threshold']:.4f}"] if has_thresholds else []),
        ]
        for each in record["classes"]
    ]
    header = ["class", record["unit"], "predicted", "right", "precision", "recall", "F1"]
    header += ["threshold"] if has_thresholds else []
    matrix = record["confusion"]
    is_square = len(matrix) == len(names) and all(
        isinstance(row, list) and len(row) == len(names) and all(map(is_number, row))
        for row in matrix
    )
    confusion = None
    if matrix and is_square and len(names) <= MAX_COLUMNS:
        cells = ([f"{count:,}" for count in row] for row in matrix)
        confusion = Table(
            ["label / prediction", *names],
            [[name, *row] for name, row in zip(names, cells, strict=True)],
        )
    return ClassTables(step, Table(header, rows), confusion)


def _is_scored(record: Record) -> bool:
    """Return whether a record holds the scores of at least one class, and nothing else."""
    keys = (*_CLASS_COUNTS, *_CLASS_RATES)
    return bool(record["classes"]) and all(
        isinstance(each, dict)
        and isinstance(each.get("name"), str)
        and all(is_number(each.get(key)) for key in keys)
        for each in record["classes"]
    )


def data_statistics(run: RunFolder) -> tuple[Table, list[str]]:
    """Return documents and tokens of a run's shards, and what could not be read."""
    rows, problems = [], []
    for use in ("train", "validation"):
        for prefix in _prefixes(run.config.get(f"data.{use}")):
            try:
                manifest = read_manifest(prefix)
            except (MegatronDebertaError, OSError) as error:
                problems.append(f"data of {use}, {prefix}: {_line(error)}")
                continue
            rows.append([use, Path(prefix).name, *_manifest_cells(manifest)])
    header = ["use", "shard", "documents", "tokens", "tokens per document", "left out"]
    return Table(header, rows), problems


def _prefixes(value: object) -> list[str]:
    """Return the shards of ``data.train``, without the weights of a blend."""
    texts = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [text for text in map(str, texts) if text and blend_weight(text) is None]


def _manifest_cells(manifest: ShardManifest | None) -> list[str]:
    if manifest is None:
        return ["no manifest", "", "", ""]
    documents, tokens = manifest.num_documents, manifest.num_tokens
    left_out = manifest.documents_empty + manifest.documents_quarantined
    return [
        f"{documents:,}", f"{tokens:,}", f"{tokens / max(documents, 1):,.1f}", f"{left_out:,}",
    ]  # fmt: skip


def config_differences(runs: Sequence[RunFolder], defaults: dict[str, Any]) -> Table:
    """Return the keys whose values differ between runs; of one run, between it and the defaults."""
    columns = [run.config for run in runs]
    names = [run.name for run in runs]
    if len(runs) == 1:
        columns, names = [*columns, defaults], ["this run", "default"]
    keys = dict.fromkeys(key for column in columns for key in column if key not in _HIDDEN_KEYS)
    rows = []
    for key in keys:
        values = [_show(column.get(key, _MISSING)) for column in columns]
        if len(set(values)) > 1:
            rows.append([key, *values])
    return Table(["key", *names], rows)


_MISSING = object()


def _show(value: object) -> str:
    if value is _MISSING:
        return "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_show, value)) or "(none)"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else "(none)"


def _clock(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")
    except (ValueError, OverflowError, OSError):
        return f"{seconds:g}"


def _line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())


@dataclass(frozen=True, slots=True)
class Fill:
    """What the model predicts for a mask at one validation.

    Attributes:
        text: most probable token.
        probability: its probability.
        is_right: whether it is the original token.
        others: further candidates with probabilities, as text.
    """

    text: str
    probability: float
    is_right: bool
    others: str


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a sample's text.

    Attributes:
        text: with a leading space where a word starts.
        number: of the mask, from 1; 0: not masked.
        input: token that the model sees there.
    """

    text: str
    number: int
    input: str


@dataclass(frozen=True, slots=True)
class SampleTable:
    """A row of the validation set.

    Attributes:
        sample: its global sample index.
        pieces: its text; masked tokens are the original ones.
        steps: steps of the validations shown.
        total: number of validations recorded.
        rows: of each mask, its number, original token, and prediction at each of ``steps``.
    """

    sample: int
    pieces: Sequence[Piece]
    steps: Sequence[int]
    total: int
    rows: Sequence[tuple[int, str, Sequence[Fill | None]]]


def sample_tables(run: RunFolder) -> tuple[list[SampleTable], int]:
    """Return the samples of a run, and the number of those that are damaged."""
    groups: dict[tuple[object, ...], dict[int, Record]] = {}
    damaged = 0
    for record in run.samples:
        for sample in record["samples"]:
            if not _is_sample(sample):
                damaged += 1
                continue
            masks = tuple((mask["position"], mask["token"]) for mask in sample["masks"])
            groups.setdefault((sample["sample"], masks), {})[record["step"]] = sample
    return [_sample_table(found) for found in list(groups.values())[:MAX_SAMPLES]], damaged


class _MaskRecord(TypedDict):
    position: Count
    token: str
    predictions: Annotated[list[tuple[str, Number]], Field(min_length=1)]


class _SampleRecord(TypedDict):
    sample: Number
    pieces: list[str]
    masks: list[_MaskRecord]


def _is_sample(sample: object) -> bool:
    try:
        found = conform(sample, _SampleRecord, "", "a sample", remedy="", ignore_unknown=True)
    except DataError:
        return False
    return all(mask["position"] < len(found["pieces"]) for mask in found["masks"])


def _sample_table(by_step: dict[int, Record]) -> SampleTable:
    """Arrange the validations of one sample."""
    known = sorted(by_step)
    places = np.unique(np.linspace(0, len(known) - 1, min(len(known), MAX_VALIDATIONS)).round())
    steps = [known[int(place)] for place in places]
    last = by_step[known[-1]]
    numbers = {mask["position"]: number for number, mask in enumerate(last["masks"], start=1)}
    tokens = {mask["position"]: mask["token"] for mask in last["masks"]}
    pieces = [
        Piece(
            _text_of(tokens.get(position, piece)),
            numbers.get(position, 0),
            _text_of(piece).strip(),
        )
        for position, piece in enumerate(last["pieces"])
    ]
    rows = [
        (
            number,
            _text_of(tokens[position]).strip(),
            [_fill(by_step[s], number - 1) for s in steps],
        )
        for position, number in numbers.items()
    ]
    return SampleTable(int(last["sample"]), pieces, steps, len(known), rows)


def _fill(sample: Record, index: int) -> Fill:
    mask = sample["masks"][index]
    (text, probability), *others = mask["predictions"]
    rest = ", ".join(f"{_text_of(piece).strip()} {share:.1%}" for piece, share in others)
    return Fill(_text_of(text).strip() or text, probability, text == mask["token"], rest)


def _text_of(piece: str) -> str:
    """Return a piece of SentencePiece, or of byte-level BPE, as text."""
    return piece.replace(_WORD_START, " ").replace("Ġ", " ").replace("Ċ", "\n")
