"""``--min-nodes``: after a node failure without a spare node, the run continues on the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import committed_steps
from tests.slurm.submitted_run import command, submit
from tests.slurm.virtual_cluster import VirtualCluster
from tests.support.jobs import losses

STEPS = 40
RUN = (
    f"train.exit_step={STEPS}", "train.steps=1000000", "optimizer.schedule=constant",
    "train.eval_every=0", "checkpoint.save_every=10", "data.num_workers=0",
    # Starts faster than DeepSpeed, which other tests cover.
    "precision.engine=plain",
)  # fmt: skip


@pytest.mark.nightly
def test_run_continues_on_the_remaining_node(
    cluster: VirtualCluster, run_yaml: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "fewer"
    run = submit(cluster, run_yaml, run_dir, *RUN, "--min-nodes=1", nodes=2, exclude="node3,node4")
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
    assert len(losses(run_dir)) == STEPS == committed_steps(run_dir)[-1]
    logs = run_dir / "logs"
    assert [path.name for path in sorted((logs / f"{run.jobs[0]}.1").glob("rank_*.log"))] == [
        "rank_0.log"
    ]
    assert "1 of 2 nodes: running on 1" in (logs / f"job_{run.jobs[0]}.log").read_text()
    assert " node2 " in command(cluster, "status", str(run_dir)).stdout


def test_too_few_nodes_are_refused(cluster: VirtualCluster, run_yaml: Path, tmp_path: Path) -> None:
    for least, message in (
        ("3", "--min-nodes 3 must be between 1 and --nodes 2"),
        ("0", "--min-nodes 0 must be between 1 and --nodes 2"),
    ):
        done = command(
            cluster, "submit", str(run_yaml), "--cluster", "local", "--nodes", "2",
            "--min-nodes", least, f"train.run_dir={tmp_path / 'refused'}",
        )  # fmt: skip
        assert done.returncode == 2
        assert message in done.stderr
