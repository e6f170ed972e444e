"""At most ``local_every`` steps are done again, however long a save takes."""

from __future__ import annotations

import pytest

from megatron_deberta.checkpoint.local.saver import SaveSchedule


def lost_steps(every: int, durations: list[int], steps: int = 60) -> tuple[int, int]:
    """Train with saves that take some numbers of steps in turn, or end when they are waited for.

    Returns:
        The most steps that a failure would have lost, and the number of saves.
    """
    schedule, saving, most, saves = SaveSchedule(every, 0), None, 0, 0
    for step in range(1, steps + 1):
        # A failure now loses what is not saved completely.
        most = max(most, step - schedule.safe)
        if saving is not None and step >= saving[1]:
            schedule.finished(step, saving[0], is_complete=True)
            saving = None
        for is_second_look in (False, True):
            if saving is not None and schedule.must_wait(step):
                schedule.finished(step, saving[0], is_complete=True)
                saving = None
            if not is_second_look and saving is None and schedule.is_due(step):
                schedule.started(step)
                saving = step, step + durations[saves % len(durations)]
                saves += 1
    return most, saves


@pytest.mark.parametrize("every", [1, 2, 3, 10])
@pytest.mark.parametrize("durations", [[1], [2], [1, 7], [100]])
def test_no_failure_loses_more_steps(every: int, durations: list[int]) -> None:
    assert lost_steps(every, durations)[0] <= every


def test_short_saves_start_as_rarely_as_possible() -> None:
    # The first one after half the steps; a save that takes a step starts one step early.
    assert lost_steps(10, [1], steps=60)[1] == 1 + (60 - 5) // 9


def test_failed_saves_are_not_waited_for() -> None:
    schedule = SaveSchedule(4, 0)
    assert [step for step in range(1, 5) if schedule.is_due(step)][0] == 2
    schedule.started(2)
    assert schedule.must_wait(4)
    schedule.finished(4, 2, is_complete=False)
    assert not schedule.is_due(5)
    assert schedule.is_due(6)
    schedule.started(6)
    assert not schedule.must_wait(6)
    schedule.finished(7, 6, is_complete=True)
    assert (schedule.safe, schedule.must_wait(10), schedule.must_wait(9)) == (6, True, False)


def test_a_save_that_hangs_is_waited_for_once() -> None:
    schedule = SaveSchedule(3, 0)
    schedule.started(2)
    assert schedule.must_wait(3)
    schedule.give_up()
    assert not any(schedule.must_wait(step) for step in range(3, 50))
