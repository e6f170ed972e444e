"""Copies of the state that each rank holds, and their exchange in the background.

Training waits only for the copy of this rank's own partitions to host memory, without
communication. A thread then sends the pieces of parameters that another rank writes to that rank,
over a gloo group that nothing else uses at the same time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_deberta.checkpoint.layout import EMA, KINDS
from megatron_deberta.checkpoint.writer import OwnedState
from megatron_deberta.distributed.control import gather_bytes
from megatron_deberta.distributed.parallelize.spec import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups
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


@dataclass(frozen=True, slots=True)
class _Source:
    """Part of a parameter that a data-parallel rank holds: ``[start, start + length)``."""

    dp_rank: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class _Assembly:
    """A parameter that a rank writes, and where its state comes from."""

    spec: ParameterSpec
    writer: int
    """Data-parallel rank."""
    sources: tuple[_Source, ...]


# Flat fp32 tensors of one piece of a parameter, in the order of KINDS and EMA.
_Piece = tuple[Tensor, ...]
HeldCopy = dict[str, _Piece]
"""Copy of this rank's pieces of the parameters that some rank writes, by name."""


class StateCollector:
    """Copies the state that this rank holds and assembles what it writes.

    Of the ranks that hold a parameter, the one with the largest piece writes it; ranks with equal
    pieces take turns. So little is exchanged, except at ZeRO stage 3.

    Args:
        engine: engine whose state is saved.
        specs: this rank's part of every parameter.
        groups: the rank grid.
        group: gloo group of all ranks; None in a single process.

    Collective over all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        specs: Mapping[str, ParameterSpec],
        groups: ProcessGroups,
        group: ProcessGroup | None,
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._group = group
        states = list(engine.held_states())
        # With the average, if the run keeps one
        self._num_kinds = len(states[0][2]) if states else len(KINDS)
        held = [(name, start, pieces[0].numel()) for name, start, pieces in states]
        own = json.dumps([[start, length] for _, start, length in held]).encode()
        ranges = [json.loads(content) for content in gather_bytes(own, group)]
        column = ranges[groups.tp_rank :: groups.tp_size]
        self._assemblies = {
            name: _assembly(
                specs[name],
                number,
                [_Source(dp, *column[dp][number]) for dp in range(groups.dp_size)],
            )
            for number, (name, _, _) in enumerate(held)
            if _writes(specs[name], number, groups)
        }

    def copy(self) -> HeldCopy:
        """Copy this rank's pieces to host memory, without communication."""
        own = self._groups.dp_rank
        copies: HeldCopy = {}
        for name, _, pieces in self._engine.held_states():
            assembly = self._assemblies.get(name)
            if assembly is not None and any(item.dp_rank == own for item in assembly.sources):
                copies[name] = tuple(
                    piece.detach().to("cpu", torch.float32, copy=True) for piece in pieces
                )
        return copies

    def assemble(self, copies: HeldCopy) -> Iterator[OwnedState]:
        """Exchange pieces and yield the states that this rank writes. Collective: all ranks.

        Args:
            copies: from ``copy``; emptied.

        Raises:
            RuntimeError: another rank is gone, or does not respond in time.
        """
        received = self._exchange(copies)
        own = self._groups.dp_rank
        for name, assembly in self._assemblies.items():
            if assembly.writer != own:
                continue
            pieces = {item: received.pop((name, item.dp_rank)) for item in assembly.sources}
            wholes = _joined(pieces, math.prod(assembly.spec.local_shape))
            states = (whole.view(assembly.spec.local_shape) for whole in wholes)
            yield (
                assembly.spec,
                {
                    kind: assembly.spec.true_part(state).contiguous()
                    for kind, state in zip((*KINDS, EMA), states, strict=False)
                },
            )

    def _exchange(self, copies: HeldCopy) -> dict[tuple[str, int], _Piece]:
        """Send pieces to their writers; return those of this rank by name and holder."""
        own = self._groups.dp_rank
        kept: dict[tuple[str, int], _Piece] = {}
        outgoing: dict[int, list[Tensor]] = {}
        incoming: dict[int, list[tuple[str, int]]] = {}
        for name, assembly in self._assemblies.items():
            for item in assembly.sources:
                if item.dp_rank == own == assembly.writer:
                    kept[name, own] = copies.pop(name)
                elif item.dp_rank == own:
                    outgoing.setdefault(assembly.writer, []).extend(copies.pop(name))
                elif assembly.writer == own:
                    incoming.setdefault(item.dp_rank, []).append((name, item.length))
        sent = {dp_rank: torch.cat(pieces) for dp_rank, pieces in outgoing.items()}
        received = {
            dp_rank: torch.empty(self._num_kinds * sum(length for _, length in pieces))
            for dp_rank, pieces in incoming.items()
        }
        self._transfer(sent, received)
        for dp_rank, names in incoming.items():
            lengths = [length for _, length in names for _ in range(self._num_kinds)]
            parts = iter(received[dp_rank].split(lengths))
            for name, _ in names:
                kept[name, dp_rank] = tuple(next(parts) for _ in range(self._num_kinds))
        return kept

    def _transfer(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> None:
        """Send and receive one message per data-parallel rank."""
        works = []
        for exchange, messages in ((dist.isend, sent), (dist.irecv, received)):
            for dp_rank, content in messages.items():
                partner = dp_rank * self._groups.tp_size + self._groups.tp_rank
                works.append(exchange(content, partner, self._group, _TAG))
        for work in works:
            assert work is not None
            work.wait()


def _writes(spec: ParameterSpec, number: int, groups: ProcessGroups) -> bool:
    """Return whether this tensor-parallel rank writes a parameter; those with replicas take turns.

    Args:
        spec: the parameter.
        number: its place in the model.
        groups: the rank grid.
    """
    is_own_turn = spec.dim is not None or number % groups.tp_size == groups.tp_rank
    return is_own_turn and spec.length > 0


def _assembly(spec: ParameterSpec, number: int, held: list[_Source]) -> _Assembly:
    longest = max(item.length for item in held)
    candidates = [item for item in held if item.length == longest]
    chosen = candidates[number % len(candidates)]
    if longest == math.prod(spec.local_shape):
        return _Assembly(spec, chosen.dp_rank, (chosen,))
    return _Assembly(spec, chosen.dp_rank, tuple(item for item in held if item.length))


def _joined(pieces: Mapping[_Source, _Piece], size: int) -> _Piece:
    """Return the flat state of a parameter from its pieces."""
    if len(pieces) == 1:
        return next(iter(pieces.values()))
    num_kinds = len(next(iter(pieces.values())))
    wholes = tuple(torch.empty(size) for _ in range(num_kinds))
    for item, piece in pieces.items():
        for whole, part in zip(wholes, piece, strict=True):
            whole[item.start : item.start + item.length] = part
    return wholes
