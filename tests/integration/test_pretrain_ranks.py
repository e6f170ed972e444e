"""``pretrain`` with real launchers, stop signals, and failures on one rank only."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import committed_steps, step_dir
from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_REQUEUE, EXIT_USAGE
from megatron_deberta.observe.metrics import FILE_NAME
from tests.support.jobs import (
    TIMEOUT,
    fork_server,
    free_port,
    losses,
    rank_variables,
    run_mpi,
    run_to_end,
    start,
)

TWO_STEPS = ("train.exit_step=2", "train.eval_every=null", "parallel.zero_stage=2")


def command(run_yaml: Path, run_dir: Path) -> list[str]:
    """Return the command of one rank of a DeepSpeed run of two steps."""
    program = [sys.executable, "-m", "megatron_deberta", "pretrain", str(run_yaml)]
    return [*program, f"train.run_dir={run_dir}", *TWO_STEPS]


def assert_two_ranks_trained(run_dir: Path, uninterrupted: Path) -> None:
    """Assert that each rank wrote its sample log, and that losses are those of the whole batch."""
    assert committed_steps(run_dir) == [2]
    assert len(list((run_dir / "ledger").iterdir())) == 2
    assert losses(run_dir) == pytest.approx(losses(uninterrupted)[:2], rel=1e-5)


@pytest.mark.nightly
def test_started_by_mpirun(run_yaml: Path, uninterrupted: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_mpi(*command(run_yaml, run_dir))
    assert_two_ranks_trained(run_dir, uninterrupted)


@pytest.mark.nightly
def test_repeated_sigterm_saves_and_requests_a_requeue(
    run_yaml: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    # Starts faster than DeepSpeed, whose losses differ by rounding.
    plain = "parallel.engine=plain"
    job = start(run_yaml, run_dir, 2, plain, forked=False)
    job.wait_for_step(3)
    job.ranks[0].send_signal(signal.SIGTERM)
    # SLURM and the supervisor both send a signal, and the rank may be exiting at that time.
    while any(rank.poll() is None for rank in job.ranks):
        for rank in job.ranks if committed_steps(run_dir) else ():
            rank.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    assert job.wait() == [EXIT_REQUEUE] * 2, job.output()
    stopped_at = committed_steps(run_dir)[-1]
    assert len(losses(run_dir)) == stopped_at
    assert f"stopped by SIGTERM at step {stopped_at} of 60" in job.output()
    assert f"checkpoint  {step_dir(run_dir, stopped_at)}\n" in job.output()
    assert "requeue" not in job.output()
    end = stopped_at + 3
    job = run_to_end(run_yaml, run_dir, 2, plain, f"train.exit_step={end}")
    assert f"resuming from {step_dir(run_dir, stopped_at)}" in job.output()
    assert losses(run_dir) == pytest.approx(losses(uninterrupted)[:end], rel=1e-5)


def exit_after_training(
    environment: dict[str, str], arguments: list[str], result: Connection
) -> None:
    """Run the command without its training; send the exit code and the handler that it leaves."""
    os.environ.update(environment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_deberta.train.run.train_rank", lambda *_, **__: 0)
        code = main(arguments)
    result.send((code, signal.getsignal(signal.SIGUSR1)))


@pytest.mark.parametrize(("launched", "left"), [(True, signal.SIG_IGN), (False, signal.SIG_DFL)])
def test_finished_rank_is_not_killed_while_exiting(
    run_yaml: Path, tmp_path: Path, launched: bool, left: signal.Handlers
) -> None:
    """Regression: a signal during the exit of a stopped run made the run hang."""
    rank = rank_variables(0, 1, free_port()) if launched else {}
    arguments = ["pretrain", str(run_yaml), f"train.run_dir={tmp_path / 'run'}"]
    context = fork_server()
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=exit_after_training, args=(rank, arguments, send))
    process.start()
    send.close()
    assert receive.recv() == (0, left)
    process.join(TIMEOUT)
    assert process.exitcode == 0


@pytest.mark.parametrize("broken", ["metrics", "shard"])
def test_failure_of_rank_0_ends_all_ranks(run_yaml: Path, tmp_path: Path, broken: str) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    overrides = ["parallel.engine=plain", "train.exit_step=2"]
    if broken == "metrics":
        (run_dir / FILE_NAME).write_text("no record\n")
        message = f"{FILE_NAME}:1: not a metrics record"
    else:
        for file in run_yaml.parent.glob("docs_text_document.*"):
            shutil.copy(file, tmp_path)
        shard = tmp_path / "docs_text_document.bin"
        content = bytearray(shard.read_bytes())
        content[len(content) // 4 * 2] ^= 1
        shard.write_bytes(content)
        overrides += ["data.verify_hashes=true", f"data.train=[{shard.with_suffix('')}]"]
        message = "SHA-256"
    job = start(run_yaml, run_dir, 2, *overrides)
    # The other rank is not killed; its collectives would wait for half an hour.
    assert job.wait() == [EXIT_USAGE] * 2, job.output()
    logs = [(tmp_path / f"run.{rank}.log").read_text() for rank in range(2)]
    assert message in logs[0]
    assert "another rank failed" in logs[1]
    assert committed_steps(run_dir) == []
