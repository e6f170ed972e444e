"""Job attempts on a real SLURM of four nodes: node failure, time limit, repeated failure, cancel.

All runs are submitted at once, because most of the time is spent waiting for SLURM.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import committed_steps
from tests.slurm.submitted_run import SubmittedRun, command, submit
from tests.slurm.virtual_cluster import VirtualCluster
from tests.support.jobs import ROOT, losses

STEPS = 60
ENDLESS = (
    "train.steps=1000000", "optimizer.schedule=constant", "train.eval_every=0",
    "checkpoint.save_every=20", "data.num_workers=0",
)  # fmt: skip
ON_NODE4 = {"exclude": "node1,node2,node3"}


@dataclass(frozen=True)
class Runs:
    """The same run, four times."""

    uninterrupted: SubmittedRun
    killed: SubmittedRun
    limited: SubmittedRun
    failing: SubmittedRun


@pytest.fixture(scope="module")
def runs(cluster: VirtualCluster, run_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    # A file in place of a folder, so that every start fails in a way that might have been mended.
    (folder / "failing").mkdir()
    (folder / "failing" / "ledger").touch()
    plain = "precision.engine=plain"
    failing = submit(cluster, run_yaml, folder / "failing", plain, max_attempts=2, **ON_NODE4)
    return Runs(
        # It saves when asked only: other checkpoints would replace, or hide, the one asked for.
        uninterrupted=submit(
            cluster, run_yaml, folder / "uninterrupted", *ENDLESS,
            "checkpoint.save_every=1000000", **ON_NODE4,
        ),
        killed=submit(
            cluster, run_yaml, folder / "killed", *ENDLESS, f"train.exit_step={STEPS}",
            nodes=2, exclude="node4",
        ),
        limited=submit(
            cluster, run_yaml, folder / "limited", *ENDLESS,
            time_limit_minutes=2, signal_seconds=30, **ON_NODE4,
        ),
        failing=failing,
    )  # fmt: skip


def assert_same_losses(run: SubmittedRun, uninterrupted: SubmittedRun) -> None:
    """Assert that the losses are bit-identical, with every step once."""
    actual = losses(run.run_dir)
    uninterrupted.wait_for_step(len(actual))
    assert actual == losses(uninterrupted.run_dir)[: len(actual)]


@pytest.mark.slow
def test_node_failure_requeues_on_other_nodes(runs: Runs, cluster: VirtualCluster) -> None:
    run = runs.killed
    # After the first checkpoint.
    run.wait_for_step(25)
    victim = cluster.job(run.jobs[0])["BatchHost"]
    assert cluster.kill_node(victim)
    run.wait(lambda: len(run.events("start")) == 2, "requeue on other nodes", 120)
    cluster.start_node(victim)
    assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    first, second = run.events("start")
    assert second["step"] == 20
    assert second["nodes"] == "node[2-3]" != first["nodes"]
    assert len(losses(run.run_dir)) == STEPS
    assert_same_losses(run, runs.uninterrupted)
    status = run.status()
    assert (status["step"], status["target_step"], status["over"]) == (STEPS, STEPS, "finished")
    outcomes = [attempt["outcome"] for attempt in status["attempts"]]
    assert outcomes == ["lost: the node or the job was killed", "finished"]
    shown = command(cluster, "status", str(run.run_dir)).stdout
    assert "restarts:       1\n" in shown
    assert "step:           60 of 60 (100.0%); checkpoint at 60\n" in shown


@pytest.mark.slow
def test_run_without_progress_stops(runs: Runs, cluster: VirtualCluster) -> None:
    run = runs.failing
    assert run.wait_for_end() == "FAILED", run.diagnostics()
    job = cluster.job(run.jobs[0])
    assert job["ExitCode"] == "93:0", run.diagnostics()
    assert job["Restarts"] == "2"
    assert [end["code"] for end in run.events("end")] == [1, 1, 1]
    assert run.events("end")[-1]["reason"].startswith("3 consecutive job attempts made no progress")
    waiting = run.jobs[1]
    assert cluster.job(waiting)["JobState"] == "CANCELLED"
    assert command(cluster, "status", str(run.run_dir)).returncode == 0


def test_time_limit_saves_and_requeues(runs: Runs) -> None:
    run = runs.limited
    run.wait(lambda: len(run.events("start")) >= 2, "the requeue after the time limit")
    first = run.events("end")[0]
    assert (first["code"], first["goes_on"]) == (75, True), run.diagnostics()
    assert first["step"] == run.events("start")[1]["step"] > 0
    run.wait_for_step(first["step"] + 5)
    (run.run_dir / "stop").touch()
    assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    assert not (run.run_dir / "stop").exists()
    assert committed_steps(run.run_dir)[-1] == len(losses(run.run_dir)) > first["step"]
    assert_same_losses(run, runs.uninterrupted)


def test_save_file_status_logs_and_cancel(
    runs: Runs, cluster: VirtualCluster, run_yaml: Path
) -> None:
    run = runs.uninterrupted
    follower = subprocess.Popen(
        [sys.executable, "-m", "megatron_deberta", "logs", "-f", str(run.run_dir), "--rank", "0"],
        env={**cluster.environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    status = run.status()
    assert (status["state"], status["jobs"]) == ("RUNNING", [str(run.jobs[0])])
    assert status["tokens_per_second"] > 0
    assert status["seconds_left"] > 0
    assert f"SLURM job {run.jobs[0]}" in status["holder"]
    doctor = command(cluster, "doctor", str(run_yaml), "--cluster", "local", "--nodes", "1",
                     f"train.run_dir={run.run_dir}")  # fmt: skip
    assert "ok      SLURM: answers; partitions normal, urgent\n" in doctor.stdout
    assert f"SLURM job {run.jobs[0]}" in doctor.stdout
    assert doctor.returncode == 2
    again = command(cluster, "submit", str(run_yaml), "--cluster", "local", "--nodes", "1",
                    f"train.run_dir={run.run_dir}")  # fmt: skip
    assert again.returncode == 2
    assert f"has job {run.jobs[0]} in the queue (RUNNING)" in again.stderr
    (run.run_dir / "save").touch()
    run.wait(lambda: not (run.run_dir / "save").exists(), "the checkpoint asked for", 60)
    assert len(committed_steps(run.run_dir)) == 1, run.diagnostics()
    done = command(cluster, "cancel", str(run.run_dir))
    assert "saving, then ending" in done.stdout, done.stderr
    assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    assert run.events("end")[-1]["reason"] == "cancelled"
    assert committed_steps(run.run_dir)[-1] == len(losses(run.run_dir))
    printed, _ = follower.communicate(timeout=60)
    assert follower.returncode == 0
    assert "step 1/1000000 | loss" in printed
    assert "stopped by SIGUSR1 at step " in printed
