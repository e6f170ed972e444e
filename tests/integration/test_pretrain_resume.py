"""Runs that are killed, stopped or moved to another layout resume bit-identically."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import committed_steps, step_dir
from megatron_deberta.config import load_config
from megatron_deberta.data.sample_log import check_sample_log, read_sample_log
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
from tests.integration.conftest import STEPS
from tests.support.jobs import (
    Run,
    assert_same_checkpoints,
    losses,
    records,
    run_to_end,
    start,
)

BACKGROUND = ("checkpoint.asynchronous=true", f"train.exit_step={STEPS}")


@pytest.mark.slow
def test_uninterrupted_run_learns_and_writes_its_files(uninterrupted: Path) -> None:
    curve = losses(uninterrupted)
    assert len(curve) == STEPS
    assert sum(curve[-5:]) / 5 < sum(curve[:5]) / 5 - 0.5
    validation = records(uninterrupted, "validation")
    assert list(validation) == [0, 25, STEPS]
    assert validation[STEPS]["loss"] < curve[0] - 0.5
    assert validation[0]["unigram_loss"] > 3
    assert committed_steps(uninterrupted) == [28, 35, STEPS]
    check_sample_log(uninterrupted / "ledger", 8, STEPS)
    assert (uninterrupted / "loss.png").stat().st_size > 1000
    assert "vocab_size: 600" in (uninterrupted / "config.yaml").read_text()
    lines = (uninterrupted / "stdout.txt").read_text().splitlines()
    assert sum(line.startswith("step ") for line in lines) == STEPS
    assert sum("unigram loss" in line for line in lines) == 2


@pytest.mark.slow
def test_killed_and_signalled_run_equals_the_uninterrupted_one(
    run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    # The time is random on purpose; it is printed with a failure.
    kill_at, delay = random.randint(1, 15), random.random() * 0.1
    print(f"SIGKILL of rank 1 {delay:.3f} s after step {kill_at}")
    job = start(run_yaml, run_dir, 2, *BACKGROUND)
    job.wait_for_step(kill_at)
    time.sleep(delay)
    job.ranks[1].kill()
    codes = job.wait()
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, EXIT_REQUEUE)

    job = start(run_yaml, run_dir, 2, *BACKGROUND)
    job.wait_for_step(20)
    job.ranks[0].send_signal(signal.SIGUSR2)
    assert job.wait() == [EXIT_REQUEUE] * 2, job.output()
    stopped_at = committed_steps(run_dir)[-1]
    # A save in flight when the signal comes is the last one; the steps after it are repeated.
    assert 14 <= stopped_at < STEPS
    assert stopped_at <= len(losses(run_dir)) < STEPS

    job = run_to_end(run_yaml, run_dir, 2, *BACKGROUND)
    assert f"resuming from {step_dir(run_dir, stopped_at)}" in job.output()
    assert losses(run_dir) == losses(uninterrupted)
    assert read_sample_log(run_dir / "ledger") == read_sample_log(uninterrupted / "ledger")
    assert_same_checkpoints(run_dir, uninterrupted, STEPS)
    actual, expected = (records(folder, "validation")[STEPS] for folder in (run_dir, uninterrupted))
    assert actual == expected
    # Background saves are committed later and reported with their cost.
    cost = read_metrics(run_dir / FILE_NAME)
    saves = [record for record in cost if record["kind"] == "checkpoint"]
    assert saves[-1]["checkpoint_step"] == STEPS
    assert all(record["blocked_seconds"] <= record["seconds"] for record in saves)


@pytest.mark.slow
def test_tensor_parallel_run_resumes_data_parallel(
    run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    # Each of the five ranks would start a process for its loader.
    no_worker = "data.num_workers=0"
    tensor_parallel = ("parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true")
    run_to_end(
        run_yaml, run_dir, 2, *tensor_parallel, "parallel.zero_stage=2", "train.exit_step=12",
        no_worker,
    )  # fmt: skip
    assert committed_steps(run_dir)[-1] == 12
    job = run_to_end(
        run_yaml, run_dir, 2, "parallel.zero_stage=3", "train.micro_batch_size=4",
        "train.exit_step=18", no_worker,
    )  # fmt: skip
    assert "changed since then: parallel.tensor_parallel_size: 2 -> 1" in job.output()
    run_to_end(run_yaml, run_dir, 1, "parallel.engine=plain", f"train.exit_step={STEPS}", no_worker)
    assert losses(run_dir) == pytest.approx(losses(uninterrupted), rel=1e-5)
    check_sample_log(run_dir / "ledger", 8, STEPS)


def test_auto_precision_is_recorded_and_kept(pretrain: Run, tmp_path: Path) -> None:
    """A resumed run keeps format and engine, whatever a new run would take here."""
    auto = ("precision.dtype=auto", "parallel.engine=auto")

    def recorded(folder: str) -> tuple[str, str]:
        config = load_config(tmp_path / folder / "config.yaml")
        return config.precision.dtype, config.parallel.engine

    assert pretrain(*auto, run_dir="new")[0] == EXIT_DONE
    assert recorded("new") == ("fp32", "plain")
    began = ("precision.dtype=bf16", "parallel.engine=deepspeed", "train.exit_step=1")
    assert pretrain(*began, run_dir="other")[0] == EXIT_DONE
    assert pretrain(*auto, run_dir="other")[0] == EXIT_DONE
    assert recorded("other") == ("bf16", "deepspeed")
    assert committed_steps(tmp_path / "other")[-1] == 2
    # A format that is set is another experiment.
    code, error = pretrain("precision.dtype=fp32", "parallel.engine=auto", run_dir="other")
    assert code != EXIT_DONE
    assert "precision.dtype='fp32' but the checkpoint of step 2 was trained with 'bf16'" in error
