"""Configs are found by name from any folder."""

from pathlib import Path

import pytest

from megatron_deberta.config import load_config
from megatron_deberta.errors import ConfigError


def test_a_packaged_config_is_found_outside_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/runs/small.yaml").train.steps == 4000
    (tmp_path / "run.yaml").write_text("base: configs/models/small.yaml\ntrain: {steps: 20007}\n")
    assert load_config("run.yaml").train.steps == 20007


def test_a_local_config_takes_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    local = tmp_path / "configs/runs/small.yaml"
    local.parent.mkdir(parents=True)
    local.write_text("train: {steps: 20007}\n")
    assert load_config("configs/runs/small.yaml").train.steps == 20007


def test_an_unknown_config_is_an_error() -> None:
    with pytest.raises(ConfigError, match="configs/runs/absent.yaml"):
        load_config("configs/runs/absent.yaml")
