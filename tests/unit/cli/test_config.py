"""``config``, the page of keys, and shell completion."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import argcomplete
import pytest

from megatron_deberta.cli.completion import complete
from megatron_deberta.cli.config import list_keys, markdown, profile_table
from megatron_deberta.cli.main import main
from megatron_deberta.config import RunConfig, load_config
from megatron_deberta.tasks.task import task_names

ROOT = Path(__file__).parents[3]
RUN = str(ROOT / "configs" / "runs" / "small.yaml")


def test_every_key_has_a_meaning() -> None:
    names = [
        f"{section.name}.{key.name}"
        for section in fields(RunConfig)
        for key in fields(getattr(RunConfig(), section.name))
    ]
    assert [key.name for key in list_keys()] == names
    assert all(key.meaning.endswith(".") for key in list_keys())


def test_the_page_of_keys_is_up_to_date() -> None:
    assert (ROOT / "docs" / "keys.md").read_text() == markdown(list_keys()), (
        "run: megatron-deberta config --list --markdown > docs/keys.md"
    )


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--list", "train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any("model." in line for line in lines)
    # Without a terminal: one line per key, not padded.
    assert "train.steps\tint\t100000\tNumber of optimizer steps." in lines
    (device,) = [line for line in lines if "train.device" in line]
    assert '\tauto, cpu, cuda\t"auto"\t' in device
    assert main(["config", "--list"]) == 0
    assert "model.num_layers" in capsys.readouterr().out


@pytest.mark.slow
def test_packaged_runs_and_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--runs"]) == 0
    header, *lines = lines_of(capsys)
    assert header == "run\tparameters\thardware\tbatch\tsteps\twhat"
    rows = {line.split("\t")[0]: line.split("\t")[1:] for line in lines}
    files = {f"configs/runs/{path.name}" for path in (ROOT / "configs" / "runs").glob("*.yaml")}
    assert rows.keys() == files
    assert rows["configs/runs/base_dgx2.yaml"] == [
        "139.6M", "64 GPUs, fp16", "2,048", "1,000,000",
        "DeBERTa-base of the paper (Table 8): four DGX-2, 64 V100",
    ]  # fmt: skip
    assert rows["configs/runs/small.yaml"][0] == "5.1M + 257 x vocabulary"
    assert main(["config", "--models"]) == 0
    header, *lines = lines_of(capsys)
    assert header == "model\tparameters\tlayers\twidth\theads\tvocabulary\twhat"
    models = {line.split("\t")[0]: line.split("\t")[1:] for line in lines}
    assert models["configs/models/v3_large.yaml"][:5] == ["435.7M", "24", "1024", "16", "128,100"]
    assert all(row[-1] for row in (*rows.values(), *models.values())), "a file has no comment"


def test_packaged_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["finetune", "--list-tasks"])
    assert caught.value.code == 0
    header, *rows = [line.split("\t") for line in lines_of(capsys)]
    assert header == ["task", "kind", "metrics, the first selects", "files", "what"]
    assert [row[0] for row in rows] == task_names()
    (sst2,) = [row for row in rows if row[0] == "sst2"]
    assert sst2[1:4] == ["classification", "accuracy", "tsv: train.tsv, dev.tsv, test.tsv"]
    assert all(len(row) == 5 and all(row) for row in rows)


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines printed since the last call."""
    return capsys.readouterr().out.splitlines()


def test_resolved_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["config", RUN, "train.steps=700"]) == 0
    copy = tmp_path / "run.yaml"
    copy.write_text(capsys.readouterr().out)
    assert load_config(copy) == load_config(RUN, ["train.steps=700"])


def test_an_open_vocabulary_size_is_shown_as_auto(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert load_config(RUN).model.vocab_size == 0
    assert main(["config", RUN]) == 0
    assert "\n  vocab_size: auto\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pre"], ["preprocess", "pretrain", "predict"]),
        (["pretrain", "--dry"], ["--dry-run"]),
        (["pretrain", "RUN.yaml", "train.st"], ["train.steps="]),
        # Also behind an option.
        (["pretrain", "RUN.yaml", "--dry-run", "train.st"], ["train.steps="]),
        (["doctor", "RUN.yaml", "--nodes", "2", "train.st"], ["train.steps="]),
        (["status", "train.st"], []),
        (["pretrain", "configs/runs/qu"], ["configs/runs/quickstart.yaml"]),
        (["search", "configs/searches/paper_b"], ["configs/searches/paper_base.yaml"]),
        (["finetune", "sst"], ["sst2", "sst2_zero_shot"]),
        (["submit", "RUN.yaml", "--cluster", "dgx_"], ["dgx_h100"]),
        (["plan", "RUN.yaml", "--task", "sst"], ["sst2", "sst2_zero_shot"]),
        (["pretrain", "RUN.yaml", "precision.dtype="], ["fp32", "bf16", "fp16", "auto"]),
        (["launch", "RUN.yaml", "parallel.sequence_parallel=t"], ["true"]),
        (["inspect", "sh"], ["shards"]),
        (["evaluate", "task", "sst"], ["sst2", "sst2_zero_shot"]),
        (["evaluate", "blimp", "--me"], ["--metric"]),
        (["convert", "--dtype", "fp"], ["fp32", "fp16"]),
        (["convert", "--dtype=b"], ["bf16"]),
    ],
)
def test_completion(words: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = " ".join(["megatron-deberta", *words])
    variables = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line,
        # bash makes words of their own of "=".
        "COMP_POINT": str(len(line)), "_ARGCOMPLETE_COMP_WORDBREAKS": "=",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # It would open file descriptor 9, which is in use here.
    monkeypatch.setattr(argcomplete.CompletionFinder, "_init_debug_stream", lambda _: None)
    found = io.StringIO()
    with pytest.raises(SystemExit):
        complete(output_stream=found, exit_method=sys.exit)
    assert found.getvalue().replace(" ", "").split() == expected


def test_shells_call_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("zsh", "fish", "bash"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert "megatron-deberta" in script
    call = (
        "COMP_LINE='megatron-deberta pretrain --dry'; COMP_POINT=31; "
        "_python_argcomplete megatron-deberta; echo ${COMPREPLY[@]}"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{call}"],
        capture_output=True, text=True, check=True, env={**os.environ, "PATH": path},
    )  # fmt: skip
    assert done.stdout.split() == ["--dry-run"]


def test_the_page_has_the_keys_of_profiles() -> None:
    table = profile_table()
    assert "| `gpu_type` |" in table
    assert table in (ROOT / "docs" / "slurm.md").read_text(), f"put into docs/slurm.md:\n{table}"
