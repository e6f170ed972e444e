"""Nodes whose rank hangs, that are lost, or that fail the node check; spare ones and none."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.cluster.slurm.history import BadNodes
from tests.slurm.processes import ranks_of
from tests.slurm.submitted_run import ENDLESS, PLAIN, command, submit
from tests.slurm.virtual_cluster import VirtualCluster, wait_until
from tests.support.jobs import losses, run_to_end

VICTIM = "node2"


def nodes_of(cluster: VirtualCluster, listed: str) -> list[str]:
    """Return the names in SLURM's list of nodes."""
    return cluster.run("scontrol", "show", "hostnames", listed).split()


def rank_on(run_dir: Path, node: str) -> psutil.Process:
    """Return the process of a run's rank on a node."""
    return next(p for p in ranks_of(run_dir) if p.environ().get("SLURMD_NODENAME") == node)


@pytest.mark.nightly
def test_a_hang_moves_the_job_to_other_nodes(
    cluster: VirtualCluster, run_yaml: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "hung"
    limits = (
        "train.exit_step=60", "cluster.step_timeout_seconds=15",
        "cluster.data_timeout_seconds=15", "cluster.save_timeout_seconds=15",
    )  # fmt: skip
    run = submit(cluster, run_yaml, run_dir, *ENDLESS, *limits, nodes=2, exclude="node4")
    run.wait_for_step(15)
    _, victim = nodes_of(cluster, cluster.job(run.jobs[0])["NodeList"])
    rank_on(run_dir, victim).send_signal(signal.SIGSTOP)
    run.wait(lambda: len(run.events("end")) == 1, "the end of the attempt that hangs")
    end = run.events("end")[0]
    assert end["goes_on"], run.diagnostics()
    assert f"rank 1 on {victim} hangs in " in end["reason"], run.diagnostics()
    run.wait(lambda: len(run.events("start")) == 2, "the requeue")
    # The node of the hanging rank, and the node that the profile excludes.
    excluded = cluster.job(run.jobs[0])["ExcNodeList"]
    assert set(nodes_of(cluster, excluded)) == {victim, "node4"}
    second = run.events("start")[1]
    assert victim not in nodes_of(cluster, second["nodes"])
    assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    assert len(losses(run_dir)) == 60
    assert list(BadNodes(run_dir, 24).current()) == [victim]
    shown = command(cluster, "status", str(run_dir)).stdout
    assert f"excluded nodes: {victim}, since " in shown
    assert f"rank 1 on {victim} hangs in " in shown


@pytest.mark.nightly
def test_spare_node_resumes_from_replicas(
    cluster: VirtualCluster, run_yaml: Path, tmp_path: Path
) -> None:
    run_dir, local_dir = tmp_path / "lost", tmp_path / "local"
    every = 4
    plain = (*PLAIN, "train.exit_step=40", "checkpoint.save_every=null")
    local = (f"checkpoint.local_every={every}", f"checkpoint.local_dir={local_dir}")
    # One spare: SLURM would otherwise requeue on two other nodes, which hold nothing.
    run = submit(cluster, run_yaml, run_dir, *plain, *local, nodes=2, exclude="node4")
    run.wait_for_step(14)
    first, victim = nodes_of(cluster, cluster.job(run.jobs[0])["NodeList"])
    cluster.kill_node(victim)
    reached = run.steps()
    assert committed_steps(run_dir) == []
    shutil.rmtree(local_dir / victim)
    run.wait(lambda: len(run.events("start")) > 1, "the requeue")
    cluster.start_node(victim)
    assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    spares = nodes_of(cluster, run.events("start")[1]["nodes"])
    assert victim not in spares
    log = (run_dir / "logs" / f"{run.jobs[0]}.1" / "rank_0.log").read_text()
    recovered = committed_steps(run_dir)[0]
    assert f"the local checkpoint of step {recovered} is complete" in log, run.diagnostics()
    assert f"replicas of ranks: 1 from {first}" in log
    assert reached - recovered <= every
    reference = tmp_path / "uninterrupted"
    run_to_end(run_yaml, reference, 2, *plain)
    assert losses(run_dir) == losses(reference)
    wait_until(lambda: set(cluster.states().values()) == {"IDLE"}, 120, "idle nodes")


@pytest.fixture
def small_disk(cluster: VirtualCluster, tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 8 MiB for the temporary files of one node; needs root."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
    cluster.set_variable(VICTIM, "TMPDIR", str(folder))
    yield folder
    cluster.set_variable(VICTIM, "TMPDIR", str(tmp_path))
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.nightly
def test_node_with_a_full_disk_is_excluded(
    cluster: VirtualCluster, run_yaml: Path, tmp_path: Path, small_disk: Path
) -> None:
    run_dir = tmp_path / "checked"
    run = submit(
        cluster, run_yaml, run_dir, *PLAIN, "train.exit_step=5", nodes=2, exclude="node4",
        node_check=True,
    )  # fmt: skip
    run.wait(lambda: len(run.events("end")) == 1, "the end of the attempt whose check fails")
    end = run.events("end")[0]
    disk = f"{small_disk}: 0.01 GiB free, less than 1; make room"
    wrong = f"the node check failed: {VICTIM}: disk: {disk}"
    assert (end["goes_on"], end["reason"]) == (True, wrong), run.diagnostics()
    logs = run_dir / "logs" / f"{run.jobs[0]}.0"
    assert not list(logs.glob("rank_*.log"))
    assert f"WRONG {VICTIM} disk: " in (logs / "check_1.log").read_text()
    assert "WRONG" not in (logs / "check_0.log").read_text()
    assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    assert [record["nodes"] for record in run.events("start")] == ["node[1-2]", "node[1,3]"]
    assert len(losses(run_dir)) == 5
    assert list(BadNodes(run_dir, 24).current()) == [VICTIM]
    checked = run_dir / "logs" / f"{run.jobs[0]}.1" / "check_1.log"
    assert "ok    node3 all-reduce across nodes: " in checked.read_text()
    assert f"excluded nodes: {VICTIM}, since " in command(cluster, "status", str(run_dir)).stdout


@pytest.mark.nightly
def test_run_continues_on_the_remaining_node(
    cluster: VirtualCluster, run_yaml: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "fewer"
    options = (*ENDLESS, "train.exit_step=40", "--min-nodes=1")
    run = submit(cluster, run_yaml, run_dir, *options, nodes=2, exclude="node3,node4")
    run.wait_for_step(15)
    assert run.events("start")[0]["nodes"] == "node[1-2]"
    # The node of rank 0 and of the batch script, so that SLURM requeues the job.
    victim = cluster.job(run.jobs[0])["BatchHost"]
    assert cluster.kill_node(victim)
    try:
        run.wait(lambda: len(run.events("start")) == 2, "the start on the other node")
        assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    finally:
        cluster.start_node(victim)
    second = run.events("start")[1]
    assert (second["nodes"], second["step"]) == ("node2", 10)
    assert len(losses(run_dir)) == 40 == committed_steps(run_dir)[-1]
    logs = run_dir / "logs"
    files = (logs / f"{run.jobs[0]}.1").glob("rank_*.log")
    assert [path.name for path in files] == ["rank_0.log"]
    assert "1 of 2 nodes: running on 1" in (logs / f"job_{run.jobs[0]}.log").read_text()
    assert " node2 " in command(cluster, "status", str(run_dir)).stdout
