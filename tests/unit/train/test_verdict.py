"""The verdict about a repeated step: which ranks computed wrong, and whether they still do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_deberta.train.stability.rerun import Place, Verdict, diagnose

PLACES = 5


def records(dp_size: int, tp_size: int = 1, runs: int = 3) -> Tensor:
    """Return records of ranks that compute right; every data-parallel rank has other batches."""
    table = torch.ones(dp_size * tp_size, runs, PLACES, 2, dtype=torch.int64)
    for rank in range(dp_size * tp_size):
        for run in range(runs):
            batch = (rank // tp_size - (run == 2)) % dp_size
            table[rank, run, :, 0] = 100 * batch + 10 * (rank % tp_size) + torch.arange(PLACES)
    return table


def spoil(table: Tensor, rank: int, run: int, place: int = 2, *, finite: bool = False) -> None:
    """Make a rank compute other values from a place on."""
    table[rank, run, place:, 0] += 1000 + rank
    table[rank, run, place:, 1] = int(finite)


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("dp_size", [2, 4])
def test_transient_fault(dp_size: int, finite: bool) -> None:
    table = records(dp_size)
    spoil(table, 1, 0, finite=finite)
    assert diagnose(table, 1, repeats=False) == ("transient", (1,))


@pytest.mark.parametrize("dp_size", [2, 4])
def test_persistent_fault(dp_size: int) -> None:
    table = records(dp_size)
    for run in range(3):
        spoil(table, 1, run)
    assert diagnose(table, 1, repeats=True) == ("persistent", (1,))


def test_persistent_fault_with_finite_values_needs_a_majority() -> None:
    for dp_size, expected in ((2, (0, 1)), (4, (1,))):
        table = records(dp_size)
        for run in range(3):
            spoil(table, 1, run, finite=True)
        assert diagnose(table, 1, repeats=False) == ("persistent", expected)


def test_first_rank_in_the_order_of_computation_is_named() -> None:
    table = records(2, tp_size=2)
    for run in range(3):
        # The fault of rank 3 spreads to its tensor-parallel partner.
        spoil(table, 3, run, place=1)
        spoil(table, 2, run, place=2)
    assert diagnose(table, 2, repeats=True) == ("persistent", (3,))
    table = records(2, tp_size=2)
    spoil(table, 3, 0, place=1)
    spoil(table, 2, 0, place=2)
    assert diagnose(table, 2, repeats=False) == ("transient", (3,))


def test_data_are_the_cause_if_every_rank_computes_the_same() -> None:
    table = records(2)
    table[0, :2, 1:, 1] = 0
    table[1, 2, 1:, 1] = 0
    assert diagnose(table, 1, repeats=True) == ("reproducible", ())


def test_without_another_rank_device_and_data_cannot_be_told_apart() -> None:
    table = records(1, runs=2)
    table[..., 1] = 0
    assert diagnose(table, 1, repeats=True) == ("undecided", ())
    table[0, 1, :, 1] = 1
    table[0, 1, :, 0] += 1
    assert diagnose(table, 1, repeats=False) == ("transient", (0,))


def test_fault_between_ranks_has_no_rank() -> None:
    assert diagnose(records(2), 1, repeats=False) == ("transient", ())


def test_order_of_sums_that_is_not_fixed_is_no_fault() -> None:
    table = records(3)
    table[..., 0] += torch.arange(table[..., 0].numel()).view_as(table[..., 0])
    assert diagnose(table, 1, repeats=True) == ("reproducible", ())
    table[2, 0, 3:, 1] = 0
    assert diagnose(table, 1, repeats=False) == ("transient", (2,))


def test_text_names_rank_host_and_device() -> None:
    place = Place(3, "node7", "cuda:1")
    text = str(Verdict(12, "gradient not finite", "persistent", (place,)))
    assert text.startswith(
        "step 12: gradient not finite; run again: a persistent fault on rank 3 (node7, cuda:1): "
    )
    both = Verdict(12, "replicas differ", "transient", (place, Place(4, "node8", "cuda:0")))
    assert "on one of rank 3 (node7, cuda:1), rank 4 (node8, cuda:0): " in str(both)


def test_later_run_decides_about_differing_replicas() -> None:
    place = Place(1, "node", "cpu")
    kinds = [
        Verdict(5, "replicas differ", kind, ()).about_replicas([place])
        for kind in ("reproducible", "transient", "persistent", "undecided")
    ]
    assert [v.kind for v in kinds] == ["transient", "persistent", "persistent", "undecided"]
    assert all(v.places == (place,) for v in kinds)
