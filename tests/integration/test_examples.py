"""The scripts in examples/ and the snippets of docs/python.md run as documented."""

from __future__ import annotations

import re
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_deberta import load_config, pretrain
from megatron_deberta.checkpoint.layout import step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.store import find_newest
from megatron_deberta.cli.main import main
from megatron_deberta.errors import ConfigError
from megatron_deberta.objectives import build_objective
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
from megatron_deberta.train.preemption import PREEMPTION_SIGNALS
from tests.support.tiny_task import MODEL, write_task

ROOT = Path(__file__).parents[2]
OLD_RUN = ROOT / "tests/golden/c6955b0"
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a script in this process and returns its output."""

    def run(script: str, *arguments: str) -> str:
        path = str(ROOT / "examples" / script)
        monkeypatch.setattr("sys.argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_snippets_of_the_page(tmp_path: Path) -> None:
    """In the page's order, with the inputs that the text describes and paths of a test run."""
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(snippets) == 5
    code = "\n".join(snippets)
    tokenizer = f'"{OLD_RUN}/tokenizer"'
    for shown, existing in {
        # The run names the tokenizer where it was when the run was made.
        '(Path("runs/first"))': f'(Path("{OLD_RUN}/run"), {tokenizer})',
        '"shards/books_text_document"': f'"{OLD_RUN}/shards/docs_text_document"',
        '"tokenizer"': tokenizer,
        "vocab_size=32000": "vocab_size=320",
    }.items():
        assert shown in code
        code = code.replace(shown, existing)
    ids = torch.randint(5, 300, (2, 16))
    names: dict[str, Any] = {"torch": torch, "ids": ids, "labels": ids, "targets": ids}
    names |= {"attention_mask": torch.ones_like(ids), "steps": 1, "MASK": 4}
    names |= {name: torch.randn(2, 4, 16, 8) for name in ("query", "key", "value")}
    names |= {f"position_{name}": torch.randn(4, 64, 8) for name in ("key", "query")}
    names["mask"] = torch.ones(2, 16, dtype=torch.bool)
    script = tmp_path / "snippets.py"
    script.write_text(code, encoding="utf-8")
    names = runpy.run_path(str(script), init_globals=names)
    assert names["out"].shape == (2, 4, 16, 8)
    assert next(iter(names["loader"])).inputs.input_ids.shape == (4, 128)
    assert names["logits"].shape[:2] == (2, 16)


def test_the_run_of_the_readme(run_yaml: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(from megatron_deberta import load.*?)```", readme, re.DOTALL)
    for shown, existing in {
        "configs/runs/small.yaml": str(run_yaml),
        "data.train=shards/corpus_text_document": "train.exit_step=2",
        "tokenizer.path=tokenizer": "parallel.engine=plain",
        "runs/first": f"{tmp_path}/run",
    }.items():
        assert shown in code
        code = code.replace(shown, existing)
    (script := tmp_path / "readme.py").write_text(code, encoding="utf-8")
    runpy.run_path(str(script))
    assert find_newest(tmp_path / "run") == step_dir(tmp_path / "run", 2)


def test_train_in_forty_lines(run: Run) -> None:
    losses = [float(line.split()[-1]) for line in run("train_in_forty_lines.py", "40").splitlines()]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 2


def test_pretrain_with_callback(run_yaml: Path, tmp_path: Path) -> None:
    """Resumed after step 10: the callback sees each step once."""
    script = runpy.run_path(str(ROOT / "examples/pretrain_with_callback.py"))
    handlers = [signal.getsignal(number) for number in PREEMPTION_SIGNALS]
    for last in (10, 12):
        overrides = [f"train.run_dir={tmp_path / 'run'}", f"train.exit_step={last}"]
        config = load_config(str(run_yaml), overrides)
        assert pretrain(config, callbacks=[script["EveryStep"]()]) == 0
    assert [signal.getsignal(number) for number in PREEMPTION_SIGNALS] == handlers
    rows = (tmp_path / "run" / "steps.csv").read_text().splitlines()
    assert [int(row.split(",")[0]) for row in rows] == list(range(1, 13))
    assert all(float(row.split(",")[2]) > 0 for row in rows)


def test_pretrain_with_loss(
    run_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    overrides = ["objective.class_path=pretrain_with_loss.PenalisedModelling"]
    overrides += [f"train.run_dir={tmp_path / 'run'}", "train.exit_step=6", "log.every=1"]
    assert main(["pretrain", str(run_yaml), *overrides]) == 0
    records = read_metrics(tmp_path / "run" / FILE_NAME)
    penalties = [record["penalty_loss"] for record in records if record["kind"] == "train"]
    assert penalties[-1] < penalties[0]
    assert any("penalty_loss" in record for record in records if record["kind"] == "validation")


@pytest.mark.parametrize("path", ["no_such_module.Loss", "torch.no_such_name", "os.path.join", "."])
def test_a_class_path_that_names_no_objective(path: str, run_yaml: Path) -> None:
    config = load_config(str(run_yaml), [f"objective.class_path={path}"])
    with pytest.raises(ConfigError, match=re.escape(f"objective.class_path={path}")):
        build_objective(config)


def test_finetune_with_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained, stopped and resumed: the head's own weights are in the checkpoint."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    data, run_dir = write_task(tmp_path / "data"), tmp_path / "run"
    command = [
        "finetune", str(data / "task.yaml"), "--model", str(MODEL), "--data", str(data),
        f"train.run_dir={run_dir}", "parallel.engine=plain", "log.tensorboard=false",
        "train.global_batch_size=8", "train.device=cpu", "log.every=1", "finetune.epochs=2",
        "objective.class_path=finetune_with_head.ClassificationWithResidual",
    ]  # fmt: skip
    assert main([*command, "train.exit_step=2"]) == 0
    before = CheckpointReader(step_dir(run_dir, 2)).tensor("classifier.residual.weight")
    assert main(command) == 0
    newest = find_newest(run_dir)
    assert newest is not None
    assert not torch.equal(CheckpointReader(newest).tensor("classifier.residual.weight"), before)
    assert any("accuracy" in record for record in read_metrics(run_dir / FILE_NAME))


def test_attention_operator(run: Run) -> None:
    assert "output [2, 100, 64]" in run("attention_operator.py")


def test_shards_dataloader(run: Run) -> None:
    random = run("shards_dataloader.py").splitlines()
    assert random[1] == "input_ids [4, 128], 76 masked tokens"
    shard = (str(OLD_RUN / "shards/docs_text_document"), str(OLD_RUN / "tokenizer"))
    assert run("shards_dataloader.py", *shard).startswith("9,059 tokens")


def test_fill_mask_from_run(run: Run) -> None:
    text = "The [MASK] of [MASK]."
    shown = run("fill_mask_from_run.py", str(OLD_RUN / "run"), text, str(OLD_RUN / "tokenizer"))
    assert len(shown.splitlines()) == 10
    assert shown.startswith("position 2: ")
