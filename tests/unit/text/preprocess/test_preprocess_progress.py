"""What is shown of a run, and that it counts what others and earlier runs have done."""

from __future__ import annotations

import gzip
import io
import re
import time
from pathlib import Path

import pytest
from rich.console import Console

from megatron_deberta.text.preprocess import progress as progress_module
from megatron_deberta.text.preprocess.progress import (
    ProgressCounters,
    ProgressDisplay,
)
from megatron_deberta.text.preprocess.units import plan_segments, recorded_bytes
from megatron_deberta.text.readers.sources import find_sources


def count(board: ProgressCounters) -> None:
    board.enter("reading")
    board.add(file_bytes=250, text_bytes=1_000_000, tokens=10, documents=1, quarantined=2)


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_SECONDS_BETWEEN_LINES", 0.0)
    shown = io.StringIO()
    counters = ProgressCounters()
    with ProgressDisplay(1000, [counters], lambda: 0, Console(file=shown)) as display:
        count(counters)
        display.refresh()
    first, *_, last = shown.getvalue().splitlines()
    assert first.startswith("preprocess: reading, 25%, ETA ")
    assert first.endswith("2 quarantined")
    assert last.startswith("preprocess: 1 documents, 10 tokens from 1.0 MB of text in ")


def test_bar_on_a_terminal() -> None:
    shown = io.StringIO()
    counters = ProgressCounters()
    console = Console(file=shown, force_terminal=True, width=100)
    with ProgressDisplay(1000, [counters], lambda: 0, console) as display:
        count(counters)
        display.refresh()
    assert "25%" in shown.getvalue()
    assert "MB/s" in shown.getvalue()


def test_what_others_and_earlier_runs_did_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock[0])
    shown = io.StringIO()
    counters = ProgressCounters()
    recorded = iter([500, 900])
    with ProgressDisplay(1000, [counters], lambda: next(recorded), Console(file=shown)) as display:
        count(counters)
        clock[0] += 8.0
        display.refresh()
    # 500 before, 250 here and 150 elsewhere in 8 s: 100 are left.
    assert shown.getvalue().startswith("preprocess: reading, 90%, ETA 2 s, ")


def test_shows_itself_while_the_work_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_module, "_SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(progress_module, "_SECONDS_BETWEEN_LOOKS", 0.01)
    shown = io.StringIO()
    counters = ProgressCounters()
    with ProgressDisplay(1000, [counters], lambda: 0, Console(file=shown)):
        count(counters)
        deadline = time.monotonic() + 60
        while "25%" not in shown.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert re.search(r"ETA \d+ s", shown.getvalue())


def test_bytes_of_recorded_units(tmp_path: Path) -> None:
    plain, stream = tmp_path / "plain.jsonl", tmp_path / "stream.jsonl.gz"
    plain.write_text('{"text": "A line."}\n' * 1000)
    stream.write_bytes(gzip.compress(bytes(range(256)) * 400, compresslevel=0))
    sources = find_sources([str(plain), str(stream)])
    segments = plan_segments(sources, 4_000)
    records: set[str] = set()

    def done() -> int:
        return recorded_bytes(records, segments, sources, 4_000)

    assert done() == 0
    records.add("00000000-000000")
    records.add("layout")
    assert done() == 4_000
    stream_segment = f"{len(segments) - 1:08d}"
    records.add(f"{stream_segment}-000000")
    records.add(f"{stream_segment}-000001")
    # A compressed text is taken to be four times as long as its file.
    assert done() == 4_000 + 2 * 1_000
