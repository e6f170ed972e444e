"""Settings for data of one's own, which is often small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_deberta.config.schema import ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.finetune.data import check_warmup
from megatron_deberta.finetune.settings import choose_settings
from megatron_deberta.tasks import load_task


@pytest.mark.parametrize("head", ["classification", "regression", "spans", "tokens", "choices"])
def test_custom_tasks_use_the_usual_settings_and_not_a_search_space(head: str) -> None:
    task = load_task(f"custom_{head}")
    chosen = choose_settings(task, ModelConfig())
    assert chosen == task.settings["default"]
    assert chosen["optimizer.warmup_fraction"] == 0.1


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
