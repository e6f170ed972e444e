"""A search as a job array: one element is signalled, requeued and resumed, the other is not."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from megatron_deberta.cluster.slurm.history import JobHistory
from tests.slurm.processes import has_pending_signal, ranks_of
from tests.slurm.submitted_run import PROFILE, command
from tests.slurm.virtual_cluster import VirtualCluster, wait_until
from tests.support.jobs import recorded_steps
from tests.support.tiny_task import MODEL, write_task

STEPS = 100
SECONDS = 240.0


@pytest.mark.nightly
def test_elements_of_an_array_requeue_alone(cluster: VirtualCluster, tmp_path: Path) -> None:
    data, output = write_task(tmp_path / "data"), tmp_path / "out"
    grid = {
        "optimizer.warmup_steps": 0, "train.steps": STEPS, "train.eval_every": 50,
        "train.global_batch_size": 8, "train.device": "cpu", "parallel.engine": "plain",
        "log.every": 1, "log.tensorboard": False, "checkpoint.save_every": 1000,
        "finetune.keep_best": False,
    }  # fmt: skip
    search = tmp_path / "search.yaml"
    values = {
        "task": str(data / "task.yaml"), "model": str(MODEL), "data": str(data), "seeds": 2,
        "output": str(output), "grid": grid,
    }  # fmt: skip
    search.write_text(json.dumps(values))
    profile = tmp_path / "cluster.yaml"
    profile.write_text(json.dumps({"ranks_per_node": 1, **PROFILE}))
    done = command(cluster, "search", str(search), "--cluster", str(profile))
    assert done.returncode == 0, done.stderr
    array = done.stdout.partition(";")[0].removeprefix("submitted ")
    again = command(cluster, "search", str(search), "--cluster", str(profile))
    assert "2 runs are queued or running already" in again.stdout, again.stderr

    folders = [output / "cells" / "cell" / f"seed_{seed}" for seed in (1, 2)]
    try:
        wait_until(lambda: len(recorded_steps(folders[0])) > 4, SECONDS, "the first steps")
        (rank,) = ranks_of(folders[0])
        # It cannot finish before the signal.
        rank.suspend()
        assert len(recorded_steps(folders[0])) < STEPS
        cluster.run("scancel", "--signal=USR1", f"{array}_0")
        wait_until(lambda: has_pending_signal(rank, signal.SIGUSR1), SECONDS, "the signal")
        rank.resume()

        def are_finished() -> bool:
            return all(JobHistory(folder).end_reason() for folder in folders)

        wait_until(are_finished, SECONDS, "the end")
    except TimeoutError as error:
        logs = [path.read_text() for path in output.rglob("*.log")]
        raise TimeoutError("\n".join([str(error), *logs])) from None
    for folder in folders:
        assert JobHistory(folder).end_reason() == "finished"
        assert recorded_steps(folder) == list(range(1, STEPS + 1))
    starts = [
        [r["link"] for r in JobHistory(folder).records() if r["event"] == "start"]
        for folder in folders
    ]
    assert starts == [[f"{array}_0.0", f"{array}_0.1"], [f"{array}_1.0"]]
    table = command(cluster, "search", str(search), "--table")
    assert "2 of 2 runs finished" in table.stdout, table.stderr
    logs = command(cluster, "logs", str(folders[0]))
    assert logs.returncode == 0, logs.stderr
