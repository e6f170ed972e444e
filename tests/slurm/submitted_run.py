"""Runs submitted to a virtual cluster: submission, state and waiting."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.cluster.run_lock import newest_lock, read_lock
from megatron_deberta.cluster.slurm.history import JobHistory
from tests.slurm.virtual_cluster import VirtualCluster, wait_until
from tests.support.jobs import ROOT, recorded_steps

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
TIMEOUT = 480.0
PLAIN = ("train.eval_every=null", "data.num_workers=0", "parallel.engine=plain")
"""Without validation; starts faster than DeepSpeed, which other tests cover."""
ENDLESS = (
    *PLAIN, "train.steps=1000000", "optimizer.schedule=constant", "checkpoint.save_every=10",
)  # fmt: skip
PROFILE = {
    "dtypes": ["fp32"],
    "memory_gib_per_node": 1,
    "rendezvous_interface": "lo",
    "exit_wait_seconds": 20,
    "environment": {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
}


def command(cluster: VirtualCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``megatron-deberta`` in this process, in the environment and folder of the cluster."""
    out, error = io.StringIO(), io.StringIO()
    environment = {**cluster.environment, "PYTHONPATH": str(ROOT)}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(error):
        patch.chdir(cluster.folder)
        for name in os.environ.keys() - environment.keys():
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        code = main(arguments)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), error.getvalue())


@dataclass
class SubmittedRun:
    """A run and its SLURM jobs."""

    cluster: VirtualCluster
    run_dir: Path
    jobs: list[int]

    def state(self) -> str:
        """Return the SLURM state of the first job."""
        return self.cluster.job(self.jobs[0])["JobState"]

    def steps(self) -> int:
        """Return the last step in the metrics."""
        return max(recorded_steps(self.run_dir), default=0)

    def holder_restarts(self) -> int:
        """Return the restart count of the attempt that holds the run's lock; -1: none."""
        lock = newest_lock(self.run_dir / "lock")
        holder = read_lock(lock) if lock is not None else None
        return -1 if holder is None or holder.released else holder.restarts

    def wait(self, condition: Callable[[], bool], event: str, seconds: float = TIMEOUT) -> None:
        """Wait for a condition; on time-out, raise an error with the run's logs."""
        try:
            wait_until(condition, seconds, event)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.diagnostics()}") from None

    def wait_for_step(self, step: int) -> None:
        """Return once a step is in the metrics."""
        self.wait(lambda: self.steps() >= step or self.state() in ENDED, f"step {step}")
        assert self.steps() >= step, self.diagnostics()

    def wait_for_end(self) -> str:
        """Return the final SLURM state of the first job."""
        self.wait(lambda: self.state() in ENDED, "the end")
        return self.state()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of a kind in the job history."""
        return [record for record in JobHistory(self.run_dir).records() if record["event"] == kind]

    def status(self) -> dict[str, Any]:
        """Return the output of ``megatron-deberta status --json``."""
        done = command(self.cluster, "status", str(self.run_dir), "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def diagnostics(self) -> str:
        """Return the job states and the ends of all logs."""
        parts = [self.cluster.run("scontrol", "show", "job", check=False)]
        for path in (self.run_dir / "chain.jsonl", *sorted(self.run_dir.rglob("*.log"))):
            if path.exists():
                lines = path.read_text(errors="replace").splitlines()
                parts.append(f"== {path}\n" + "\n".join(lines[-12:]))
        return "\n".join(parts)


def submit(
    cluster: VirtualCluster,
    run_yaml: Path,
    run_dir: Path,
    *overrides: str,
    nodes: int = 1,
    max_attempts: int = 1,
    **profile: object,
) -> SubmittedRun:
    """Submit a run of two ranks; ``profile`` overrides the cluster profile."""
    values = {"ranks_per_node": 2 // nodes, **PROFILE, **profile}
    file = run_dir.parent / f"{run_dir.name}.cluster.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values))
    done = command(
        cluster, "submit", str(run_yaml), "--cluster", str(file), "--nodes", str(nodes),
        "--max-attempts", str(max_attempts), f"train.run_dir={run_dir}", *overrides,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    numbers = done.stdout.removeprefix("submitted ").partition(";")[0]
    return SubmittedRun(cluster, run_dir, [int(number) for number in numbers.split(", ")])
