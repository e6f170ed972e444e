"""Asynchronous saves on the nodes' own disks, with replicas on neighbour nodes.

Training waits for the copy of the state to host memory. A thread of each rank assembles and writes
the rank's part, sends it to a rank of the next node and writes the part that it receives. A full,
slow, hung or read-only disk is counted and does not end the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_deberta.checkpoint import store
from megatron_deberta.checkpoint.held_state import HeldCopy, StateCollector
from megatron_deberta.checkpoint.layout import CheckpointMetadata
from megatron_deberta.checkpoint.local.nodes import Nodes
from megatron_deberta.checkpoint.local.parts import (
    PartManifest,
    PartWriter,
    SaveId,
    delete_parts,
    serialized,
)
from megatron_deberta.distributed.control import all_reduce_max
from megatron_deberta.distributed.parallelize.plan import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine
from megatron_deberta.errors import CheckpointError

logger = logging.getLogger(__name__)

# Kinds of messages between partners
_TENSOR_FILE, _MANIFEST = range(2)


@dataclass(frozen=True, slots=True)
class LocalSaved:
    """A finished local save; the same on every rank, apart from the durations.

    Attributes:
        save: the save.
        seconds: time from start to the end of the slowest rank's transfer, as seen by this rank.
        blocked_seconds: time that training waited.
        num_bytes: bytes written by all ranks, replicas included.
        is_complete: every part is on at least one node.
        failed_parts: parts that are not on their own rank's node.
        failed_replicas: parts without the replica that they should have.
        skipped: saves of this process that were not started, because one was in progress.
    """

    save: SaveId
    seconds: float
    blocked_seconds: float
    num_bytes: int
    is_complete: bool
    failed_parts: int
    failed_replicas: int
    skipped: int


@dataclass
class LocalSaver:
    """Saves this rank's part on its node, one save at a time.

    Attributes:
        folder: folder of the run on this node.
        engine: engine whose state is saved.
        specs: this rank's part of every parameter.
        groups: the rank grid.
        nodes: the nodes, and the group for replicas.
        generation: of the saves, see ``history``.
    """

    folder: Path
    engine: Engine
    specs: Mapping[str, ParameterSpec]
    groups: ProcessGroups
    nodes: Nodes
    generation: int
    _thread: _TransferThread | None = field(default=None, init=False)
    _collector: StateCollector | None = field(default=None, init=False)
    _complete: SaveId | None = field(default=None, init=False)
    _skipped: int = field(default=0, init=False)
    _has_warned: bool = field(default=False, init=False)
    _is_broken: bool = field(default=False, init=False)

    @property
    def in_progress(self) -> bool:
        """Whether a save has started and not all ranks have finished it; the same on all ranks."""
        return self._thread is not None

    def start(self, metadata: CheckpointMetadata, began: float | None = None) -> bool:
        """Copy the state and start saving it. Collective over all ranks.

        Args:
            metadata: of the checkpoint.
            began: ``time.monotonic()`` when training began to wait for the save; None: now.

        Returns:
            False if it is skipped: a save is still in progress on a rank, or a connection between
            ranks has broken, after which the order of messages is unknown.
        """
        began = time.monotonic() if began is None else began
        if self._thread is not None or self._is_broken:
            self._skipped += 1
            return False
        metadata = store.with_engine_state(metadata, self.engine, self.groups)
        if self._collector is None:
            self._collector = StateCollector(self.engine, self.specs, self.groups, self.nodes.group)
        copies = self._collector.copy()
        shapes = {name: spec.logical_shape for name, spec in self.specs.items()}
        save = SaveId(self.generation, metadata.step)
        rank, world_size = self.groups.rank, self.groups.world_size
        manifest = PartManifest(save, rank, world_size, metadata, shapes, (), ())
        self._thread = _TransferThread(
            self.folder, self.nodes, manifest, self._collector, copies, self._complete, began
        )
        return True

    def poll(self) -> LocalSaved | None:
        """Return the save in progress if all ranks have finished it. Collective over all ranks."""
        if self._thread is None:
            return None
        thread, began = self._thread, time.monotonic()
        is_running = torch.tensor(thread.is_alive(), dtype=torch.int32, device=self.groups.device)
        if all_reduce_max(is_running, self.groups).item():
            thread.blocked_seconds += time.monotonic() - began
            return None
        thread.join()
        self._thread = None
        return self._finished(thread, began)

    def join(self, seconds: float) -> None:
        """Wait for this rank's thread, at most for a time."""
        if self._thread is not None:
            began = time.monotonic()
            self._thread.join(seconds)
            self._thread.blocked_seconds += time.monotonic() - began

    def _finished(self, thread: _TransferThread, began: float) -> LocalSaved:
        """Sum the ranks' results. Collective over all ranks."""
        world_size = self.groups.world_size
        own, kept = [0] * world_size, [0] * world_size
        own[self.groups.rank] = int(thread.is_own_saved)
        for source in thread.replicated:
            kept[source] = 1
        sums = self.nodes.sum([*own, *kept, thread.num_bytes, int(thread.is_broken)])
        own, kept = sums[:world_size], sums[world_size : 2 * world_size]
        num_bytes, num_broken = sums[2 * world_size :]
        is_complete = all(map(any, zip(own, kept, strict=True)))
        if is_complete:
            self._complete = thread.save
        self._warn(thread, num_broken)
        now = time.monotonic()
        return LocalSaved(
            save=thread.save,
            seconds=now - thread.began,
            blocked_seconds=thread.blocked_seconds + now - began,
            num_bytes=num_bytes,
            is_complete=is_complete,
            failed_parts=world_size - sum(own),
            failed_replicas=world_size - sum(kept) if self.nodes.target is not None else 0,
            skipped=self._skipped,
        )

    def _warn(self, thread: _TransferThread, num_broken: int) -> None:
        """Log the first failure of this rank; end local saves after a broken connection."""
        if num_broken:
            self._is_broken = True
            if self.groups.rank == 0:
                logger.warning(
                    "local checkpoints: the connection of %d ranks broke; none are saved until the "
                    "next start",
                    num_broken,
                )
        if thread.error is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "local checkpoint of step %d on %s: %s; training continues, and metrics.jsonl "
                "counts such failures",
                thread.save.step,
                self.nodes.names[self.nodes.rank],
                thread.error,
            )


class _TransferThread(threading.Thread):
    """Writes this rank's part and exchanges replicas.

    Attributes:
        save: the save.
        error: first failure of a disk or a connection.
        is_broken: the exchange with another rank failed.
        is_own_saved: this rank's part is on its node.
        replicated: ranks whose part this rank has received and written.
        num_bytes: bytes written.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Nodes,
        manifest: PartManifest,
        collector: StateCollector,
        copies: HeldCopy,
        keep: SaveId | None,
        began: float,
    ) -> None:
        super().__init__(name="local checkpoint", daemon=True)
        self.save, self.began = manifest.save, began
        self.error: Exception | None = None
        self.is_broken = False
        self.is_own_saved = False
        self.replicated: list[int] = []
        self.num_bytes = 0
        self._folder, self._nodes = folder, nodes
        self._manifest, self._keep = manifest, keep
        self._collector, self._copies = collector, copies
        self.start()
        self.blocked_seconds = time.monotonic() - began

    def run(self) -> None:
        rank = self._manifest.rank
        try:
            delete_parts(self._folder, [rank, *self._nodes.sources], self._keep)
            own = PartWriter(self._folder, self.save, rank)
            replicas = {
                source: PartWriter(self._folder, self.save, source)
                for source in self._nodes.sources
            }
            self._exchange(self._outgoing(own), replicas)
            for part in (own, *replicas.values()):
                self.num_bytes += part.num_bytes
                self.error = self.error or part.error
        except Exception as error:
            self.error = error
            self.is_broken = self._nodes.group is not None
        finally:
            # Free host memory before the next save.
            self._copies.clear()

    def _outgoing(self, own: PartWriter) -> Iterator[tuple[int, bytes]]:
        """Write this rank's part, and yield the same as messages."""
        files, fragments = [], []
        states = self._collector.assemble(self._copies)
        for content, inside in serialized(states, self._manifest.rank):
            files.append(own.add(content))
            fragments += inside
            yield _TENSOR_FILE, content
        filled = PartManifest(
            self.save, self._manifest.rank, self._manifest.world_size, self._manifest.metadata,
            self._manifest.parameters, tuple(files), tuple(fragments),
        ).to_json()  # fmt: skip
        self.is_own_saved = own.commit(filled)
        yield _MANIFEST, filled

    def _exchange(
        self, outgoing: Iterable[tuple[int, bytes]], replicas: dict[int, PartWriter]
    ) -> None:
        """Send messages to the target while receiving those of the sources.

        Raises:
            RuntimeError: a partner is gone, or does not respond in time.
        """
        messages, group = iter(outgoing), self._nodes.group
        open_sources, message = dict(replicas), next(messages, None)
        while message is not None or open_sources:
            sends, received = [], {}
            if message is not None and self._nodes.target is not None:
                kind, content = message
                header = torch.tensor([kind, len(content)])
                payload = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                sends = [(dist.isend(t, self._nodes.target, group), t) for t in (header, payload)]
            for source in open_sources:
                received[source] = _receive(source, group)
            for work, _ in sends:
                assert work is not None
                work.wait()
            for source, (kind, content) in received.items():
                if self._store(replicas[source], source, kind, content):
                    del open_sources[source]
            message = next(messages, None) if message is not None else None

    def _store(self, part: PartWriter, source: int, kind: int, content: bytes) -> bool:
        """Write a received message; return whether it is the last one of its source."""
        if kind == _TENSOR_FILE:
            part.add(content)
            return False
        try:
            if part.commit(content):
                self.replicated.append(source)
        except CheckpointError as error:
            self.error = error
        return True


def _receive(source: int, group: dist.ProcessGroup | None) -> tuple[int, bytes]:
    header = torch.empty(2, dtype=torch.int64)
    dist.recv(header, source, group)
    kind, size = header.tolist()
    payload: Tensor = torch.empty(size, dtype=torch.uint8)
    dist.recv(payload, source, group)
    return kind, payload.numpy().tobytes()
