"""``--estimate`` prints the requirements of a command and creates no file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.tokenizer.training import train_sentencepiece
from tests.support.commands import Command
from tests.support.machine_text import documents


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Return a file of some megabytes, more than is sampled."""
    path = tmp_path / "corpus.jsonl"
    texts = documents()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    path.write_text(lines * (1 + 10_000_000 // len(lines)))
    return path


def estimate(command: list[str], cli: Command, folder: Path) -> str:
    before = sorted(folder.rglob("*"))
    described = cli(*command, "--estimate", "--nodes", "3", "--workers", "2")
    assert sorted(folder.rglob("*")) == before
    assert "with 3 x 2 workers" in described
    for word in ("time ", "disk ", "memory "):
        assert f"\n{word}" in described
    return described


def gigabytes(text: str, described: str) -> float:
    (found,) = re.findall(text.replace("N", r"([\d.]+) GB"), described)
    return float(found)


def test_split(corpus: Path, tmp_path: Path, cli: Command) -> None:
    command = ["split", "--input", str(corpus), "--output", str(tmp_path / "parted")]
    described = estimate(command, cli, tmp_path)
    assert main([*command, "--workers", "0"]) == 0
    written = sum(p.stat().st_size for p in (tmp_path / "parted").rglob("*.jsonl"))
    estimated = gigabytes("at most N for the uncompressed result", described)
    assert estimated == pytest.approx(written / 1e9, abs=0.006)


def test_train_tokenizer(corpus: Path, tmp_path: Path, cli: Command) -> None:
    command = ["train-tokenizer", "--input", str(corpus), "--output", str(tmp_path / "tokenizer")]
    size = corpus.stat().st_size
    whole = estimate([*command, "--sample-mb", "0"], cli, tmp_path)
    part = estimate([*command, "--sample-mb", "0.1"], cli, tmp_path)
    (megabytes,) = re.findall(r"sample  ([\d.]+) MB", whole)
    # The file has escapes besides the text.
    assert float(megabytes) == pytest.approx(size / 1e6, rel=0.1)
    assert "sample  0.1 MB" in part
    assert main([*command, "--sample-mb", "-1", "--estimate"]) == 2
    # A small sample needs less of everything.
    assert gigabytes("disk +N", part) < gigabytes("disk +N", whole)
    assert gigabytes("memory +N", part) < gigabytes("memory +N", whole)


def test_merge(corpus: Path, tmp_path: Path, cli: Command) -> None:
    train_sentencepiece(documents()[:40], str(tmp_path / "tokenizer"), vocab_size=500)
    for name in ("a", "b"):
        make = ["preprocess", "--input", str(corpus), "--tokenizer", str(tmp_path / "tokenizer")]
        assert main([*make, "--output", str(tmp_path / name), "--workers", "0"]) == 0
    shards = [str(tmp_path / f"{name}_text_document") for name in ("a", "b")]
    command = ["merge", *shards, "--output", str(tmp_path / "merged")]
    described = estimate(command, cli, tmp_path)
    merged = cli(*command, "--workers", "0")
    (count,) = re.findall(r"shards  2 of ([\d,]+) documents", described)
    assert f"merged: {count} documents" in merged
    written = sum(path.stat().st_size for path in tmp_path.glob("merged.*"))
    estimated = gigabytes("at most N for the uncompressed result", described)
    assert estimated == pytest.approx(written / 1e9, abs=0.006)
