"""The charts of a report: what is drawn of each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_deberta.report.charts import Chart, Point, Series, Style
from megatron_deberta.report.run_folder import Record, RunFolder, is_number, points

SECTIONS = {
    "forward": "forward pass",
    "step": "backward pass and update",
    "data": "waiting for data",
    "evaluation": "validation",
    "save": "checkpoint",
    "log": "log and checks",
    "start-up": "start-up",
}
"""Parts of the time in ``timeline.jsonl``, in the order in which they are stacked."""
_KNOWN_VALIDATION = {"step", "kind", "loss", "perplexity", "num_targets", "unigram_loss"}
_TIME_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_MOST_BANDS = 120
"""Groups of records of which time by part is shown."""
_GIB = 2.0**30


def training_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    """Return loss, learning rate and gradient norm against steps, with validations."""
    charts = [
        Chart("Loss", "mean per target", list(_losses(runs)), note=_loss_note(runs)),
        *_validation_charts(runs),
        Chart("Learning rate", "learning rate", _per_run(runs, "train", "learning_rate")),
        Chart(
            "Gradient norm",
            "norm before clipping",
            [*_per_run(runs, "train", "grad_norm"), *_skipped_marks(runs)],
        ),
    ]
    scales = {value for run in runs for _, value in points(run.of_kind("train"), "loss_scale")}
    if scales - {1.0}:
        scale = _per_run(runs, "train", "loss_scale")
        charts.append(Chart("Loss scale", "loss scale (fp16)", scale))
    return charts


def speed_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    """Return throughput, MFU, time by part and memory."""
    memory = [
        Series(run.name, points(_steps(run), "memory_bytes", 1 / _GIB), number)
        for number, run in enumerate(runs)
    ]
    throughput = _per_run(runs, "train", "tokens_per_second")
    mfu = _per_run(runs, "train", "utilization")
    saves = _per_run(runs, "checkpoint", "seconds", "points")
    charts = [
        Chart("Throughput", "tokens per second, all ranks", throughput),
        Chart("MFU", "share of the matrix rate", mfu, percent=True),
        *(_time_by_part(run, runs) for run in runs),
        Chart("Peak memory of rank 0", "GiB", memory),
        Chart("Checkpoints", "seconds per checkpoint", saves),
    ]
    return charts


def time_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    """Return the steps of each run against the time of day, with its restarts and faults."""
    return [_progress(run, runs) for run in runs]


def score_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    """Return minimal pairs and fine-tuning scores against steps."""
    pairs = _per_run(runs, "minimal_pairs", "accuracy", "points")
    charts = [Chart("BLiMP, all pairs", "accuracy", pairs, percent=True)]
    if len(runs) == 1:
        charts.append(Chart("BLiMP by field", "accuracy", _pair_fields(runs[0]), percent=True))
    tasks = {(curve["task"], curve["metric"]) for run in runs for curve in run.finetuned}
    for task, metric in sorted(tasks):
        charts.append(
            Chart(
                f"Fine-tuned: {task}",
                metric.replace("_", " "),
                [
                    Series(run.name, _curve(run, task, metric), number, "points")
                    for number, run in enumerate(runs)
                ],
                x_label="pretraining step",
                note="Mean over seeds of the best score on the dev split.",
            )
        )
    return charts


def first_time(run: RunFolder) -> float | None:
    """Return when a run first started, in seconds since the epoch; None: unknown."""
    times = [record["time"] for record in (*run.timeline, *run.history)]
    return min(times or run.checkpoints.values(), default=None)


def _per_run(runs: Sequence[RunFolder], kind: str, key: str, style: Style = "line") -> list[Series]:
    """Return a key of the metrics of a kind, a series per run."""
    return [
        Series(run.name, points(run.of_kind(kind), key), number, style)
        for number, run in enumerate(runs)
    ]


def loss_owner(run: RunFolder) -> str:
    """Return which model or form of a run has the metric ``loss``, after a space; empty: it all."""
    owners = {"rtd": " (generator)", "mlm+ar": " (masked)", "retromae": " (encoder)"}
    return owners.get(str(run.config.get("objective.name")), "")


def _loss_note(runs: Sequence[RunFolder]) -> str:
    """Return what the losses are of, where that is not the whole model."""
    found = {loss_owner(run) for run in runs}
    notes = {
        " (generator)": "Of replaced-token detection: the generator's loss.",
        " (masked)": "Of two forms: training has the loss of the step's form, validation the "
        "masked one's.",
        " (encoder)": "Of RetroMAE: the loss of the encoder's masked tokens.",
    }
    return " ".join(note for owner, note in notes.items() if owner in found)


def _losses(runs: Sequence[RunFolder]) -> Iterator[Series]:
    """Yield training and validation losses, and the unigram baseline."""
    is_lone = len(runs) == 1
    for number, run in enumerate(runs):
        name = "" if is_lone else f"{run.name}: "
        train = points(run.of_kind("train"), "loss")
        validation = points(run.of_kind("validation"), "loss")
        yield Series(f"{name}training", train, number)
        yield Series(f"{name}validation", validation, number + is_lone, "points")
        baseline = points(run.of_kind("validation"), "unigram_loss")
        if is_lone and baseline and (ends := train or validation):
            level = baseline[-1][1]
            line = [(ends[0][0], level), (ends[-1][0], level)]
            yield Series("unigram baseline", line, 2, "dashed")


def _validation_charts(runs: Sequence[RunFolder]) -> Iterator[Chart]:
    """Yield a chart for each further metric of validations."""
    records = [record for run in runs for record in run.of_kind("validation")]
    keys = dict.fromkeys(key for record in records for key, value in record.items()
                         if key not in _KNOWN_VALIDATION and is_number(value))  # fmt: skip
    for key in keys:
        label = key.replace("_", " ")
        series = _per_run(runs, "validation", key, "points")
        yield Chart(f"Validation: {label}", label, series, percent=key.endswith("accuracy"))


def skipped_updates(run: RunFolder) -> list[Record]:
    """Return the guard's records of skipped updates, without overflows of fp16."""
    skips = [record for record in run.of_kind("guard") if record.get("skip")]
    return [record for record in skips if record["skip"] != "overflow"]


def _skipped_marks(runs: Sequence[RunFolder]) -> list[Series]:
    """Return the skipped updates of a single run as vertical lines."""
    steps = [(record["step"], 0.0) for record in skipped_updates(runs[0])]
    return [Series("skipped update", steps, 5, "marker")] if steps and len(runs) == 1 else []


def _time_by_part(run: RunFolder, runs: Sequence[RunFolder]) -> Chart:
    """Return the share of each part in the time of some steps."""
    records = sorted(_steps(run), key=lambda record: int(record["step"]))
    shares: dict[str, list[Point]] = {part: [] for part in SECTIONS}
    size = max(1, math.ceil(len(records) / _MOST_BANDS))
    for first in range(0, len(records), size):
        group = [part_seconds(record) for record in records[first : first + size]]
        total = sum(sum(each.values()) for each in group)
        step = records[min(first + size, len(records)) - 1]["step"]
        for part in SECTIONS if total > 0 else ():
            shares[part].append((step, sum(each[part] for each in group) / total))
    first = min((record["step"] for record in run.timeline), default=0)
    # A share belongs to the steps up to its record, so that the first one has to begin somewhere.
    series = [
        Series(SECTIONS[part], [(first, values[0][1]), *values], number, "band")
        for number, (part, values) in enumerate(shares.items())
        if any(share for _, share in values)
    ]
    note = "Of rank 0; on a GPU, parts end when their kernels are queued or awaited."
    title = _of(run, runs, "Time by part")
    return Chart(title, "share of the time", series, note=note, percent=True)


def part_seconds(record: Record) -> dict[str, float]:
    """Return the seconds of each part of ``SECTIONS`` in a record of ``timeline.jsonl``."""
    found = record.get("seconds")
    seconds = found if isinstance(found, dict) else {}
    return {
        part: float(seconds[part]) if is_number(seconds.get(part)) else 0.0 for part in SECTIONS
    }


def _steps(run: RunFolder) -> list[Record]:
    return [record for record in run.timeline if record["event"] == "steps"]


def _progress(run: RunFolder, runs: Sequence[RunFolder]) -> Chart:
    start = first_time(run) or 0.0
    steps = [(record["time"], float(record["step"])) for record in run.timeline]
    steps = sorted(steps or [(time, float(step)) for step, time in run.checkpoints.items()])
    faults = fault_times(run)
    last = max([time for time, _ in steps] + [time for times in faults.values() for time in times]
               + [start])  # fmt: skip
    unit, name = next(each for each in _TIME_UNITS if last - start >= 2 * each[0] or each[0] == 1)
    curve = [((time - start) / unit, step) for time, step in steps]
    series = [Series("step", curve, 0, "line" if run.timeline else "points")]
    for number, (kind, times) in enumerate(faults.items(), start=4):
        marks = [((time - start) / unit, 0.0) for time in times]
        series.append(Series(kind, marks, number, "marker"))
    note = "" if run.timeline else "Points are the times of checkpoints; the run wrote no timeline."
    title = _of(run, runs, "Progress, restarts and faults")
    return Chart(title, "optimizer step", series, f"{name} since the first start", note)


def fault_times(run: RunFolder) -> dict[str, list[float]]:
    """Return when restarts and faults happened, by kind."""
    source = run.timeline or run.history
    starts = [record["time"] for record in source if record["event"] == "start"]
    failed = [
        record["time"] for record in run.history
        if record["event"] == "end" and record.get("code") not in (0, 75, 130)
    ]  # fmt: skip
    found = {
        "restart": starts[1:],
        "failed attempt": failed,
        "slow rank": [record["time"] for record in run.history if record["event"] == "slow"],
        "excluded node": [record["time"] for record in run.bad_nodes],
    }
    return {name: times for name, times in found.items() if times}


def _pair_fields(run: RunFolder) -> list[Series]:
    records = run.of_kind("minimal_pairs")
    keys = dict.fromkeys(key for record in records for key in record if key[:9] == "accuracy_")
    return [
        Series(key[9:].replace("_", " "), points(records, key), number, "points")
        for number, key in enumerate(keys)
    ]


def _curve(run: RunFolder, task: str, metric: str) -> list[Point]:
    found: list[Any] = [
        record
        for curve in run.finetuned
        if (curve["task"], curve["metric"]) == (task, metric)
        for record in curve["points"]
        if isinstance(record, dict)
    ]
    return points(found, "mean")


def _of(run: RunFolder, runs: Sequence[RunFolder], title: str) -> str:
    return title if len(runs) == 1 else f"{title}: {run.name}"


CHART_GROUPS: dict[str, Callable[[Sequence[RunFolder]], list[Chart]]] = {
    "Training": training_charts,
    "Speed and memory": speed_charts,
    "Time axis": time_charts,
    "Scores": score_charts,
}
"""Headings of the report and the charts below them."""
