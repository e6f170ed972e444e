"""Control-plane collectives on real ranks."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_deberta.distributed.control import (
    all_reduce_any,
    all_reduce_max,
    broadcast_from_rank_zero,
    raise_on_all_ranks,
)
from megatron_deberta.errors import EXIT_USAGE, ConfigError, MegatronDebertaError
from tests.support.ranks import RankPool, grid


def agree(rank: int, tp_size: int, chosen: int) -> tuple[bool, int, list[float]]:
    groups = grid(tp_size)
    numbers = torch.tensor([-rank - 1.5, math.inf if rank == chosen else 0.0])
    return (
        all_reduce_any(rank == chosen, groups),
        broadcast_from_rank_zero(-7 if rank == 0 else rank, groups),
        all_reduce_max(numbers, groups).tolist(),
    )


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_result_is_the_same_on_every_rank(four_ranks: RankPool, tp_size: int) -> None:
    for chosen in range(4):
        agreed = four_ranks.run(agree, tp_size, chosen)
        assert agreed == [(True, -7, [-1.5, math.inf])] * 4
    assert four_ranks.run(agree, tp_size, -1) == [(False, -7, [-1.5, 0.0])] * 4


def fail_on(rank: int, tp_size: int, failing: int) -> str:
    groups = grid(tp_size)
    try:
        with raise_on_all_ranks(groups):
            if rank == failing:
                raise OSError("disk")
    except (OSError, MegatronDebertaError) as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_failure_of_one_rank_raises_on_all(four_ranks: RankPool, tp_size: int) -> None:
    for failing in (0, 3):
        messages = four_ranks.run(fail_on, tp_size, failing)
        assert messages.pop(failing) == "disk"
        assert messages == ["another rank failed; see its message"] * 3
    assert four_ranks.run(fail_on, tp_size, -1) == ["went on"] * 4


def refuse(rank: int) -> int:
    try:
        with raise_on_all_ranks(grid(1)):
            if rank:
                raise ConfigError("no such key")
    except MegatronDebertaError as error:
        return error.exit_code
    return 0


def test_all_ranks_have_the_exit_code_of_the_one_that_failed(two_ranks: RankPool) -> None:
    assert two_ranks.run(refuse) == [EXIT_USAGE] * 2
