"""The commands of docs/first-walk.md, in their order, on a small text and with smaller numbers."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import signal
import subprocess
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_INTERRUPTED
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
from megatron_deberta.train.preemption import PREEMPTION_SIGNALS
from tests.integration.test_documented_commands import NAMED_YAML, commands
from tests.support.jobs import ROOT
from tests.support.machine_text import documents

pytestmark = pytest.mark.slow
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEPS = 80
SMALLER = {
    "--vocab-size 8000": "--vocab-size 400",
    "--to onnx": "--to onnx --no-timing",
    "hidden_size: 256": "hidden_size: 32",
    "ffn_hidden_size: 1024": "ffn_hidden_size: 64",
    "warmup_steps: 50": "warmup_steps: 5",
    "steps: 1500": f"steps: {STEPS}",
    "global_batch_size: 32\n  micro_batch_size: 32": "global_batch_size: 4\n  micro_batch_size: 4",
    "eval_every: 250": "eval_every: 50",
    "  every: 50": "  every: 1",
    "finetune.epochs: 3": "finetune.epochs: 2",
}
STOPPED_AFTER = 20
"""Steps of pretraining until Ctrl-C is pressed, at least."""
ELSEWHERE = ("git", "curl")
"""Commands that need a network; the test writes what they download."""


@dataclass(frozen=True)
class Walk:
    """The folder of the walk, and what its commands printed, by their first words."""

    folder: Path
    printed: dict[str, str]
    snippet: dict[str, Any]


def write_downloads(folder: Path) -> None:
    """Write paragraphs of Python's documentation, and sentences whose names are the capitals."""
    (novels := folder / "68_german_novels" / "corpus").mkdir(parents=True)
    texts = documents()
    for number in range(20):
        (novels / f"{number}.txt").write_text("\n\n".join(texts[number::20]), encoding="utf-8")
    (novels / "copy.txt").write_text(texts[0], encoding="utf-8")
    (folder / "wikineural").mkdir()
    sentences = re.findall(r"[A-Z]\w*(?: \w+){3,15}\.", " ".join(texts).replace("\n", " "))
    for name, part in (("val", sentences[:160]), ("test", sentences[160:200])):
        lines = []
        for sentence in part:
            for place, word in enumerate(sentence.rstrip(".").split()):
                lines.append(f"{place}\t{word}\t{'B-MISC' if place and word[0].isupper() else 'O'}")
            lines.append("")
        (folder / "wikineural" / f"{name}.conllu").write_text("\n".join(lines), encoding="utf-8")


def press_ctrl_c(run_dir: Path) -> None:
    """Send SIGINT to this process when the run has taken some steps."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        path = run_dir / FILE_NAME
        if path.exists() and path.read_bytes().count(b'"train"') >= STOPPED_AFTER:
            os.kill(os.getpid(), signal.SIGINT)
            return
        time.sleep(0.005)


def run(words: list[str]) -> str:
    """Run a command of the page; return what it printed."""
    if words[0] != "megatron-deberta" and "megatron-deberta" not in words:
        subprocess.run(["bash", "-ec", " ".join(words)], check=True)
        return ""
    arguments = words[words.index("megatron-deberta") + 1 :]
    is_interrupted = words[0] == "timeout"
    # `predict` writes bytes.
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with redirect_stdout(out), redirect_stderr(out):
        if is_interrupted:
            threading.Thread(target=press_ctrl_c, args=(Path("runs/german"),), daemon=True).start()
        handlers = {number: signal.getsignal(number) for number in PREEMPTION_SIGNALS}
        code = main(arguments)
        # The command ignores them from the end of a stopped run on.
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out.seek(0)
    text = out.read()
    assert code == (EXIT_INTERRUPTED if is_interrupted else 0), text
    return text


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """Do what the page says in a new folder."""
    pytest.importorskip("onnxruntime", reason="extra [onnx] is not installed")
    folder = tmp_path_factory.mktemp("walk")
    text = (ROOT / "docs/first-walk.md").read_text(encoding="utf-8")
    for old, new in SMALLER.items():
        assert old in text, old
        text = text.replace(old, new)
    (page := folder / "page.md").write_text(text, encoding="utf-8")
    for name, content in NAMED_YAML.findall(text):
        (folder / name).write_text(content, encoding="utf-8")
    write_downloads(folder)
    printed = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in commands(str(page)):
            if words[0] not in ELSEWHERE:
                printed[" ".join(words[:6])] = run(words)
        (folder / "tag.py").write_text("".join(PYTHON.findall(text)), encoding="utf-8")
        with redirect_stdout(io.StringIO()) as out:
            snippet = runpy.run_path("tag.py")
    printed["tag.py"] = out.getvalue()
    return Walk(folder, printed, snippet)


def output_of(walk: Walk, beginning: str) -> str:
    """Return what the only command with this beginning printed."""
    (found,) = (text for words, text in walk.printed.items() if words.startswith(beginning))
    return found


def test_copies_are_removed(walk: Walk) -> None:
    summary = json.loads((walk.folder / "clean" / "summary.json").read_text())
    assert summary["removed"]["exact"] >= len(documents()[0].split("\n\n"))


def test_the_interrupted_run_continues_at_its_step(walk: Walk) -> None:
    stopped = re.search(r"stopped by Ctrl-C at step (\d+)", output_of(walk, "timeout"))
    assert stopped is not None
    assert STOPPED_AFTER <= int(stopped[1]) < STEPS
    resumed = output_of(walk, "megatron-deberta pretrain")
    assert f"resuming from step {stopped[1]}\n" in resumed
    records = list(read_metrics(walk.folder / "runs/german" / FILE_NAME))
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, STEPS + 1))
    validations = [r["loss"] for r in records if r["kind"] == "validation" and "loss" in r]
    assert validations[-1] < validations[0]
    assert (walk.folder / "runs/german/loss.png").stat().st_size > 1000


def test_masks_are_filled(walk: Walk) -> None:
    filled = output_of(walk, "megatron-deberta fill-mask")
    assert len(re.findall(r"0\.\d+|\d+(?:\.\d+)? ?%", filled)) >= 6, filled


def test_the_tagger_has_a_score_and_predicts(walk: Walk) -> None:
    assert re.search(r"\bf1 \d", output_of(walk, "megatron-deberta finetune"))
    predicted = json.loads(output_of(walk, "megatron-deberta predict"))
    assert len(predicted["label"]) == len(predicted["words"])


def test_onnx_and_torch_agree(walk: Walk) -> None:
    found = walk.snippet
    model = AutoModelForTokenClassification.from_pretrained(walk.folder / "exports/ner").eval()
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(x) for name, x in found["inputs"].items()})
    np.testing.assert_allclose(found["logits"], expected.logits[0].numpy(), atol=1e-4)
    lines = walk.printed["tag.py"].splitlines()
    assert [line.split()[0] for line in lines] == found["words"]
    assert {line.split()[1] for line in lines} <= set(found["labels"].values())
