"""Run config of fine-tuning a model on a task."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megatron_deberta.config import config_to_dict
from megatron_deberta.config.loader import (
    OVERRIDES,
    config_from_layers,
    merge_layers,
    parse_overrides,
)
from megatron_deberta.config.rules import uses_whole_batch
from megatron_deberta.config.schema import ModelConfig, RunConfig, with_task_head
from megatron_deberta.errors import ConfigError, MegatronDebertaError
from megatron_deberta.evaluate.models import SourceModel
from megatron_deberta.evaluate.splits import class_names
from megatron_deberta.finetune.data import planned_steps
from megatron_deberta.tasks.reading import read_examples
from megatron_deberta.tasks.task import TRAIN, TaskConfig, absolute_task_name, load_task

_MICRO_BATCH = 8
_RELEASE = "release_"
_SHORT_WARMUP = 0.1
"""Warm-up of runs that are shorter than the published one, as a fraction of their steps."""
_SMALL_MODEL = 15_000_000
"""Parameters besides the token embeddings below which base models' learning rates are too small.

DeBERTa-v3-xsmall, the smallest published model, has 22 million.
"""
_SMALL_MODEL_RATE = 1e-4
"""Learning rates of at least this size suit small models; no published one is as large."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "optimizer": {"learning_rate": 2e-5, "warmup_fraction": 0.1},
    "train": {"global_batch_size": 32},
    "finetune": {"epochs": 3.0, "validations_per_epoch": 1.0},
    "data": {"num_workers": 0},
    # Losses of small batches vary too much to be compared.
    "stability": {"spike_sigmas": None},
    "checkpoint": {"keep_last": 1, "save_every": 500},
}

logger = logging.getLogger(__name__)


def finetune_config(
    task_name: str,
    model: SourceModel,
    data: str,
    overrides: Sequence[str] = (),
    *,
    settings: str = "",
    world_size: int = 1,
) -> RunConfig:
    """Return the config of a fine-tuning run.

    Later layers win: defaults, the task's published settings, the overrides.

    Args:
        task_name: task file or name of a packaged task.
        model: the model to start from.
        data: folder of the task's files.
        overrides: ``section.key=value``; ``train.steps`` replaces the number of epochs, and
            ``train.eval_every`` that of validations per epoch.
        settings: name of the task's settings; ``none``: none; empty: see `settings_name`.
        world_size: number of ranks, which matters where the batch cannot be accumulated.

    Raises:
        ConfigError: the task, its settings or a value is wrong.
    """
    task = load_task(task_name)
    layers = _task_layers(task, model.config, settings)
    given = _keys(overrides)
    for name, replaced in (("steps", "epochs"), ("eval_every", "validations_per_epoch")):
        if f"train.{name}" in given:
            layers["finetune"][replaced] = None
    if "optimizer.warmup_steps" in given:
        layers["optimizer"]["warmup_fraction"] = None
    # Absolute, so that later commands on the run work in any folder.
    layers["tokenizer"] = {"path": os.path.abspath(model.tokenizer_path)}
    layers["data"].setdefault("sequence_length", task.max_length)
    layers["checkpoint"]["load_from"] = os.path.abspath(model.path)
    layers["train"].setdefault("run_dir", os.path.join("runs", task.name))
    layers["finetune"] |= {
        "task": absolute_task_name(task_name),
        "data": os.path.abspath(data) if data else None,
    }
    _shorten_warmup(layers, overrides)
    config = config_from_layers([(f"task {task.name}", layers)], overrides)
    if "train.micro_batch_size" in given or "micro_batch_size" in layers["train"]:
        return config
    micro = _micro_batch(config, world_size)
    return config_from_layers(
        [(f"task {task.name}", layers)], [*overrides, f"train.micro_batch_size={micro}"]
    )


def _keys(overrides: Sequence[str]) -> set[str]:
    return {override.partition("=")[0].strip() for override in overrides}


def _shorten_warmup(layers: dict[str, dict[str, Any]], overrides: Sequence[str]) -> None:
    """Shorten a published warm-up that is longer than the run, unless it was set by hand."""
    given = parse_overrides(overrides)
    if any(key.startswith("warmup_") for key in given.get("optimizer", {})):
        return
    config = merge_layers([("published settings", layers), (OVERRIDES, given)])
    published = config.optimizer.warmup_steps
    if config.optimizer.warmup_fraction or not published:
        return
    steps = _num_steps(config, published) if config.finetune.epochs else config.train.steps
    if 0 < steps < published:
        shorter = round(_SHORT_WARMUP * steps)
        layers["optimizer"]["warmup_steps"] = shorter
        logger.warning(
            "optimizer.warmup_steps=%d instead of the published %d, since the run has %d steps; "
            "set it to choose another", shorter, published, steps,
        )  # fmt: skip


def _num_steps(config: RunConfig, enough: int) -> int:
    """Return the steps of a run by its epochs; a lower bound that is ``enough`` suffices.

    0: the data cannot be read, which the run reports.
    """
    try:
        examples = _count_examples(config.finetune.task, config.finetune.data)
        per_epoch = -(-examples // max(1, config.train.global_batch_size))
        # An example can have several rows.
        least = math.ceil((config.finetune.epochs or 0) * per_epoch)
        return least if least >= enough else planned_steps(config).train.steps
    except (MegatronDebertaError, OSError):
        return 0


@lru_cache(maxsize=4)
def _count_examples(task: str, data: str) -> int:
    return len(read_examples(load_task(task), data, TRAIN))


def planned_config(
    run: RunConfig,
    task_name: str,
    examples: int,
    world_size: int,
    overrides: Sequence[str] = (),
    *,
    settings: str = "",
) -> RunConfig:
    """Return the config of fine-tuning a run's model on a task whose data is not at hand.

    Args:
        run: the run; its model, parallelism and number formats are used.
        task_name: task file or name of a packaged task.
        examples: number of training examples.
        world_size: number of ranks, over which the batch is divided.
        overrides: ``section.key=value``.
        settings: as for `finetune_config`.

    Raises:
        ConfigError: the task, its settings or a value is wrong.
    """
    task = load_task(task_name)
    layers = _task_layers(task, run.model, settings)
    length = layers["data"].pop("sequence_length", task.max_length)
    layers["data"] |= {"sequence_length": length, "short_steps": 0, "train": []}
    layers["finetune"]["task"] = task_name
    named = [("run", config_to_dict(run)), (f"task {task.name}", layers)]
    config = config_from_layers(named, overrides)
    train, epochs, given = config.train, config.finetune.epochs, _keys(overrides)
    if epochs and "train.steps" not in given:
        steps = math.ceil(epochs * -(-examples // train.global_batch_size))
        train = replace(train, steps=steps)
    if "train.micro_batch_size" not in given and "micro_batch_size" not in layers["train"]:
        train = replace(train, micro_batch_size=_micro_batch(config, world_size))
    return replace(config, train=train)


def _micro_batch(config: RunConfig, world_size: int) -> int:
    """Return the micro batch of a run on this many ranks that states none."""
    dp_size = max(1, world_size // config.parallel.tensor_parallel_size)
    share = max(1, config.train.global_batch_size // dp_size)
    return share if uses_whole_batch(config) else math.gcd(share, _MICRO_BATCH)


def _task_layers(task: TaskConfig, model: ModelConfig, settings: str) -> dict[str, dict[str, Any]]:
    """Return the defaults, the task's settings and the model with the task's head, by section."""
    layers = {section: dict(values) for section, values in _DEFAULTS.items()}
    for name, value in choose_settings(task, model, settings).items():
        section, _, key = name.partition(".")
        layers.setdefault(section, {})[key] = value
    dropout = layers.pop("model", {}).get("head_dropout", model.head_dropout)
    architecture = with_task_head(model, task.head, class_names(task), dropout)
    layers["model"] = config_to_dict(architecture)
    layers.setdefault("objective", {})["name"] = task.head
    return layers


def choose_settings(task: TaskConfig, model: ModelConfig, name: str = "") -> dict[str, Any]:
    """Return the settings of `settings_name` as run keys; of a grid, the first value of each.

    Args:
        task: the task.
        model: the architecture.
        name: of the settings; empty: chosen by the model's size.

    Raises:
        ConfigError: the task has no settings of that name.
    """
    found = task.settings.get(settings_name(task, model, name), {})
    keys = {key: v[0] if isinstance(v, list) else v for key, v in found.items()}
    if keys.get("optimizer.warmup_steps"):
        keys.setdefault("optimizer.warmup_fraction", None)
    return keys


def settings_name(task: TaskConfig, model: ModelConfig, name: str = "") -> str:
    """Return the name of the settings of a run, ``none`` if it has none.

    Without a name, these are the release's for the model's size, else those that the task names as
    its default. A default that is the release's for another size comes after the paper's search
    space for this size.

    Args:
        task: the task.
        model: the architecture.
        name: given name; empty: none.

    Raises:
        ConfigError: the task has no settings of that name.
    """
    if name and name not in (*task.settings, "none"):
        known = ", ".join([*task.settings, "none"])
        raise ConfigError(f"--settings {name}: task {task.name} has {known}")
    if name:
        return name
    size = "base" if model.hidden_size <= 768 else "large" if model.hidden_size <= 1024 else "1.5b"
    default, paper = task.default_settings, f"paper_{size}"
    others = (paper, default) if default.startswith(_RELEASE) else (default, paper)
    names = (f"{_RELEASE}{size}", *others)
    return next((each for each in names if each in task.settings), "none")


def describe_settings(task: TaskConfig, model: ModelConfig, name: str, config: RunConfig) -> str:
    """Return a line with the settings of a run and the values that they have in its config.

    Args:
        task: the task.
        model: the model that the run starts from.
        name: as for `settings_name`.
        config: the run.
    """
    chosen = settings_name(task, model, name)
    values = config_to_dict(config)
    parts = []
    for key, value in choose_settings(task, model, name).items():
        section, _, last = key.partition(".")
        used = values[section][last]
        published = task.settings[chosen].get(key)
        note = f" (first of {len(published)})" if isinstance(published, list) else ""
        if used != value:
            note = f" (replaces {value})"
        parts.append(f"{key}={used}{note}")
    return f"settings of task {task.name}: {chosen}{': ' * bool(parts)}{', '.join(parts)}"


def learning_rate_hint(
    config: RunConfig, overrides: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """Return a hint if the learning rate was chosen for larger models, else an empty text.

    That of a task's settings, or the default, was chosen for base models or larger ones.

    Args:
        config: the run.
        overrides: those that it was made with; one of the learning rate is the user's own choice.
        shapes: of the model's parameters, by canonical name.
    """
    key, rate = "optimizer.learning_rate", config.optimizer.learning_rate
    if rate >= _SMALL_MODEL_RATE or key in _keys(overrides):
        return ""
    size = sum(
        math.prod(shape) for name, shape in shapes.items() if not name.startswith("embeddings.")
    )
    if size >= _SMALL_MODEL:
        return ""
    return (
        f"{key}={rate} is a value for base models; this model has {size / 1e6:.1f} million "
        f"parameters besides its token embeddings: try {key}=5e-4, or compare values with "
        "megatron-deberta search"
    )
