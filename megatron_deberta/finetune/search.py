"""Searches: a YAML file with task, model, data, grid and seeds; its cells, runs and results.

A cell is a point of the grid; it has a run per seed.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import math
import os
import re
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from megatron_deberta.checkpoint.layout import checkpoints_dir
from megatron_deberta.config import load_config, save_config, validate_for_world
from megatron_deberta.config.loader import (
    OVERRIDES,
    config_to_dict,
    holds_text,
    parse_override,
    plain_value,
    read_alternatives,
    read_value,
    use_new_names,
)
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.config.yaml_reader import TextLoader, parse_string, parse_yaml, read_yaml
from megatron_deberta.errors import ConfigError
from megatron_deberta.evaluate.models import SourceModel
from megatron_deberta.evaluate.outputs import FOLDER as OUTPUTS
from megatron_deberta.evaluate.outputs import SEARCH_RESULTS, RunResult, finished_validation
from megatron_deberta.files import write_atomically
from megatron_deberta.finetune.settings import finetune_config
from megatron_deberta.parsing import conform, read_json
from megatron_deberta.tasks.task import (
    DEV,
    TaskConfig,
    absolute_task_name,
    check_keys,
    packaged_file,
)

MAX_SEEDS = 10_000
"""Most seeds of a cell that a number may stand for."""


Statistic = Literal["median", "mean", "min", "max"]


Value = int | float | str | bool
"""Value of a run key."""


_SET_BY_SEARCH = {
    "train.seed": "seeds", "train.run_dir": "output", "finetune.task": "task",
    "finetune.data": "data", "checkpoint.load_from": "model", "tokenizer.path": "tokenizer",
}  # fmt: skip
"""Run keys that follow from a key of the search."""


_REQUIRED = ("task", "model", "data")


_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")
"""Numbers such as 1e-5, which YAML takes for text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchConfig:
    """A search over hyper-parameters of one task. All paths are absolute."""

    task: str
    """Task file, or name of a packaged task."""
    model: str
    """Run, checkpoint, export or release to start from."""
    data: str
    """Folder of the task's files."""
    output: str = ""
    """Folder of the search; empty: ``searches/TASK``."""
    tokenizer: str = ""
    """The model's tokenizer; empty: its own."""
    settings: str = ""
    """The task's settings to use, of which lists belong to the grid; ``none``: none; empty: the
    release's for this size of model."""
    grid: dict[str, Value | list[Value]] = field(default_factory=dict)
    """Run keys (``section.key``) with a list of values to search, or with one value for all
    runs."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = (1, 2, 3, 4, 5)
    """Seeds of each cell; a number N stands for 1 to N."""
    select: Statistic = "median"
    """Statistic over the seeds that selects the best cell."""
    sample: Annotated[int, Field(ge=0)] = 0
    """Number of cells, chosen at random but always the same; 0: all."""
    ranks: Annotated[int, Field(ge=1)] = 1
    """Ranks per run on one machine."""


_TYPES = {item.name: item.type for item in fields(SearchConfig)}


def load_search(path: str, arguments: Sequence[str] = ()) -> SearchConfig:
    """Load a search config.

    Args:
        path: YAML file, or the name of a packaged one (``configs/searches/paper_base.yaml``).
        arguments: ``key=value`` of the search or ``section.key=value`` of its grid; they win.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or inconsistent values.
    """
    values = read_yaml(packaged_file(Path(path)), TextLoader)
    data = {key: _typed(key, value, path) for key, value in values.items()}
    grid = data.get("grid") or {}
    if not isinstance(grid, Mapping):
        raise ConfigError(f"{path}: grid={grid!r}: write `section.key: [value, ...]` lines below")
    grid = use_new_names({str(key): value for key, value in grid.items()}, path)
    data["grid"] = {key: read_alternatives(key, value, path) for key, value in grid.items()}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise ConfigError(f"command line: {argument!r} is not key=value, as in seeds=3")
        key = key.strip()
        if "." in key:
            (key,) = use_new_names({key: text}, OVERRIDES)
            data["grid"][key] = read_alternatives(key, parse_override(key, text), OVERRIDES)
        elif _is_text(key):
            data[key] = parse_string(text, OVERRIDES)
        else:
            value = parse_yaml(text, OVERRIDES, TextLoader) if text.strip() else ""
            data[key] = _typed(key, value, OVERRIDES)
    return _build(data, path)


def _typed(key: str, value: Any, source: str) -> Any:
    """Return a value of the search: its text, or what YAML makes of it."""
    if key == "grid" and isinstance(value, Mapping):
        return value
    try:
        return read_value(str, value, key, source) if _is_text(key) else plain_value(value)
    except ValueError as error:
        raise ConfigError(f"{source}: {key}: {error}; write it as a decimal number") from error


def _is_text(key: str) -> bool:
    return _TYPES.get(key) == "str"


def _build(data: dict[str, Any], source: str) -> SearchConfig:
    check_keys(data, SearchConfig, source, " (run keys belong to grid)")
    for key in _REQUIRED:
        if not data.get(key):
            raise ConfigError(
                f"{source}: {key} is missing; add it, or give {key}=... after the file"
            )
    seeds = data.get("seeds")
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        if seeds > MAX_SEEDS:
            raise ConfigError(f"{source}: seeds={seeds}: give at most {MAX_SEEDS:,}")
        if seeds < 1:
            raise ConfigError(f"{source}: seeds={seeds}: give 1 or more, or a list of seeds")
        data["seeds"] = list(range(1, seeds + 1))
    data["grid"] = {
        str(key): value if holds_text(str(key)) else _with_numbers(value)
        for key, value in data["grid"].items()
    }
    search = conform(
        data, SearchConfig, source, "a search", error=ConfigError, remedy="correct this key"
    )
    _check(search, source)
    return _with_absolute_paths(search)


def _with_numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    is_number = isinstance(value, str) and _NUMBER.fullmatch(value)
    return float(value) if is_number else value


def _check(search: SearchConfig, source: str) -> None:
    if not search.seeds or len(set(search.seeds)) != len(search.seeds):
        raise ConfigError(f"{source}: seeds={list(search.seeds)}: give different seeds")
    if {"train.steps", "finetune.epochs"} <= search.grid.keys():
        raise ConfigError(f"{source}: grid has train.steps and finetune.epochs; keep one of them")
    for key, value in search.grid.items():
        if key in _SET_BY_SEARCH:
            raise ConfigError(f"{source}: grid.{key}: set the key {_SET_BY_SEARCH[key]} instead")
        if isinstance(value, list) and (not value or len(set(map(str, value))) != len(value)):
            raise ConfigError(f"{source}: grid.{key}={value}: give different values")


def _with_absolute_paths(search: SearchConfig) -> SearchConfig:
    task = absolute_task_name(search.task)
    output = os.path.abspath(search.output or f"searches/{Path(task).stem}")
    given = {key: getattr(search, key) for key in ("model", "data", "tokenizer")}
    paths = {key: os.path.abspath(path) for key, path in given.items() if path}
    return replace(search, task=task, output=output, **paths)


RUN_FILE = "finetune.yaml"
"""In the run folder: the run as the search has started it."""


INPUTS_FILE = "inputs.json"
"""In the folder of a search: fingerprints of task, data, tokenizer and model of its runs."""


ENCODED = "encoded"
"""Folder of encoded examples, which all runs of a search share."""


MAX_RUNS = 100_000
"""Most runs of a search; the cells of a larger grid would fill the memory."""


_UNSAFE = re.compile(r"[^A-Za-z0-9.,=_+-]")


_MAX_NAME = 120


_MAY_CHANGE = (
    "cluster", "log", "data.num_workers", "train.micro_batch_size", "train.run_dir",
    "finetune.cache",
)  # fmt: skip
"""Sections and keys that a search may change between its runs."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A point of the grid.

    Attributes:
        values: value of each searched run key.
    """

    values: dict[str, Value]

    @property
    def name(self) -> str:
        """Return the name of its folder, which depends on its values only."""
        keys = short_names(list(self.values))
        text = ",".join(f"{keys[key]}={value}" for key, value in self.values.items()) or "cell"
        safe = _UNSAFE.sub("_", text)
        if safe == text and len(safe) <= _MAX_NAME:
            return safe
        digest = hashlib.sha256(json.dumps(self.values).encode()).hexdigest()[:8]
        return f"{safe[:_MAX_NAME]}-{digest}"


@dataclass(frozen=True, slots=True)
class SearchRun:
    """The fine-tuning run of a cell with one seed.

    Attributes:
        cell: the cell.
        seed: ``train.seed``.
        folder: ``train.run_dir``.
    """

    cell: Cell
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        """Cell and seed, for messages."""
        return f"{self.cell.name} seed {self.seed}"


@dataclass(frozen=True, slots=True)
class ConfiguredRun(SearchRun):
    """A run with its config.

    Attributes:
        config: the config.
    """

    config: RunConfig

    def write_config(self) -> Path:
        """Write the run's config into its folder, and return the file.

        Raises:
            ConfigError: the folder holds a run with another config.
        """
        self.check_config()
        self.folder.mkdir(parents=True, exist_ok=True)
        save_config(self.config, self.folder / RUN_FILE)
        return self.folder / RUN_FILE

    def check_config(self) -> None:
        """Check that the folder holds no run with another config.

        Raises:
            ConfigError: it does.
        """
        path = self.folder / RUN_FILE
        if not path.exists():
            return
        old, new = config_to_dict(load_config(path)), config_to_dict(self.config)
        for section in sorted(new.keys() - set(_MAY_CHANGE)):
            for key, value in new[section].items():
                name = f"{section}.{key}"
                # A run keeps the format and the engine with which it began.
                is_kept = name in ("precision.dtype", "parallel.engine") and value == "auto"
                if old[section][key] != value and name not in _MAY_CHANGE and not is_kept:
                    raise ConfigError(
                        f"{path}: {name} was {old[section][key]!r} and is now {value!r}; restore "
                        "it, or give the search another output"
                    )


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each run key, or the whole key where that is ambiguous."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: name if last.count(name) == 1 else key for key, name in zip(keys, last, strict=True)
    }


def grid_of(
    search: SearchConfig, task: TaskConfig
) -> tuple[dict[str, list[Value]], dict[str, Any]]:
    """Return the searched values, and the values of all runs, by run key.

    Raises:
        ConfigError: the task has no settings of the search's name.
    """
    known = task.settings
    if search.settings and search.settings not in (*known, "none"):
        names = ", ".join([*known, "none"])
        raise ConfigError(f"settings={search.settings!r}: task {task.name} has {names}")
    named = known.get(search.settings, {})
    combined = {key: v for key, v in named.items() if isinstance(v, list)} | search.grid
    axes = {key: value for key, value in combined.items() if isinstance(value, list)}
    return axes, {key: value for key, value in combined.items() if key not in axes}


def list_cells(search: SearchConfig, task: TaskConfig) -> list[Cell]:
    """Return the cells of a search in the order of its grid; of a sample, only those are built.

    Raises:
        ConfigError: the search has more than ``MAX_RUNS`` runs, or the grid is too large to draw a
            sample from.
    """
    axes, _ = grid_of(search, task)
    total = math.prod(len(values) for values in axes.values())
    count = search.sample if 0 < search.sample < total else total
    if count * len(search.seeds) > MAX_RUNS or total >= 1 << 63:
        raise ConfigError(
            f"{search.output}: {count:,} of the grid's {total:,} cells with {len(search.seeds):,} "
            f"seeds each; a search has at most {MAX_RUNS:,} runs: shorten the lists of grid, or "
            "lower sample or seeds"
        )
    if count == total:
        return [
            Cell(dict(zip(axes, values, strict=True)))
            for values in itertools.product(*axes.values())
        ]
    chosen = np.random.default_rng(0).choice(total, count, replace=False)
    # The last key of the grid changes first.
    places = np.unravel_index(np.sort(chosen), [len(values) for values in axes.values()])
    return [
        Cell({key: known[at] for (key, known), at in zip(axes.items(), place, strict=True)})
        for place in np.transpose(places).tolist()
    ]


def list_runs(search: SearchConfig, task: TaskConfig) -> list[SearchRun]:
    """Return all runs of a search, seed by seed within each cell.

    Raises:
        ConfigError: see ``list_cells``.
    """
    folder = Path(search.output) / "cells"
    return [
        SearchRun(cell, seed, folder / cell.name / f"seed_{seed}")
        for cell in list_cells(search, task)
        for seed in search.seeds
    ]


def configure_runs(
    search: SearchConfig, task: TaskConfig, model: SourceModel
) -> list[ConfiguredRun]:
    """Build the configs of all runs of a search.

    Args:
        search: the search.
        task: its task.
        model: model that is fine-tuned.

    Raises:
        ConfigError: the task has no split for validation, a value is wrong, or the folder of a run
            holds one with another config.
        TopologyError: the ranks do not divide.
    """
    if DEV not in task.splits:
        raise ConfigError(f"task {task.name} has no split {DEV!r}, which selects the best cell")
    _, fixed = grid_of(search, task)
    configs: dict[str, RunConfig] = {}
    runs = []
    for run in list_runs(search, task):
        if run.cell.name not in configs:
            values = {"finetune.cache": f"{search.output}/{ENCODED}", **fixed, **run.cell.values}
            overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
            config = finetune_config(
                search.task, model, search.data, overrides, settings=search.settings
            )
            validate_for_world(config, search.ranks)
            configs[run.cell.name] = config
        config = configs[run.cell.name]
        train = replace(config.train, seed=run.seed, run_dir=str(run.folder))
        runs.append(ConfiguredRun(run.cell, run.seed, run.folder, replace(config, train=train)))
        runs[-1].check_config()
    return runs


RESULT_FILE = "result.json"
"""In the run folder: the result of a finished run; such a run is not started again."""


RESULTS_CSV = "results.csv"


STATISTICS: Mapping[Statistic, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "min": min,
    "max": max,
}


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
    found = finished_validation(folder, metric)
    if found is not None:
        write_atomically(path, json.dumps(asdict(found), indent=1).encode() + b"\n")
    return found


def collect(runs: Sequence[SearchRun], metric: str) -> list[CellResult]:
    """Return the results of all cells, in the order of the grid."""
    cells: dict[str, list[SearchRun]] = {}
    for run in runs:
        cells.setdefault(run.cell.name, []).append(run)
    found = []
    for members in cells.values():
        results = ((run.seed, read_result(run.folder, metric)) for run in members)
        scores = {seed: each.score for seed, each in results if each and each.score is not None}
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
    header = [*short_names(keys).values(), "runs", *STATISTICS]
    # Those without a score come last.
    ordered = sorted(results, key=lambda r: -r.statistic(search.select) if r.scores else math.inf)
    rows = [header]
    for result in ordered:
        values = [str(result.cell.values[key]) for key in keys]
        count = f"{len(result.scores)}/{len(result.runs)}"
        figures = [f"{result.statistic(s):.4f}" if result.scores else "-" for s in STATISTICS]
        rows.append([*values, count, *figures])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    best = best_cell(results, search.select)
    found = "best cell: none yet; no cell has finished with all of its seeds"
    if best is not None:
        folder = best.runs[0].folder.parent
        found = f"best cell by {search.select}: {best.cell.name} ({folder})"
    lines = [
        f"{search.output}: {finished} of {total} runs finished",
        f"{metric} on the split {DEV}, which selected checkpoints and cells; it is no test result",
        "",
        *("  ".join(map(str.rjust, row, widths)) for row in rows),
        "",
        found,
    ]
    return "\n".join(lines)


def write_results(search: SearchConfig, metric: str, results: Sequence[CellResult]) -> list[Path]:
    """Write ``results.json`` and, with a line per cell, ``results.csv`` into the search's folder.

    Args:
        search: the search.
        metric: name of the metric.
        results: of all cells.

    Returns:
        The paths of both files.
    """
    best = best_cell(results, search.select)
    cells: list[dict[str, Any]] = [
        {
            "folder": f"cells/{result.cell.name}",
            "values": result.cell.values,
            "is_best": result is best,
            "runs": len(result.runs),
            "finished": len(result.scores),
            **{name: result.statistic(name) if result.scores else None for name in STATISTICS},
            "scores": {str(seed): score for seed, score in result.scores.items()},
        }
        for result in results
    ]
    content = {
        "task": search.task, "metric": metric, "split": DEV, "select": search.select,
        "best": None if best is None else f"cells/{best.cell.name}", "cells": cells,
    }  # fmt: skip
    folder = Path(search.output)
    write_atomically(folder / SEARCH_RESULTS, json.dumps(content, indent=1).encode() + b"\n")
    figures = ("finished", *STATISTICS)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    seeds = (f"seed_{seed}" for seed in search.seeds)
    writer.writerow([*cells[0]["values"], "split", "metric", *figures, *seeds])
    for cell in cells:
        shown = ["" if cell[name] is None else cell[name] for name in figures]
        scores = [cell["scores"].get(str(seed), "") for seed in search.seeds]
        writer.writerow([*cell["values"].values(), DEV, metric, *shown, *scores])
    write_atomically(folder / RESULTS_CSV, stream.getvalue().encode())
    return [folder / SEARCH_RESULTS, folder / RESULTS_CSV]
