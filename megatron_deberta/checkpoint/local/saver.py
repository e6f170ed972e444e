"""Asynchronous saves on the nodes' own disks, with replicas on neighbour nodes.

Training waits for the copy of the state to host memory. A thread of each rank assembles and writes
the rank's part, sends it to a rank of the next node and writes the part that it receives. A full,
slow, hung or read-only disk is counted and does not end the run.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_deberta.checkpoint.layout import CheckpointMetadata, FileEntry, Fragment
from megatron_deberta.checkpoint.local.parts import (
    FILE_BYTES,
    PartManifest,
    PartWriter,
    SaveId,
    delete_parts,
)
from megatron_deberta.checkpoint.saver import StateCollector, Work, with_engine_state
from megatron_deberta.checkpoint.writer import OwnedState, tensor_files
from megatron_deberta.distributed.control import gather_bytes
from megatron_deberta.distributed.parallelize.plan import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups, host_group
from megatron_deberta.engine.base import Engine
from megatron_deberta.errors import CheckpointError

logger = logging.getLogger(__name__)

# Kinds of messages between partners
_TENSOR_FILE, _MANIFEST = range(2)


def node_name() -> str:
    """Return this node's name: SLURM's, else the host name; usable as a folder name."""
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of all ranks.

    Attributes:
        rank: this rank.
        names: node name by rank.
        group: gloo group of all ranks for data in host memory; None in a single process.
    """

    rank: int
    names: tuple[str, ...]
    group: ProcessGroup | None

    @classmethod
    def connect(cls, groups: ProcessGroups, timeout_minutes: float) -> Nodes:
        """Create the group and gather the names. Collective over all ranks."""
        group = host_group(groups, timeout_minutes)
        names = gather_bytes(node_name().encode(), group)
        return cls(groups.rank, tuple(name.decode() for name in names), group)

    @property
    def own_ranks(self) -> list[int]:
        """Ranks on this rank's node."""
        return self._ranks_on(self.names[self.rank])

    @property
    def target(self) -> int | None:
        """Rank on the next node that keeps this rank's replica; None: there is one node."""
        return self._target_of(self.rank)

    @property
    def sources(self) -> list[int]:
        """Ranks whose replicas this rank keeps."""
        ranks = range(len(self.names))
        return [rank for rank in ranks if self._target_of(rank) == self.rank]

    def gather(self, content: bytes) -> list[bytes]:
        """Return every rank's content, by rank. Collective over all ranks."""
        return gather_bytes(content, self.group)

    def sum(self, numbers: Sequence[int]) -> list[int]:
        """Return sums over all ranks. Collective over all ranks."""
        total = torch.tensor(numbers, dtype=torch.int64)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return [int(number) for number in total]

    def _ranks_on(self, name: str) -> list[int]:
        return [rank for rank, other in enumerate(self.names) if other == name]

    def _target_of(self, rank: int) -> int | None:
        nodes = list(dict.fromkeys(self.names))
        if len(nodes) == 1:
            return None
        name = self.names[rank]
        neighbours = self._ranks_on(nodes[(nodes.index(name) + 1) % len(nodes)])
        return neighbours[self._ranks_on(name).index(rank) % len(neighbours)]


@dataclass(slots=True)
class SaveSchedule:
    """Limits the steps since the last complete save to a number.

    A save starts so many steps before that limit as the last one took. If it is not complete at the
    limit, training waits for it. All inputs are equal on all ranks.

    Attributes:
        every: the limit; at least 1.
        safe: step of the newest complete save, or from which the run started.
        is_suspended: the last save failed or was given up: nothing is waited for until one is
            complete.
    """

    every: int
    safe: int
    is_suspended: bool = field(default=False, init=False)
    _next: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Start the first save in the middle, because its duration is unknown."""
        self._next = self.safe + self.every - self.every // 2

    def is_due(self, step: int) -> bool:
        """Return whether a save starts after ``step``."""
        return step >= self._next

    def must_wait(self, step: int) -> bool:
        """Return whether the next step has to wait for the save in progress."""
        return step - self.safe >= self.every and not self.is_suspended

    def started(self, step: int) -> None:
        """Record that a save has started, or that one is skipped because another is in progress."""
        self._next = step + self.every

    def finished(self, step: int, saved: int, *, is_complete: bool) -> None:
        """Record the end of a save.

        Args:
            step: the last step made when the end is seen.
            saved: step whose state was saved.
            is_complete: the save is complete and valid on all ranks.
        """
        self.is_suspended = not is_complete
        if is_complete:
            self.safe = saved
            self._next = saved + max(1, self.every - (step - saved))

    def give_up(self) -> None:
        """Wait no longer for the save in progress."""
        self.is_suspended = True


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
        generation: of the saves, see ``History``.
    """

    folder: Path
    engine: Engine
    specs: Mapping[str, ParameterSpec]
    groups: ProcessGroups
    nodes: Nodes
    generation: int
    _transfer: _Transfer | None = field(default=None, init=False)
    _collector: StateCollector | None = field(default=None, init=False)
    _complete: SaveId | None = field(default=None, init=False)
    _skipped: int = field(default=0, init=False)
    _has_warned: bool = field(default=False, init=False)
    _is_broken: bool = field(default=False, init=False)

    @property
    def in_progress(self) -> bool:
        """Whether a save has started and not all ranks have finished it; the same on all ranks."""
        return self._transfer is not None

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
        if self._transfer is not None or self._is_broken:
            self._skipped += 1
            return False
        manifest = PartManifest(
            SaveId(self.generation, metadata.step),
            self.groups.rank,
            self.groups.world_size,
            with_engine_state(metadata, self.engine, self.groups),
            {name: spec.logical_shape for name, spec in self.specs.items()},
            (),
            (),
        )
        if self._collector is None:
            # In one exchange: ranks that wait for partners must not wait for each other's batches.
            self._collector = StateCollector(self.engine, self.specs, self.groups, self.nodes.group)
        transfer = _Transfer(self.folder, self.nodes, manifest, self._complete)
        transfer.work = Work("local checkpoint", self._collector, transfer.run, began)
        self._transfer = transfer
        return True

    def poll(self) -> LocalSaved | None:
        """Return the save in progress if all ranks have finished it. Collective over all ranks."""
        transfer = self._transfer
        if transfer is None:
            return None
        with transfer.work.blocking():
            if not transfer.work.is_done(self.groups):
                return None
            self._transfer = None
            world_size = self.groups.world_size
            own, kept = [0] * world_size, [0] * world_size
            own[self.groups.rank] = int(transfer.is_own_saved)
            for source in transfer.replicated:
                kept[source] = 1
            # An exchange with another rank failed.
            is_broken = transfer.work.error is not None and self.nodes.group is not None
            sums = self.nodes.sum([*own, *kept, transfer.num_bytes, int(is_broken)])
        own, kept = sums[:world_size], sums[world_size : 2 * world_size]
        num_bytes, num_broken = sums[2 * world_size :]
        is_complete = all(map(any, zip(own, kept, strict=True)))
        if is_complete:
            self._complete = transfer.save
        self._warn(transfer, num_broken)
        return LocalSaved(
            save=transfer.save,
            seconds=time.monotonic() - transfer.work.began,
            blocked_seconds=transfer.work.blocked_seconds,
            num_bytes=num_bytes,
            is_complete=is_complete,
            failed_parts=world_size - sum(own),
            failed_replicas=world_size - sum(kept) if self.nodes.target is not None else 0,
            skipped=self._skipped,
        )

    def join(self, seconds: float) -> None:
        """Wait for this rank's thread, at most for a time."""
        if self._transfer is not None:
            self._transfer.work.join(seconds)

    def _warn(self, transfer: _Transfer, num_broken: int) -> None:
        """Log the first failure of this rank; end local saves after a broken connection."""
        if num_broken:
            self._is_broken = True
            if self.groups.rank == 0:
                logger.warning(
                    "local checkpoints: the connection of %d ranks broke; none are saved until the "
                    "next start",
                    num_broken,
                )
        error = transfer.work.error or transfer.error
        if error is not None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "local checkpoint of step %d on %s: %s; training continues, and metrics.jsonl "
                "counts such failures",
                transfer.save.step,
                self.nodes.names[self.nodes.rank],
                error,
            )


class _Transfer:
    """Writes this rank's part and exchanges replicas.

    Args:
        folder: folder of the run on this node.
        nodes: the nodes.
        manifest: of the part, without its files.
        keep: save whose parts are not deleted before.

    Attributes:
        save: the save.
        work: runs it in a thread.
        error: first failure of a disk.
        is_own_saved: this rank's part is on its node.
        replicated: ranks whose part this rank has received and written.
        num_bytes: bytes written.
    """

    work: Work

    def __init__(
        self, folder: Path, nodes: Nodes, manifest: PartManifest, keep: SaveId | None
    ) -> None:
        self.save = manifest.save
        self.error: Exception | None = None
        self.is_own_saved = False
        self.replicated: list[int] = []
        self.num_bytes = 0
        self._folder, self._nodes = folder, nodes
        self._manifest, self._keep = manifest, keep

    def run(self, states: Iterable[OwnedState]) -> None:
        """Write the part with these states, and exchange replicas. Collective over all ranks.

        Raises:
            RuntimeError: a partner is gone, or does not respond in time.
        """
        rank, sources = self._manifest.rank, self._nodes.sources
        delete_parts(self._folder, [rank, *sources], self._keep)
        own = PartWriter(self._folder, self.save, rank)
        replicas = {source: PartWriter(self._folder, self.save, source) for source in sources}
        self._exchange(self._outgoing(own, states), replicas)
        for part in (own, *replicas.values()):
            self.num_bytes += part.num_bytes
            self.error = self.error or part.error

    def _outgoing(
        self, own: PartWriter, states: Iterable[OwnedState]
    ) -> Iterator[tuple[int, bytes]]:
        """Write this rank's part, and yield the same as messages."""
        files: list[FileEntry] = []
        fragments: list[Fragment] = []
        for _, tensors, contained in tensor_files(states, self._manifest.rank, FILE_BYTES):
            content = save(tensors)
            files.append(own.add(content))
            fragments += contained
            yield _TENSOR_FILE, content
        filled = replace(self._manifest, files=tuple(files), fragments=tuple(fragments)).to_json()
        self.is_own_saved = own.commit(filled)
        yield _MANIFEST, filled

    def _exchange(
        self, outgoing: Iterator[tuple[int, bytes]], replicas: Mapping[int, PartWriter]
    ) -> None:
        """Send messages to the target while receiving those of the sources."""
        group = self._nodes.group
        open_sources, message = set(replicas), next(outgoing, None)
        while message is not None or open_sources:
            sends = []
            if message is not None and self._nodes.target is not None:
                kind, content = message
                header = torch.tensor([kind, len(content)])
                payload = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                sends = [(dist.isend(t, self._nodes.target, group), t) for t in (header, payload)]
            received = {source: _receive(source, group) for source in sorted(open_sources)}
            for work, _ in sends:
                assert work is not None
                work.wait()
            for source, (kind, content) in received.items():
                if self._store(replicas[source], source, kind, content):
                    open_sources.remove(source)
            message = next(outgoing, None) if message is not None else None

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


def _receive(source: int, group: ProcessGroup | None) -> tuple[int, bytes]:
    header = torch.empty(2, dtype=torch.int64)
    dist.recv(header, source, group)
    kind, size = header.tolist()
    payload: Tensor = torch.empty(size, dtype=torch.uint8)
    dist.recv(payload, source, group)
    return kind, payload.numpy().tobytes()
