"""Tests some calls of ``tests.faults.thread_calls``."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch import Tensor

from megatron_deberta.hf import fast_attention
from tests.faults.thread_calls import run_case


def test_threads_have_the_results_of_calls_alone() -> None:
    found = run_case(0, calls=200)
    assert found["ok"], found


def test_a_difference_in_threads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fast_attention.packed_attention

    def different(*arguments: Any, **options: Any) -> Tensor:
        is_alone = threading.current_thread() is threading.main_thread()
        result: Tensor = original(*arguments, **options)
        return result if is_alone else result + 1e-3

    monkeypatch.setattr(fast_attention, "packed_attention", different)
    found = run_case(0, calls=40)
    assert found["different"]
    assert not found["ok"]
