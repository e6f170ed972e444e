"""What a rank writes, a supervisor reads, also while it is being written."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_deberta.cluster.heartbeat import (
    DUMP_SIGNAL,
    FOLDER_VARIABLE,
    Heartbeat,
    Section,
    beat_path,
    read_beat,
    stacks_path,
)
from tests.support.jobs import ROOT


def test_sections_steps_and_times_are_read_back(tmp_path: Path) -> None:
    path = beat_path(tmp_path, 3)
    assert read_beat(path) is None
    with Heartbeat(path) as heartbeat:
        first = read_beat(path)
        assert first is not None
        assert (first.section, first.position, first.pid) == (Section.STARTUP, 0, os.getpid())
        heartbeat.enter(Section.DATA, 41)
        heartbeat.add_times(steps=1, data=5, whole=20)
        heartbeat.enter(Section.STEP)
        heartbeat.mark()
        with heartbeat.section(Section.SAVE):
            inside = read_beat(path)
        after = read_beat(path)
    assert inside is not None
    assert after is not None
    assert (inside.section, inside.step, inside.position) == (Section.SAVE, 41, 4)
    assert (after.section, after.position) == (Section.STEP, 5)
    assert (after.steps_timed, after.data_time, after.forward_time, after.step_time) == (
        1,
        5,
        0,
        20,
    )
    assert 0 <= time.monotonic_ns() - after.time < 10**9
    # What was said last outlives whoever said it.
    assert read_beat(path) == after


def test_without_a_supervisor_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with Heartbeat.of_this_rank(0) as heartbeat:
        heartbeat.enter(Section.DATA, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_reader_never_sees_half_a_sign(tmp_path: Path) -> None:
    path = beat_path(tmp_path, 0)
    done = threading.Event()
    with Heartbeat(path) as heartbeat:

        def write() -> None:
            step = 0
            while not done.is_set():
                # Each step's numbers belong together.
                heartbeat.add_times(steps=1, data=2, forward=3, whole=4)
                step += 1
                heartbeat.enter(Section.DATA, step)

        writer = threading.Thread(target=write)
        writer.start()
        for _ in range(5000):
            beat = read_beat(path)
            assert beat is not None
            expected = tuple(beat.step * n for n in (1, 2, 3, 4))
            found = (beat.steps_timed, beat.data_time, beat.forward_time, beat.step_time)
            assert found == expected
            assert beat.position == beat.step
        done.set()
        writer.join()
    assert beat.step > 100


def test_a_writer_that_died_halfway_is_still_read(tmp_path: Path) -> None:
    path = beat_path(tmp_path, 0)
    with Heartbeat(path) as heartbeat:
        heartbeat.enter(Section.SAVE, 7)
    content = bytearray(path.read_bytes())
    struct.pack_into("<q", content, 0, 99)
    path.write_bytes(content)
    beat = read_beat(path)
    assert beat is not None
    assert (beat.section, beat.step) == (Section.SAVE, 7)


def test_the_signal_shows_where_a_blocked_process_stands(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = f"""
from megatron_deberta.cluster.heartbeat import Heartbeat
def blocked():
    print("here", flush=True)
    open({str(fifo)!r}).read()
with Heartbeat.of_this_rank(0):
    blocked()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, FOLDER_VARIABLE: str(tmp_path), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        process.send_signal(DUMP_SIGNAL)
        stacks = stacks_path(beat_path(tmp_path, 0))
        deadline = time.monotonic() + 10
        while "in blocked" not in stacks.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
