"""Saves that training does not wait for, beyond the copy of the state to host memory.

Owns the thread that writes, flushes and hashes, and when its work is committed. Refuses collectives
in that thread: ranks may reach them in another order than those of training, and then wait for
each other for ever. The ranks agree on the commit in the main thread, between two steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_deberta.checkpoint import store
from megatron_deberta.checkpoint.layout import CheckpointMetadata
from megatron_deberta.checkpoint.retention import Retention, delete_oldest
from megatron_deberta.distributed.control import all_reduce_max
from megatron_deberta.distributed.parallelize.spec import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.protocol import Engine


@dataclass(frozen=True, slots=True)
class Saved:
    """A committed checkpoint."""

    path: Path
    step: int
    seconds: float
    """From the beginning to the commit."""
    blocked_seconds: float
    """How long training waited for it."""


class Saver:
    """Saves checkpoints of a run, one at a time.

    Args:
        run_dir: folder of the run.
        engine: where the state is.
        specs: this rank's part of every parameter.
        groups: the rank grid.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        engine: Engine,
        specs: Mapping[str, ParameterSpec],
        groups: ProcessGroups,
    ) -> None:
        self._run_dir = run_dir
        self._engine = engine
        self._specs = specs
        self._groups = groups
        self._job: _Job | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a save has begun and is not committed; the same on every rank."""
        return self._job is not None

    def save(self, metadata: CheckpointMetadata, retention: Retention) -> Saved:
        """Save and commit. Collective over all ranks; nothing may be under way.

        Raises:
            CheckpointError: see ``store.save``.
        """
        assert self._job is None, "finish() comes first"
        start = time.monotonic()
        path = store.save(
            self._run_dir, self._engine, self._specs, self._groups, metadata, retention=retention
        )
        seconds = time.monotonic() - start
        return Saved(path, metadata.step, seconds, seconds)

    def start(self, metadata: CheckpointMetadata, retention: Retention) -> None:
        """Copy the state to host memory and begin to write it. Collective over all ranks.

        Nothing may be under way. The copy takes 12 bytes for each parameter that this rank writes.

        Raises:
            CheckpointError: there is no space.
        """
        assert self._job is None, "finish() comes first"
        start = time.monotonic()
        metadata = store.complete(metadata, self._engine, self._groups)
        draft = store.begin(self._run_dir, self._specs, self._groups, metadata)
        states = store.own_states(store.engine_states(self._engine), self._specs, self._groups)
        self._job = _Job(draft, list(states), retention, start)

    def poll(self) -> Saved | None:
        """Commit what is under way if all ranks have written it. Collective if something is.

        Raises:
            CheckpointError: a rank could not write it; nothing of it is left.
        """
        if self._job is None:
            return None
        job, start = self._job, time.monotonic()
        # Not is_alive alone on one rank: all of them come to the commit, or none.
        writes = torch.tensor(job.is_alive(), dtype=torch.int32, device=self._groups.device)
        if all_reduce_max(writes, self._groups).item():
            job.blocked_seconds += time.monotonic() - start
            return None
        job.join()
        self._job = None
        path = store.commit(job.draft, job.problem)
        if self._groups.rank == 0:
            delete_oldest(self._run_dir, job.draft.metadata.step, job.retention)
        now = time.monotonic()
        blocked = job.blocked_seconds + now - start
        return Saved(path, job.draft.metadata.step, now - job.start_time, blocked)

    def finish(self) -> Saved | None:
        """Wait for what is under way and commit it. Collective if something is.

        Raises:
            CheckpointError: see ``poll``.
        """
        if self._job is None:
            return None
        start = time.monotonic()
        self._job.join()
        self._job.blocked_seconds += time.monotonic() - start
        # All ranks have waited for their own part, so none writes any more.
        return self.poll()


class _Job(threading.Thread):
    """Writes one rank's part of a checkpoint."""

    def __init__(
        self, draft: store.Draft, states: list[store.OwnState], retention: Retention, start: float
    ) -> None:
        # A rank that has to die dies at once; what it leaves is hidden and removed later.
        super().__init__(name="checkpoint", daemon=True)
        self.draft = draft
        self.retention = retention
        self.problem: Exception | None = None
        self.start_time = start
        self._states = states
        self.start()
        self.blocked_seconds = time.monotonic() - start

    def run(self) -> None:
        try:
            store.write(self.draft, self._states)
        except Exception as error:
            self.problem = error
        finally:
            # Host memory, until the commit.
            self._states = []
