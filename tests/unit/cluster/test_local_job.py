"""What follows the ranks' exit on one machine, with a supervisor that only returns codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.watchdog import local_job
from megatron_deberta.config.schema import RunConfig, TrainConfig
from megatron_deberta.errors import EXIT_INTERRUPTED, EXIT_USAGE


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a job whose ranks end with these codes; return its own and how often they started."""

    def run(*codes: int) -> tuple[int, int]:
        left = list(codes)

        class Ends:
            def __init__(self, plan: Any) -> None:
                pass

            def run(self) -> int:
                return left.pop(0)

        monkeypatch.setattr(local_job, "Supervisor", Ends)
        config = RunConfig(train=TrainConfig(run_dir=str(tmp_path)))
        code = local_job.run_local_job(config, [], 2, 3)
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


def test_ctrl_c_is_the_end(launch: Any, tmp_path: Path) -> None:
    assert launch(EXIT_INTERRUPTED, 0) == (EXIT_INTERRUPTED, 1)
    assert "Ctrl-C" in JobHistory(tmp_path).end_reason()


def test_the_end_is_told_and_a_restart_is_not(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        "megatron_deberta.cluster.notify.Notifier.send", lambda self, *message: told.extend(message)
    )
    launch(1, 1, 0)
    assert told == ["ended", "finished (exit code 0)"]


def test_a_failure_is_repeated(launch: Any) -> None:
    assert launch(1, 1, 0) == (0, 3)
