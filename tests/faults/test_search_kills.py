"""Tests one case of each command of ``tests.faults.search_kills``."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import product
from pathlib import Path

import psutil
import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE
from megatron_deberta.train import setup
from tests.faults.search_kills import (
    CASES,
    GRID,
    MOMENTS,
    ONE_RUN,
    PRINTED,
    RATES,
    SIGNALS,
    SearchKills,
    plan_case,
)
from tests.support.jobs import known_matmul_rate
from tests.support.tiny_task import MODEL


class ForkedCommands(SearchKills):
    """Commands are forks of this process, which has imported what they need."""

    def make_runs(self) -> None:
        if not self.runs.exists():
            data, grid = self.folder / "data", {**GRID, "optimizer.learning_rate": RATES[1]}
            settings = [f"{key}={value}" for key, value in grid.items()]
            arguments = ["finetune", str(data / "task.yaml"), "--model", str(MODEL), "--data"]
            arguments += [str(data), f"train.run_dir={self.runs / ONE_RUN}", *settings]
            assert main(arguments) == EXIT_DONE

    def start(self, arguments: Sequence[str], *before: str) -> psutil.Process:
        if (pid := os.fork()) == 0:
            code = 1
            # A fixture of another test may have set a handler.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                with (self.folder / PRINTED).open("w") as out, redirect_stdout(out):
                    with (self.folder / "errors").open("w") as err, redirect_stderr(err):
                        code = main(arguments)
            finally:
                os._exit(code)
        return psutil.Process(pid)


def test_sixty_cases_have_every_command_signal_and_moment() -> None:
    plans = [plan_case(number) for number in range(CASES)]
    assert Counter(plan["kind"] for plan in plans) == {"search": 30, "compare": 15, "ensemble": 15}
    for kind, moments in MOMENTS.items():
        found = {(plan["signal"], plan["moment"]) for plan in plans if plan["kind"] == kind}
        assert found == set(product(SIGNALS, moments))
    assert any(plan["again_seconds"] for plan in plans)


@pytest.mark.slow
def test_a_stopped_comparison_gives_the_same_when_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "measure_matmul_rate", known_matmul_rate)
    outcome = ForkedCommands(tmp_path).run(5)
    assert (outcome["kind"], outcome["signal"]) == ("compare", "SIGTERM")
    assert outcome["ok"], outcome


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> SearchKills:
    return SearchKills(tmp_path_factory.mktemp("search_kills"))


# A search killed after a step; a comparison and an ensemble killed as they write a file.
@pytest.mark.nightly
@pytest.mark.parametrize("number", [6, 13, 3])
def test_an_interrupted_command_gives_the_same_when_started_again(
    campaign: SearchKills, number: int
) -> None:
    if plan_case(number)["moment"] == "write" and shutil.which("strace") is None:
        pytest.skip("strace is missing; apt-get install strace enables this")
    outcome = campaign.run(number)
    assert outcome["ok"], outcome
