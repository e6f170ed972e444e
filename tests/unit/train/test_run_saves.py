"""Replicas are compared before every save: weights of a faulty rank are not saved."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_deberta.config.schema import GuardConfig, RunConfig
from megatron_deberta.errors import ReplicaError
from megatron_deberta.train import run
from megatron_deberta.train.stability.guard import Guard
from megatron_deberta.train.start import Identity
from megatron_deberta.train.state import TrainState


def components(calls: list[str], check_every: int) -> Any:
    """Components of a run whose saver notes what it is asked."""
    return SimpleNamespace(
        config=RunConfig(guard=GuardConfig(replica_check_every=check_every)),
        engine=SimpleNamespace(module=None),
        model=SimpleNamespace(specs={}),
        groups=None,
        data=SimpleNamespace(identity=Identity("/tokenizer", "t" * 64, "d" * 64)),
        saver=SimpleNamespace(
            save=lambda metadata, *_: calls.append(f"save {metadata.step}"),
            start=lambda metadata, *_: calls.append(f"start {metadata.step}"),
        ),
    )


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("check_every", [0, 50])
def test_replicas_are_compared_before_a_save(
    monkeypatch: pytest.MonkeyPatch, wait: bool, check_every: int
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(run, "check_replicas", lambda *args: calls.append(f"check {args[-1]}"))
    of_run = components(calls, check_every)
    run._save(of_run, Guard.of_run(of_run.config), None, None, TrainState(7, 28), wait, 0.0)
    check = ["check 7"] if check_every else []
    assert calls == [*check, "save 7" if wait else "start 7"]


@pytest.mark.parametrize("wait", [True, False])
def test_differing_replicas_are_not_saved(monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    def differing(*args: Any) -> None:
        raise ReplicaError("step 7: weight differs")

    calls: list[str] = []
    monkeypatch.setattr(run, "check_replicas", differing)
    of_run = components(calls, 50)
    with pytest.raises(ReplicaError, match="step 7"):
        run._save(of_run, Guard.of_run(of_run.config), None, None, TrainState(7, 28), wait, 0.0)
    assert calls == []


def test_worst_case_of_a_stop_contains_the_check_of_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "check_replicas", lambda *_: time.sleep(0.01))
    records: Any = SimpleNamespace(
        longest_step=2.0, longest_check=0.0, record_checkpoint=lambda *_: None
    )
    of_run = components([], 50)
    run._save(of_run, Guard.of_run(of_run.config), records, None, TrainState(7, 28), True, 0.0)
    assert records.longest_check >= 0.01
    events: list[dict[str, Any]] = []
    of_run.lock = SimpleNamespace(record=lambda event, **values: events.append(values))
    saved = SimpleNamespace(step=7, consumed_samples=28, seconds=3.0)
    run._record_saved(of_run, records, None, 7, saved)  # type: ignore[arg-type]
    assert events[0]["save_seconds"] == 3.0 + records.longest_check
    # The step after the signal may end with a check of its own.
    assert events[0]["step_seconds"] == 2.0 + records.longest_check
