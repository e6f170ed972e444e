"""Sample of lines for a vocabulary: bounded, even, the same on every executor, resumable."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.text import sample as module
from megatron_deberta.text.jobs.executors import RunOptions
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.jobs.progress import Counts
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import find_sources
from megatron_deberta.text.sample import sampled_lines
from tests.support.commands import Command
from tests.support.duplicates import with_run_options

LINES = [f"line {index:05d}" for index in range(10_000)]


def write(folder: Path, texts: list[str], name: str = "a.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def sample(path: Path, output: Path, sample_bytes: int = 0, **options: Any) -> list[str]:
    sources = find_sources([str(path)])
    options = with_run_options(options)
    with sampled_lines(sources, output, ReadOptions(), sample_bytes, **options) as lines:
        return lines


def test_sample_is_bounded_and_even(tmp_path: Path) -> None:
    path = write(tmp_path, LINES)
    lines = sample(path, tmp_path / "out", 20_000, unit_bytes=30_000)
    assert 5_000 < sum(map(len, lines)) <= 20_000
    positions = [int(line.split()[1]) for line in lines]
    assert positions == sorted(positions)
    quarters = [sum(q <= p * 4 // 10_000 < q + 1 for p in positions) for q in range(4)]
    assert min(quarters) > 0.5 * max(quarters)
    assert list(tmp_path.iterdir()) == [path]
    assert sample(path, tmp_path / "out") == LINES
    assert sample(path, tmp_path / "out", 110_000) == LINES
    with pytest.raises(ConfigError, match="--sample-mb -1"):
        sample(path, tmp_path / "out", -1_000_000)


def test_workers_drop_lines_of_a_large_input(tmp_path: Path) -> None:
    """Of 290 kB, workers keep no more than 16 times the sample."""
    path = write(tmp_path, LINES)
    kept = 0

    def look(stage: str, tasks: int, done: int, _: Counts) -> None:
        nonlocal kept
        if (stage, done) == ("check", 0):
            found = JobFolder(tmp_path / "out").path.glob("*/sample/*/lines.txt")
            kept = sum(path.stat().st_size for path in found)

    lines = sample(path, tmp_path / "out", 2_000, unit_bytes=30_000, advance=look)
    assert 500 < sum(map(len, lines)) <= 2_000
    assert 2_000 < kept <= 32_000


def test_an_interrupted_sample_continues_with_other_workers(tmp_path: Path) -> None:
    path = write(tmp_path, LINES)
    expected = sample(path, tmp_path / "whole", 20_000, unit_bytes=30_000)

    def stop(stage: str, tasks: int, done: int, _: Counts) -> None:
        assert tasks > 4
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sample(path, tmp_path / "out", 20_000, unit_bytes=30_000, advance=stop)
    counts: list[int] = []
    lines = sample(
        path, tmp_path / "out", 20_000, unit_bytes=30_000, workers=2,
        advance=lambda stage, tasks, done, _: counts.append(done),
    )  # fmt: skip
    assert counts[0] == 3
    assert lines == expected


def test_a_few_bad_records_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = b'{"text": "fine"}\n'
    path = tmp_path / "a.jsonl"
    path.write_bytes(good * 1500 + b'{"text": "a\\u0000b"}\n' + good * 10)
    assert len(sample(path, tmp_path / "out")) == 1510
    assert "1 records cannot be used and are left out; the first:" in caplog.text
    assert f'"offset": {1500 * len(good)}, "reason": "NUL character"' in caplog.text
    path.write_bytes(good * 500 + b"{\n")
    with pytest.raises(DataError, match=r"1 of 501 records are bad \(1 malformed JSON\)") as error:
        sample(path, tmp_path / "many")
    listed = re.search("they are listed in ([^;]*);", str(error.value))
    assert listed is not None
    (line,) = Path(listed[1]).read_text().splitlines()
    assert json.loads(line)["offset"] == 500 * len(good)
    assert len(sample(path, tmp_path / "many", allow_bad=0.01)) == 500


def test_a_smaller_vocabulary_reuses_the_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, ["hello world, this is text", "more of the same text, the the"] * 20)
    call = ["train-tokenizer", "--input", str(path), "--output", str(tmp_path / "out")]
    assert main([*call, "--vocab-size", "5000"]) != 0
    assert "at most" in capsys.readouterr().err
    assert JobFolder(tmp_path / "out").exists()
    assert main([*call, "--vocab-size", "20"]) == 0
    assert not JobFolder(tmp_path / "out").path.exists()


def test_a_failed_start_does_not_block_the_corrected_one(tmp_path: Path, cli: Command) -> None:
    path, bad = write(tmp_path, LINES[:300]), write(tmp_path, ["a b c"] * 300, "bad.jsonl")
    with bad.open("a") as stream:
        stream.write("{broken\n" * 9)
    output = ["--output", str(tmp_path / "out"), "--workers", "0"]
    command = ["train-tokenizer", *output, "--vocab-size", "25", "--input"]
    assert main([*command, str(bad)]) == 1
    assert "supports at most" in cli.errors(2, *command, str(path), "--vocab-size", "90000")
    assert main([*command, str(path), "--sample-mb", "0.001"]) == 0
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.jsonl", "bad.jsonl", "out"]
    assert main([*command, str(path), "--force", "--character-coverage", "3"]) == 2
    assert not (tmp_path / "out.unfinished").exists()


def test_one_that_comes_second_samples_nothing_and_leaves_nothing(
    tmp_path: Path, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands at a time: the second one waits for the folder, and finds the tokenizer."""
    path = write(tmp_path, LINES[:300])
    command = ["train-tokenizer", "--output", str(tmp_path / "out"), "--workers", "0"]
    command += ["--vocab-size", "25", "--input", str(path)]
    begin = module.begin_work

    def late(*arguments: Any) -> Any:
        work = begin(*arguments)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "tokenizer.json").touch()
        return work

    monkeypatch.setattr(module, "begin_work", late)
    monkeypatch.setattr(module, "StageRunner", None)
    assert "exists; name a new directory or add --force" in cli.errors(2, *command)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_a_killed_sample_is_still_protected(tmp_path: Path) -> None:
    path = write(tmp_path, LINES[:300])

    def kill() -> None:
        sources = find_sources([str(path)])
        with sampled_lines(sources, tmp_path / "out", ReadOptions(), 0, run=RunOptions(workers=0)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kill()
    with pytest.raises(ConfigError, match="begin again with --restart"):
        sample(path, tmp_path / "out", 2000)
