"""Saving of a run's checkpoints from the shards that the ranks hold.

Each rank copies its own shards to host memory, without communication. Then ranks send the shards of
parameters that another rank writes to that rank, over a gloo group that nothing else uses at the
same time, and write, flush and hash their files. A save in the background does this in a thread,
and training waits only for the copy; a synchronous save copies and writes a few parameters at a
time while training waits. The ranks agree on the commit in the main thread.
"""

from __future__ import annotations

import functools
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_deberta.checkpoint import writer
from megatron_deberta.checkpoint.layout import EMA, KINDS, CheckpointMetadata, state_kinds
from megatron_deberta.checkpoint.retention import Retention, delete_expired
from megatron_deberta.checkpoint.writer import UNLOCKED, Fence, OwnedState
from megatron_deberta.distributed.control import all_reduce_max, gather_bytes
from megatron_deberta.distributed.parallelize.plan import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups, host_group
from megatron_deberta.engine.base import Engine

FREE_SHARE = 0.5
"""Share of a node's free memory that copies may take with ``checkpoint.asynchronous=auto``."""
# Messages of the same group between the same ranks may follow, with other tags.
_TAG = 1


def state_bytes(ema_decay: float | None) -> int:
    """Return the bytes per parameter of a checkpoint: fp32 weight, moments and moving average.

    Args:
        ema_decay: ``optimizer.ema_decay``; None: there is no average.
    """
    return 4 * (len(KINDS) + (ema_decay is not None))


def copy_bytes(num_bytes: int, dp_size: int, zero_stage: int) -> int:
    """Return the host memory of a rank's copy during a save in the background, in bytes.

    Args:
        num_bytes: state of this rank's tensor-parallel shard.
        dp_size: data-parallel ranks, which divide the copy.
        zero_stage: at stage 3 every parameter is assembled from the partitions of all ranks.
    """
    share = -(-num_bytes // dp_size)
    return 2 * share if zero_stage == 3 and dp_size > 1 else share


def with_engine_state(
    metadata: CheckpointMetadata, engine: Engine, groups: ProcessGroups
) -> CheckpointMetadata:
    """Return the metadata with the engine's scalars and the parallel layout filled in.

    Args:
        metadata: of the checkpoint.
        engine: engine of this rank.
        groups: process groups.
    """
    layout = {"tp_size": groups.tp_size, "dp_size": groups.dp_size}
    return replace(metadata, scalars=engine.state_dict(), layout=layout)


@dataclass(frozen=True, slots=True)
class _Assembly:
    """A parameter that is written, and where its state comes from.

    Attributes:
        spec: the parameter.
        writer: data-parallel rank that writes it.
        sources: start and length of the shards that are needed, by data-parallel rank.
    """

    spec: ParameterSpec
    writer: int
    sources: Mapping[int, tuple[int, int]]


# Flat fp32 tensors of one shard of a parameter, in the order of KINDS and EMA.
_Tensors = tuple[Tensor, ...]
Copies = deque[tuple[str, _Tensors]]
"""Copies of the shards of this rank that some rank writes, with their names, in model order."""


class StateCollector:
    """Copies the shards that this rank holds and assembles the states that it writes.

    In the background, the rank with the largest shard of a parameter writes it, and ranks with
    equal shards take turns: little is exchanged beside training, except at ZeRO stage 3. While
    training waits, all data-parallel ranks take turns, so that each writes an equal share.

    Args:
        engine: engine whose state is saved.
        specs: this rank's part of every parameter.
        groups: the rank grid.
        group: gloo group of all ranks; None in a single process.
        batch_bytes: state of the parameters that are exchanged at a time; bounds the memory.
        in_turn: all data-parallel ranks take turns in writing.

    Collective over all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        specs: Mapping[str, ParameterSpec],
        groups: ProcessGroups,
        group: ProcessGroup | None,
        batch_bytes: float = math.inf,
        *,
        in_turn: bool = False,
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._group = group
        shards = list(engine.local_shards())
        # With the average, if the run keeps one; a frozen parameter has its weight only.
        self._num_kinds = {shard.name: len(shard.tensors) for shard in shards}
        own = [(shard.start, shard.tensors[0].numel()) for shard in shards]
        # Start and length by data-parallel rank and parameter
        ranges: list[list[tuple[int, int]]] = [
            json.loads(content)
            for content in gather_bytes(json.dumps(own).encode(), group)[
                groups.tp_rank :: groups.tp_size
            ]
        ]
        self._batches: list[dict[str, _Assembly]] = [{}]
        num_bytes = 0
        for number, (name, _, _) in enumerate(shards):
            spec = specs[name]
            if not _writes(spec, number, groups):
                continue
            if num_bytes >= batch_bytes:
                self._batches.append({})
                num_bytes = 0
            held = [of_rank[number] for of_rank in ranges]
            self._batches[-1][name] = _assembly(spec, number, held, in_turn=in_turn)
            num_bytes += 4 * self._num_kinds[name] * math.prod(spec.local_shape)

    def copy(self) -> Copies:
        """Copy this rank's shards to host memory, without communication."""
        return deque(
            (name, tuple(t.detach().to("cpu", torch.float32, copy=True) for t in tensors))
            for name, tensors in self._needed()
        )

    def assemble(self, copies: Copies | None = None) -> Iterator[OwnedState]:
        """Exchange shards and yield the states that this rank writes. Collective: all ranks.

        Args:
            copies: from ``copy``; emptied. None: read the engine's state while it is yielded;
                training must not continue meanwhile.

        Raises:
            RuntimeError: another rank is gone, or does not respond in time.
        """
        shards = self._needed() if copies is None else _drained(copies)
        for batch in self._batches:
            yield from self._assemble(batch, shards)

    def _needed(self) -> Iterator[tuple[str, _Tensors]]:
        """Yield the shards of this rank that some rank writes, with their names."""
        assemblies = {name: one for batch in self._batches for name, one in batch.items()}
        for name, _, tensors in self._engine.local_shards():
            if name in assemblies and self._groups.dp_rank in assemblies[name].sources:
                yield name, tensors

    def _assemble(
        self, batch: Mapping[str, _Assembly], shards: Iterator[tuple[str, _Tensors]]
    ) -> Iterator[OwnedState]:
        found = self._exchange(batch, shards)
        for name, assembly in batch.items():
            if assembly.writer != self._groups.dp_rank:
                continue
            wholes = _joined(assembly, found.pop(name))
            states = (whole.view(assembly.spec.local_shape) for whole in wholes)
            yield (
                assembly.spec,
                {
                    kind: assembly.spec.true_part(state).contiguous()
                    for kind, state in zip((*KINDS, EMA), states, strict=False)
                },
            )

    def _exchange(
        self, batch: Mapping[str, _Assembly], shards: Iterator[tuple[str, _Tensors]]
    ) -> dict[str, dict[int, _Tensors]]:
        """Send shards to their writers; return those of this rank by name and holder."""
        own = self._groups.dp_rank
        num_own = sum(own in assembly.sources for assembly in batch.values())
        copies = {
            name: tuple(t.detach().to("cpu", torch.float32) for t in tensors)
            for name, tensors in islice(shards, num_own)
        }
        found: dict[str, dict[int, _Tensors]] = {name: {} for name in batch}
        messages = []
        for name, assembly in batch.items():
            for dp_rank, (_, length) in assembly.sources.items():
                if dp_rank == own == assembly.writer:
                    found[name][own] = copies.pop(name)
                elif dp_rank == own:
                    content = torch.stack(copies.pop(name))
                    partner = self._rank_of(assembly.writer)
                    messages.append((dist.isend(content, partner, self._group, _TAG), content))
                elif assembly.writer == own:
                    content = torch.empty(self._num_kinds[name], length)
                    partner = self._rank_of(dp_rank)
                    messages.append((dist.irecv(content, partner, self._group, _TAG), content))
                    found[name][dp_rank] = content.unbind()
        for work, _ in messages:
            assert work is not None
            work.wait()
        return found

    def _rank_of(self, dp_rank: int) -> int:
        """Return the rank of the same tensor-parallel rank and this data-parallel rank."""
        return dp_rank * self._groups.tp_size + self._groups.tp_rank


def _drained(copies: Copies) -> Iterator[tuple[str, _Tensors]]:
    """Yield copies and forget them, so that their memory is free once they are written."""
    while copies:
        yield copies.popleft()


def _writes(spec: ParameterSpec, number: int, groups: ProcessGroups) -> bool:
    """Return whether this tensor-parallel rank writes a parameter; those with replicas take turns.

    Args:
        spec: the parameter.
        number: its place in the model.
        groups: the rank grid.
    """
    is_own_turn = spec.dim is not None or number % groups.tp_size == groups.tp_rank
    return is_own_turn and spec.length > 0


def _assembly(
    spec: ParameterSpec, number: int, held: list[tuple[int, int]], *, in_turn: bool
) -> _Assembly:
    """Choose who writes a parameter; ``held``: start and length by data-parallel rank."""
    longest = max(length for _, length in held)
    largest = [dp_rank for dp_rank, (_, length) in enumerate(held) if length == longest]
    candidates = range(len(held)) if in_turn else largest
    writer = candidates[number % len(candidates)]
    if longest == math.prod(spec.local_shape):
        source = writer if writer in largest else largest[0]
        return _Assembly(spec, writer, {source: held[source]})
    return _Assembly(spec, writer, {rank: shard for rank, shard in enumerate(held) if shard[1]})


def _joined(assembly: _Assembly, shards: Mapping[int, _Tensors]) -> _Tensors:
    """Return the flat state of a parameter from its shards by data-parallel rank."""
    if len(shards) == 1:
        return next(iter(shards.values()))
    num_kinds = len(next(iter(shards.values())))
    wholes = torch.empty(num_kinds, math.prod(assembly.spec.local_shape))
    for dp_rank, tensors in shards.items():
        start, length = assembly.sources[dp_rank]
        for whole, tensor in zip(wholes, tensors, strict=True):
            whole[start : start + length] = tensor
    return wholes.unbind()


class Work:
    """Writing of the states of this rank, which starts at once. Collective: all ranks.

    Args:
        name: of the thread.
        collector: assembles the states.
        write: writes them.
        began: ``time.monotonic()`` when training began to wait for the save.
        in_background: copy the shards and write in a thread; False: write now, without a copy.

    Attributes:
        began: as given.
        blocked_seconds: time that training has waited.
        error: what ``write`` has raised.
    """

    def __init__(
        self,
        name: str,
        collector: StateCollector,
        write: Callable[[Iterator[OwnedState]], None],
        began: float,
        *,
        in_background: bool = True,
    ) -> None:
        self.began = began
        self.error: Exception | None = None
        copies = collector.copy() if in_background else None

        def run() -> None:
            try:
                write(collector.assemble(copies))
            except Exception as error:
                self.error = error
            finally:
                # Free host memory before the commit, also of an error with its frames.
                if copies is not None:
                    copies.clear()

        # A daemon thread does not delay the exit of a failing rank; leftovers are deleted later.
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        if in_background:
            self._thread.start()
        else:
            run()
        self.blocked_seconds = time.monotonic() - began

    def join(self, seconds: float | None = None) -> None:
        """Wait for this rank's thread, at most for a time; None: without a limit."""
        if self._thread.is_alive():
            with self.blocking():
                self._thread.join(seconds)

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Count the time of a block as time that training has waited."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.blocked_seconds += time.monotonic() - start

    def is_done(self, groups: ProcessGroups) -> bool:
        """Return whether all ranks have written their parts. Collective: all ranks."""
        number = torch.tensor(self._thread.is_alive(), dtype=torch.int32, device=groups.device)
        return not all_reduce_max(number, groups).item()


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
        run_dir: folder of the run, on a file system shared by all ranks.
        engine: engine whose state is saved.
        specs: this rank's part of every parameter.
        groups: the rank grid.
        fence: lock of the run folder.
        timeout_minutes: of each exchange between ranks.
    """

    run_dir: str | os.PathLike[str]
    engine: Engine
    specs: Mapping[str, ParameterSpec]
    groups: ProcessGroups
    fence: Fence = UNLOCKED
    timeout_minutes: float = 30.0
    _save: tuple[Work, writer.StagedCheckpoint, Retention] | None = field(default=None, init=False)
    _collectors: dict[bool, StateCollector] = field(default_factory=dict, init=False)
    _group: ProcessGroup | None = field(default=None, init=False)

    @property
    def in_flight(self) -> bool:
        """Whether a save has started and is not committed; the same on every rank."""
        return self._save is not None

    def save(
        self,
        metadata: CheckpointMetadata,
        retention: Retention | None = None,
        began: float | None = None,
    ) -> Saved:
        """Save and commit while training waits; no save may be in flight. Collective: all ranks.

        Arguments as in ``start``. Older checkpoints are kept until the new one is committed.

        Raises:
            CheckpointError: the disk is full or cannot be written on any rank; the staged files are
                deleted and older checkpoints are intact.
        """
        self.start(metadata, retention, began, in_background=False)
        saved = self.finish()
        assert saved is not None
        return saved

    def start(
        self,
        metadata: CheckpointMetadata,
        retention: Retention | None = None,
        began: float | None = None,
        *,
        in_background: bool = True,
    ) -> None:
        """Copy the state to host memory and start writing it. Collective: all ranks.

        No save may be in flight. The copy takes ``copy_bytes`` of host memory.

        Args:
            metadata: of the checkpoint; engine scalars and layout are filled in here.
            retention: which older checkpoints are kept after the commit; None: all.
            began: ``time.monotonic()`` when training began to wait for the save; None: now.
            in_background: False: write before returning, without a copy of the whole state.

        Raises:
            CheckpointError: there is too little disk space.
        """
        assert self._save is None, "call finish() first"
        began = time.monotonic() if began is None else began
        collector = self._collector(in_turn=not in_background)
        metadata = with_engine_state(metadata, self.engine, self.groups)
        kinds = state_kinds(metadata.config)
        shapes = {name: spec.logical_shape for name, spec in self.specs.items()}
        staged = writer.StagedCheckpoint(
            self.run_dir, metadata, kinds, shapes, self.groups, self.fence
        )
        writer.begin(staged)
        write = functools.partial(writer.write, staged)
        work = Work("checkpoint", collector, write, began, in_background=in_background)
        self._save = work, staged, retention or Retention()

    def _collector(self, *, in_turn: bool) -> StateCollector:
        """Return the collector, built at the first save of its kind. Collective: all ranks."""
        if self._group is None:
            self._group = host_group(self.groups, self.timeout_minutes)
        if in_turn not in self._collectors:
            self._collectors[in_turn] = StateCollector(
                self.engine, self.specs, self.groups, self._group, writer.FILE_BYTES,
                in_turn=in_turn,
            )  # fmt: skip
        return self._collectors[in_turn]

    def poll(self) -> Saved | None:
        """Commit the save in flight if all ranks have written it. Collective: all ranks.

        Raises:
            CheckpointError: a rank failed to write; the staged files are deleted.
        """
        if self._save is None:
            return None
        work, staged, retention = self._save
        with work.blocking():
            # Over all ranks, so that either all of them commit or none.
            if not work.is_done(self.groups):
                return None
            self._save = None
            path = writer.commit(staged, work.error)
            if self.groups.rank == 0:
                delete_expired(self.run_dir, staged.metadata.step, retention)
        seconds = time.monotonic() - work.began
        return Saved(
            path,
            staged.metadata.step,
            seconds,
            work.blocked_seconds,
            staged.metadata.consumed_samples,
        )

    def finish(self) -> Saved | None:
        """Wait for the save in flight and commit it. Collective: all ranks.

        Raises:
            CheckpointError: see ``poll``.
        """
        if self._save is None:
            return None
        self._save[0].join()
        # Every rank has joined its own thread, so poll() commits.
        return self.poll()
