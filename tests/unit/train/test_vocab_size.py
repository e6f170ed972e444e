"""``model.vocab_size: auto`` becomes a number before anything is built or stored."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.config import RunConfig, load_config
from megatron_deberta.errors import ConfigError
from megatron_deberta.model import DebertaModel
from megatron_deberta.train import run
from megatron_deberta.train.preemption import SignalRecorder
from tests.support.tiny_models import tiny_tokenizer

AUTO = "model.vocab_size=auto"
SMALL = "configs/runs/small.yaml"


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save(str(folder))
    return folder


def test_a_run_replaces_auto_and_says_so(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class StoppedError(Exception):
        pass

    def capture(config: RunConfig, _: int) -> None:
        raise StoppedError(config.model.vocab_size)

    monkeypatch.setattr(run, "validate_for_world", capture)
    config = load_config(None, [AUTO, f"tokenizer.path={tokenizer_dir}"])
    with (
        caplog.at_level(logging.INFO),
        SignalRecorder() as signals,
        pytest.raises(StoppedError, match="^128$"),
    ):
        run.train_rank(config, signals, signals)
    assert "rounded up to a multiple of 128" in caplog.text


def test_a_dry_run_shows_the_number(
    tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pretrain", SMALL, "--dry-run", f"tokenizer.path={tokenizer_dir}"]) == 0
    assert "vocab_size: 128\n" in capsys.readouterr().out


def test_auto_needs_a_tokenizer() -> None:
    config = load_config(None, [AUTO])
    with pytest.raises(ConfigError, match=r"needs tokenizer.path or data.train"):
        run.with_vocab_size(config)
    with pytest.raises(ConfigError, match="vocab_size=auto needs a tokenizer"):
        DebertaModel(config.model)
