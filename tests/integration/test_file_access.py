"""What a run reads and writes between two steps: nothing, unless a log or a save is due."""

from __future__ import annotations

import builtins
import io
import os
from threading import current_thread, main_thread
from typing import Any

import pytest

from megatron_deberta.train.preemption import SAVE_FILE, STOP_FILE, Requests
from megatron_deberta.train.step import TrainStep
from tests.support.jobs import Run

FIRST, LAST = 2, 12


def test_ten_steps_look_for_requests_alone_and_only_while_the_device_computes(
    pretrain: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, between, looked = [0], list[str](), list[str]()
    place = [between]
    step, look = TrainStep.__call__, Requests.look_for_files

    def counted(*args: Any, **options: Any) -> Any:
        result = step(*args, **options)
        steps[0] += 1
        return result

    def looking(requests: Requests) -> None:
        place[0] = looked
        look(requests)
        place[0] = between

    def watch(module: Any, name: str) -> None:
        function = getattr(module, name)

        def watched(path: Any, *args: Any, **options: Any) -> Any:
            # The run's lock is renewed by a thread.
            if FIRST <= steps[0] < LAST and current_thread() is main_thread():
                place[0].append(str(path))
            return function(path, *args, **options)

        monkeypatch.setattr(module, name, watched)

    monkeypatch.setattr(TrainStep, "__call__", counted)
    monkeypatch.setattr(Requests, "look_for_files", looking)
    for module, name in (
        (os, "stat"),
        (os, "open"),
        (os, "lstat"),
        (io, "open"),
        (builtins, "open"),
    ):
        watch(module, name)
    code, error = pretrain(
        f"train.exit_step={LAST + 2}", "log.every=50", "checkpoint.save_every=50"
    )
    assert code == 0, error
    assert steps[0] == LAST + 2
    assert not between, between
    assert {path.rpartition("/")[2] for path in looked} == {STOP_FILE, SAVE_FILE}
    assert len(looked) == 2 * (LAST - FIRST)
