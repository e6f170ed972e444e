"""A few calls of the campaign ``tests.faults.thread_calls``."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from megatron_deberta.hf import fast_attention
from tests.faults.thread_calls import run_case


def test_threads_have_the_results_of_calls_alone() -> None:
    found = run_case(0, calls=200)
    assert found["ok"], found


def test_a_state_that_threads_share_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the threads get the operator's results of another call."""
    original, last = fast_attention.packed_attention, []

    def mixed(*arguments: Any, **options: Any) -> Any:
        last.append(original(*arguments, **options))
        is_other = threading.current_thread() is not threading.main_thread()
        return last[-1] + 1e-3 * is_other

    monkeypatch.setattr(fast_attention, "packed_attention", mixed)
    found = run_case(0, calls=40)
    assert found["different"]
    assert not found["ok"]
