"""A node that fails the node check is excluded before any rank starts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_deberta.cluster.slurm.history import BadNodes
from tests.slurm.submitted_run import command, submit
from tests.slurm.virtual_cluster import VirtualCluster
from tests.support.jobs import losses

VICTIM = "node2"
STEPS = 5
RUN = (
    f"train.exit_step={STEPS}", "train.eval_every=0", "data.num_workers=0",
    # Starts faster than DeepSpeed, which other tests cover.
    "precision.engine=plain",
)  # fmt: skip


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
        cluster, run_yaml, run_dir, *RUN, nodes=2, exclude="node4", node_check=True
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
    assert len(losses(run_dir)) == STEPS
    assert list(BadNodes(run_dir, 24).current()) == [VICTIM]
    checked = run_dir / "logs" / f"{run.jobs[0]}.1" / "check_1.log"
    assert "ok    node3 all-reduce across nodes: " in checked.read_text()
    assert f"excluded nodes: {VICTIM}, since " in command(cluster, "status", str(run_dir)).stdout
