"""Kills and signals during a run of four ranks; the resumed run must equal an uninterrupted one."""

from __future__ import annotations

import hashlib
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_deberta.checkpoint.layout import committed_steps, step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.cluster.watchdog.heartbeat import FOLDER_VARIABLE, beat_path, read_beat
from megatron_deberta.data.sample_log import read_sample_log
from megatron_deberta.errors import EXIT_REQUEUE
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
from megatron_deberta.observe.progress import Section
from tests.support.jobs import TIMEOUT, Job, losses, start
from tests.support.pauses import PHASES, Pause

WORLD_SIZE = 4
STEPS = 30
SAVE_EVERY = 7
KEPT = 2
OVERRIDES = (
    "parallel.tensor_parallel_size=2", "parallel.zero_stage=1", "train.micro_batch_size=2",
    f"checkpoint.save_every={SAVE_EVERY}", f"checkpoint.keep_last={KEPT}", "log.tensorboard=false",
    # Time-out for a rank that is killed before the process groups exist.
    "cluster.collective_timeout_minutes=0.3",
)  # fmt: skip
ACCUMULATION = 2
PREEMPTED_PHASES = (
    "data", "forward", "backward", "optimizer", "save, before the commit", "validation",
)  # fmt: skip
GRACE_SECONDS = 30.0
"""Time from SIGTERM to SIGKILL at SLURM's default (``KillWait``)."""
LOG_CHARACTERS = 3000
POLL_SECONDS = 0.001


@dataclass(slots=True)
class Instant:
    """Time at which a fault is injected.

    Attributes:
        phase: one of ``PHASES`` if the rank paused there, otherwise the section of its heartbeat.
        is_aimed: the rank paused.
        sections: section of each observed rank's heartbeat at that time.
        step: completed steps according to the first of these heartbeats.
    """

    phase: str
    is_aimed: bool
    sections: list[str]
    step: int


class TrainingCases:
    """Cases on one tiny run: TP2 x DP2, ZeRO-1, dropout on, a save every 7 steps.

    With even seeds a rank pauses at one of ``PHASES`` in turn, so that the fault falls there; with
    odd ones the fault comes at a random time, and the ranks' heartbeats say in which section.

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

    def _start(
        self, run_dir: Path, *overrides: str, pause: Pause | None = None, ranks_per_node: int = 0
    ) -> Job:
        for log in run_dir.parent.glob(f"{run_dir.name}.*.log"):
            log.unlink()
        beats = self._folder / "beats"
        shutil.rmtree(beats, ignore_errors=True)
        beats.mkdir()
        variables = {FOLDER_VARIABLE: str(beats), **(pause.variables() if pause else {})}
        overrides = (*OVERRIDES, f"train.steps={self._steps}", *overrides)
        return start(
            self._run_yaml, run_dir, WORLD_SIZE, *overrides, ranks_per_node=ranks_per_node,
            variables=variables,
        )  # fmt: skip

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
        """Kill one rank with SIGKILL, resume the run and compare the results."""
        rng = random.Random(f"one {seed}")
        return self._interrupt(seed, rng, [rng.randrange(WORLD_SIZE)])

    def kill_all(self, seed: int) -> dict[str, Any]:
        """Kill all ranks with SIGKILL, resume the run and compare the results."""
        return self._interrupt(seed, random.Random(f"all {seed}"), list(range(WORLD_SIZE)))

    def _interrupt(self, seed: int, rng: random.Random, victims: list[int]) -> dict[str, Any]:
        expected = self.expected()
        run_dir = self._folder / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        asynchronous = f"checkpoint.asynchronous={str(rng.random() < 0.5).lower()}"
        pause = self._pause(seed, rng, victims[0], tuple(PHASES))
        if pause is not None and pause.phase == "retention":
            # Rank 0 deletes checkpoints.
            victims = victims if len(victims) > 1 else [0]
            pause = replace(pause, rank=0)
        job = self._start(run_dir, asynchronous, pause=pause)
        if pause is None:
            self._wait_for_random_time(rng, run_dir, job)
        else:
            wait_until(Path(pause.token).exists, job)
        for rank in victims:
            job.ranks[rank].send_signal(signal.SIGSTOP)
        instant = self._instant(pause, victims)
        for rank in victims:
            job.ranks[rank].kill()
        killed = time.monotonic()
        codes = job.wait()
        survivors = time.monotonic() - killed
        committed = committed_steps(run_dir) if run_dir.exists() else []
        # After the last save a rank may finish without the others.
        is_done = committed[-1:] == [self._steps]
        killed_in_time = any(codes[rank] == -signal.SIGKILL for rank in victims)
        stopped = killed_in_time and None not in codes and (is_done or 0 not in codes)
        again = self._start(run_dir, asynchronous)
        resumed = again.wait()
        same = resumed == [0] * WORLD_SIZE and result(run_dir, self._steps) == expected
        in_phase = _is_in_phase(instant, asynchronous.endswith("true"))
        ok = stopped and same and in_phase
        return {
            "ok": ok,
            **asdict(instant), "ranks": victims, "save": asynchronous, "codes": codes,
            "survivors_seconds": round(survivors, 2), "committed": committed[-1:],
            "resumed_codes": resumed, "identical": same,
            "left_over": left_over(run_dir), "log": log_end(again, ok),
        }  # fmt: skip

    def preempt(self, seed: int) -> dict[str, Any]:
        """Send a stop signal to one or all ranks, resume the run and compare the results.

        The ranks must save and exit with code 75 within ``GRACE_SECONDS``.
        """
        rng = random.Random(f"signal {seed}")
        expected = self.expected()
        number = rng.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
        targets = rng.choice(([rng.randrange(WORLD_SIZE)], list(range(WORLD_SIZE))))
        run_dir = self._folder / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        pause = self._pause(seed, rng, targets[0], PREEMPTED_PHASES)
        job = self._start(run_dir, pause=pause)
        if pause is None:
            step, delay = rng.randint(1, self._steps - 5), rng.uniform(0.0, 0.05)
            wait_until(lambda: last_step(run_dir) >= step, job)
            time.sleep(delay)
        else:
            wait_until(Path(pause.token).exists, job)
        before = last_step(run_dir)
        instant = self._instant(pause, targets)
        for rank in targets:
            job.ranks[rank].send_signal(number)
        began = time.monotonic()
        if pause is not None:
            Path(pause.token).with_name("go").touch()
        codes = job.wait()
        seconds = time.monotonic() - began
        saved = committed_steps(run_dir)[-1]
        # The record of a step is written after the step: the signal arrived in the step after
        # `before` or after its record, and the current step is still finished. A save in the
        # background is completed then instead of a second one.
        behind = last_step(run_dir) - saved
        is_saved = behind == 0 or (saved % SAVE_EVERY == 0 and behind <= 2)
        in_time = saved - before <= 2 and is_saved and seconds <= GRACE_SECONDS
        again = self._start(run_dir)
        resumed = again.wait()
        same = resumed == [0] * WORLD_SIZE and result(run_dir, self._steps) == expected
        ok = codes == [EXIT_REQUEUE] * WORLD_SIZE and in_time and same
        return {
            "ok": ok,
            **asdict(instant), "signal": signal.Signals(number).name, "ranks": targets,
            "after_step": before, "saved_step": saved, "steps_behind": behind, "codes": codes,
            "stop_seconds": round(seconds, 2), "grace_seconds": GRACE_SECONDS, "identical": same,
            "log": log_end(again, ok),
        }  # fmt: skip

    def _pause(
        self, seed: int, rng: random.Random, rank: int, phases: Sequence[str]
    ) -> Pause | None:
        """Return where the rank pauses; None: nowhere."""
        for name in ("token", "go"):
            (self._folder / name).unlink(missing_ok=True)
        if seed % 2:
            return None
        phase = phases[seed // 2 % len(phases)]
        saves = -(-self._steps // SAVE_EVERY)
        most = {
            "start-up": 1, "end": 1, "retention": saves - KEPT, "data": self._steps - 5,
            "optimizer": self._steps - 5, "forward": ACCUMULATION * (self._steps - 5),
            "backward": ACCUMULATION * (self._steps - 5), "validation": 2,
        }.get(phase, saves - 2)  # fmt: skip
        return Pause(rank, phase, rng.randint(1, most), str(self._folder / "token"))

    def _instant(self, pause: Pause | None, ranks: Sequence[int]) -> Instant:
        beats = [read_beat(beat_path(self._folder / "beats", rank)) for rank in ranks]
        sections = [beat.section.label if beat else Section.STARTUP.label for beat in beats]
        phase = pause.phase if pause else sections[0]
        return Instant(phase, pause is not None, sections, beats[0].step if beats[0] else 0)

    def _wait_for_random_time(self, rng: random.Random, run_dir: Path, job: Job) -> None:
        """Wait for a random time of start-up or training."""
        if rng.random() < 0.2:
            end = time.monotonic() + rng.uniform(0.0, 3.0)
            while time.monotonic() < end and last_step(run_dir) == 0:
                time.sleep(POLL_SECONDS)
            return
        step, delay = rng.randint(1, self._steps - 2), rng.uniform(0.0, 0.05)
        wait_until(lambda: last_step(run_dir) >= step, job)
        time.sleep(delay)


def _is_in_phase(instant: Instant, in_background: bool) -> bool:
    """Return whether the heartbeat of a rank that paused confirms the phase."""
    if not instant.is_aimed or (in_background and PHASES[instant.phase].section == Section.SAVE):
        return True
    return instant.sections[0] == PHASES[instant.phase].section.label


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
