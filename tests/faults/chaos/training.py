"""Kills and signals during a run of four ranks; the resumed run must equal an uninterrupted one."""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_deberta.checkpoint.layout import committed_steps, step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.data.sample_log import read_sample_log
from megatron_deberta.errors import EXIT_REQUEUE
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
from tests.support.jobs import TIMEOUT, Job, losses, start

WORLD_SIZE = 4
STEPS = 30
SAVE_EVERY = 7
OVERRIDES = (
    "parallel.tensor_parallel_size=2", "precision.zero_stage=1",
    f"checkpoint.save_every={SAVE_EVERY}", "log.tensorboard=false",
    # Time-out for a rank that is killed before the process groups exist.
    "cluster.collective_timeout_minutes=0.3",
)  # fmt: skip
PHASES = ("start-up", "step", "save", "evaluation", "end")
LOG_CHARACTERS = 3000
POLL_SECONDS = 0.001


class TrainingCases:
    """Cases on one tiny run: TP2 x DP2, ZeRO-1, dropout on, a save every 7 steps.

    Args:
        folder: working folder.
        run_yaml: the run.
        steps: of the run.
    """

    def __init__(self, folder: Path, run_yaml: Path, steps: int = STEPS) -> None:
        self._folder = folder
        self._run_yaml = run_yaml
        self._steps = steps
        self._expected: dict[str, Any] | None = None

    def _start(self, run_dir: Path) -> Job:
        for log in run_dir.parent.glob(f"{run_dir.name}.*.log"):
            log.unlink()
        overrides = (*OVERRIDES, f"train.steps={self._steps}")
        return start(self._run_yaml, run_dir, WORLD_SIZE, *overrides)

    def expected(self) -> dict[str, Any]:
        """Return the result of the uninterrupted run."""
        if self._expected is None:
            run_dir = self._folder / "uninterrupted"
            shutil.rmtree(run_dir, ignore_errors=True)
            job = self._start(run_dir)
            codes = job.wait()
            assert codes == [0] * WORLD_SIZE, job.output()[-4000:]
            self._expected = result(run_dir, self._steps)
        return self._expected

    def kill_one(self, seed: int) -> dict[str, Any]:
        """SIGKILL of a random rank at a random time in a phase, then a resumed run."""
        rng = random.Random(f"one {seed}")
        victim = rng.randrange(WORLD_SIZE)
        return self._interrupt(seed, rng, lambda job: job.ranks[victim].kill(), {"rank": victim})

    def kill_all(self, seed: int) -> dict[str, Any]:
        """SIGKILL of all ranks."""

        def kill(job: Job) -> None:
            for rank in job.ranks:
                rank.kill()

        return self._interrupt(seed, random.Random(f"all {seed}"), kill, {})

    def _interrupt(
        self, seed: int, rng: random.Random, kill: Callable[[Job], None], plan: dict[str, Any]
    ) -> dict[str, Any]:
        expected = self.expected()
        phase = PHASES[seed % len(PHASES)]
        run_dir = self._folder / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        job = self._start(run_dir)
        time_of_kill = self._wait_for(phase, rng, run_dir, job)
        kill(job)
        killed = time.monotonic()
        codes = job.wait()
        survivors = time.monotonic() - killed
        # At the end a rank may finish before the kill.
        stopped = None not in codes and (phase == "end" or 0 not in codes)
        committed = committed_steps(run_dir) if run_dir.exists() else []
        again = self._start(run_dir)
        resumed = again.wait()
        same = resumed == [0] * WORLD_SIZE and result(run_dir, self._steps) == expected
        return {
            "ok": stopped and same,
            "phase": phase, **plan, "at": time_of_kill, "codes": codes,
            "survivors_seconds": round(survivors, 2), "committed": committed[-1:],
            "resumed_codes": resumed, "identical": same,
            "left_over": left_over(run_dir), "log": log_end(again, stopped and same),
        }  # fmt: skip

    def preempt(self, seed: int) -> dict[str, Any]:
        """A signal to one or all ranks: a save within a step, exit code 75, resumed run."""
        rng = random.Random(f"signal {seed}")
        expected = self.expected()
        number = rng.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
        targets = rng.choice(([rng.randrange(WORLD_SIZE)], list(range(WORLD_SIZE))))
        phase = ("step", "save", "evaluation")[seed % 3]
        run_dir = self._folder / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        job = self._start(run_dir)
        self._wait_for(phase, rng, run_dir, job)
        before = last_step(run_dir)
        for rank in targets:
            job.ranks[rank].send_signal(number)
        began = time.monotonic()
        codes = job.wait()
        seconds = time.monotonic() - began
        saved = committed_steps(run_dir)[-1]
        # The record of a step is written after the step: the signal arrived in the step after
        # `before` or after its record, and the current step is still finished.
        in_time = saved - before <= 2 and last_step(run_dir) == saved
        again = self._start(run_dir)
        resumed = again.wait()
        same = resumed == [0] * WORLD_SIZE and result(run_dir, self._steps) == expected
        ok = codes == [EXIT_REQUEUE] * WORLD_SIZE and in_time and same
        return {
            "ok": ok,
            "phase": phase, "signal": signal.Signals(number).name, "ranks": targets,
            "after_step": before, "saved_step": saved, "codes": codes,
            "stop_seconds": round(seconds, 2), "identical": same, "log": log_end(again, ok),
        }  # fmt: skip

    def _wait_for(self, phase: str, rng: random.Random, run_dir: Path, job: Job) -> str:
        """Wait for a random time in a phase; return a description of it."""
        if phase == "start-up":
            delay = rng.uniform(0.0, 3.0)
            end = time.monotonic() + delay
            while time.monotonic() < end and last_step(run_dir) == 0:
                time.sleep(POLL_SECONDS)
            return f"{delay:.3f} s"
        delay = rng.uniform(0.0, 0.05)
        if phase == "save":
            step = SAVE_EVERY * rng.randint(1, self._steps // SAVE_EVERY)
            name = step_dir(run_dir, step).name
            # Its temporary name, then its final one: the save is in progress.
            wait_until(
                lambda: any(name in path.name for path in (run_dir / "checkpoints").glob("*")
                            if run_dir.exists()) or last_step(run_dir) > step,
                job,
            )  # fmt: skip
            time.sleep(rng.uniform(0.0, 0.04))
            return f"save of step {step}"
        random_step = rng.randint(1, self._steps - 5)
        step = {"step": random_step, "evaluation": 24, "end": self._steps}[phase]
        wait_until(lambda: last_step(run_dir) >= step, job)
        time.sleep(delay)
        return f"{delay:.3f} s after step {step}"


def wait_until(condition: Callable[[], bool], job: Job) -> None:
    """Wait until a condition holds while the run lives."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert job.is_running(), job.output()[-4000:]
        assert time.monotonic() < deadline, "time-out"
        time.sleep(POLL_SECONDS)


_STEP = re.compile(rb'"step":(\d+)')


def last_step(run_dir: Path) -> int:
    """Return the last step in the metrics; cheap enough for polling."""
    try:
        with (run_dir / FILE_NAME).open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - 2000))
            steps = _STEP.findall(stream.read())
    except OSError:
        return 0
    return int(steps[-1]) if steps else 0


def result(run_dir: Path, steps: int) -> dict[str, Any]:
    """Return the bits of all losses, of the final weights and moments, and the sample log."""
    reader = CheckpointReader(step_dir(run_dir, steps))
    digest = hashlib.sha256()
    for name in reader.shapes:
        for kind in reader.kinds:
            digest.update(reader.tensor(name, kind).numpy().tobytes())
    validation = [
        (record["step"], record.get("loss"))
        for record in read_metrics(run_dir / FILE_NAME)
        if record["kind"] == "validation"
    ]
    return {
        "losses": [value.hex() for value in losses(run_dir)],
        "validation": validation,
        "state": digest.hexdigest(),
        "ledger": read_sample_log(run_dir / "ledger"),
    }


def log_end(job: Job, ok: bool) -> str:
    """Return the end of the logs of a failed run."""
    return "" if ok else job.output()[-LOG_CHARACTERS:]


def left_over(run_dir: Path) -> list[str]:
    """Return hidden files of interrupted saves."""
    return sorted(path.name for path in (run_dir / "checkpoints").glob(".*"))
