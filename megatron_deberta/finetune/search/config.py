"""Search configs: a YAML file with task, model, data, grid and seeds."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_deberta.config.loader import (
    CONFIG_ROOTS,
    OVERRIDES,
    holds_text,
    parse_override,
    plain_value,
    read_alternatives,
    read_value,
)
from megatron_deberta.config.yaml_reader import TextLoader, parse_string, parse_yaml, read_yaml
from megatron_deberta.errors import ConfigError
from megatron_deberta.parsing import conform

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
    data = {k: _typed(k, v, path) for k, v in read_yaml(_find(path), TextLoader).items()}
    grid = data.get("grid") or {}
    if not isinstance(grid, Mapping):
        raise ConfigError(f"{path}: grid={grid!r}: write `section.key: [value, ...]` lines below")
    data["grid"] = {key: read_alternatives(key, value, path) for key, value in grid.items()}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key:
            raise ConfigError(f"command line: {argument!r} is not key=value, as in seeds=3")
        key = key.strip()
        if "." in key:
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


def _find(name: str) -> Path:
    path = Path(name)
    if not path.exists() and path.parts[:1] == ("configs",):
        return next((root / path for root in CONFIG_ROOTS if (root / path).is_file()), path)
    return path


def _build(data: dict[str, Any], source: str) -> SearchConfig:
    known = [item.name for item in fields(SearchConfig)]
    for key in data:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}"
            raise ConfigError(f"{source}: no key {key!r}; {hint} (run keys belong to grid)")
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
    def absolute(path: str) -> str:
        return os.path.abspath(path) if path else ""

    is_file = search.task.endswith((".yaml", ".yml"))
    is_packaged = search.task.startswith("configs/") and not os.path.exists(search.task)
    task = absolute(search.task) if is_file and not is_packaged else search.task
    values = {item.name: getattr(search, item.name) for item in fields(search)}
    values |= {"task": task, "output": absolute(search.output or f"searches/{Path(task).stem}")}
    values |= {key: absolute(values[key]) for key in ("model", "data", "tokenizer")}
    return SearchConfig(**values)
