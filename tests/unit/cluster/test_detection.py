"""Whether a run hangs and which rank caused it, case by case."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from megatron_deberta.cluster.watchdog.detection import (
    Diagnosis,
    Limits,
    RankView,
    StragglerWatch,
    Times,
    diagnose_deaths,
    diagnose_hang,
    find_hang,
)
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.observe.progress import Section

CONFIG = ClusterConfig()


def view(rank: int, position: int = 100, age: float = 50.0, **values: Any) -> RankView:
    known: dict[str, Any] = {
        "node": rank // 2, "host": f"node{rank // 2}", "section": Section.STEP, "step": 9,
        "state": "S", "waiting": True, **values,
    }  # fmt: skip
    return RankView(rank=rank, position=position, age=age, **known)


def diagnosed(*views: RankView) -> Diagnosis:
    return diagnose_hang(views, "no progress")


def limits(*views: RankView, seconds: float = 10.0) -> dict[int, float]:
    return {view.rank: seconds for view in views}


def test_only_the_rank_behind_is_compared_with_its_time_out() -> None:
    reading = view(2, 99, age=500, section=Section.DATA)
    views = [view(0, age=499), view(1, age=499), reading]
    of_each = limits(*views, seconds=120) | {2: 600}
    # The others exceed the time-out of their section, but wait for a rank that does not.
    assert find_hang(views, of_each) == ""
    overdue = find_hang([*views[:2], replace(reading, age=601)], of_each)
    assert overdue == "no progress in data at step 9 for 601.0 s (time-out 600 s)"


def test_late_rank_resets_the_time_of_those_that_wait() -> None:
    views = [view(0, age=500), view(1, age=3)]
    assert find_hang(views, limits(*views)) == ""
    assert find_hang([view(0, age=500), view(1, age=11)], limits(*views)) != ""


def test_ended_ranks_do_not_hang() -> None:
    ended = view(0, 1, age=900, code=0)
    assert find_hang([ended, view(1, age=3)], limits(ended, view(1))) == ""
    assert find_hang([ended], limits(ended)) == ""


@pytest.mark.parametrize(
    ("section", "done", "seconds"),
    [
        (Section.STARTUP, 0, CONFIG.startup_timeout_seconds),
        (Section.STEP, 0, CONFIG.startup_timeout_seconds),
        (Section.STEP, 1, CONFIG.startup_timeout_seconds),
        (Section.STEP, 2, 200.0),
        (Section.DATA, 0, CONFIG.startup_timeout_seconds),
        (Section.DATA, 1, CONFIG.data_timeout_seconds),
        (Section.EVALUATION, 5, CONFIG.evaluation_timeout_seconds),
        (Section.SAVE, 5, CONFIG.save_timeout_seconds),
        (Section.END, 5, CONFIG.save_timeout_seconds),
    ],
)
def test_time_outs(section: Section, done: int, seconds: float) -> None:
    assert Limits(CONFIG, (9.0, 10.0, 11.0)).of(section, done) == seconds


def test_fast_steps_have_the_minimum_time_out() -> None:
    for times in ((0.1, 0.2), ()):
        assert Limits(CONFIG, times).of(Section.STEP, 9) == CONFIG.step_timeout_seconds


def test_behind_in_the_data() -> None:
    found = diagnosed(view(0), view(1), view(2, 99, section=Section.DATA, waiting=False), view(3))
    assert (found.ranks, found.hosts) == ((2,), ("node1",))
    assert "rank 2 on node1 hangs in data at step 9" in found.reason


def test_stopped_rank_takes_precedence_over_the_one_behind() -> None:
    # It has done its part of a collective; the others have not.
    found = diagnosed(view(0, 99), view(1, 100, state="T", waiting=None), view(2, 99), view(3, 99))
    assert found.ranks == (1,)


def test_ranks_at_the_same_position_are_distinguished_by_diagnostics() -> None:
    others = [view(0), view(1), view(3)]
    assert diagnosed(*others, view(2, waiting=False)).ranks == (2,)
    assert diagnosed(*others, view(2, waiting=None)).ranks == (2,)
    assert diagnosed(*others, view(2, state="D")).ranks == (2,)
    assert diagnosed(view(0, waiting=False)).ranks == (0,)
    # Another rank is behind as well, but waits in a collective.
    found = diagnosed(view(0, 101), view(1, 101), view(2, waiting=False), view(3))
    assert found.ranks == (2,)


def test_ambiguous_hang_names_all_candidates() -> None:
    found = diagnosed(view(0), view(1))
    assert (found.ranks, found.hosts) == ((), ())
    assert "no rank is behind" in found.reason
    several = diagnosed(view(0), view(1, waiting=False), view(2, waiting=False))
    assert several.ranks == (1, 2)
    assert several.hosts == ("node0", "node1")
    assert "equally likely: ranks 2" in several.reason


def test_deaths() -> None:
    assert diagnose_deaths([view(0, code=0), view(1, code=75), view(2)]) is None
    assert diagnose_deaths([view(0, code=-9, killed=True), view(1, code=0)]) is None
    # Ranks that depend on the dead one may be seen to end before it.
    found = diagnose_deaths([view(0, code=1, ended=5.0), view(1, code=-9, ended=5.1), view(2)])
    assert found is not None
    assert found.ranks == (1,)
    assert (
        found.reason == "rank 1 on node0 was killed by signal 9 (out of memory?) in step at step 9"
    )
    first = diagnose_deaths([view(0, code=1, ended=5.2), view(1, code=1, ended=5.1)])
    assert first is not None
    assert "rank 1 on node0 ended with 1" in first.reason


def test_while_a_node_is_silent_only_evidence_names_a_rank() -> None:
    # All wait, perhaps for a rank of the silent node: none of them is at fault.
    waiting = [view(0, 99), view(1, 100)]
    found = diagnose_hang(waiting, "no progress", ["node1"])
    assert (found.ranks, found.hosts) == ((), ())
    assert "no report from node1" in found.reason
    outside = view(0, 99, waiting=False)
    assert diagnose_hang([outside, waiting[1]], "no progress", ["node1"]).ranks == (0,)
    stopped = view(1, state="T")
    assert diagnose_hang([waiting[0], stopped], "no progress", ["node1"]).ranks == (1,)


def test_a_death_with_a_known_cause_blames_no_node() -> None:
    found = diagnose_deaths([view(0, code=-7, cause="/dev/shm is full"), view(1)])
    assert found is not None
    assert (found.ranks, found.hosts) == ((0,), ())
    assert "was killed by signal 7 (/dev/shm is full) in step" in found.reason


def test_the_longest_time_out() -> None:
    assert Limits(ClusterConfig(save_timeout_seconds=9999)).longest() == 9999


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
