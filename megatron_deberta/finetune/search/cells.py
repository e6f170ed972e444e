"""Cells of a search (the points of its grid), and the runs of each cell, one per seed."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_deberta.config import load_config, save_config, validate_for_world
from megatron_deberta.config.loader import config_to_dict
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.finetune.data import DEV
from megatron_deberta.finetune.models import SourceModel
from megatron_deberta.finetune.search.config import SearchConfig, Value
from megatron_deberta.finetune.settings import finetune_config
from megatron_deberta.tasks.task import TaskConfig

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
        if path.exists():
            _check_unchanged(self.config, load_config(path), path)


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
    return [_cell_at(axes, int(index)) for index in sorted(chosen)]


def _cell_at(axes: Mapping[str, Sequence[Value]], index: int) -> Cell:
    """Return a cell by its position in the order of the grid, whose last key changes first."""
    values = {}
    for key, known in reversed(list(axes.items())):
        index, place = divmod(index, len(known))
        values[key] = known[place]
    return Cell({key: values[key] for key in axes})


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


def _check_unchanged(config: RunConfig, before: RunConfig, path: Path) -> None:
    """Check that a run has the config with which it was started."""
    old, new = config_to_dict(before), config_to_dict(config)
    for section in sorted(new.keys() - set(_MAY_CHANGE)):
        for key, value in new[section].items():
            name = f"{section}.{key}"
            if old[section][key] != value and name not in _MAY_CHANGE:
                raise ConfigError(
                    f"{path}: {name} was {old[section][key]!r} and is now {value!r}; restore it, "
                    "or give the search another output"
                )
