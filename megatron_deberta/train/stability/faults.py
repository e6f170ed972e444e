"""Reports of faulty devices, and what a second run of a step says about differing replicas."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Placements
from megatron_deberta.errors import ReplicaError
from megatron_deberta.train.records import RunRecords
from megatron_deberta.train.stability.replicas import make_equal
from megatron_deberta.train.stability.rerun import RerunStep
from megatron_deberta.train.stability.verdict import Verdict
from megatron_deberta.train.state import FolderLock

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class FaultReports:
    """Reports verdicts to the log, ``metrics.jsonl`` and the job history.

    Args:
        groups: the rank grid.
        lock: has the job history.

    Attributes:
        records: of the present segment, on rank 0.
        train_step: of the present segment, with ``guard.rerun``.
    """

    groups: ProcessGroups
    lock: FolderLock
    records: RunRecords | None = field(default=None, init=False)
    train_step: RerunStep | None = field(default=None, init=False)

    def report(self, verdict: Verdict) -> None:
        """Report a verdict, which all ranks have; rank 0 does."""
        if self.groups.rank == 0:
            logger.error("%s", verdict)
            if self.records is not None:
                self.records.record_verdict(verdict)
            places: list[Mapping[str, int | str]] = [
                {"rank": place.rank, "host": place.host, "device": place.device}
                for place in verdict.places
            ]
            self.lock.record_fault(step=verdict.step, verdict=verdict.kind, places=places)

    def explained(self, error: ReplicaError, module: nn.Module, specs: Placements) -> ReplicaError:
        """Return an error with the verdict about differing replicas. Collective over all ranks.

        Args:
            error: of ``check_replicas``.
            module: the model, whose replicas are made equal.
            specs: placement of every parameter.
        """
        if self.train_step is None:
            return error
        make_equal(module, specs, self.groups, error.differing)
        ranks = sorted({rank for ranks in error.differing.values() for rank in ranks})
        verdict = self.train_step.check_last("replicas differ", ranks)
        return error if verdict is None else ReplicaError(f"{error}; {verdict}", error.differing)
