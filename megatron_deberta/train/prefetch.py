"""Prefetching of micro batches to the device while the previous step runs.

Prefetched batches that are not used when a run stops do not count as consumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron_deberta.data.batch import MicroBatch


class InputQueue:
    """Provides the steps of a loader in order; on CUDA, one step is prefetched.

    Copies from pinned memory run on a separate stream, so that they overlap with kernels.

    Args:
        steps: yields this rank's micro batches of a step.
        device: the target device.
        streams: replaces ``torch.cuda`` in tests.

    Attributes:
        host: micro batches of the last step that was taken, in host memory.
    """

    def __init__(
        self, steps: Iterable[Sequence[MicroBatch]], device: torch.device, streams: Any = None
    ) -> None:
        self._steps: Iterator[Sequence[MicroBatch]] = iter(steps)
        self._device = device
        self._streams = torch.cuda if streams is None and device.type == "cuda" else streams
        self._copy_stream = None if self._streams is None else self._streams.Stream(device)
        self.host: Sequence[MicroBatch] = ()
        # In host memory, on the device, and the event of the copy
        self._prefetched: tuple[Sequence[MicroBatch], Sequence[MicroBatch], Any] | None = None
        self._failure: Exception | None = None

    def fetch(self) -> None:
        """Start copying the next step, unless one is prefetched already.

        Call it when work is queued on the device, before the host waits for it. Errors are raised
        by ``take``, because the current step is not affected.
        """
        if self._copy_stream is None or self._prefetched is not None or self._failure is not None:
            return
        try:
            host = next(self._steps)
            with self._streams.stream(self._copy_stream):
                copies = [batch.to(self._device, non_blocking=True) for batch in host]
                copied = self._copy_stream.record_event()
        except Exception as failure:
            self._failure = failure
            return
        self._prefetched = host, copies, copied

    def take(self) -> Sequence[MicroBatch]:
        """Return the micro batches of the next step, on the device.

        Work queued on the device afterwards sees the complete copy.

        Raises:
            DataError: a shard is damaged, or a loader process died.
            StopIteration: the loader has no more steps.
        """
        if self._copy_stream is None:
            self.host = next(self._steps)
            return [batch.to(self._device) for batch in self.host]
        self.fetch()
        if self._failure is not None:
            raise self._failure
        assert self._prefetched is not None
        self.host, batches, copied = self._prefetched
        self._prefetched = None
        compute = self._streams.current_stream(self._device)
        compute.wait_event(copied)
        for batch in batches:
            # The memory belongs to the copy stream, which must not reuse it while this one reads.
            batch.record_stream(compute)
        return batches
