"""Second and third run of a step, on the same and on another rank, to find faulty devices."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_deberta.data.batch import MicroBatch
from megatron_deberta.data.batch_bytes import batches_from_bytes, batches_to_bytes
from megatron_deberta.distributed.control import all_reduce_max, gather_rows
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.train.stability.verdict import Place, Verdict, diagnose

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
_NAME_BYTES = 64

Outputs = Sequence[Tensor | None]
# Runs forward and backward of micro batches without an update; returns the record, and whether loss
# and gradient of all ranks together are finite.
Compute = Callable[[Sequence[MicroBatch], Outputs], tuple[Tensor, bool]]


class ComputationRecord:
    """Checksums of this rank's losses and gradients, in the order of computation.

    A context manager. Without host synchronization; costs two passes over each gradient.

    Args:
        module: the model.
        enabled: False does nothing.
    """

    def __init__(self, module: nn.Module, *, enabled: bool) -> None:
        self._parameters = [p for p in module.parameters() if p.requires_grad] if enabled else []
        self._enabled = enabled
        self._handles: list[RemovableHandle] = []
        self._rows: list[Tensor] = []

    def __enter__(self) -> ComputationRecord:
        """Register the gradient hooks."""
        self._handles = [parameter.register_hook(self.add) for parameter in self._parameters]
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks; the record is kept."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def add(self, tensor: Tensor) -> None:
        """Add a tensor: the sum of its bits as integers, and whether its norm is finite."""
        if self._enabled:
            values = tensor.detach().reshape(-1)
            bits = values.view(_INTEGERS[values.element_size()]).sum()
            is_finite = torch.isfinite(torch.linalg.vector_norm(values))
            self._rows.append(torch.stack([bits, is_finite.to(bits.dtype)]))

    def table(self) -> Tensor:
        """Return the record: [N, 2] int64, checksums and flags."""
        return torch.stack(self._rows)


def run_again(
    step: int,
    cause: str,
    first: Tensor,
    compute: Compute,
    batches: Sequence[MicroBatch],
    outputs: Outputs,
    groups: ProcessGroups,
    *,
    has_failed: bool = True,
) -> Verdict:
    """Run a step again on the same rank and on the next data-parallel rank. Collective.

    Args:
        step: counted from 1.
        cause: why.
        first: record of the original run.
        compute: runs forward and backward.
        batches: this rank's micro batches.
        outputs: of each micro batch in the update before.
        groups: the rank grid.
        has_failed: the original run of all ranks together was not finite.
    """
    again, is_finite = compute(batches, outputs)
    runs = [first, again]
    if groups.dp_group is not None:
        content = _pass_on(batches_to_bytes(batches, outputs), groups)
        others, other_outputs = batches_from_bytes(content)
        device = groups.device
        moved = [batch.to(device) for batch in others]
        of_moved = [None if output is None else output.to(device) for output in other_outputs]
        runs.append(compute(moved, of_moved)[0])
    records = gather_rows(_padded(runs, groups), groups).cpu()
    kind, ranks = diagnose(records, groups.tp_size, repeats=not (has_failed and is_finite))
    return Verdict(step, cause, kind, tuple(places(ranks, groups)))


def places(ranks: Sequence[int], groups: ProcessGroups) -> list[Place]:
    """Return hosts and devices of ranks. Collective over all ranks."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    names = [_gather_text(text, groups) for text in (host, str(groups.device))]
    return [Place(rank, *(texts[rank] for texts in names)) for rank in ranks]


def _gather_text(text: str, groups: ProcessGroups) -> list[str]:
    content = text.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    row = torch.tensor(list(content), dtype=torch.uint8, device=groups.device)
    rows = gather_rows(row, groups)
    return [bytes(found.tolist()).rstrip(b"\0").decode(errors="replace") for found in rows]


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
