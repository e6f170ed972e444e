"""The run lock: one holder per folder, with dead processes, other machines and earlier attempts."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_deberta.cluster import run_lock
from megatron_deberta.cluster.run_lock import (
    Holder,
    RunLock,
    newest_lock,
    raise_if_locked,
    read_lock,
)
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.errors import ConfigError, DataError
from tests.support.jobs import ROOT

HOLD = """
import errno, fcntl, os, sys, time
if len(sys.argv) > 3:
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")
    fcntl.flock = flock
from megatron_deberta.cluster import run_lock
from megatron_deberta.cluster.run_lock import RunLock
from megatron_deberta.errors import ConfigError
run_lock.HEARTBEAT_SECONDS = 0.3
try:
    with RunLock(sys.argv[1]):
        if os.fork() == 0:
            # A loader process that outlives its parent.
            time.sleep(60)
        print("held", os.getpid(), flush=True)
        time.sleep(float(sys.argv[2]))
except ConfigError as error:
    print(error, flush=True)
    sys.exit(2)
"""


@contextmanager
def started(
    run_dir: Path, seconds: float, *options: str, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a process that takes the lock, in a new session that is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir), str(seconds), *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time-outs for holders on other machines."""
    monkeypatch.setattr(run_lock, "DEAD_SECONDS", 1.0)
    monkeypatch.setattr(run_lock, "SILENT_SECONDS", 0.5)


def test_lock_is_exclusive_and_released(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "):
            RunLock(tmp_path).__enter__()
    with RunLock(tmp_path), pytest.raises(ConfigError):
        RunLock(tmp_path).__enter__()
    assert len(list((tmp_path / "lock").iterdir())) == 1


def test_files_of_a_process_killed_while_it_took_the_lock_are_removed(tmp_path: Path) -> None:
    killed = "os.link = lambda *_: os.kill(os.getpid(), 9)\n"
    command = [sys.executable, "-c", f"import os\n{killed}{HOLD}", str(tmp_path), "0"]
    process = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert process.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "lock").iterdir())) == 1
    with RunLock(tmp_path):
        assert [path.name for path in (tmp_path / "lock").iterdir()] == ["00000001.json"]


def test_raise_if_locked(tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    raise_if_locked(tmp_path)
    with RunLock(tmp_path):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "):
            raise_if_locked(tmp_path)
    raise_if_locked(tmp_path)
    write_foreign_lock(tmp_path / "elsewhere")
    raise_if_locked(tmp_path / "elsewhere")
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    with RunLock(tmp_path / "requeued"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        raise_if_locked(tmp_path / "requeued")


def test_pretrain_checks_the_lock_before_importing_torch() -> None:
    modules = "megatron_deberta.cli.pretrain, megatron_deberta.rank_process"
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "False\n"


def test_a_full_disk_does_not_hide_why_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lock's own file cannot be written either."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_lock, "write_atomically", fail)
    with pytest.raises(DataError, match="cannot write the sample log"), RunLock(tmp_path):
        raise DataError("cannot write the sample log")
    monkeypatch.undo()
    assert "00000001.json: not released: No space left on device" in caplog.text
    with RunLock(tmp_path) as lock:
        assert lock.number == 2


def test_killed_holder_releases_the_lock_while_its_loader_lives(tmp_path: Path) -> None:
    with started(tmp_path, 60) as holder:
        assert first_line(holder) == f"held {holder.pid}"
        with started(tmp_path, 0) as loser:
            assert re.search(rf"in use by process {holder.pid} on ", first_line(loser))
            assert loser.wait(10) == 2
        holder.kill()
        # Signals are delivered with a delay.
        holder.wait(5)
        with RunLock(tmp_path):
            pass


@pytest.mark.slow
def test_one_of_many_processes_takes_over_from_a_dead_holder(tmp_path: Path) -> None:
    for _ in range(2):
        with started(tmp_path, 60) as dead:
            first_line(dead)
        with started(tmp_path, 20) as a, started(tmp_path, 20) as b, started(tmp_path, 20) as c:
            lines = {process.pid: first_line(process) for process in (a, b, c)}
            winners = [pid for pid, line in lines.items() if line == f"held {pid}"]
            assert len(winners) == 1, lines
            others = [line for pid, line in lines.items() if pid not in winners]
            assert all(f"in use by process {winners[0]} on " in line for line in others)


def take_into(held: list[RunLock], folder: Path, barrier: threading.Barrier) -> None:
    barrier.wait()
    with suppress(ConfigError):
        held.append(RunLock(folder).__enter__())


def test_threads_compete_for_a_new_folder(tmp_path: Path) -> None:
    for number in range(30):
        folder, barrier = tmp_path / str(number), threading.Barrier(6)
        held: list[RunLock] = []
        threads = [
            threading.Thread(target=take_into, args=(held, folder, barrier)) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1
        held[0].__exit__(None, None, None)


def write_foreign_lock(run_dir: Path, **values: object) -> Path:
    """Write the lock of another machine, as seen on a shared disk."""
    holder = replace(Holder.this_process(), host="elsewhere", boot="other", pid=7)
    path = run_dir / "lock" / "00000041.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(holder) | values))
    return path


def test_live_holder_on_another_machine_is_named(tmp_path: Path) -> None:
    path = write_foreign_lock(tmp_path)
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(0.5):
            os.utime(path)

    heart = threading.Thread(target=beat)
    heart.start()
    began = time.monotonic()
    try:
        with pytest.raises(ConfigError, match="in use by process 7 on elsewhere, since 20"):
            RunLock(tmp_path).__enter__()
    finally:
        stop.set()
        heart.join()
    assert time.monotonic() - began < 10


def test_silent_holder_on_another_machine_is_dead(
    tmp_path: Path, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    # Written by a clock that is an hour ahead.
    later = time.time() + 3600
    os.utime(write_foreign_lock(tmp_path), (later, later))
    with RunLock(tmp_path) as lock:
        assert newest_lock(tmp_path / "lock") == tmp_path / "lock" / "00000042.json"
    assert "taking the lock of process 7 on elsewhere" in caplog.text
    assert lock is not None


def test_slurm_reports_that_the_holders_job_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(run_lock, "job_has_ended", lambda job: asked.append(job) or True)
    write_foreign_lock(tmp_path, job="123")
    began = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - began < 5
    assert asked == ["123"]


def test_requeued_job_takes_over_from_its_earlier_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, 60, SLURM_JOB_ID="5", SLURM_RESTART_COUNT="1") as earlier:
        assert first_line(earlier) == f"held {earlier.pid}"
        with started(tmp_path, 0, SLURM_JOB_ID="5", SLURM_RESTART_COUNT="1") as twin:
            assert "SLURM job 5" in first_line(twin)
        monkeypatch.setenv("SLURM_JOB_ID", "5")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
        with RunLock(tmp_path):
            assert earlier.wait(1) == 1
        assert "was taken by process" in first_line(earlier)


def without_flock(*_: object) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_live_holder_without_flock_keeps_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, 60, "without flock") as holder:
        assert first_line(holder) == f"held {holder.pid}"
        # Also if the locks of the file server have come back since.
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid} on "):
            RunLock(tmp_path).__enter__()
        monkeypatch.setattr(fcntl, "flock", without_flock)
        for take in (raise_if_locked, RunLock.__enter__):
            began = time.monotonic()
            with pytest.raises(ConfigError, match=f"in use by process {holder.pid} on "):
                take(RunLock(tmp_path) if take is RunLock.__enter__ else tmp_path)  # type: ignore[arg-type]
            assert time.monotonic() - began < 10
        assert holder.poll() is None


def test_dead_holder_without_flock_is_silent(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(tmp_path, 60, "without flock") as holder:
        assert first_line(holder) == f"held {holder.pid}"
    monkeypatch.setattr(fcntl, "flock", without_flock)
    raise_if_locked(tmp_path)
    with RunLock(tmp_path) as lock:
        assert lock.number == 2


def test_dead_clients_flock_is_no_sign_of_life(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file server keeps the lock of a machine that has gone."""
    path = write_foreign_lock(tmp_path, job="123")
    with path.open("rb") as stream:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
        raise_if_locked(tmp_path)
        with RunLock(tmp_path):
            pass
        monkeypatch.setattr(run_lock, "job_has_ended", lambda job: job == "123")
        monkeypatch.setattr(run_lock, "DEAD_SECONDS", 1000.0)
        path = write_foreign_lock(tmp_path, job="123")
        raise_if_locked(tmp_path)
        with RunLock(tmp_path):
            pass


def test_number_that_was_taken_and_removed_is_not_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLock(tmp_path):
        pass
    holders: list[RunLock] = []
    create = RunLock._create

    def delayed(lock: RunLock, path: Path) -> bool:
        """Let others take the lock twice before the first attempt to create a file."""
        monkeypatch.setattr(RunLock, "_create", create)
        with RunLock(tmp_path):
            pass
        holders.append(RunLock(tmp_path).__enter__())
        return create(lock, path)

    monkeypatch.setattr(RunLock, "_create", delayed)
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "):
        RunLock(tmp_path).__enter__()
    assert [lock.number for lock in holders] == [3]
    assert [path.name for path in (tmp_path / "lock").iterdir()] == ["00000003.json"]
    holders[0].__exit__()


class Ended(BaseException):
    """In place of the end of the process."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise where the loser's process would end, and keep heartbeats from noticing first."""

    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 1000.0)


def test_loser_cannot_commit(tmp_path: Path, ends: None) -> None:
    JobHistory(tmp_path).append("submit")
    with RunLock(tmp_path) as lock:
        assert lock.number == 1
        lock.check()
        lock.record("resume", step=3, samples=24)
        (tmp_path / "lock" / "00000002.json").write_bytes(Holder.this_process().to_json())
        with pytest.raises(Ended):
            lock.check()
        with pytest.raises(Ended):
            lock.record("checkpoint", step=4, samples=32)
    events = [record["event"] for record in JobHistory(tmp_path).records()]
    assert events == ["submit", "resume"]


def test_runs_without_a_job_history_get_none(tmp_path: Path) -> None:
    with RunLock(tmp_path) as lock:
        lock.record("resume", step=3, samples=24)
    assert not JobHistory(tmp_path).path.exists()


def test_invalid_lock_file(tmp_path: Path) -> None:
    write_foreign_lock(tmp_path).write_text("[1]")
    with pytest.raises(ConfigError, match="not a lock"):
        RunLock(tmp_path).__enter__()
    assert read_lock(tmp_path / "none") is None
