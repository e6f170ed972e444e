"""Stop signals and files stop all ranks at the same step."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatron_deberta.train.preemption import (
    SAVE_FILE,
    STOP_FILE,
    Request,
    Requests,
    SignalRecorder,
)
from tests.support.ranks import RankPool, grid


def run_steps(
    rank: int, tp_size: int, target: int, number: signal.Signals = signal.SIGUSR2
) -> tuple[int, bool]:
    groups = grid(tp_size)
    with SignalRecorder() as stop:
        requests = Requests(stop, "nowhere", groups)
        for step in range(6):
            if rank == target and step == 3:
                os.kill(os.getpid(), number)
            if requests.poll() == Request(
                preempt=number != signal.SIGINT, interrupt=number == signal.SIGINT
            ):
                return step, stop.received is number
    return -1, stop.received is not None


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("target", [0, 1, 3])
def test_all_ranks_stop_together(four_ranks: RankPool, tp_size: int, target: int) -> None:
    stopped = four_ranks.run(run_steps, tp_size, target)
    assert stopped == [(3, rank == target) for rank in range(4)]


def test_all_ranks_learn_of_ctrl_c(two_ranks: RankPool) -> None:
    assert two_ranks.run(run_steps, 2, 1, signal.SIGINT) == [(3, False), (3, True)]


def test_no_stop_without_a_signal(two_ranks: RankPool) -> None:
    assert two_ranks.run(run_steps, 2, -1) == [(-1, False)] * 2


def look(rank: int, tp_size: int, run_dir: str) -> Request:
    return Requests(SignalRecorder(), run_dir, grid(tp_size)).poll()


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_all_ranks_see_a_file(four_ranks: RankPool, tp_size: int, tmp_path: Path) -> None:
    assert four_ranks.run(look, tp_size, str(tmp_path)) == [Request()] * 4
    (tmp_path / SAVE_FILE).touch()
    assert four_ranks.run(look, tp_size, str(tmp_path)) == [Request(save=True)] * 4
    (tmp_path / STOP_FILE).touch()
    assert four_ranks.run(look, tp_size, str(tmp_path)) == [Request(stop=True, save=True)] * 4
