"""Settings for data of one's own, which is often small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_deberta.config.schema import (
    FinetuneConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.errors import ConfigError
from megatron_deberta.finetune.data import check_warmup
from megatron_deberta.finetune.settings import choose_settings, describe_settings, settings_name
from megatron_deberta.tasks import load_task
from megatron_deberta.tasks.task import absolute_task_name


@pytest.mark.parametrize("head", ["classification", "regression", "spans", "tokens", "choices"])
def test_custom_tasks_use_the_usual_settings_and_not_a_search_space(head: str) -> None:
    task = load_task(f"custom_{head}")
    chosen = choose_settings(task, ModelConfig())
    assert chosen == task.settings["default"]
    assert chosen["optimizer.warmup_fraction"] == 0.1


@pytest.mark.parametrize(
    ("task", "hidden_size", "name"),
    [
        ("wnut17", 768, "default"),
        ("policyqa", 768, "default"),
        ("policyqa", 1024, "default"),
        ("wnut17", 1536, "default"),
        ("mrpc", 768, "release_base"),
        ("mrpc", 1024, "release_large"),
        # The release's for another size are worse than the paper's for this one.
        ("mrpc", 1536, "paper_1.5b"),
    ],
)
def test_the_settings_of_a_run_are_those_that_the_task_names(
    task: str, hidden_size: int, name: str
) -> None:
    model = ModelConfig(hidden_size=hidden_size)
    assert settings_name(load_task(task), model) == name


def test_the_settings_and_their_values_are_named() -> None:
    task, model = load_task("wnut17"), ModelConfig()
    config = RunConfig(
        model=ModelConfig(head_dropout=0.1),
        train=TrainConfig(global_batch_size=32),
        optimizer=OptimizerConfig(learning_rate=3e-5, warmup_fraction=0.1, warmup_steps=0),
        finetune=FinetuneConfig(epochs=10),
    )
    assert describe_settings(task, model, "", config) == (
        "settings of task wnut17: default: optimizer.learning_rate=3e-05, "
        "optimizer.warmup_fraction=0.1, train.global_batch_size=32 (replaces 16), "
        "finetune.epochs=10, model.head_dropout=0.1"
    )
    line = describe_settings(task, model, "paper_base", config)
    assert line.startswith("settings of task wnut17: paper_base: ")
    assert "optimizer.learning_rate=3e-05 (replaces 1.5e-05)" in line
    assert "train.global_batch_size=32 (replaces 16)" in line
    assert describe_settings(task, model, "none", config) == "settings of task wnut17: none"


def test_paths_of_a_run_are_absolute_but_packaged_names_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_task_name("sst2") == "sst2"
    assert absolute_task_name("configs/tasks/sst2.yaml") == "configs/tasks/sst2.yaml"
    assert absolute_task_name("own.yaml") == str(tmp_path / "own.yaml")


def test_a_warm_up_longer_than_the_epochs_names_the_remedy() -> None:
    config = RunConfig(train=TrainConfig(steps=12), optimizer=OptimizerConfig(warmup_steps=500))
    message = (
        r"warmup_steps=500 exceeds the 12 steps of finetune\.epochs=6 of 64 examples; published "
        r"settings .* add optimizer\.warmup_fraction=0\.1"
    )
    with pytest.raises(ConfigError, match=message):
        check_warmup(config, "finetune.epochs=6 of 64 examples")
    share = replace(config.optimizer, warmup_fraction=0.1)
    check_warmup(replace(config, optimizer=share), "")
