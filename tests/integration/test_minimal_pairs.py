"""``evaluate blimp`` of runs and exports, and the same during pretraining."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE, EXIT_USAGE
from tests.support.jobs import Run, records
from tests.support.minimal_pairs import PAIRS, write_pairs
from tests.support.tiny_runs import export_run

GOLDEN = Path(__file__).parents[1] / "golden" / "c6955b0"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write_pairs(tmp_path / "pairs")


def evaluate(model: Path, pairs: Path, output: Path, *options: str) -> int:
    task = ["evaluate", "blimp", "--model", str(model), "--data", str(pairs)]
    return main([*task, "--output", str(output), *options])


def test_a_run_and_its_export_have_the_same_accuracies(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = ("--tokenizer", str(GOLDEN / "tokenizer"))
    found = {}
    for name in ("run", "hf"):
        output = tmp_path / f"{name}.json"
        assert evaluate(GOLDEN / name, pairs, output, *tokenizer) == EXIT_DONE
        found[name] = json.loads(output.read_text())
    assert found["run"] == found["hf"]
    assert found["run"]["num_pairs"] == len(PAIRS)
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["paradigm", "pairs", "accuracy"]
    assert table[-1].split()[:2] == ["all", "6"]
    assert "syntax semantics" in "\n".join(table)

    output = tmp_path / "word.json"
    options = (*tokenizer, "--limit", "1", "--metric", "within_word_l2r")
    assert evaluate(GOLDEN / "run", pairs, output, *options) == EXIT_DONE
    found["word"] = json.loads(output.read_text())
    assert (found["word"]["num_pairs"], found["word"]["metric"]) == (4, "within_word_l2r")


def test_wrong_arguments_are_one_line(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, model = tmp_path / "out.json", GOLDEN / "run"
    for data, options, message in (
        (tmp_path / "absent", (), "absent: no such folder"),
        (pairs, ("--split", "dev"), "unrecognized arguments: --split"),
        (pairs, ("--metric", "x"), "invalid choice"),
    ):
        try:
            code = evaluate(model, data, output, *options)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        assert code != EXIT_DONE
        assert message in capsys.readouterr().err
        assert not output.exists()
    task = ["evaluate", "task", "sst2", "--model", str(model), "--data", str(pairs)]
    assert main([*task, "--limit", "3"]) == EXIT_USAGE
    assert "unrecognized arguments: --limit" in capsys.readouterr().err


def test_generator_of_replaced_token_detection(
    pretrain: Run, pairs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rtd = ("objective.name=rtd", "model.head=rtd", "train.exit_step=1")
    assert pretrain(*rtd)[0] == EXIT_DONE
    run = tmp_path / "run"
    exported = export_run(run, tmp_path / "hf")
    found = []
    for model in (run, exported / "generator"):
        output = tmp_path / f"{model.name}.json"
        assert evaluate(model, pairs, output) == EXIT_DONE
        found.append(json.loads(output.read_text()))
    assert found[0] == found[1]
    assert evaluate(exported, pairs, tmp_path / "none.json") != EXIT_DONE
    assert "give a model trained for masked language modelling" in capfd.readouterr().err


def test_pretraining_records_accuracies_and_resumes(
    pretrain: Run, pairs: Path, tmp_path: Path
) -> None:
    settings = ("train.blimp_every=2", f"train.blimp_data={pairs}", "checkpoint.save_every=1")
    assert pretrain(*settings, "train.exit_step=3", run_dir="whole")[0] == EXIT_DONE
    whole = records(tmp_path / "whole", "minimal_pairs")
    assert list(whole) == [2, 3]
    assert whole[2].keys() >= {"accuracy", "accuracy_syntax", "num_pairs"}

    # Resumed at a step whose evaluation was lost, as after a kill.
    assert pretrain(*settings, "train.exit_step=2", run_dir="resumed")[0] == EXIT_DONE
    path = tmp_path / "resumed" / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines() if "minimal_pairs" not in line]
    path.write_text("\n".join(kept) + "\n")
    assert pretrain(*settings, "train.exit_step=3", run_dir="resumed")[0] == EXIT_DONE
    assert records(tmp_path / "resumed", "minimal_pairs") == whole

    # The accuracies are those of the command.
    output = tmp_path / "blimp.json"
    assert evaluate(tmp_path / "whole", pairs, output, "--limit", "50") == EXIT_DONE
    found = json.loads(output.read_text())
    assert found["accuracy"] == pytest.approx(whole[3]["accuracy"])
    recorded = {name: whole[3][f"accuracy_{name}"] for name in found["fields"]}
    assert found["fields"] == pytest.approx(recorded)
