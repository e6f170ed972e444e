"""Training and validation loaders of one data-parallel rank.

The only state is the number of consumed samples, which is enough to resume.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_deberta.data.batch import MicroBatch
from megatron_deberta.data.collate import FILLER, Builder
from megatron_deberta.errors import DataError
from megatron_deberta.processes import die_with_parent

# Micro batches in flight, over all workers. Each tensor of one is shared memory, which takes a file
# descriptor until the batch has been copied.
_IN_FLIGHT = 32
# Part of torch's message when a worker process has died.
_WORKER_DIED = "exited unexpectedly"


_Batch = TypeVar("_Batch", bound=MicroBatch)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSampler:
    """Distributes the samples of each global batch over data-parallel ranks and micro batches.

    Step s of a run without changes of batch size reads samples [s * G, (s + 1) * G) in any layout.

    Attributes:
        global_batch_size: G, samples per step over all ranks.
        micro_batch_size: samples per forward pass.
        dp_rank: data-parallel rank; its tensor-parallel ranks read the same samples.
        dp_size: data-parallel ranks. ``batch_arithmetic`` checks that the sizes divide.
    """

    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    @property
    def num_micro_batches(self) -> int:
        """Micro batches per rank and step."""
        return self.global_batch_size // (self.micro_batch_size * self.dp_size)

    def micro_batches(self, first_sample: int) -> list[range]:
        """Return this rank's samples of the step that begins at ``first_sample``, in order."""
        share = self.global_batch_size // self.dp_size
        begin = first_sample + self.dp_rank * share
        return [
            range(start, start + self.micro_batch_size)
            for start in range(begin, begin + share, self.micro_batch_size)
        ]

    def endless(self, consumed_samples: int) -> Iterator[range]:
        """Yield this rank's micro batches of all steps after ``consumed_samples``."""
        for first in itertools.count(consumed_samples, self.global_batch_size):
            yield from self.micro_batches(first)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A ``DataError`` passed from a worker without torch's traceback around it."""

    message: str


class _MicroBatches(Dataset[Any], Generic[_Batch]):
    """Map-style dataset whose keys are the sample indices of a micro batch."""

    def __init__(self, builder: Builder[_Batch]) -> None:
        self._builder = builder

    def __getitem__(self, samples: Sequence[int]) -> _Batch | _Failure:
        try:
            return self._builder.build(samples)
        except DataError as error:
            return _Failure(str(error))
        except MemoryError as error:
            return _Failure(
                f"train.micro_batch_size={len(samples)}: not enough memory for a micro batch "
                f"({error}); lower it"
            )


class TrainLoader(Generic[_Batch]):
    """Endless iterator over steps of a data-parallel rank; yields the micro batches of each.

    Batches do not depend on the number of workers. Worker processes are forked when iteration
    starts and share the shards' indices with the rank.

    Args:
        builder: builds batches.
        sampler: samples of each micro batch.
        consumed_samples: global samples of completed steps.
        num_workers: worker processes; 0: build in this process.
        pin_memory: put batches into page-locked memory (needs CUDA).

    Attributes:
        consumed_samples: first sample of the iteration.
    """

    def __init__(
        self,
        builder: Builder[_Batch],
        sampler: StepSampler,
        consumed_samples: int,
        num_workers: int,
        pin_memory: bool,
    ) -> None:
        """See the class."""
        self.consumed_samples = consumed_samples
        self._dataset = _MicroBatches(builder)
        self._sampler = sampler
        self._num_workers = num_workers
        self._pin_memory = pin_memory

    def __iter__(self) -> Iterator[list[_Batch]]:
        """Yield the micro batches of each step, endlessly.

        Raises:
            DataError: a shard is damaged, or a worker process died.
        """
        batches, workers = self._start()
        kill = functools.partial(_kill, workers)
        # Python's exit sends SIGTERM, which workers ignore, and then waits for them.
        atexit.register(kill)
        try:
            while True:
                yield [self._next(batches) for _ in range(self._sampler.num_micro_batches)]
        finally:
            # The order matters: a worker killed while it checks torch's "done" event keeps the
            # event's lock, for which torch's shutdown would then wait forever.
            if workers:
                batches._shutdown_workers()
            kill()
            atexit.unregister(kill)

    def _next(self, batches: Iterator[_Batch | _Failure]) -> _Batch:
        """Return the next batch; raise ``DataError`` if its worker failed or died."""
        try:
            batch = next(batches)
        except (RuntimeError, OSError, EOFError) as error:
            # OSError and EOFError: the worker died while passing the batch.
            if isinstance(error, RuntimeError) and _WORKER_DIED not in str(error):
                raise
            raise DataError(
                f"a loader process died ({' '.join(repr(error).split())}); was it killed for "
                "memory, or is /dev/shm full? lower data.num_workers (0: no processes)"
            ) from error
        if isinstance(batch, _Failure):
            raise DataError(batch.message)
        # A whole step of shared memory would exceed the limit of open files and fill /dev/shm.
        return batch.clone() if self._num_workers and not self._pin_memory else batch

    def _start(self) -> tuple[Any, list[BaseProcess]]:
        """Start the workers; return the iterator over batches and the worker processes."""
        workers = self._num_workers
        # Prefetch one whole step beyond the current one, if that is not too much.
        in_flight = min(2 * self._sampler.num_micro_batches, _IN_FLIGHT)
        ahead = max(2, -(-in_flight // workers)) if workers else None
        loader = DataLoader(
            self._dataset,
            batch_size=None,
            sampler=self._sampler.endless(self.consumed_samples),
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=self._pin_memory,
            prefetch_factor=ahead,
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=functools.partial(_become_worker, os.getpid()),
        )
        if workers:
            # Build the lazy indices before the fork, so that workers share them.
            self._dataset[range(self.consumed_samples, self.consumed_samples + 1)]
        others = multiprocessing.active_children()
        in_main_thread = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGCHLD)
        batches = iter(loader)
        if in_main_thread and handler is not None:
            # torch's handler raises at an arbitrary place when a worker dies. Without it the next
            # request for a batch reports the death.
            signal.signal(signal.SIGCHLD, handler)
        return batches, [one for one in multiprocessing.active_children() if one not in others]


@dataclass(frozen=True, slots=True)
class ValidationLoader(Generic[_Batch]):
    """Iterable over a rank's validation batches, the same at every validation.

    All ranks yield the same number of micro batches, as collectives require; the last one is
    filled with padding rows. Batches are built in this process.

    Attributes:
        builder: builds batches with validation masks.
        num_samples: validation samples over all ranks.
        micro_batch_size: samples per forward pass.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
        others: builders of the same samples in other forms, which follow in the same order.
    """

    builder: Builder[_Batch]
    num_samples: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int
    others: tuple[Builder[_Batch], ...] = ()

    def __len__(self) -> int:
        """Return the number of micro batches per rank."""
        return self._batches_per_form * (1 + len(self.others))

    @property
    def _batches_per_form(self) -> int:
        return -(-self.num_samples // (self.micro_batch_size * self.dp_size))

    def __iter__(self) -> Iterator[_Batch]:
        """Yield this rank's micro batches.

        Raises:
            DataError: a shard is damaged.
        """
        for builder in (self.builder, *self.others):
            for number in range(self._batches_per_form):
                begin = (number * self.dp_size + self.dp_rank) * self.micro_batch_size
                samples = range(begin, begin + self.micro_batch_size)
                yield builder.build([s if s < self.num_samples else FILLER for s in samples])


def _kill(workers: list[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


def _unchanged(batch: Any) -> Any:
    return batch


def _become_worker(rank_pid: int, worker: int) -> None:
    """Ignore signals: the rank still needs batches between SIGTERM and its checkpoint.

    The rank kills its workers at its end; the kernel does if the rank dies, since workers hold
    its sockets open, by which other ranks detect the death.
    """
    die_with_parent(rank_pid)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
