"""Results of a search: the score of each run, statistics over seeds per cell, table and files."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_deberta.checkpoint.layout import checkpoints_dir
from megatron_deberta.errors import ConfigError
from megatron_deberta.files import write_atomically
from megatron_deberta.finetune.data import DEV
from megatron_deberta.finetune.outputs import FOLDER as OUTPUTS
from megatron_deberta.finetune.outputs import SEARCH_RESULTS, finished_validation
from megatron_deberta.finetune.search.cells import Cell, SearchRun, short_names
from megatron_deberta.finetune.search.config import SearchConfig, Statistic
from megatron_deberta.parsing import read_json

RESULT_FILE = "result.json"
"""In the run folder: the result of a finished run; such a run is not started again."""
RESULTS_CSV = "results.csv"

STATISTICS: Mapping[Statistic, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "min": min,
    "max": max,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """Score of a finished run.

    Attributes:
        split: the split on which the score was computed, always the one for validation.
        metric: name of the score, the task's first metric.
        score: of the best checkpoint, or else of the last one, see ``finished_validation``; None:
            it was infinite or not a number, as after a divergence.
        step: of that checkpoint.
        steps: number of steps of the run.
        metrics: all metrics at that step.
    """

    split: str
    metric: str
    score: float | None
    step: int
    steps: int
    metrics: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class CellResult:
    """Scores of a cell.

    Attributes:
        cell: the cell.
        runs: all of its runs.
        scores: score by seed of the finished ones; a run without one keeps its cell incomplete.
    """

    cell: Cell
    runs: tuple[SearchRun, ...]
    scores: dict[int, float]

    @property
    def is_complete(self) -> bool:
        """Whether all runs have finished, with a score."""
        return len(self.scores) == len(self.runs)

    def statistic(self, name: Statistic) -> float:
        """Return a statistic over the finished seeds; NaN without any."""
        return STATISTICS[name](list(self.scores.values())) if self.scores else math.nan


def read_result(folder: Path, metric: str) -> RunResult | None:
    """Return the result of a run, None if it has not finished; record it in the run folder.

    Args:
        folder: folder of the run.
        metric: name of the task's first metric.

    Raises:
        ConfigError: the result is of another metric.
        DataError: a file is damaged.
    """
    path = folder / RESULT_FILE
    if path.exists():
        result = read_json(path, RunResult, "the result of a run", remedy="remove it")
        if result.metric != metric:
            raise ConfigError(
                f"{path}: {result.metric} has selected this checkpoint, but the task's first "
                f"metric is {metric} now; restore metrics, or give the search another output"
            )
        return result
    finished = finished_validation(folder, metric)
    if finished is None:
        return None
    result = RunResult(
        split=DEV,
        metric=metric,
        score=finished.score,
        step=finished.step,
        steps=finished.last_step,
        metrics=finished.metrics,
    )
    write_atomically(path, json.dumps(asdict(result), indent=1).encode() + b"\n")
    return result


def collect(runs: Sequence[SearchRun], metric: str) -> list[CellResult]:
    """Return the results of all cells, in the order of the grid."""
    cells: dict[str, list[SearchRun]] = {}
    for run in runs:
        cells.setdefault(run.cell.name, []).append(run)
    found = []
    for members in cells.values():
        results = {run.seed: read_result(run.folder, metric) for run in members}
        scores = {
            seed: result.score
            for seed, result in results.items()
            if result is not None and result.score is not None
        }
        found.append(CellResult(members[0].cell, tuple(members), scores))
    return found


def best_cell(results: Sequence[CellResult], statistic: Statistic) -> CellResult | None:
    """Return the complete cell with the best statistic, the first of equals; None: no cell."""
    complete = [result for result in results if result.is_complete]
    return max(complete, key=lambda result: result.statistic(statistic), default=None)


def prune(results: Sequence[CellResult], statistic: Statistic) -> int:
    """Delete the checkpoints of complete cells other than the best; return how many runs had some.

    Their results remain.
    """
    best, pruned = best_cell(results, statistic), 0
    for result in results:
        if result is best or not result.is_complete:
            continue
        for run in result.runs:
            if (folder := checkpoints_dir(run.folder)).exists():
                shutil.rmtree(folder)
                pruned += 1
            # Outputs of these checkpoints; nothing would remove them later.
            shutil.rmtree(run.folder / OUTPUTS, ignore_errors=True)
    return pruned


def format_table(search: SearchConfig, metric: str, results: Sequence[CellResult]) -> str:
    """Format the cells, best first, with median, mean, minimum and maximum over seeds.

    Args:
        search: the search.
        metric: name of the metric.
        results: of all cells.
    """
    finished = sum(len(result.scores) for result in results)
    total = sum(len(result.runs) for result in results)
    keys = list(results[0].cell.values)
    names = short_names(keys)
    header = [*(names[key] for key in keys), "runs", *STATISTICS]
    ordered = sorted(results, key=lambda r: (not r.scores, -_rank(r, search.select)))
    rows = [header]
    for result in ordered:
        values = [str(result.cell.values[key]) for key in keys]
        count = f"{len(result.scores)}/{len(result.runs)}"
        figures = [f"{result.statistic(s):.4f}" if result.scores else "-" for s in STATISTICS]
        rows.append([*values, count, *figures])
    lines = [
        f"{search.output}: {finished} of {total} runs finished",
        f"{metric} on the split {DEV}, which selected checkpoints and cells; it is no test result",
        "",
        *_aligned(rows),
        "",
        _describe_best(search.select, best_cell(results, search.select)),
    ]
    return "\n".join(lines)


def _rank(result: CellResult, statistic: Statistic) -> float:
    return result.statistic(statistic) if result.scores else 0.0


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _describe_best(statistic: Statistic, best: CellResult | None) -> str:
    if best is None:
        return "best cell: none yet; no cell has finished with all of its seeds"
    folder = best.runs[0].folder.parent
    return f"best cell by {statistic}: {best.cell.name} ({folder})"


def write_results(search: SearchConfig, metric: str, results: Sequence[CellResult]) -> list[Path]:
    """Write ``results.json`` and ``results.csv`` into the folder of the search.

    Args:
        search: the search.
        metric: name of the metric.
        results: of all cells.

    Returns:
        The paths of both files.
    """
    best = best_cell(results, search.select)
    cells: list[dict[str, Any]] = []
    for result in results:
        figures: dict[str, Any] = {
            name: result.statistic(name) if result.scores else None for name in STATISTICS
        }
        cells.append(
            {
                "folder": f"cells/{result.cell.name}",
                "values": result.cell.values,
                "is_best": result is best,
                "runs": len(result.runs),
                "finished": len(result.scores),
                **figures,
                "scores": {str(seed): score for seed, score in result.scores.items()},
            }
        )
    content = {
        "task": search.task, "metric": metric, "split": DEV, "select": search.select,
        "best": None if best is None else f"cells/{best.cell.name}", "cells": cells,
    }  # fmt: skip
    folder = Path(search.output)
    write_atomically(folder / SEARCH_RESULTS, json.dumps(content, indent=1).encode() + b"\n")
    write_atomically(folder / RESULTS_CSV, _csv(cells, metric, search.seeds).encode())
    return [folder / SEARCH_RESULTS, folder / RESULTS_CSV]


def _csv(cells: Sequence[Mapping[str, Any]], metric: str, seeds: Sequence[int]) -> str:
    """Return one line per cell: values, split and metric, statistics, score of each seed."""
    keys = list(cells[0]["values"])
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    figures = ("finished", *STATISTICS)
    writer.writerow([*keys, "split", "metric", *figures, *(f"seed_{seed}" for seed in seeds)])
    for cell in cells:
        scores = [cell["scores"].get(str(seed), "") for seed in seeds]
        shown = ["" if cell[name] is None else cell[name] for name in figures]
        writer.writerow([*cell["values"].values(), DEV, metric, *shown, *scores])
    return stream.getvalue()
