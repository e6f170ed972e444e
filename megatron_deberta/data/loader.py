"""Steps of micro batches for one rank, built by worker processes.

Owns worker start, pinning, and what a dead worker looks like. Refuses to have a position of its
own: it starts at a number of consumed samples and that number is all there is to resume.
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
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_deberta.data.batch import Batch
from megatron_deberta.data.collate import FILLER, Builder
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.processes import die_with_parent

_WORKER_DIED = "exited unexpectedly"
"""What torch says, in a RuntimeError, of a worker that is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSampler:
    """Distributes the samples of each global batch over data-parallel ranks and micro batches.

    Step s of a run without changes of batch size reads samples [s * G, (s + 1) * G) in any layout.

    Attributes:
        global_batch_size: G, samples per step over all ranks.
        micro_batch_size: samples per forward pass.
        dp_rank: data-parallel rank; its tensor-parallel ranks read the same samples.
        dp_size: data-parallel ranks.

    Raises:
        ConfigError: the sizes do not divide.
    """

    global_batch_size: int
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def __post_init__(self) -> None:
        """Check that the sizes divide."""
        if self.global_batch_size % (self.micro_batch_size * self.dp_size):
            raise ConfigError(
                f"train.global_batch_size {self.global_batch_size} is not a multiple of "
                f"train.micro_batch_size {self.micro_batch_size} x {self.dp_size} data-parallel "
                "ranks; change one of them"
            )

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
    """A ``DataError`` on its way out of a worker, without torch's traceback around it."""

    message: str


class _MicroBatches(Dataset["Batch | _Failure"]):
    """Sample indices to batch, in whichever process torch calls it."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def __getitem__(self, samples: Sequence[int]) -> Batch | _Failure:
        try:
            return self._builder.build(samples)
        except DataError as error:
            return _Failure(str(error))


class TrainLoader:
    """Endless steps of a data-parallel rank; iterating yields the micro batches of one step.

    The batches are the same for any number of workers. Worker processes are forked when iteration
    starts, so they share the shards' indices with the rank.

    Args:
        builder: builds batches.
        sampler: deals samples.
        consumed_samples: global samples of the steps already done.
        num_workers: processes; 0 builds in this process.
        pin_memory: put batches into page-locked memory (needs CUDA).

    Attributes:
        consumed_samples: where iteration starts.
    """

    def __init__(
        self,
        builder: Builder,
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

    def __iter__(self) -> Iterator[list[Batch]]:
        """Yield the micro batches of the next step, for ever.

        Raises:
            DataError: a shard is damaged, or a worker process died.
        """
        batches, workers = self._start()
        kill = functools.partial(_kill, workers)
        # Python's own exit sends SIGTERM, which workers ignore, and would wait for ever.
        atexit.register(kill)
        try:
            while True:
                yield [_received(batches) for _ in range(self._sampler.num_micro_batches)]
        finally:
            _end(batches, workers)
            atexit.unregister(kill)

    def _start(self) -> tuple[Iterator[Batch | _Failure], list[BaseProcess]]:
        """Start the worker processes and return their batches in order, and them."""
        workers = self._num_workers
        # Workers hold the step after the one in use, however many micro batches that is.
        ahead = max(2, -(-2 * self._sampler.num_micro_batches // workers)) if workers else None
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
            # What the first sample makes the rank draw up, workers share instead of drawing anew.
            self._dataset[range(self.consumed_samples, self.consumed_samples + 1)]
        others = multiprocessing.active_children()
        in_main_thread = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGCHLD)
        batches = iter(loader)
        if in_main_thread and handler is not None:
            # torch raises from a signal handler when a worker dies, wherever the rank happens to
            # be. Without it the loss is found when the next batch is asked for.
            signal.signal(signal.SIGCHLD, handler)
        return batches, [one for one in multiprocessing.active_children() if one not in others]


class ValidationLoader:
    """The same batches at every validation, fixed by the validation sample index.

    All ranks yield equally many micro batches, so that collectives meet; rows beyond the last
    sample are fillers without labels. Builds in this process: a validation is short.

    Args:
        builder: builds batches with validation masks.
        num_samples: how many validation samples, over all ranks.
        micro_batch_size: samples a forward pass.
        dp_rank: data-parallel rank.
        dp_size: data-parallel ranks.
    """

    def __init__(
        self,
        builder: Builder,
        num_samples: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        """See the class."""
        self.num_samples = num_samples
        self._builder = builder
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size

    def __len__(self) -> int:
        """Return the number of micro batches a rank."""
        return -(-self.num_samples // (self._micro_batch_size * self._dp_size))

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro batches.

        Raises:
            DataError: a shard is damaged.
        """
        for number in range(len(self)):
            begin = (number * self._dp_size + self._dp_rank) * self._micro_batch_size
            samples = range(begin, begin + self._micro_batch_size)
            yield self._builder.build([s if s < self.num_samples else FILLER for s in samples])


def _received(batches: Iterator[Batch | _Failure]) -> Batch:
    """Return the next batch, whatever happened to the process that should build it."""
    try:
        batch = next(batches)
    except (RuntimeError, OSError, EOFError) as error:
        # A worker can be missed as such, or while its batch is handed over.
        if isinstance(error, RuntimeError) and _WORKER_DIED not in str(error):
            raise
        raise DataError(
            f"a loader process died ({' '.join(repr(error).split())}); was it killed for memory, "
            "or is /dev/shm full? lower data.num_workers (0: no processes)"
        ) from error
    if isinstance(batch, _Failure):
        raise DataError(batch.message)
    return batch


def _end(batches: Any, workers: list[BaseProcess]) -> None:
    """End workers as torch does, and kill what is left.

    A worker that is killed while it looks at torch's "done" event keeps the event's lock for good.
    torch takes this lock to end workers, at the latest when ``batches`` is deleted, and would wait
    for ever. So nobody may be killed before that.
    """
    if workers:
        batches._shutdown_workers()
    _kill(workers)


def _kill(workers: list[BaseProcess]) -> None:
    """End workers at once; they hold nothing that could be lost."""
    for worker in workers:
        worker.kill()


def _unchanged(batch: Any) -> Any:
    return batch


def _become_worker(rank_pid: int, worker: int) -> None:
    """Leave signals to the rank, which still needs batches between SIGTERM and its checkpoint.

    The rank kills its workers when it is done, and the kernel when the rank is gone: other ranks
    learn of that only once nobody holds its sockets any more.
    """
    die_with_parent(rank_pid)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
