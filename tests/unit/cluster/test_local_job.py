"""What follows the ranks' exit on one machine, with a supervisor that only returns codes."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.cluster.monitor import Notifier
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.watchdog import supervisor
from megatron_deberta.cluster.watchdog.detection import RankView
from megatron_deberta.cluster.watchdog.ranks import NodePlan
from megatron_deberta.cluster.watchdog.reports import NodeReport, ReportStore
from megatron_deberta.config.schema import RunConfig, TrainConfig
from megatron_deberta.errors import EXIT_INTERRUPTED, EXIT_NEVER_REQUEUE, EXIT_REQUEUE, EXIT_USAGE
from megatron_deberta.observe.progress import Section


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a job whose ranks end with these codes; return its own and how often they started."""

    def run(*codes: int) -> tuple[int, int]:
        left = list(codes)

        class Ends:
            errors: ClassVar[dict[int, str]] = {}

            def __init__(self, *_: Any) -> None:
                pass

            def run(self) -> int:
                return left.pop(0)

        monkeypatch.setattr(supervisor, "Supervisor", Ends)
        config = RunConfig(train=TrainConfig(run_dir=str(tmp_path)))
        code = supervisor.run_local_job(config, [], 2, 3)
        return code, len(codes) - len(left)

    return run


def test_a_refusal_is_neither_repeated_nor_recorded(launch: Any, tmp_path: Path) -> None:
    history = JobHistory(tmp_path)
    assert launch(EXIT_USAGE, 0) == (EXIT_USAGE, 1)
    assert not history.path.exists()
    assert launch(0) == (0, 1)
    before = history.records()
    assert history.end_reason() == "finished"
    assert launch(EXIT_USAGE, 0) == (EXIT_USAGE, 1)
    assert history.records() == before


def test_an_attempt_is_named_by_its_time(launch: Any, tmp_path: Path) -> None:
    before = int(time.strftime("%Y%m%d%H%M%S", time.gmtime()))
    launch(1, 0)
    names = [event["link"] for event in JobHistory(tmp_path).records() if event["event"] == "start"]
    jobs = [int(name.partition(".")[0]) for name in names]
    assert [name.partition(".")[2] for name in names] == ["0", "1"]
    assert before <= jobs[0] == jobs[1] <= before + 100
    # Logs of jobs that an older release named by seconds since the epoch stay in front.
    assert jobs[0] > time.time()


def test_ctrl_c_is_the_end(launch: Any, tmp_path: Path) -> None:
    assert launch(EXIT_INTERRUPTED, 0) == (EXIT_INTERRUPTED, 1)
    assert "Ctrl-C" in JobHistory(tmp_path).end_reason()


def test_a_failure_is_repeated_and_only_the_end_is_told(
    launch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Notifier, "send", lambda self, *message: told.extend(message))
    assert launch(1, 1, 0) == (0, 3)
    assert told == ["ended", "finished (exit code 0)"]


@pytest.fixture
def launch_with_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a job whose attempts fail at these (steps, error of rank 1); return code and starts."""

    def run(*attempts: tuple[int, str]) -> tuple[int, int]:
        left = list(attempts)

        class Fails:
            def __init__(self, plan: NodePlan, *_: Any) -> None:
                self.plan = plan
                self.errors: dict[int, str] = {}

            def run(self) -> int:
                steps, error = left.pop(0)
                plan = self.plan
                plan.logs.mkdir(parents=True)
                (plan.logs / "rank_0.log").write_text("RuntimeError: connection closed by peer\n")
                text = f"Traceback (most recent call last):\n{error}\nnanobind: leaked 1 instance\n"
                (plan.logs / "rank_1.log").write_text(text)
                views = tuple(
                    RankView(rank=rank, node=0, host="here", section=Section.STARTUP, step=steps,
                             position=0, age=0.0, pid=1, code=1, ended=2.0 - rank)
                    for rank in range(2)
                )  # fmt: skip
                report = NodeReport(
                    node=0, host="here", serial=1, views=views, limits=(1.0, 1.0),
                    times=((steps, 0, 0, 0),) * 2, code=1,
                )  # fmt: skip
                ReportStore(plan.run_dir, plan.attempt).publish(report)
                return 1

        monkeypatch.setattr(supervisor, "Supervisor", Fails)
        config = RunConfig(train=TrainConfig(run_dir=str(tmp_path)))
        code = supervisor.run_local_job(config, [], 2, 9)
        return code, len(attempts) - len(left)

    return run


def test_a_start_that_fails_twice_alike_is_not_tried_again(
    launch_with_errors: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [(0, f"ValueError: port {port} at 0x7f{port}") for port in (1, 2, 3)]
    assert launch_with_errors(*errors) == (EXIT_NEVER_REQUEUE, 2)
    assert "rank 1 on here ended with 1 in start-up at step 0: ValueError: port 1" in caplog.text
    reason = JobHistory(tmp_path).end_reason()
    assert reason == (
        "two starts failed before the first step with the same error: rank 1 on here ended with 1 "
        "in start-up at step 0: ValueError: port 2 at 0x7f2"
    )


@pytest.mark.parametrize(
    "attempts",
    [
        [(0, "ValueError: one"), (0, "OSError: another"), (0, "ValueError: one")],
        [(3, "ValueError: one"), (3, "ValueError: one"), (3, "ValueError: one")],
        [(0, "no error is named"), (0, "no error is named"), (0, "no error is named")],
    ],
    ids=["other errors", "after a step", "no error"],
)
def test_other_failures_are_tried_three_times(
    launch_with_errors: Any, attempts: list[tuple[int, str]]
) -> None:
    assert launch_with_errors(*attempts) == (EXIT_NEVER_REQUEUE, 3)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, EXIT_REQUEUE), (signal.SIGINT, EXIT_INTERRUPTED)]
)
def test_stop_signal_while_no_ranks_run(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    diagnose = ReportStore.diagnose

    def stopped(store: ReportStore, nodes: int) -> Any:
        os.kill(os.getpid(), number)
        return diagnose(store, nodes)

    before = signal.getsignal(number)
    monkeypatch.setattr(ReportStore, "diagnose", stopped)
    assert launch(1, 0) == (code, 1)
    assert signal.getsignal(number) is before
    assert JobHistory(tmp_path).end_reason() == "failed with exit code 1"


def test_stop_signal_after_the_end_of_an_attempt_reaches_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks are started, and told to stop at once."""
    commands = iter([("false",), ("sleep", "60")])
    plan_of = supervisor._local_plan
    monkeypatch.setattr(
        supervisor, "_local_plan",
        lambda *arguments: replace(plan_of(*arguments), command=next(commands)),
    )  # fmt: skip
    monkeypatch.setattr(supervisor, "export_once", lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
    config = RunConfig(train=TrainConfig(run_dir=str(tmp_path)))
    assert supervisor.run_local_job(config, [], 1, 3) == EXIT_REQUEUE
    history = JobHistory(tmp_path)
    assert [event["event"] for event in history.current()].count("start") == 2
    assert history.end_reason() == "stopped by SIGUSR1 before the first step"


def test_dry_run_describes_the_ranks_and_starts_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["model.vocab_size=8000", f"train.run_dir={tmp_path}/run"]
    run = ["launch", "configs/runs/quickstart.yaml", "--ranks", "2", *settings]
    assert main([*run, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "ranks: 2 = 1 data-parallel x 2 tensor-parallel" in shown
    assert shown.endswith(
        "starts 2 ranks, and up to 10 times again after a failure:\n"
        f"  {sys.executable} -m megatron_deberta pretrain {' '.join(run[1:2] + settings)}\n"
    )
    assert main([*run, "--dry-run", "--max-restarts", "3"]) == 0
    assert "and up to 3 times again" in capsys.readouterr().out
    # What the ranks would refuse is refused here.
    assert main([*run, "--dry-run", "train.global_batch_size=33"]) == 2
    assert "train.global_batch_size=33" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
