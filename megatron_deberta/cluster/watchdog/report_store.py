"""Reports of a job attempt's nodes: one small JSON file per node in ``supervision/ATTEMPT/``.

They are exchanged through the run folder, so no port is opened. Clocks of nodes need not agree: a
report gives ages, and a reader adds the time since it saw the file change.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_deberta.cluster.watchdog.hang import Diagnosis, RankView, diagnose_deaths
from megatron_deberta.cluster.watchdog.straggler import Times
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE, DataError
from megatron_deberta.files import write_atomically
from megatron_deberta.parsing import Number, dump_json, parse_json

FOLDER = "supervision"
"""Folder in the run folder with a folder per job attempt."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Report of a node's supervisor."""

    node: int
    host: str
    serial: int
    views: tuple[RankView, ...]
    limits: tuple[Number, ...]
    """Their time-outs in seconds, in the same order, as are their times."""
    times: tuple[Times, ...]
    alarm: str = ""
    """What is overdue according to this node; empty: nothing."""
    has_diagnostics: Annotated[bool, Field(alias="evidence")] = False
    """Whether the views include the states of processes."""
    diagnosis: Annotated[Diagnosis | None, Field(alias="verdict")] = None
    code: int | None = None

    def to_json(self) -> bytes:
        """Return the content of its file."""
        return dump_json(self)

    @classmethod
    def from_json(cls, content: bytes) -> NodeReport:
        """Read the content of a report's file.

        Raises:
            DataError: it is not a report.
        """
        report = parse_json(content, cls, "report", "a node's report", remedy="it is ignored")
        if {len(report.limits), len(report.times)} != {len(report.views)}:
            raise DataError("report: another number of time-outs or times than of ranks")
        return report


class ReportStore:
    """Reports of a job attempt's nodes.

    Args:
        run_dir: folder of the run.
        attempt: name of the attempt.
    """

    def __init__(self, run_dir: str | os.PathLike[str], attempt: str) -> None:
        self.folder = Path(run_dir) / FOLDER / attempt
        self._seen: dict[int, tuple[int, float]] = {}

    def publish(self, report: NodeReport) -> None:
        """Replace this node's report atomically, but not durably.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path(report.node), report.to_json(), durable=False)

    def read(self, nodes: Iterable[int]) -> dict[int, NodeReport]:
        """Return the newest report of each of the nodes that has one, with ages as of now."""
        reports: dict[int, NodeReport] = {}
        for node in nodes:
            try:
                report = NodeReport.from_json(self._path(node).read_bytes())
            except (OSError, DataError):
                continue
            now = time.monotonic()
            serial, since = self._seen.get(node, (-1, now))
            if serial != report.serial:
                since = now
                self._seen[node] = (report.serial, now)
            aged = tuple(replace(view, age=view.age + now - since) for view in report.views)
            reports[node] = replace(report, views=aged)
        return reports

    def silence(self, node: int) -> float:
        """Return the seconds since a new report of the node was read; infinite if none was."""
        _, since = self._seen.get(node, (-1, -math.inf))
        return time.monotonic() - since

    def diagnose(self, num_nodes: int) -> Diagnosis | None:
        """Return why an attempt failed: a hang, a silent node, or the first rank that died."""
        reports = list(self.read(range(num_nodes)).values())
        hangs = [report.diagnosis for report in reports if report.diagnosis is not None]
        silent = [report for report in reports if report.code is None]
        is_one_silent = len(silent) == 1 and len(reports) > 1
        if hangs and (hangs[0].ranks or not is_one_silent):
            return hangs[0]
        if is_one_silent and all(r.code in (None, EXIT_DONE, EXIT_REQUEUE) for r in reports):
            # The others ended as they should, so it did, too, and could not write.
            return None
        if is_one_silent:
            # The state of its ranks is unknown; it is named, but not excluded: its supervisor may
            # have been unable to write.
            host, step = silent[0].host, max((view.step for view in silent[0].views), default=0)
            reason = f"{host} stopped reporting at step {step}"
            return Diagnosis("death", (), (host,), reason)
        return diagnose_deaths([view for report in reports for view in report.views])

    def _path(self, node: int) -> Path:
        return self.folder / f"node_{node}.json"
