"""Asynchronous checkpointing: training waits only for the copy of the state to host memory.

A thread assembles parameters, over a gloo group of its own, and writes, flushes and hashes the
files. On the groups of training it issues no collectives, whose order would differ between ranks;
the ranks agree on the commit in the main thread.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_deberta.checkpoint import store, writer
from megatron_deberta.checkpoint.fence import UNLOCKED, Fence
from megatron_deberta.checkpoint.held_state import HeldCopy, StateCollector
from megatron_deberta.checkpoint.layout import CheckpointMetadata, state_kinds
from megatron_deberta.checkpoint.retention import Retention, delete_expired
from megatron_deberta.distributed.control import all_reduce_max
from megatron_deberta.distributed.parallelize.plan import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint and the duration of its save.

    Attributes:
        path: folder of the checkpoint.
        step: completed steps.
        seconds: time from start to commit.
        blocked_seconds: time that training waited.
        consumed_samples: position in the data after those steps.
    """

    path: Path
    step: int
    seconds: float
    blocked_seconds: float
    consumed_samples: int = 0


@dataclass
class Saver:
    """Saves checkpoints of a run, one at a time.

    Attributes:
        run_dir: folder of the run.
        engine: engine whose state is saved.
        specs: this rank's part of every parameter.
        groups: the rank grid.
        fence: lock of the run folder.
        timeout_minutes: of each collective of a save in the background.
    """

    run_dir: str | os.PathLike[str]
    engine: Engine
    specs: Mapping[str, ParameterSpec]
    groups: ProcessGroups
    fence: Fence = UNLOCKED
    timeout_minutes: float = 30.0
    _thread: _WriterThread | None = field(default=None, init=False)
    _collector: StateCollector | None = field(default=None, init=False)

    @property
    def in_flight(self) -> bool:
        """Whether a save has started and is not committed; the same on every rank."""
        return self._thread is not None

    def save(
        self, metadata: CheckpointMetadata, retention: Retention, began: float | None = None
    ) -> Saved:
        """Save and commit synchronously; no save may be in flight. Collective: all ranks.

        Arguments as in ``start``.

        Raises:
            CheckpointError: see ``store.save``.
        """
        assert self._thread is None, "call finish() first"
        start = time.monotonic() if began is None else began
        source = self.run_dir, self.engine, self.specs, self.groups
        path = store.save(*source, metadata, retention=retention, fence=self.fence)
        seconds = time.monotonic() - start
        return Saved(path, metadata.step, seconds, seconds, metadata.consumed_samples)

    def start(
        self, metadata: CheckpointMetadata, retention: Retention, began: float | None = None
    ) -> None:
        """Copy the state to host memory and start writing it. Collective: all ranks.

        No save may be in flight. The copy takes ``held_state.copy_bytes`` of host memory.

        Args:
            metadata: of the checkpoint.
            retention: which older checkpoints are deleted after the commit.
            began: ``time.monotonic()`` when training began to wait for the save; None: now.

        Raises:
            CheckpointError: there is too little disk space.
        """
        assert self._thread is None, "call finish() first"
        start = time.monotonic() if began is None else began
        if self._collector is None:
            group = None
            if self.groups.world_size > 1:
                timeout = datetime.timedelta(minutes=self.timeout_minutes)
                group = dist.new_group(backend="gloo", timeout=timeout)
            self._collector = StateCollector(self.engine, self.specs, self.groups, group)
        metadata = store.with_engine_state(metadata, self.engine, self.groups)
        kinds = state_kinds(metadata.config)
        staged = writer.begin(self.run_dir, self.specs, self.groups, metadata, kinds, self.fence)
        copies = self._collector.copy()
        self._thread = _WriterThread(staged, self._collector, copies, retention, start)

    def poll(self) -> Saved | None:
        """Commit the save in flight if all ranks have written it. Collective: all ranks.

        Raises:
            CheckpointError: a rank failed to write; the staged files are deleted.
        """
        if self._thread is None:
            return None
        thread, start = self._thread, time.monotonic()
        # Reduced over all ranks, so that either all of them commit or none.
        is_writing = torch.tensor(thread.is_alive(), dtype=torch.int32, device=self.groups.device)
        if all_reduce_max(is_writing, self.groups).item():
            thread.blocked_seconds += time.monotonic() - start
            return None
        thread.join()
        self._thread = None
        metadata = thread.staged.metadata
        path = writer.commit(thread.staged, thread.error)
        if self.groups.rank == 0:
            delete_expired(self.run_dir, metadata.step, thread.retention)
        now = time.monotonic()
        blocked = thread.blocked_seconds + now - start
        seconds = now - thread.start_time
        return Saved(path, metadata.step, seconds, blocked, metadata.consumed_samples)

    def finish(self) -> Saved | None:
        """Wait for the save in flight and commit it. Collective: all ranks.

        Raises:
            CheckpointError: see ``poll``.
        """
        if self._thread is None:
            return None
        start = time.monotonic()
        self._thread.join()
        self._thread.blocked_seconds += time.monotonic() - start
        # Every rank has joined its own thread, so poll() commits.
        return self.poll()


class _WriterThread(threading.Thread):
    """Writes one rank's part of a checkpoint."""

    def __init__(
        self,
        staged: writer.StagedCheckpoint,
        collector: StateCollector,
        copies: HeldCopy,
        retention: Retention,
        start: float,
    ) -> None:
        # A daemon thread does not delay the exit of a failing rank; leftovers are deleted later.
        super().__init__(name="checkpoint", daemon=True)
        self.staged = staged
        self.retention = retention
        self.error: Exception | None = None
        self.start_time = start
        self._collector, self._copies = collector, copies
        self.start()
        self.blocked_seconds = time.monotonic() - start

    def run(self) -> None:
        try:
            writer.write(self.staged, self._collector.assemble(self._copies))
        except Exception as error:
            self.error = error
        finally:
            # Free host memory before the commit.
            self._copies.clear()
