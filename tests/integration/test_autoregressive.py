"""Autoregressive objectives from ``pretrain`` to ``generate`` and ``evaluate``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE, EXIT_USAGE
from megatron_deberta.evaluate.language_models import evaluate_perplexity
from tests.support.jobs import Run, records
from tests.support.minimal_pairs import write_pairs
from tests.support.tiny_runs import export_run

BOTH = ("objective.name=mlm+ar",)
ALONE = ("objective.name=autoregressive",)
TEXT = "The old man walked to the river .\n \n = He sat down = \nand looked at the water .\n"
OPTIONS = ("--stride", "8", "data.sequence_length=32", "train.micro_batch_size=2")


def evaluate(task: str, model: Path, data: Path, *options: str) -> dict[str, float]:
    output = model.parent / f"{task}.json"
    words = ["evaluate", task, "--model", str(model), "--data", str(data), "--output", str(output)]
    assert main([*words, *options]) == EXIT_DONE
    found: dict[str, float] = json.loads(output.read_text())
    return found


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_both_forms_are_trained_and_resumed(
    pretrain: Run, tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    every = ("log.every=1", "checkpoint.save_every=1", "train.eval_every=3")
    for exit_step in (2, 3, 6):
        assert pretrain(*BOTH, *every, f"train.exit_step={exit_step}")[0] == EXIT_DONE
    assert pretrain(*BOTH, *every, "train.exit_step=6", run_dir="whole")[0] == EXIT_DONE
    resumed, whole = (records(tmp_path / name, "train") for name in ("run", "whole"))
    forms = ["autoregressive_loss" in whole[step] for step in range(1, 7)]
    assert sum(forms) == 3
    for step, values in whole.items():
        assert resumed[step].keys() == values.keys()
        assert resumed[step]["loss"] == values["loss"]
    measured = records(tmp_path / "run", "validation")[6]
    assert measured.keys() >= {"loss", "masked_accuracy", "autoregressive_perplexity"}

    run_dir = tmp_path / "run"
    found = {
        form: evaluate("perplexity", run_dir, text, *OPTIONS, *options)
        for form, options in {"autoregressive": (), "masked": ("--form", "masked")}.items()
    }
    for form, values in found.items():
        assert values["form"] == form
        assert values["num_words"] == len(TEXT.split()) + 4
        assert values["perplexity_per_word"] == pytest.approx(
            math.exp(values["loss"] / values["num_words"])
        )
    assert found["masked"]["mask_every"] == 7
    assert main(["generate", str(run_dir), "The old", "", "--max-new-tokens", "4"]) == EXIT_DONE
    assert "The old" in capfd.readouterr().out
    options = ["--temperature", "1", "--top-k", "20", "--seed", "3", "--max-new-tokens", "4"]
    assert main(["generate", str(run_dir), "The old", *options]) == EXIT_DONE
    assert main(["fill-mask", str(run_dir), "The [MASK] man"]) == EXIT_DONE
    exported = export_run(run_dir, tmp_path / "exported", "--form", "autoregressive")
    assert 'pipeline("text-generation"' in capfd.readouterr().out
    card = (exported / "README.md").read_text()
    loss = f"{measured['autoregressive_loss']:.4f}"
    assert f"| loss, nats per predicted token | {loss} |" in card
    assert main(["fill-mask", str(exported), "The [MASK] man"]) != EXIT_DONE
    assert "its head is autoregressive" in capfd.readouterr().err


def test_autoregressive_alone(
    pretrain: Run, tmp_path: Path, text: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pairs = write_pairs(tmp_path / "pairs")
    blimp = ("train.blimp_every=2", f"train.blimp_data={pairs}")
    assert pretrain(*ALONE, *blimp)[0] == EXIT_DONE
    run_dir = tmp_path / "run"
    assert evaluate("blimp", run_dir, pairs)["accuracy"] == pytest.approx(
        records(run_dir, "minimal_pairs")[2]["accuracy"]
    )
    assert evaluate("perplexity", run_dir, text, *OPTIONS)["form"] == "autoregressive"
    assert main(["generate", str(run_dir), "The old", "--max-new-tokens", "4"]) == EXIT_DONE
    capfd.readouterr()
    model, data, absent = ["--model", str(run_dir)], ["--data", str(text)], tmp_path / "x"
    for words, message in (
        (["fill-mask", str(run_dir), "The [MASK]"], "fills no masks"),
        (
            ["convert", "--checkpoint", str(run_dir), "--form", "masked", "--output", str(absent)],
            "--form masked: the model was trained with objective.name=autoregressive",
        ),
        (["evaluate", "perplexity", *model, *data, "--form", "masked"], "--form masked"),
        (["evaluate", "perplexity", *model, *data, "--mask-every", "3"], "for the masked form"),
        (["evaluate", "perplexity", *model, *data, "--stride", "999"], "--stride 999 exceeds"),
        (["evaluate", "perplexity", *model, *data, "--limit", "9"],
         "unrecognized arguments: --limit"),
        (["evaluate", "blimp", *model, "--data", str(pairs), "--metric", "within_word_l2r"],
         "is for masked language models"),
        (["generate", str(run_dir), "The", "--top-k", "3"], "needs --temperature"),
    ):  # fmt: skip
        assert main(words) == EXIT_USAGE, words
        assert message in capfd.readouterr().err
    assert not absent.exists()


@pytest.mark.slow
def test_masked_model_has_a_masked_perplexity_only(
    uninterrupted: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result, is_first = evaluate_perplexity(uninterrupted, str(text), stride=8)
    assert is_first
    assert (result.form, result.mask_every, result.num_unknown) == ("masked", 7, 0)
    assert 1 < result.per_piece < 1e5
    words = ["evaluate", "perplexity", "--model", str(uninterrupted), "--data", str(text)]
    assert main([*words, "--form", "autoregressive"]) == EXIT_USAGE
    assert "objective.name=mlm" in capsys.readouterr().err
    assert main(["generate", str(uninterrupted), "The"]) == EXIT_USAGE
    assert "does not predict next tokens" in capsys.readouterr().err
