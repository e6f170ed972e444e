"""Who is slow, from sums of times."""

from __future__ import annotations

import random

from megatron_deberta.cluster.watchdog.straggler import StragglerWatch, Times

MS = 1_000_000


class Ranks:
    """Sums of four ranks that take steps."""

    def __init__(self, seed: int = 0, ranks: int = 4) -> None:
        self.draw = random.Random(seed)
        self.sums: dict[int, Times] = dict.fromkeys(range(ranks), (0, 0, 0, 0))

    def steps(self, count: int, slow: int = -1, part: int = 2, factor: float = 1.5) -> None:
        for _ in range(count):
            for rank, sums in self.sums.items():
                own = [1, 2 * MS, round(30 * MS * self.draw.uniform(0.8, 1.2)), 100 * MS]
                if rank == slow:
                    own[part] += round((factor - 1) * 32 * MS)
                one, data, forward, whole = (a + b for a, b in zip(sums, own, strict=True))
                self.sums[rank] = (one, data, forward, whole)


def test_a_slow_rank_is_found_with_its_part_within_100_steps() -> None:
    for seed in range(20):
        for part, name in ((1, "data"), (2, "forward")):
            ranks, watch = Ranks(seed), StragglerWatch(1.3, 50)
            watch.update(ranks.sums)
            ranks.steps(50, slow=seed % 4, part=part)
            assert watch.update(ranks.sums) == ()
            ranks.steps(50, slow=seed % 4, part=part)
            found = watch.update(ranks.sums)
            assert found is not None
            assert [(item.rank, item.part) for item in found] == [(seed % 4, name)]
            assert 1.4 < found[0].factor < 1.6
            # And is forgotten once it keeps up.
            ranks.steps(50)
            assert watch.update(ranks.sums) == ()


def test_even_ranks_are_never_slow() -> None:
    for seed in range(20):
        ranks, watch = Ranks(seed), StragglerWatch(1.3, 50)
        for _ in range(20):
            ranks.steps(50)
            assert not watch.update(ranks.sums)


def test_what_costs_no_time_is_not_told() -> None:
    # Ten times the median, of a hundredth of the step.
    sums: dict[int, Times] = {r: (100, 0, 100 * MS, 10_000 * MS) for r in range(4)}
    sums[2] = (100, 0, 1_000 * MS, 10_000 * MS)
    watch = StragglerWatch(1.3, 50)
    watch.update(dict.fromkeys(range(4), (0, 0, 0, 0)))
    assert watch.update(sums) == ()


def test_waits_until_every_rank_has_done_a_window() -> None:
    ranks, watch = Ranks(), StragglerWatch(1.3, 50)
    assert watch.update(ranks.sums) is None
    ranks.steps(49)
    assert watch.update(ranks.sums) is None
    ranks.steps(1)
    assert watch.update(ranks.sums) == ()
    # A rank that was not there before starts the window anew.
    assert watch.update({**ranks.sums, 4: (0, 0, 0, 0)}) is None


def test_one_of_two_can_be_slow() -> None:
    ranks, watch = Ranks(ranks=2), StragglerWatch(1.3, 10)
    watch.update(ranks.sums)
    for _ in range(2):
        ranks.steps(10, slow=1)
        found = watch.update(ranks.sums)
    assert found is not None
    assert [item.rank for item in found] == [1]


def test_who_waits_in_forward_for_a_late_batch_is_not_slow() -> None:
    # Of two pairs that split layers, rank 0's batches come late: its pair waits for it in forward,
    # and so does the half of the other pair whose other half waits at the masks' sum.
    watch = StragglerWatch(1.3, 10)
    late, waiting, usual = (
        tuple(ms * MS for ms in (data, forward, 4_000))
        for data, forward in ((2_000, 800), (0, 2_800), (0, 800))
    )
    for windows in range(3):
        sums = {
            rank: (10 * windows, *(windows * part for part in times))
            for rank, times in enumerate((late, waiting, usual, waiting))
        }
        found = watch.update(sums)
    assert found is not None
    assert [(item.rank, item.part) for item in found] == [(0, "data")]
