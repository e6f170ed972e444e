"""A killed node is replaced by a spare one; its state comes from the neighbour's replica."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import committed_steps
from tests.slurm.submitted_run import submit
from tests.slurm.virtual_cluster import VirtualCluster, wait_until
from tests.support.jobs import losses, run_to_end

STEPS, EVERY = 40, 4
RUN = (
    f"train.exit_step={STEPS}", "train.eval_every=0", "data.num_workers=0",
    "checkpoint.save_every=0",
    # Starts faster than DeepSpeed, which other tests cover.
    "precision.engine=plain",
)  # fmt: skip


@pytest.mark.nightly
def test_spare_node_resumes_from_replicas(
    cluster: VirtualCluster, run_yaml: Path, tmp_path: Path
) -> None:
    run_dir, local_dir = tmp_path / "lost", tmp_path / "local"
    local = (f"checkpoint.local_every={EVERY}", f"checkpoint.local_dir={local_dir}")
    # One spare: SLURM would otherwise requeue on two other nodes, which hold nothing.
    run = submit(cluster, run_yaml, run_dir, *RUN, *local, nodes=2, exclude="node4")
    run.wait_for_step(14)
    nodes = cluster.run("scontrol", "show", "hostnames", cluster.job(run.jobs[0])["NodeList"])
    victim = nodes.split()[1]
    cluster.kill_node(victim)
    reached = run.steps()
    assert committed_steps(run_dir) == []
    shutil.rmtree(local_dir / victim)
    run.wait(lambda: len(run.events("start")) > 1, "the requeue")
    cluster.start_node(victim)
    assert run.wait_for_end() == "COMPLETED", run.diagnostics()
    spares = cluster.run("scontrol", "show", "hostnames", run.events("start")[1]["nodes"]).split()
    assert victim not in spares
    log = (run_dir / "logs" / f"{run.jobs[0]}.1" / "rank_0.log").read_text()
    recovered = committed_steps(run_dir)[0]
    assert f"the local checkpoint of step {recovered} is complete" in log, run.diagnostics()
    assert f"replicas of ranks: 1 from {nodes.split()[0]}" in log
    assert reached - recovered <= EVERY
    reference = tmp_path / "uninterrupted"
    run_to_end(run_yaml, reference, 2, *RUN)
    assert losses(run_dir) == losses(reference)
    wait_until(lambda: set(cluster.states().values()) == {"IDLE"}, 120, "idle nodes")
