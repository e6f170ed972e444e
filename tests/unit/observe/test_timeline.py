"""Time axis of a run: time by part, restarts, and lines that a crash has cut short."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from megatron_deberta.observe.metrics import JsonLines
from megatron_deberta.observe.progress import ProgressObserver, Section
from megatron_deberta.observe.timeline import SectionTimer, Timeline

CPU = torch.device("cpu")


def test_seconds_are_counted_by_section(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    timer = SectionTimer(ProgressObserver())
    for seconds, section in ((3, Section.DATA), (1, Section.STEP)):
        now += seconds
        timer.enter(section)
    now += 5
    with timer.section(Section.DATA):
        now += 2
    now += 1
    timer.add_times(forward=4_000_000_000)
    assert timer.take() == {"start-up": 3, "data": 3, "step": 2, "forward": 4}
    now += 7
    timer.enter(Section.SAVE)
    assert timer.take() == {"step": 7}


def test_the_observer_receives_everything() -> None:
    calls: list[object] = []

    class Observer(ProgressObserver):
        def enter(self, section: Section, step: int | None = None) -> None:
            calls.append((section, step))

        def mark(self) -> None:
            calls.append("mark")

        def add_times(
            self, *, steps: int = 0, data: int = 0, forward: int = 0, whole: int = 0
        ) -> None:
            calls.append((steps, data, forward, whole))

    timer = SectionTimer(Observer())
    timer.enter(Section.STEP, 3)
    timer.mark()
    timer.add_times(steps=1, data=2, forward=3, whole=4)
    assert calls == [(Section.STEP, 3), "mark", (1, 2, 3, 4)]


def test_restarts_and_errors_stay_on_the_time_axis(tmp_path: Path) -> None:
    timer = SectionTimer(ProgressObserver())
    lost = Timeline(str(tmp_path), timer, CPU, 0, 2)
    lost.__enter__()
    lost.record(10)
    lost.__exit__(ValueError, ValueError("lost\nnode"), None)
    with Timeline(str(tmp_path), timer, CPU, 5, 1) as timeline:
        timeline.record(6)
    lines = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [
        ("start", 0), ("steps", 10), ("end", 10), ("start", 5), ("steps", 6), ("end", 6),
    ]  # fmt: skip
    assert lines[0]["world_size"] == 2
    assert lines[1]["memory_bytes"] > 1e6
    assert (lines[2]["reason"], lines[5]["reason"]) == ("ValueError: lost node", "")


def test_end_has_the_last_step_although_it_was_not_recorded(tmp_path: Path) -> None:
    timer = SectionTimer(ProgressObserver())
    with Timeline(str(tmp_path), timer, CPU, 500, 1) as timeline:
        timer.enter(Section.AFTER, 525)
        timeline.record(525)
        timer.enter(Section.DATA, 537)
        timer.enter(Section.STEP)
        timer.enter(Section.AFTER, 538)
        timer.enter(Section.END)
    lines = [json.loads(line) for line in (tmp_path / "timeline.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [500, 525, 538]


def test_a_cut_line_spoils_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"st')
    lines = JsonLines(path)
    lines.append({"step": 2, "loss": float("nan")})
    assert path.read_text() == '{"step": 1}\n{"st\n{"step":2,"loss":null}\n'
    lines.cut_after(1)
    assert path.read_text() == '{"step": 1}\n'
    JsonLines(tmp_path / "absent").cut_after(1)


def test_a_full_disk_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    lines = JsonLines(Path("/dev/full"))
    lines.append({"step": 1})
    lines.append({"step": 2})
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full: [Errno 28] No space left on device; training goes on"
    ]
