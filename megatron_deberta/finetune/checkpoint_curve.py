"""Score of a labelled task against pretraining steps.

Source: He et al. 2021, arXiv:2006.03654, Figure 1 (MNLI accuracy of DeBERTa and RoBERTa against
pretraining steps).
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from typing_extensions import TypedDict

from megatron_deberta.checkpoint.layout import committed_steps, step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.errors import CheckpointError, DataError
from megatron_deberta.evaluate.outputs import finished_validation
from megatron_deberta.files import write_atomically
from megatron_deberta.finetune.inputs import check_inputs, fingerprint_weights, record_inputs
from megatron_deberta.parsing import Count, Number, read_json

RESULT_FILE = "result.json"
"""In the folder of a fine-tuning run: its score, written when it has finished."""
SETTINGS_FILE = "settings.json"
WEIGHTS_FILE = "weights.json"
"""In the output folder: fingerprint of each checkpoint by name."""
CURVE_FILE = "curve.json"
PICTURE_FILE = "curve.png"
_RUNS = "step_*-seed_*"
"""Folders of the fine-tuning runs in the output folder."""
_REMEDY = "use another --output"


class _Result(TypedDict):
    step: Count
    samples: Count
    seed: Count
    score: Number
    best_step: Count


@dataclass(frozen=True, slots=True)
class CurveRun:
    """One fine-tuning run of a checkpoint.

    Attributes:
        checkpoint: the pretrained checkpoint.
        step: its step.
        samples: sequences that it was trained on.
        seed: ``train.seed`` of the fine-tuning run.
        folder: of the fine-tuning run.
    """

    checkpoint: Path
    step: int
    samples: int
    seed: int
    folder: Path

    def record_result(self, metric: str) -> bool:
        """Write the score of the run, and return whether it has finished.

        Args:
            metric: name of the task's first metric.

        Raises:
            DataError: a file of the run is damaged, or its score is infinite or not a number.
        """
        finished = finished_validation(self.folder, metric)
        if finished is None:
            return False
        if finished.score is None:
            raise DataError(
                f"{self.folder}: {metric} at step {finished.step} is infinite or not a number; use "
                "a lower optimizer.learning_rate and another --output"
            )
        values = _Result(
            step=self.step,
            samples=self.samples,
            seed=self.seed,
            score=finished.score,
            best_step=finished.step,
        )
        write_atomically(self.folder / RESULT_FILE, (json.dumps(values) + "\n").encode())
        return True

    @property
    def score(self) -> float | None:
        """The recorded score; None: the run has not finished."""
        path = self.folder / RESULT_FILE
        return _read_result(path)["score"] if path.exists() else None


def _read_result(path: Path) -> _Result:
    remedy = "remove it, and the command writes it again"
    return read_json(path, _Result, "a result", remedy=remedy)


def plan_runs(run_dir: Path, output: Path, every: int, seeds: int) -> list[CurveRun]:
    """Return the fine-tuning runs, by step and seed.

    Args:
        run_dir: the pretraining run.
        output: folder of the fine-tuning runs.
        every: use every n-th kept checkpoint, and the last one.
        seeds: runs per checkpoint, with the seeds 1, 2, ...

    Raises:
        CheckpointError: the run has no checkpoint.
    """
    steps = committed_steps(run_dir)
    if not steps:
        raise CheckpointError(f"{run_dir} has no committed checkpoint; give a pretraining run")
    chosen = sorted({*steps[every - 1 :: every], steps[-1]})
    runs = []
    for step in chosen:
        path = step_dir(run_dir, step)
        samples = CheckpointReader(path).metadata.consumed_samples
        folders = [(seed, output / f"{path.name}-seed_{seed}") for seed in range(1, seeds + 1)]
        runs += [CurveRun(path, step, samples, seed, folder) for seed, folder in folders]
    return runs


def check_settings(output: Path, settings: dict[str, Any]) -> None:
    """Record what all runs have in common; they are comparable only if it is the same.

    Args:
        output: folder of the runs; if it has none, the settings may be replaced.
        settings: by name.

    Raises:
        ConfigError: the folder has runs with other settings.
    """
    has_runs = any(output.glob(_RUNS))
    check_inputs(output / SETTINGS_FILE, settings, has_runs=has_runs, remedy=_REMEDY)
    record_inputs(output / SETTINGS_FILE, settings)


def check_weights(output: Path, runs: Sequence[CurveRun]) -> None:
    """Record the weights of each checkpoint; a repeated pretraining run has others.

    Args:
        output: folder of the runs.
        runs: the runs to come.

    Raises:
        ConfigError: the folder has runs of other weights of the same step.
    """
    path = output / WEIGHTS_FILE
    found = {run.checkpoint.name: fingerprint_weights(run.checkpoint) for run in runs}
    started = {run.checkpoint.name for run in runs if run.folder.exists()}
    inputs = {name: found[name] for name in sorted(started)}
    check_inputs(path, inputs, has_runs=bool(started), remedy=_REMEDY)
    # Those of checkpoints that pretraining has deleted since remain.
    known = (
        read_json(path, dict[str, str], "weights of runs", remedy=_REMEDY) if path.exists() else {}
    )
    record_inputs(path, known | found)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Scores of one checkpoint, by seed."""

    step: int
    samples: int
    scores: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean score."""
        return mean(self.scores)


def curve_of(output: Path) -> list[CurvePoint]:
    """Return the points of the checkpoints with at least one finished run, by step.

    Checkpoints that pretraining has deleted since are included.

    Args:
        output: folder of the fine-tuning runs.
    """
    results = [_read_result(path) for path in output.glob(f"{_RUNS}/{RESULT_FILE}")]
    found: dict[tuple[int, int], list[float]] = {}
    for result in sorted(results, key=lambda result: (result["step"], result["seed"])):
        found.setdefault((result["step"], result["samples"]), []).append(result["score"])
    return [CurvePoint(step, samples, tuple(scores)) for (step, samples), scores in found.items()]


def write_curve(output: Path, points: Sequence[CurvePoint], task: str, metric: str) -> None:
    """Write ``curve.json`` and ``curve.png``: mean and range of the score over pretraining steps.

    Args:
        output: folder of the files.
        points: at least one.
        task: name of the task.
        metric: name of the score.
    """
    from matplotlib.figure import Figure

    content = {
        "task": task,
        "metric": metric,
        "points": [{**asdict(point), "mean": point.mean} for point in points],
    }
    write_atomically(output / CURVE_FILE, (json.dumps(content, indent=1) + "\n").encode())
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [point.step for point in points]
    axes.plot(steps, [point.mean for point in points], marker="o", label="mean over seeds")
    if any(len(point.scores) > 1 for point in points):
        lowest, highest = ([f(point.scores) for point in points] for f in (min, max))
        axes.fill_between(steps, lowest, highest, alpha=0.2, label="range")
        axes.legend()
    axes.set(xlabel="pretraining step", ylabel=f"{task}: {metric.replace('_', ' ')} (dev)")
    axes.grid(alpha=0.3)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_atomically(output / PICTURE_FILE, picture.getvalue())


def describe_curve(points: Sequence[CurvePoint], metric: str) -> str:
    """Format a table of the points."""
    lines = [f"{'step':>10}{'sequences':>14}{'seeds':>7}{metric:>20}{'min':>9}{'max':>9}"]
    lines += [
        f"{point.step:>10,}{point.samples:>14,}{len(point.scores):>7}{point.mean:>20.4f}"
        f"{min(point.scores):>9.4f}{max(point.scores):>9.4f}"
        for point in points
    ]
    return "\n".join(lines)
