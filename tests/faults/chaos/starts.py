"""Two starts in one run folder on a file system without ``flock``: one trains, one is refused."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_deberta.checkpoint.layout import committed_steps, step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.errors import EXIT_DONE, EXIT_USAGE
from tests.faults.chaos.training import last_step, log_end
from tests.support.jobs import WITHOUT_FLOCK, Job, losses, start

OVERRIDES = (
    "parallel.engine=plain", "optimizer.schedule=constant", "train.eval_every=null",
    "data.num_workers=0", "log.tensorboard=false",
)  # fmt: skip
LONG = "train.steps=1000000"
REFERENCE_STEPS = 40
WAIT_SECONDS = 120.0


class StartCases:
    """Cases on one tiny run of one rank.

    Args:
        folder: working folder.
        run_yaml: the run.
    """

    def __init__(self, folder: Path, run_yaml: Path) -> None:
        self._folder = folder
        self._run_yaml = run_yaml
        self._expected: list[float] = []

    def _start(self, run_dir: Path, *overrides: str) -> Job:
        return start(self._run_yaml, run_dir, 1, *OVERRIDES, LONG, *overrides)

    def expected(self) -> list[float]:
        """Return the losses of an undisturbed run."""
        if not self._expected:
            run_dir = self._folder / "undisturbed"
            shutil.rmtree(run_dir, ignore_errors=True)
            job = self._start(run_dir, f"train.exit_step={REFERENCE_STEPS}")
            assert job.wait() == [EXIT_DONE], job.output()[-4000:]
            self._expected = losses(run_dir)
        return self._expected

    def double(self, seed: int) -> dict[str, Any]:
        """Start twice within four seconds; with odd seeds after the death of a former holder."""
        rng = random.Random(f"double {seed}")
        expected, run_dir = self.expected(), self._folder / "run"
        shutil.rmtree(run_dir, ignore_errors=True)
        for log in run_dir.parent.glob(f"{run_dir.name}.*.log"):
            log.unlink()
        delay = rng.uniform(0.0, 4.0) * rng.randint(0, 1)
        with without_flock():
            if seed % 2:
                dead = self._start(run_dir)
                dead.wait_for_step(rng.randint(1, 20))
                dead.ranks[0].kill()
                dead.wait()
            jobs = [self._start(run_dir)]
            time.sleep(delay)
            jobs.append(self._start(run_dir))
        began = time.monotonic()
        ended = wait_for(lambda: any(not job.is_running() for job in jobs))
        refused = time.monotonic() - began
        # The winner trains on: the other one has not taken anything from it.
        reached = last_step(run_dir)
        goes_on = wait_for(lambda: last_step(run_dir) > max(reached, REFERENCE_STEPS))
        (run_dir / "stop").touch()
        codes = sorted(job.wait()[0] or 0 for job in jobs)
        winner = next((job.ranks[0].pid for job in jobs if job.ranks[0].returncode == 0), 0)
        named = re.search(rf"in use by process {winner} on \S+, since", jobs[0].output())
        steps = committed_steps(run_dir)
        CheckpointReader(step_dir(run_dir, steps[-1])).verify()
        actual = losses(run_dir)
        same = actual[:REFERENCE_STEPS] == expected and len(actual) == steps[-1]
        ok = codes == [EXIT_DONE, EXIT_USAGE] and ended and goes_on and bool(named) and same
        return {
            "ok": ok,
            "former_holder": bool(seed % 2), "delay": round(delay, 2), "codes": codes,
            "refused_seconds": round(refused, 2), "named": bool(named), "identical": same,
            "log": log_end(jobs[0], ok),
        }  # fmt: skip


@contextmanager
def without_flock() -> Iterator[None]:
    """Start ranks for which ``flock`` fails as on Lustre without ``-o flock``."""
    os.environ[WITHOUT_FLOCK] = "1"
    try:
        yield
    finally:
        del os.environ[WITHOUT_FLOCK]


def wait_for(condition: Any) -> bool:
    """Wait until a condition holds; return whether it does."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())
