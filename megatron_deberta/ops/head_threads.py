"""Parallelism over heads: each CPU thread computes a share of the heads from start to end.

Torch's intra-op parallelism synchronises its threads hundreds of times per attention call. On
cores shared with other processes each of these can cost a time slice, which made attention up to
fifty times slower. Heads are independent, so here threads synchronise once, at the end, and a
head's arithmetic does not depend on the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_THREAD_COUNT = threading.Lock()
"""Guards torch's number of threads, which is global to the process."""
_MIN_SCORES_PER_THREAD = 1 << 16
"""With fewer scores a thread costs more than it saves."""


def for_heads(work: Callable[[slice], None], heads: int, scores: int) -> None:
    """Call ``work`` for slices that cover all heads, in parallel.

    Args:
        work: computes a slice of heads; runs without autograd.
        heads: number of heads.
        scores: number of scores of all heads, which limits the number of threads.

    Raises:
        Exception: raised by ``work``.
    """
    threads = torch.get_num_threads()
    workers = min(threads, heads, max(1, scores // _MIN_SCORES_PER_THREAD))
    if workers < 2:
        work(slice(0, heads))
        return
    inference = torch.is_inference_mode_enabled()

    def share(worker: int) -> None:
        # Threads start with torch's defaults: gradients on, every operation on all cores.
        torch.set_num_threads(threads // workers)
        with torch.inference_mode() if inference else torch.no_grad():
            work(slice(worker * heads // workers, (worker + 1) * heads // workers))

    with _THREAD_COUNT:
        try:
            with ThreadPoolExecutor(workers) as pool:
                for _ in pool.map(share, range(workers)):
                    pass
        finally:
            torch.set_num_threads(threads)
