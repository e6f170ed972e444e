"""Rank pool: failures are reported, the other ranks are stopped, and the pool restarts."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, RankPool


def add_ranks(rank: int, start: int) -> torch.Tensor:
    total = torch.tensor([float(rank + start)])
    dist.all_reduce(total)
    return total


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is broken")
    dist.barrier()


def die_on_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(rank: int) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("function", "message", "seconds"),
    [
        (fail_on_one, "ValueError: rank one is broken", 10.0),
        (die_on_one, "died with exit code -9", 10.0),
        (sleep, "did not respond in time", 0.5),
    ],
)
def test_failure_is_reported_and_stops_all_processes(
    function: object, message: str, seconds: float
) -> None:
    with RankPool(2) as pool:
        assert pool.run(add_ranks, 1) == [3.0, 3.0]
        processes = pool.process_ids
        begun = time.monotonic()
        with pytest.raises(RankError, match=message):
            pool.run(function, timeout=seconds)  # type: ignore[arg-type]
        assert time.monotonic() - begun < 15
        for process in processes:
            with pytest.raises(ProcessLookupError):
                os.kill(process, 0)
        if function is fail_on_one:
            assert pool.run(add_ranks, 2) == [5.0, 5.0], "a pool starts again after a failure"
