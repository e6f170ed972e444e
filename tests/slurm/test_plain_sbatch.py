"""``launch/pretrain.sbatch`` without the submitter: save on signal, requeue, resume, finish."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.slurm.submitted_run import ENDLESS, SubmittedRun
from tests.slurm.virtual_cluster import VirtualCluster
from tests.support.jobs import ROOT, losses

STEPS = 20
SCRIPT = str(ROOT / "launch" / "pretrain.sbatch")
RUN = (*ENDLESS, f"train.exit_step={STEPS}", "checkpoint.save_every=1000")
LAUNCHERS = {
    "srun": ("--nodes=2", "--ntasks-per-node=1"),
    "torchrun": ("--nodes=1", "--ntasks-per-node=2"),
}


class Job(SubmittedRun):
    """A job of ``pretrain.sbatch``."""

    def restarts(self) -> str:
        """Return how often SLURM has requeued the job."""
        return self.cluster.job(self.jobs[0])["Restarts"]

    def log(self) -> str:
        """Return the output of the script and its ranks."""
        return (self.run_dir.parent / f"deberta_{self.jobs[0]}.log").read_text()


def submit(
    cluster: VirtualCluster,
    folder: Path,
    *arguments: str,
    launcher: str = "srun",
    options: tuple[str, ...] = ("--nodes=1",),
) -> Job:
    """Submit ``launch/pretrain.sbatch`` from a folder, where its log is written."""
    folder.mkdir(exist_ok=True)
    printed = subprocess.run(
        ["sbatch", "--parsable", *options, "--mem=1G", SCRIPT, *arguments],
        env={
            **cluster.environment, "LAUNCHER": launcher, "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "lo",
        },
        cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Job(cluster, folder / "run", [int(printed.stdout)])


def submit_two_ranks(cluster: VirtualCluster, run_yaml: Path, folder: Path, launcher: str) -> Job:
    """Submit a run of two ranks."""
    return submit(
        cluster, folder, str(run_yaml), *RUN, f"train.run_dir={folder / 'run'}",
        launcher=launcher, options=LAUNCHERS[launcher],
    )  # fmt: skip


def send_signal(job: Job) -> None:
    """Send SIGUSR1 to the batch script after five steps, as SLURM does before the time limit."""
    job.wait_for_step(5)
    job.cluster.run("scancel", "--batch", "--signal=USR1", str(job.jobs[0]))


def losses_of_both_starts(job: Job) -> list[float]:
    """Wait until a job was requeued and has completed; return its training losses by step."""
    job.wait(lambda: job.restarts() == "1", "the requeue")
    state, log = job.wait_for_end(), job.log()
    assert state == "COMPLETED", log
    assert "pretrain.sbatch: USR1: telling the ranks to save" in log
    assert "pretrain.sbatch: saved; requeueing" in log
    assert ", start 2" in log
    # Every step once: the second attempt resumed from the checkpoint of the first.
    found = losses(job.run_dir)
    assert len(found) == STEPS
    return found


@pytest.mark.slow
def test_job_saves_is_requeued_and_resumes(
    cluster: VirtualCluster, run_yaml: Path, tmp_path: Path
) -> None:
    job = submit_two_ranks(cluster, run_yaml, tmp_path / "srun", "srun")
    send_signal(job)
    losses_of_both_starts(job)


@pytest.mark.nightly
def test_both_launchers_have_the_same_losses(
    cluster: VirtualCluster, run_yaml: Path, tmp_path: Path
) -> None:
    jobs = [submit_two_ranks(cluster, run_yaml, tmp_path / name, name) for name in LAUNCHERS]
    for job in jobs:
        send_signal(job)
    first, second = map(losses_of_both_starts, jobs)
    assert first == second


@pytest.mark.slow
def test_failed_or_cancelled_job_is_not_requeued(
    cluster: VirtualCluster, run_yaml: Path, tmp_path: Path
) -> None:
    failed = submit(cluster, tmp_path, str(run_yaml), "train.stepz=3")
    run_dir = f"train.run_dir={tmp_path / 'run'}"
    cancelled = submit(cluster, tmp_path, str(run_yaml), *RUN, "train.exit_step=null", run_dir)
    failed.wait_for_end()
    assert cluster.job(failed.jobs[0])["ExitCode"] == "2:0", failed.log()
    assert "train.stepz" in failed.log()
    cancelled.wait_for_step(2)
    cluster.run("scancel", str(cancelled.jobs[0]))
    assert cancelled.wait_for_end() == "CANCELLED"
    assert cancelled.restarts() == failed.restarts() == "0"


def test_script_prints_usage_without_slurm() -> None:
    done = subprocess.run(["bash", SCRIPT, "RUN.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "sbatch --nodes=16 launch/pretrain.sbatch RUN.yaml" in done.stderr
