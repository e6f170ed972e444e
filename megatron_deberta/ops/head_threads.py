"""Spreads heads over threads, one thread a share of the heads from the first step to the last.

Torch's own way, every operation split over all threads, makes threads wait for each other
hundreds of times an attention call. Where cores are shared with other processes, each of these
waits can cost a time slice: attention was then up to fifty times slower. Heads never need
each other, so here the threads meet once, at the end. A head's arithmetic is also the same
whatever the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_THREAD_COUNT = threading.Lock()
"""Held while torch's number of threads, which the whole process shares, is changed."""
_WORTH_A_THREAD = 1 << 16
"""Scores below which a thread costs more than it saves."""


def for_heads(work: Callable[[slice], None], heads: int, scores: int, device: str) -> None:
    """Calls ``work`` for slices that together are all heads; on the CPU, in parallel.

    Args:
        work: does everything for a slice of heads, without gradients of its own.
        heads: number of heads.
        scores: scores of all heads, which tells whether threads are worth their start.
        device: device type of the tensors.

    Raises:
        Exception: whatever ``work`` raises.
    """
    threads = torch.get_num_threads() if device == "cpu" else 1
    workers = min(threads, heads, max(1, scores // _WORTH_A_THREAD))
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
