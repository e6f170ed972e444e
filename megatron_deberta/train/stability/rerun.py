"""Steps that run again, on the same and on another rank, to find faulty devices.

A rank's losses and gradients of one update are recorded as checksums in the order of computation,
before they are summed over data-parallel ranks. The record of the same micro batches must be the
same at any time and on any data-parallel rank. Where it is not, the verdict is a transient or a
persistent fault.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.data.batch import MicroBatch, batches_from_bytes, batches_to_bytes
from megatron_deberta.distributed.control import all_reduce_max, gather_rows
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Placements
from megatron_deberta.errors import LossScaleError, ReplicaError
from megatron_deberta.train.records import RunRecords
from megatron_deberta.train.stability.guard import NONFINITE, GradientHooks
from megatron_deberta.train.stability.replicas import (
    INTEGERS,
    gather_hosts,
    gather_names,
    make_equal,
)
from megatron_deberta.train.state import FolderLock
from megatron_deberta.train.step import TrainStep, UpdatePass

_OVERFLOW = "gradient overflows at the smallest loss scale"

Outputs = Sequence[Tensor | None]
logger = logging.getLogger(__name__)

Kind = Literal["transient", "persistent", "reproducible", "undecided"]

_TEXTS: dict[Kind, str] = {
    "transient": "a transient fault: the second run of the step did not repeat it",
    "persistent": "a persistent fault: another rank computes the same micro batches differently; "
    "exclude that node",
    "reproducible": "no fault of a device: other ranks compute the same; the data, the weights or "
    "the learning rate are the cause",
    "undecided": "the same rank computes the same again, and no other rank holds its weights, so "
    "the device and the data cannot be told apart",
}


@dataclass(frozen=True, slots=True)
class Place:
    """A rank, its host and its device."""

    rank: int
    host: str
    device: str

    def __str__(self) -> str:
        """Return the text for messages."""
        return f"rank {self.rank} ({self.host}, {self.device})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of running a step again.

    Attributes:
        step: counted from 1.
        cause: why the step was run again.
        kind: ``transient``, ``persistent``, ``reproducible`` or ``undecided``.
        places: ranks that are suspected; several: one of them. Empty: none, or it is unknown which.
    """

    step: int
    cause: str
    kind: Kind
    places: tuple[Place, ...]

    def about_replicas(self, places: Sequence[Place]) -> Verdict:
        """Return the verdict about ranks whose replicas differ, given that of a later run.

        Args:
            places: the ranks.
        """
        if self.kind == "transient":
            # Two runs after the fault differ: it is still there.
            return replace(self, kind="persistent", places=self.places or tuple(places))
        if self.kind == "reproducible":
            # All ranks compute the same now.
            return replace(self, kind="transient", places=tuple(places))
        return self if self.places else replace(self, places=tuple(places))

    def __str__(self) -> str:
        """Return one line."""
        where = ""
        if self.places:
            one_of = "one of " if len(self.places) > 1 else ""
            where = f" on {one_of}{', '.join(map(str, self.places))}"
        name, colon, rest = _TEXTS[self.kind].partition(":")
        return f"step {self.step}: {self.cause}; run again: {name}{where}{colon}{rest}"


class RerunStep(TrainStep):
    """Executes optimizer steps; runs an update that is not finite again to find out why.

    After a transient fault, the update is made with the values of another run. Costs two passes
    over each gradient.

    Args:
        on_verdict: called with what a second run has shown.
        options: the arguments of `TrainStep`, by name.
    """

    def __init__(self, *, on_verdict: Callable[[Verdict], None], **options: Any) -> None:
        super().__init__(**options)
        self._on_verdict = on_verdict
        self._record = ComputationRecord(self._engine.module)
        self._last: tuple[UpdatePass, Sequence[MicroBatch]] | None = None

    def _run(
        self,
        current: UpdatePass,
        batches: Sequence[MicroBatch],
        outputs: list[Tensor | None],
        prefetch: Callable[[], None],
    ) -> None:
        """Run an update, and again if a transient fault has spoiled it.

        Raises:
            ReplicaError: a device computes wrong, again and again.
        """
        before = list(outputs)
        if current.is_first:
            self._last = current, batches
        with self._record:
            super()._run(current, batches, outputs, prefetch)
        # An overflow is no fault, unless the loss scale cannot be lower.
        if current.error is None and current.skip not in NONFINITE:
            return
        cause = str(current.skip) if current.error is None else _OVERFLOW
        verdict = self._run_again(current, cause, self._record.table(), batches, before)
        self._on_verdict(verdict)
        if verdict.kind == "persistent":
            raise ReplicaError(str(verdict))
        if verdict.kind == "transient":
            outputs[:] = before
            current.outcome = current.error = current.skip = None
            super()._run(current, batches, outputs, lambda: None)

    def _on_losses(self, totals: Tensor) -> None:
        self._record.add(totals)

    def _compute(
        self, current: UpdatePass, batches: Sequence[MicroBatch], outputs: Outputs
    ) -> tuple[Tensor, bool]:
        """Run forward and backward of micro batches without an update.

        Returns:
            The record, and whether loss and gradient of all ranks together are finite.
        """
        scalars = current.engine.state_dict()
        with self._record:
            totals = self._accumulate(current, batches, list(outputs))
        *_, is_nonfinite = self._reduce(totals, current.num_targets, ()).tolist()
        try:
            outcome = current.engine.step(
                self._learning_rate(current.step, current.update), -math.inf
            )
            is_nonfinite = is_nonfinite or not math.isfinite(outcome.grad_norm)
        except LossScaleError:
            is_nonfinite = True
        current.engine.load_state_dict(scalars)
        return self._record.table(), not is_nonfinite

    def _run_again(
        self,
        current: UpdatePass,
        cause: str,
        first: Tensor,
        batches: Sequence[MicroBatch],
        outputs: Outputs,
        *,
        has_failed: bool = True,
    ) -> Verdict:
        """Run an update again on this rank and on the next data-parallel rank. Collective.

        Args:
            current: the update.
            cause: why.
            first: record of the original run, int64 ``[N, 2]``.
            batches: this rank's micro batches.
            outputs: of each micro batch in the update before, any shape; None: it has none.
            has_failed: the original run of all ranks together was not finite.
        """
        groups = self._groups
        again, is_finite = self._compute(current, batches, outputs)
        runs = [first, again]
        if groups.dp_group is not None:
            content = _pass_on(batches_to_bytes(batches, outputs), groups)
            others, other_outputs = batches_from_bytes(content)
            moved = [batch.to(groups.device) for batch in others]
            of_moved = [None if x is None else x.to(groups.device) for x in other_outputs]
            runs.append(self._compute(current, moved, of_moved)[0])
        records = gather_rows(_padded(runs, groups), groups).cpu()
        kind, ranks = diagnose(records, groups.tp_size, repeats=not (has_failed and is_finite))
        return Verdict(current.step + 1, cause, kind, tuple(places(ranks, groups)))

    def explained(self, error: ReplicaError, specs: Placements) -> ReplicaError:
        """Return an error with the verdict about differing replicas. Collective over all ranks.

        Makes the replicas equal and runs the last step again, if there is one. The state is not to
        be trained on afterwards.

        Args:
            error: of ``check_replicas``.
            specs: placement of every parameter.
        """
        if self._last is None:
            return error
        make_equal(self._engine.module, specs, self._groups, error.differing)
        current, batches = self._last
        none = [None] * len(batches)
        first, _ = self._compute(current, batches, none)
        verdict = self._run_again(
            current, "replicas differ", first, batches, none, has_failed=False
        )
        ranks = sorted({rank for ranks in error.differing.values() for rank in ranks})
        verdict = verdict.about_replicas(places(ranks, self._groups))
        self._on_verdict(verdict)
        return ReplicaError(f"{error}; {verdict}", error.differing)


class ComputationRecord(GradientHooks):
    """Checksums of this rank's losses and gradients, in the order of computation.

    Entering it begins a new record. Without host synchronization; costs two passes over each
    gradient.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.named_parameters())
        self._rows: list[Tensor] = []

    def __enter__(self) -> None:
        """Begin a record."""
        self._rows = []
        super().__enter__()

    def on_gradient(self, index: int, gradient: Tensor) -> None:
        """Add a gradient's checksum to the record."""
        self.add(gradient)

    def add(self, tensor: Tensor) -> None:
        """Add a tensor: the sum of its bits as integers, and whether its norm is finite.

        Args:
            tensor: any shape.
        """
        values = tensor.detach().reshape(-1)
        bits = values.view(INTEGERS[values.element_size()]).sum()
        is_finite = torch.isfinite(torch.linalg.vector_norm(values))
        self._rows.append(torch.stack([bits, is_finite.to(bits.dtype)]))

    def table(self) -> Tensor:
        """Return the record: [N, 2] int64, checksums and flags."""
        return torch.stack(self._rows)


def diagnose(records: Tensor, tp_size: int, *, repeats: bool) -> tuple[Kind, tuple[int, ...]]:
    """Compare the records of all ranks.

    Args:
        records: int64 ``[W, R, N, 2]`` on the CPU: by rank, run and place in the computation, a
            checksum, and whether the norm is finite. The runs are the original, the same again,
            and, if R is 3, that with the micro batches of the data-parallel rank before.
        tp_size: tensor-parallel size; these ranks are consecutive.
        repeats: the second run of all ranks together failed again.

    Returns:
        The kind, and the ranks that are suspected.
    """
    num_runs = records.shape[1]
    sums, finite = records[..., 0], records[..., 1]
    if (sums[:, 0] != sums[:, 1]).any(-1).all():
        # Operators whose sums depend on their order, as on some GPUs: only flags are comparable.
        sums = finite
    if num_runs > 2:
        # By the rank whose micro batches they are.
        other_sums, other_finite = (part[:, 2].roll(-tp_size, 0) for part in (sums, finite))
        differs = sums[:, 1] != other_sums
        if differs.any():
            return "persistent", _wrong(differs, finite[:, 1] > 0, other_finite > 0, tp_size)
    changed = sums[:, 0] != sums[:, 1]
    if changed.any():
        return "transient", _earliest(changed)
    if not repeats:
        # Every rank computed the same, so it was in the exchange between them.
        return "transient", ()
    return ("reproducible" if num_runs > 2 else "undecided"), ()


def _earliest(differs: Tensor) -> tuple[int, ...]:
    """Return the ranks that differ first in the order of computation; [W, N] bool."""
    places = _first_places(differs)
    return tuple(rank for rank, place in enumerate(places) if place == min(places))


def _first_places(differs: Tensor) -> list[int]:
    """Return the first place at which each rank differs; the number of places if it does not."""
    none = differs.shape[1]
    order = torch.arange(none).expand_as(differs)
    return [int(place) for place in torch.where(differs, order, none).amin(-1)]


def _wrong(differs: Tensor, own: Tensor, other: Tensor, tp_size: int) -> tuple[int, ...]:
    """Return the ranks that compute wrong.

    Args:
        differs: [W, N] whether two ranks differ about the micro batches of each rank.
        own: [W, N] whether its own result is finite.
        other: [W, N] whether that of the next data-parallel rank is.
        tp_size: tensor-parallel size.
    """
    world_size = len(differs)
    votes: Counter[int] = Counter()
    for first in range(0, world_size, tp_size):
        places = _first_places(differs[first : first + tp_size])
        if min(places) == differs.shape[1]:
            continue
        for number, place in enumerate(places):
            # Within tensor-parallel ranks, a wrong value spreads to the others.
            if place > min(places):
                continue
            rank = first + number
            pair = (rank, (rank + tp_size) % world_size)
            flags = bool(own[rank, place]), bool(other[rank, place])
            for suspect, is_finite in zip(pair, flags, strict=True):
                if flags[0] == flags[1] or not is_finite:
                    votes[suspect] += 1 if flags[0] == flags[1] else 2
    most = max(votes.values())
    return tuple(sorted(rank for rank, count in votes.items() if count == most))


def places(ranks: Sequence[int], groups: ProcessGroups) -> list[Place]:
    """Return hosts and devices of ranks. Collective over all ranks."""
    hosts, devices = gather_hosts(groups), gather_names(str(groups.device), groups)
    return [Place(rank, hosts[rank], devices[rank]) for rank in ranks]


def _padded(runs: Sequence[Tensor], groups: ProcessGroups) -> Tensor:
    """Return [R, N, 2] with N of the longest record of all ranks. Collective over all ranks."""
    longest = torch.tensor(max(map(len, runs)), device=groups.device)
    size = int(all_reduce_max(longest, groups))
    return torch.stack(
        [nn.functional.pad(run, (0, 0, 0, size - len(run)), value=1) for run in runs]
    )


def _pass_on(content: bytes, groups: ProcessGroups) -> bytes:
    """Send bytes to the next data-parallel rank; return those of the one before."""
    own = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(groups.device)
    size = torch.tensor([len(own)], device=groups.device)
    other_size = _exchange(size, torch.empty_like(size), groups)
    other = own.new_empty(int(other_size))
    return bytes(_exchange(own, other, groups).cpu().numpy().tobytes())


def _exchange(own: Tensor, other: Tensor, groups: ProcessGroups) -> Tensor:
    after, before = (
        (groups.dp_rank + step) % groups.dp_size * groups.tp_size + groups.tp_rank
        for step in (1, -1)
    )
    operations = [
        dist.P2POp(dist.isend, own, after, groups.dp_group),
        dist.P2POp(dist.irecv, other, before, groups.dp_group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return other


def report_verdict(
    verdict: Verdict, groups: ProcessGroups, records: RunRecords | None, lock: FolderLock
) -> None:
    """Report a verdict, which all ranks have, to the log, ``metrics.jsonl`` and the job history.

    Args:
        verdict: the verdict.
        groups: the rank grid; rank 0 reports.
        records: of the present segment, on rank 0.
        lock: has the job history.
    """
    if groups.rank == 0:
        logger.error("%s", verdict)
        if records is not None:
            values = {
                "event": "rerun",
                "verdict": verdict.kind,
                "cause": verdict.cause,
                "ranks": ", ".join(str(place.rank) for place in verdict.places),
                "hosts": ", ".join(place.host for place in verdict.places),
                "devices": ", ".join(place.device for place in verdict.places),
            }
            records.writer.write(verdict.step, values, kind="guard")
        lock.record_fault(
            step=verdict.step,
            verdict=verdict.kind,
            places=[asdict(place) for place in verdict.places],
        )
