"""A run that loses a node resumes from local checkpoints, bit-identical to an unbroken one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.checkpoint.local.recovery import FILE_NAME
from megatron_deberta.errors import EXIT_USAGE
from tests.support.jobs import LOCAL_DISK, Job, Run, losses, records, start

EVERY = 3


@pytest.mark.slow
def test_lost_node_is_replaced_by_its_replicas(
    run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir, local_dir = tmp_path / "run", tmp_path / "local"
    overrides = (
        "checkpoint.save_every=null", f"checkpoint.local_every={EVERY}",
        f"checkpoint.local_dir={local_dir}", "train.exit_step=24", "train.eval_every=null",
        "cluster.collective_timeout_minutes=0.5",
    )  # fmt: skip
    job = start(run_yaml, run_dir, 2, *overrides, ranks_per_node=1)
    job.wait_for_step(14)
    job.ranks[1].kill()
    codes = job.wait()
    assert 0 not in codes, job.output()
    reached = max(records(run_dir))
    finished = records(run_dir, "local_checkpoint").values()
    assert finished
    for record in finished:
        assert record["failed_parts"] == record["failed_replicas"] == 0
        assert 0 < record["blocked_seconds"] <= record["seconds"]
    assert committed_steps(run_dir) == []
    shutil.rmtree(local_dir / "node1")
    job = start(run_yaml, run_dir, 2, *overrides, ranks_per_node=1)
    assert job.wait() == [0, 0], job.output()
    recovered, last = committed_steps(run_dir)
    assert last == 24
    assert reached - recovered <= EVERY
    assert f"the local checkpoint of step {recovered} is complete" in job.output()
    assert "replicas of ranks: 1 from node0" in job.output()
    assert losses(run_dir) == losses(uninterrupted)[:24]


@pytest.mark.nightly
def test_hung_disk_neither_blocks_nor_ends_a_run(
    run_yaml: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCAL_DISK, "1 hung")
    job = train_to_step_24(run_yaml, tmp_path, uninterrupted)
    assert records(tmp_path / "run", "local_checkpoint") == {}
    # Training waited once, and said so.
    assert job.output().count("a local checkpoint takes longer than") == 1, job.output()


@pytest.mark.nightly
def test_full_disk_does_not_end_a_run(
    run_yaml: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCAL_DISK, "1 full")
    job = train_to_step_24(run_yaml, tmp_path, uninterrupted)
    found = records(tmp_path / "run", "local_checkpoint").values()
    assert found
    for record in found:
        # Node 0 holds the replica of rank 1.
        assert record["is_complete"]
        assert (record["failed_parts"], record["failed_replicas"]) == (1, 1)
    assert job.output().count("training continues, and metrics.jsonl counts") == 1


def train_to_step_24(run_yaml: Path, tmp_path: Path, uninterrupted: Path) -> Job:
    """Train with local checkpoints; compare the losses with those without."""
    run_dir = tmp_path / "run"
    overrides = (
        "checkpoint.save_every=7", f"checkpoint.local_every={EVERY}",
        f"checkpoint.local_dir={tmp_path / 'local'}", "train.exit_step=24", "train.eval_every=null",
    )  # fmt: skip
    job = start(run_yaml, run_dir, 2, *overrides, ranks_per_node=1)
    assert job.wait() == [0, 0], job.output()
    assert losses(run_dir) == losses(uninterrupted)[:24]
    assert committed_steps(run_dir)[-1] == 24
    return job


def test_finished_run_deletes_its_local_checkpoints(pretrain: Run, tmp_path: Path) -> None:
    local = (
        "checkpoint.local_every=1", f"checkpoint.local_dir={tmp_path / 'local'}",
        "optimizer.warmup_steps=1",
    )  # fmt: skip
    code, _ = pretrain(*local, "train.steps=3", "train.exit_step=2")
    assert code == 0
    (folder,) = (tmp_path / "local").glob("*/*")
    assert list(folder.iterdir())
    assert (tmp_path / "run" / FILE_NAME).exists()
    code, _ = pretrain(*local, "train.steps=3", "train.exit_step=null")
    assert code == 0
    assert list((tmp_path / "local").glob("*/*")) == []


def test_folder_is_required(pretrain: Run) -> None:
    code, error = pretrain("checkpoint.local_every=5")
    assert code == EXIT_USAGE
    assert "checkpoint.local_every=5 without checkpoint.local_dir" in error
