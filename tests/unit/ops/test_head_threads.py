"""Parallelism over heads: bit-identical results, thread count, inference mode and errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from megatron_deberta.ops import RelativePositions, disentangled_attention, head_threads
from megatron_deberta.ops.head_threads import for_heads


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(head_threads, "_MIN_SCORES_PER_THREAD", 1)
    yield
    torch.set_num_threads(before)


def test_results_are_bit_identical_for_any_number_of_threads() -> None:
    positions = RelativePositions(8, 4)
    shapes = [(2, 5, 40, 8)] * 3 + [(5, 8, 8)] * 2
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    results = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        output, lse = disentangled_attention(
            *inputs, positions, dropout_p=0.2, seed=1, head_offset=3, return_lse=True
        )
        gradients = torch.autograd.grad(output, inputs, inputs[0].detach())
        assert torch.get_num_threads() == threads
        results.append((output, lse, *gradients))
    for others in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], others, strict=True))


def test_each_head_is_computed_once_in_a_worker_thread() -> None:
    seen: list[int] = []
    names = set()

    def work(heads: slice) -> None:
        seen.extend(range(heads.start, heads.stop))
        names.add(threading.get_ident())
        assert torch.get_num_threads() == 1
        assert not torch.is_grad_enabled()

    for_heads(work, heads=5, scores=100)
    assert sorted(seen) == list(range(5))
    assert threading.get_ident() not in names


def test_small_calls_use_the_calling_thread() -> None:
    callers = []
    for_heads(lambda heads: callers.append((heads, threading.get_ident())), heads=5, scores=1)
    assert callers == [(slice(0, 5), threading.get_ident())]


def test_an_error_in_a_thread_reaches_the_caller_and_leaves_its_thread_count() -> None:
    def work(heads: slice) -> None:
        if heads.stop == 5:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        for_heads(work, heads=5, scores=100)
    assert torch.get_num_threads() == 2


def test_inference_mode_reaches_the_threads() -> None:
    x = torch.randn(1, 2, 9, 4)
    with torch.inference_mode():
        output = disentangled_attention(x, x, x, None, None, RelativePositions())
    assert output.is_inference()
