"""Job attempts on a real SLURM of four nodes: node failure, time limit, repeated failure, cancel.

Runs are submitted together, because most of the time is spent waiting for SLURM, and suspended
while they wait for it, because they would keep the processor busy.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.cli.main import main
from tests.slurm.processes import has_pending_signal, ranks_of
from tests.slurm.submitted_run import ENDLESS, PLAIN, TIMEOUT, SubmittedRun, command, submit
from tests.slurm.virtual_cluster import VirtualCluster
from tests.support.jobs import ROOT, losses

STEPS = 30
ON_NODE4 = {"exclude": "node1,node2,node3"}
SUSPEND_AT = 5


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
    until_the_end = (*ENDLESS, f"train.exit_step={STEPS}")
    uninterrupted = submit(cluster, run_yaml, folder / "uninterrupted", *ENDLESS, **ON_NODE4)
    failing = submit(
        cluster, run_yaml, folder / "failing", *PLAIN, max_attempts=2, ranks_per_node=1, **ON_NODE4
    )
    limited = submit(
        cluster, run_yaml, folder / "limited", *until_the_end,
        # Longer than the ranks are suspended.
        "cluster.step_timeout_seconds=600", signal_seconds=45, **ON_NODE4,
    )  # fmt: skip
    threading.Thread(target=suspend_until_limit, args=(cluster, limited), daemon=True).start()
    uninterrupted.wait_for_step(STEPS)
    (uninterrupted.run_dir / "stop").touch()
    killed = submit(cluster, run_yaml, folder / "killed", *until_the_end, nodes=2, exclude="node4")
    return Runs(uninterrupted, killed, limited, failing)


def suspend_until_limit(cluster: VirtualCluster, run: SubmittedRun) -> None:
    """Suspend a run's ranks after some steps until they have received the signal to save.

    The time limit of the first attempt ends at most two minutes after these steps, and that of the
    second one after an hour.
    """
    run.wait_for_step(SUSPEND_AT)
    ranks = ranks_of(run.run_dir)
    for rank in ranks:
        rank.suspend()
    job = run.jobs[0]
    hours, minutes, _ = cluster.job(job)["RunTime"].split(":")
    limit = 60 * int(hours) + int(minutes) + 2
    cluster.run("scontrol", "update", f"JobId={job}", f"TimeLimit={limit}")
    run.wait(
        lambda: all(has_pending_signal(rank, signal.SIGUSR1) for rank in ranks),
        "the signal before the time limit",
    )
    resume(ranks)
    run.wait(lambda: len(run.events("start")) >= 2, "the second attempt")
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")


def resume(ranks: list[psutil.Process]) -> None:
    """Continue suspended processes; some may have ended."""
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            rank.resume()


def assert_same_losses(run: SubmittedRun, uninterrupted: SubmittedRun) -> None:
    """Assert that a run's losses are bit-identical, with every step once."""
    actual = losses(run.run_dir)
    assert len(actual) == STEPS
    assert actual == losses(uninterrupted.run_dir)[:STEPS]


@pytest.mark.slow
def test_stop_file_ends_the_run(runs: Runs) -> None:
    run = runs.uninterrupted
    assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    assert not (run.run_dir / "stop").exists()
    assert committed_steps(run.run_dir)[-1] == len(losses(run.run_dir)) >= STEPS


@pytest.mark.slow
def test_node_failure_requeues_on_other_nodes(runs: Runs, cluster: VirtualCluster) -> None:
    run = runs.killed
    # After the first checkpoint.
    run.wait_for_step(15)
    ranks = ranks_of(run.run_dir)
    for rank in ranks:
        rank.suspend()  # It cannot finish before its node is killed.
    victim = cluster.job(run.jobs[0])["BatchHost"]
    assert cluster.kill_node(victim)
    resume(ranks)
    run.wait(lambda: len(run.events("start")) == 2, "requeue on other nodes")
    cluster.start_node(victim)
    assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    first, second = run.events("start")
    assert second["step"] == 10
    assert second["nodes"] == "node[2-3]" != first["nodes"]
    assert_same_losses(run, runs.uninterrupted)
    status = run.status()
    assert (status["step"], status["target_step"], status["over"]) == (STEPS, STEPS, "finished")
    outcomes = [attempt["outcome"] for attempt in status["attempts"]]
    assert outcomes == ["lost: the node or the job was killed", "finished"]
    shown = command(cluster, "status", str(run.run_dir)).stdout
    assert "restarts:       1\n" in shown
    assert f"step:           {STEPS} of {STEPS} (100.0%); checkpoint at {STEPS}\n" in shown


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


@pytest.mark.slow
def test_time_limit_saves_and_requeues(runs: Runs) -> None:
    run = runs.limited
    run.wait(lambda: len(run.events("start")) >= 2, "the requeue after the time limit")
    first = run.events("end")[0]
    assert (first["code"], first["goes_on"]) == (75, True), run.diagnostics()
    assert STEPS > first["step"] == run.events("start")[1]["step"] > 0
    assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    assert committed_steps(run.run_dir)[-1] == STEPS
    assert_same_losses(run, runs.uninterrupted)


@pytest.fixture
def here(
    cluster: VirtualCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Return a function that runs ``megatron-deberta`` in this process, on the cluster."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str]:
        code = main(list(arguments))
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return call


def test_save_file_status_logs_and_cancel(
    cluster: VirtualCluster, run_yaml: Path, tmp_path: Path, here: Callable[..., tuple[int, str]]
) -> None:
    # It saves when asked only: other checkpoints would replace, or hide, the one asked for.
    run = submit(
        cluster, run_yaml, tmp_path / "run", *ENDLESS, "checkpoint.save_every=1000000",
        ranks_per_node=1, **ON_NODE4,
    )  # fmt: skip
    follower = subprocess.Popen(
        [sys.executable, "-m", "megatron_deberta", "logs", "-f", str(run.run_dir), "--rank", "0"],
        env={**cluster.environment, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    run.wait_for_step(SUSPEND_AT)
    (rank,) = ranks_of(run.run_dir)
    rank.suspend()
    code, printed = here("status", str(run.run_dir), "--json")
    status = json.loads(printed)
    assert (status["state"], status["jobs"]) == ("RUNNING", [str(run.jobs[0])])
    assert status["tokens_per_second"] > 0
    assert status["seconds_left"] > 0
    assert f"SLURM job {run.jobs[0]}" in status["holder"]
    again = (str(run_yaml), "--cluster", "local", "--nodes", "1", f"train.run_dir={run.run_dir}")
    code, printed = here("doctor", *again)
    assert "ok      SLURM: answers; partitions normal, urgent\n" in printed
    assert f"SLURM job {run.jobs[0]}" in printed
    assert code == 2
    code, printed = here("submit", *again)
    assert code == 2
    assert f"has job {run.jobs[0]} in the queue (RUNNING)" in printed
    (run.run_dir / "save").touch()
    rank.resume()
    run.wait(lambda: not (run.run_dir / "save").exists(), "the checkpoint asked for")
    assert len(committed_steps(run.run_dir)) == 1, run.diagnostics()
    code, printed = here("cancel", str(run.run_dir))
    assert "saving, then ending" in printed
    assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    assert run.events("end")[-1]["reason"] == "cancelled"
    assert committed_steps(run.run_dir)[-1] == len(losses(run.run_dir))
    printed, _ = follower.communicate(timeout=TIMEOUT)
    assert follower.returncode == 0
    assert "step 1/1000000 | loss" in printed
    assert "stopped by SIGUSR1 at step " in printed
