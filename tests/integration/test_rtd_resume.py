"""Runs of replaced-token detection through ``pretrain`` resume bit for bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE, EXIT_USAGE
from tests.support.jobs import Run, assert_same_checkpoints, records

RTD = ("objective.name=rtd", "model.head=rtd", "train.eval_every=2", "log.every=1")
ENGINES = {
    "plain": ("parallel.engine=plain",),
    "ZeRO-2": ("parallel.engine=deepspeed", "parallel.zero_stage=2"),
    "ZeRO-3": ("parallel.engine=deepspeed", "parallel.zero_stage=3"),
}
MODES = {
    "joint": (),
    "alternating": ("rtd.update=alternating", "rtd.discriminator_learning_rate=1e-3"),
}


def numbers(run_dir: Path, kind: str) -> list[dict[str, float]]:
    """Return what records say about the model, without speeds."""
    prefixes = ("loss", "perplexity", "masked", "grad_norm", "discriminator", "replaced")
    return [
        {key: value for key, value in record.items() if key.startswith(prefixes)}
        for record in records(run_dir, kind).values()
    ]


@pytest.mark.parametrize(
    ("mode", "engine"),
    [
        ("joint", "plain"),
        pytest.param("alternating", "plain", marks=pytest.mark.nightly),
        pytest.param("alternating", "ZeRO-3", marks=pytest.mark.slow),
        pytest.param("joint", "ZeRO-2", marks=pytest.mark.nightly),
        pytest.param("joint", "ZeRO-3", marks=pytest.mark.nightly),
        pytest.param("alternating", "ZeRO-2", marks=pytest.mark.nightly),
    ],
)
def test_resumed_run_is_bit_identical(
    pretrain: Run, tmp_path: Path, mode: str, engine: str
) -> None:
    settings = (*RTD, *MODES[mode], *ENGINES[engine])
    assert pretrain(*settings, "train.exit_step=4", run_dir="whole")[0] == EXIT_DONE
    assert pretrain(*settings, "train.exit_step=2")[0] == EXIT_DONE
    if mode == "alternating" and engine == "plain":
        code, error = pretrain(*RTD, "train.exit_step=4")
        assert code == EXIT_USAGE
        assert "rtd.update='joint' but the checkpoint of step 2 was trained with" in error
    assert pretrain(*settings, "train.exit_step=4")[0] == EXIT_DONE
    run, whole = tmp_path / "run", tmp_path / "whole"
    for kind in ("train", "validation"):
        found = numbers(run, kind)
        assert found == numbers(whole, kind)
        assert len({record["discriminator_loss"] for record in found if len(record) > 1}) > 1
    assert_same_checkpoints(run, whole, 4)


def test_inspect_shows_what_the_generator_draws(
    pretrain: Run, run_yaml: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pretrain(*RTD, "train.exit_step=1")[0] == EXIT_DONE
    inspect = ["inspect", "data", str(run_yaml), "--num-samples", "2", "--statistics", "0"]
    assert main([*inspect, "--generator", str(tmp_path / "run")]) == EXIT_DONE
    output = capfd.readouterr().out
    counts = re.findall(
        r"(\d+) targets .*?generated, (\d+) of (\d+) replaced:\n(.*?)\n\n", output + "\n\n", re.S
    )
    assert len(counts) == 2
    for targets, replaced, drawn, text in counts:
        assert targets == drawn
        assert 0 < int(replaced) <= int(drawn)
        assert len(re.findall(r"\{[^{}]+>[^{}]+\}", text)) >= int(replaced) - 2
        assert "[MASK]" not in text
    assert pretrain("train.exit_step=1", run_dir="mlm")[0] == EXIT_DONE
    assert main([*inspect, "--generator", str(tmp_path / "mlm")]) == EXIT_USAGE
    assert "objective.name=mlm draws no pieces" in capfd.readouterr().err
