"""The micro batches of each step on the device, copied there while the step before runs.

Owns when a batch is fetched and copied, and that the device never reads it too early. Has no
position: what is ahead when a run stops was consumed by nobody and comes again when it resumes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_deberta.data.batch import Batch


@dataclass(frozen=True, slots=True)
class StepInput:
    """The micro batches of one rank and step."""

    host: Sequence[Batch]
    """As the loader gave them, for whoever wants to look at values."""
    device: Sequence[Batch]
    """The same on the device."""


class InputQueue:
    """Takes steps from a loader in order, on CUDA one step ahead of its use.

    Copies run on a stream of their own, from pinned memory, so that they wait for no kernel and
    no kernel waits for them. Elsewhere there is nothing to overlap and nothing is fetched ahead.

    Args:
        steps: yields this rank's micro batches of a step.
        device: where they are wanted.
        streams: in place of ``torch.cuda``, for tests.
    """

    def __init__(
        self, steps: Iterable[Sequence[Batch]], device: torch.device, streams: Any = None
    ) -> None:
        self._steps: Iterator[Sequence[Batch]] = iter(steps)
        self._device = device
        self._streams = torch.cuda if streams is None and device.type == "cuda" else streams
        self._side = None if self._streams is None else self._streams.Stream(device)
        self._ahead: tuple[StepInput, Any] | None = None
        self._failure: Exception | None = None

    def fetch(self) -> None:
        """Start copying the next step, unless one is ahead already.

        To be called when the device has work and before the host waits for it. What goes wrong is
        raised when the step is taken: the one that runs has nothing to do with it.
        """
        if self._side is None or self._ahead is not None or self._failure is not None:
            return
        try:
            host = next(self._steps)
            with self._streams.stream(self._side):
                copies = [batch.to(self._device, non_blocking=True) for batch in host]
                copied = self._side.record_event()
        except Exception as failure:
            self._failure = failure
            return
        self._ahead = StepInput(host, copies), copied

    def take(self) -> StepInput:
        """Return the next step; work queued on the device from now on finds it copied.

        Raises:
            DataError: a shard is damaged, or a loader process died.
            StopIteration: the loader has no more steps.
        """
        if self._side is None:
            host = next(self._steps)
            return StepInput(host, [batch.to(self._device) for batch in host])
        self.fetch()
        if self._failure is not None:
            raise self._failure
        assert self._ahead is not None
        step, copied = self._ahead
        self._ahead = None
        compute = self._streams.current_stream(self._device)
        compute.wait_event(copied)
        for batch in step.device:
            # Their memory was allocated for the other stream, which must not get it back while
            # this one still reads it.
            batch.record_stream(compute)
        return step
