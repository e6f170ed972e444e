"""Progress of every command for text: stage, rates, ETA, workers and quarantined records."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from megatron_deberta.cli.main import main
from megatron_deberta.text.jobs import progress
from megatron_deberta.text.jobs.executors import RunOptions
from megatron_deberta.text.jobs.progress import Counts, ProgressDisplay
from megatron_deberta.text.preprocess.pipeline import preprocess
from megatron_deberta.text.readers.sources import find_sources
from tests.support.commands import Command
from tests.support.machine_text import documents

COUNTS = {"text_bytes": 8_000_000, "tokens": 4_000, "quarantined": 2}


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    shown = io.StringIO()
    with ProgressDisplay("preprocess", lambda: 4, Console(file=shown)) as display:
        display.advance("encode", 1000, 500, {})
        clock[0] += 4
        display.advance("encode", 1000, 600, COUNTS)
        clock[0] += 4
        display.advance("encode", 1000, 900, COUNTS)
        display.advance("merge", 2, 2, {})
    # 500 of 1,000 were done before; 400 more in 8 s, so 100 take 2 s.
    assert shown.getvalue().splitlines() == [
        "preprocess: encode 90%, ETA 2 s, 1.0 MB/s, 500 tokens/s, 4 workers, 2 quarantined",
        "preprocess: merge 100%, 4 workers",
    ]


def test_bar_on_a_terminal() -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=120)
    with ProgressDisplay("deduplicate", lambda: 2, console) as display:
        display.advance("sign", 10, 0, {})
        display.advance("sign", 10, 10, COUNTS)
    text = shown.getvalue()
    assert "deduplicate: sign" in text
    assert "MB/s" in text
    assert text.rindex("100%") > text.rindex(" 0%")


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz"])
def test_preprocess_counts_what_all_processes_record(
    name: str, tokenizer_dir: str, tmp_path: Path
) -> None:
    lines = [json.dumps({"text": text}) for text in documents()[:60]] + ["{"]
    content = "\n".join(lines).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    seen: list[tuple[str, int, int, Counter[str]]] = []

    def advance(stage: str, size: int, done: int, counts: Counts) -> None:
        seen.append((stage, size, done, Counter(counts)))

    (manifest,) = preprocess(
        find_sources([str(path)]),
        tokenizer_dir,
        str(tmp_path / "out" / "c"),
        run=RunOptions(workers=2, allow_bad=1, advance=advance),
        unit_bytes=20_000,
    )
    encode = [each for each in seen if each[0] == "encode"]
    assert encode[0][1:3] == (path.stat().st_size, 0)
    _, size, done, counts = encode[-1]
    assert size == done
    assert counts["tokens"] == manifest.num_tokens
    assert counts["documents"] == manifest.num_documents == 60
    assert counts["text_bytes"] == len(content)
    assert counts["quarantined"] == 1
    merged = [each[1:3] for each in seen if each[0] == "merge"]
    assert merged[-1][0] == merged[-1][1] > 0


@pytest.mark.parametrize(
    "command", ["deduplicate", "split", "train-tokenizer", "preprocess", "merge"]
)
def test_every_command_shows_rates_and_workers(
    command: str, tokenizer_dir: str, tmp_path: Path, cli: Command
) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents()))
    call = [command, "--input", str(path), "--output", str(tmp_path / "out"), "--workers", "1"]
    if command == "merge":
        shards = [str(tmp_path / name) for name in ("a", "b")]
        for shard in shards:
            make = ["preprocess", *call[1:3], "--tokenizer", tokenizer_dir, "--output", shard]
            assert main(make) == 0
        call = [command, *(f"{shard}_text_document" for shard in shards), *call[3:]]
    call += ["--tokenizer", tokenizer_dir] if command == "preprocess" else []
    call += ["--vocab-size", "500"] if command == "train-tokenizer" else []
    first = cli.errors(0, *call).splitlines()[0]
    assert first.startswith(f"{command}: ")
    assert "100%" in first
    assert " MB/s, " in first
    assert "1 workers" in first
    assert ("tokens/s" in first) == (command == "preprocess")
