"""A hanging rank is reported, its node excluded, and the job requeued on other nodes."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from megatron_deberta.cluster.slurm.history import BadNodes
from tests.slurm.submitted_run import command, submit
from tests.slurm.virtual_cluster import VirtualCluster
from tests.support.jobs import losses

STEPS = 60
RUN = (
    "train.steps=1000000", "optimizer.schedule=constant", "train.eval_every=0",
    f"train.exit_step={STEPS}", "checkpoint.save_every=10", "data.num_workers=0",
    # Starts faster than DeepSpeed, which other tests cover.
    "precision.engine=plain",
    "cluster.step_timeout_seconds=15", "cluster.data_timeout_seconds=15",
    "cluster.save_timeout_seconds=15",
)  # fmt: skip


def rank_on(run_dir: Path, node: str) -> psutil.Process:
    """Return the process of a run's rank on a node."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "pretrain" in line and any(str(run_dir) in text for text in line):
            if process.environ().get("SLURMD_NODENAME") == node:
                return process
    raise AssertionError(f"no rank on {node}")


@pytest.mark.nightly
def test_a_hang_moves_the_job_to_other_nodes(
    cluster: VirtualCluster, run_yaml: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "hung"
    run = submit(cluster, run_yaml, run_dir, *RUN, nodes=2, exclude="node4")
    run.wait_for_step(15)
    nodes = cluster.run("scontrol", "show", "hostnames", cluster.job(run.jobs[0])["NodeList"])
    victim = nodes.split()[1]
    rank_on(run_dir, victim).send_signal(signal.SIGSTOP)
    run.wait(lambda: len(run.events("end")) == 1, "the end of the attempt that hangs")
    end = run.events("end")[0]
    assert end["goes_on"], run.diagnostics()
    assert f"rank 1 on {victim} hangs in " in end["reason"], run.diagnostics()
    run.wait(lambda: len(run.events("start")) == 2, "the requeue")
    # The node of the hanging rank, and the node that the profile excludes.
    excluded = cluster.job(run.jobs[0])["ExcNodeList"]
    assert set(cluster.run("scontrol", "show", "hostnames", excluded).split()) == {victim, "node4"}
    second = run.events("start")[1]
    assert victim not in cluster.run("scontrol", "show", "hostnames", second["nodes"]).split()
    assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    assert len(losses(run_dir)) == STEPS
    assert list(BadNodes(run_dir, 24).current()) == [victim]
    shown = command(cluster, "status", str(run_dir)).stdout
    assert f"excluded nodes: {victim}, since " in shown
    assert f"rank 1 on {victim} hangs in " in shown
