"""``config``, the page of keys, and shell completion."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_deberta.cli.completion import parsers, takes_keys
from megatron_deberta.cli.config import list_keys, markdown
from megatron_deberta.cli.main import COMMANDS, main
from megatron_deberta.config import RunConfig, load_config

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
    ("arguments", "message"),
    [
        ([], "give either RUN.yaml, to print what it resolves to, or --list"),
        (["--list", "trains"], "--list trains: must be one of checkpoint, cluster, "),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def complete(*words: str) -> list[str]:
        typed = ("megatron-deberta", *words)
        call = f"COMP_WORDS=({shlex.join(typed)}); COMP_CWORD={len(words)}; _megatron_deberta"
        done = subprocess.run(
            ["bash", "-c", f'{script}\n{call} 2>/dev/null; echo "${{COMPREPLY[@]}}"'],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.split()

    assert complete("pre") == ["preprocess", "pretrain", "predict"]
    assert complete("pretrain", "--dry") == ["--dry-run"]
    assert complete("pretrain", "RUN.yaml", "train.st") == ["train.steps="]
    assert complete("status", "train.st") == []
    assert complete("pretrain", "configs/runs/qu") == ["configs/runs/quickstart.yaml"]
    assert complete("search", "configs/searches/paper_b") == ["configs/searches/paper_base.yaml"]
    assert complete("finetune", "sst") == ["sst2"]
    assert complete("submit", "RUN.yaml", "--cluster", "dgx_") == ["dgx_h100"]
    assert complete("plan", "RUN.yaml", "--task", "sst") == ["sst2"]
    # bash makes words of their own of "=".
    assert complete("pretrain", "RUN.yaml", "precision.dtype", "=") == ["fp32", "bf16", "fp16"]
    assert complete("pretrain", "RUN.yaml", "precision.dtype", "=", "b") == ["bf16"]
    assert complete("launch", "RUN.yaml", "parallel.sequence_parallel", "=", "t") == ["true"]
    assert complete("convert", "precision.dtype", "=", "b") == []
    assert complete("convert", "--dtype", "fp") == ["fp32", "fp16"]
    assert complete("convert", "--dtype", "=", "b") == ["bf16"]
    for shell in ("zsh", "fish"):
        assert main(["completion", shell]) == 0
        script = capsys.readouterr().out
        assert all(command.name in script for command in COMMANDS)
        assert "train.steps=" in script
        assert all(name in script for name in ("configs/runs/quickstart.yaml", "sst2", "dgx_h100"))
        assert "fp32 fp16 bf16" in script


def test_commands_with_overrides_complete_keys() -> None:
    known = {command.name for command, parser in parsers().items() if takes_keys(parser)}
    tasks = {"finetune", "predict", "evaluate", "finetune-checkpoints", "search"}
    assert known == {"config", "doctor", "index", "launch", "plan", "pretrain", "submit"} | tasks
