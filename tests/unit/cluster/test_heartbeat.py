"""Heartbeats are read by the supervisor while the rank writes them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_deberta.cluster.watchdog.heartbeat import (
    DUMP_SIGNAL,
    FOLDER_VARIABLE,
    Beat,
    Heartbeat,
    beat_path,
    beats_folder,
    read_beat,
    stacks_path,
)
from megatron_deberta.errors import MegatronDebertaError
from megatron_deberta.observe.progress import Section
from tests.support.jobs import ROOT


@contextmanager
def python(
    program: str, variables: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with a Python program; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(variables or {})},
        stdout=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


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
    times = (after.steps_timed, after.data_time, after.forward_time, after.step_time)
    assert times == (1, 5, 0, 20)
    assert 0 <= time.monotonic_ns() - after.time < 10**9
    # The last heartbeat remains after the end of its writer.
    assert read_beat(path) == after


def test_no_heartbeat_without_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    with Heartbeat.of_this_rank(0) as heartbeat:
        heartbeat.enter(Section.DATA, 1)
    assert list(tmp_path.iterdir()) == []


def test_reader_sees_complete_heartbeats_only(tmp_path: Path) -> None:
    path = beat_path(tmp_path, 0)
    program = f"""
from pathlib import Path
from megatron_deberta.cluster.watchdog.heartbeat import Heartbeat
from megatron_deberta.observe.progress import Section
with Heartbeat(Path({str(path)!r})) as heartbeat:
    print("here", flush=True)
    step = 0
    while True:
        # Each step's numbers belong together.
        heartbeat.add_times(steps=1, data=2, forward=3, whole=4)
        step += 1
        heartbeat.enter(Section.DATA, step)
"""
    with python(program) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        last = reads = different = 0
        deadline = time.monotonic() + 60
        # On a busy machine the same heartbeat is read many times.
        while reads < 20_000 or different < 200:
            reads += 1
            assert time.monotonic() < deadline
            beat = read_beat(path)
            assert beat is not None
            expected = tuple(beat.step * n for n in (1, 2, 3, 4))
            found = (beat.steps_timed, beat.data_time, beat.forward_time, beat.step_time)
            assert found == expected
            assert beat.position == beat.step >= last
            different += beat.step > last
            last = beat.step


def test_interrupted_write_is_read_as_the_previous_heartbeat(tmp_path: Path) -> None:
    path = beat_path(tmp_path, 0)
    contents: list[bytes] = [b"\0" * 152]
    signs: list[Beat | None] = [None]
    with Heartbeat(path) as heartbeat:
        for step in range(300, 304):
            contents.append(path.read_bytes())
            signs.append(read_beat(path))
            heartbeat.add_times(steps=1, data=9**12, forward=9**15, whole=9**18)
            heartbeat.enter(Section.SAVE, step)
    for before, after, old, new in zip(contents, contents[1:], signs, signs[1:], strict=False):
        changed = [place for place in range(len(after)) if before[place] != after[place]]
        assert new is not None
        for count in range(len(changed) + 1):
            # Bytes that were not written yet may be zeros or those of an older heartbeat.
            torn = bytearray(before)
            for place in changed[:count]:
                torn[place] = after[place]
            path.write_bytes(torn)
            assert read_beat(path) == (new if count == len(changed) else old)
            for place in changed[count:]:
                torn[place] = 0
            path.write_bytes(torn)
            assert read_beat(path) in (old, new)


def test_signal_prints_the_stack_of_a_blocked_process(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    program = f"""
from megatron_deberta.cluster.watchdog.heartbeat import Heartbeat
def blocked():
    print("here", flush=True)
    open({str(fifo)!r}).read()
with Heartbeat.of_this_rank(0):
    blocked()
"""
    with python(program, {FOLDER_VARIABLE: str(tmp_path)}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        process.send_signal(DUMP_SIGNAL)
        stacks = stacks_path(beat_path(tmp_path, 0))
        deadline = time.monotonic() + 10
        while "in blocked" not in stacks.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert process.poll() is None


def on_a_full_disk(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program with ``folder`` on a full file system in memory."""
    script = f"""
mount -t tmpfs -o size=64k none {folder} || exit 99
head -c 200000 /dev/zero > {folder}/filler 2> /dev/null
exec {sys.executable} -c "$PROGRAM"
"""
    options = ["--mount"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--mount"]
    done = subprocess.run(
        ["unshare", *options, "bash", "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PROGRAM": program},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if done.returncode in (1, 99) and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"cannot mount: {done.stderr}")
    return done


def test_first_beat_on_a_full_memory_disk_is_an_error_and_no_sigbus(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from megatron_deberta.cluster.watchdog.heartbeat import Heartbeat, beat_path
try:
    Heartbeat(beat_path(Path("{tmp_path}"), 0))
except OSError as error:
    print(error)
"""
    done = on_a_full_disk(tmp_path, program)
    assert (done.returncode, done.stderr) == (0, "")
    assert "No space left on device" in done.stdout


def test_heartbeats_are_on_disk_if_memory_is_full(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    (tmp_path / "disk").mkdir()
    program = f"""
import tempfile
from megatron_deberta.cluster.watchdog import heartbeat
heartbeat.MEMORY_FOLDER, tempfile.tempdir = "{tmp_path}/shm", "{tmp_path}/disk"
print(heartbeat.is_memory_full(), heartbeat.beats_folder([0, 1]))
"""
    done = on_a_full_disk(tmp_path / "shm", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"True {tmp_path}/disk/ranks-")
    assert len(list((tmp_path / "disk").glob("ranks-*/rank_*"))) == 2


def test_without_any_space_the_supervisor_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(MegatronDebertaError, match="no space for heartbeats"):
        beats_folder([0])
    assert list(tmp_path.iterdir()) == []
