"""Replicas are compared before every save: weights of a faulty rank are not saved."""

from __future__ import annotations

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
            save=lambda metadata, _: calls.append(f"save {metadata.step}"),
            start=lambda metadata, _: calls.append(f"start {metadata.step}"),
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
    run._save(of_run, Guard.of_run(of_run.config), None, TrainState(7, 28), wait)
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
        run._save(of_run, Guard.of_run(of_run.config), None, TrainState(7, 28), wait)
    assert calls == []
