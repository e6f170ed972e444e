"""Prefetching of micro batches to the device while the previous step runs.

Prefetched batches that are not used when a run stops do not count as consumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_deberta.data.batch import MicroBatch


@dataclass(frozen=True, slots=True)
class StepInput:
    """Micro batches of one rank and step.

    Attributes:
        host: in host memory.
        device: on the device.
    """

    host: Sequence[MicroBatch]
    device: Sequence[MicroBatch]


class InputQueue:
    """Provides the steps of a loader in order; on CUDA, one step is prefetched.

    Copies from pinned memory run on a separate stream, so that they overlap with kernels.

    Args:
        steps: yields this rank's micro batches of a step.
        device: the target device.
        streams: replaces ``torch.cuda`` in tests.
    """

    def __init__(
        self, steps: Iterable[Sequence[MicroBatch]], device: torch.device, streams: Any = None
    ) -> None:
        self._steps: Iterator[Sequence[MicroBatch]] = iter(steps)
        self._device = device
        self._streams = torch.cuda if streams is None and device.type == "cuda" else streams
        self._copy_stream = None if self._streams is None else self._streams.Stream(device)
        self._prefetched: tuple[StepInput, Any] | None = None
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
        self._prefetched = StepInput(host, copies), copied

    def take(self) -> StepInput:
        """Return the next step; work queued on the device afterwards sees the complete copy.

        Raises:
            DataError: a shard is damaged, or a loader process died.
            StopIteration: the loader has no more steps.
        """
        if self._copy_stream is None:
            host = next(self._steps)
            return StepInput(host, [batch.to(self._device) for batch in host])
        self.fetch()
        if self._failure is not None:
            raise self._failure
        assert self._prefetched is not None
        step, copied = self._prefetched
        self._prefetched = None
        compute = self._streams.current_stream(self._device)
        compute.wait_event(copied)
        for batch in step.device:
            # The memory belongs to the copy stream, which must not reuse it while this one reads.
            batch.record_stream(compute)
        return step
