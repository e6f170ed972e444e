"""Reports of a job attempt's nodes: one small JSON file per node in ``supervision/ATTEMPT/``.

They are exchanged through the run folder, so no port is opened. Clocks of nodes need not agree: a
report gives ages, and a reader adds the time since it saw the file change. A read or write on a
stale or frozen mount may block for any time, and is not interruptible, so a supervisor exchanges
reports in a thread.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from megatron_deberta.cluster.watchdog.detection import (
    Diagnosis,
    RankView,
    Times,
    diagnose_deaths,
    find_hang,
)
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE, DataError
from megatron_deberta.files import write_atomically
from megatron_deberta.parsing import Number, dump_json, parse_json

FOLDER = "supervision"
"""Folder in the run folder with a folder per job attempt."""
logger = logging.getLogger("supervisor")


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
        write_atomically(self._path(report.node), dump_json(report), durable=False)

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
            reports[node] = aged(report, now - since)
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


class ReportExchange:
    """Publishes this node's reports and reads those of the other nodes.

    Args:
        store: reports of the job attempt.
        node: number of this node.
        num_nodes: nodes of the job.
    """

    def __init__(self, store: ReportStore, node: int, num_nodes: int) -> None:
        self._store = store
        self._nodes = [other for other in range(num_nodes) if other != node]
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._newest: NodeReport | None = None
        self._reports: dict[int, NodeReport] = {}
        self._read_at = time.monotonic()
        self._task_began: float | None = None
        self._has_warned = False
        self._thread = threading.Thread(target=self._work, name="report-exchange", daemon=True)

    def publish(self, report: NodeReport) -> None:
        """Publish a report and read the others', without waiting; only the newest one counts."""
        is_queued = self._newest is not None
        self._newest = report
        if not is_queued:
            self.submit(self._exchange)

    def submit(self, task: Callable[[], object]) -> None:
        """Run a task in the thread; its ``OSError`` is logged once for all tasks."""
        self._tasks.put(task)
        # Not earlier: the supervisor forks its ranks before it has anything to publish.
        if self._thread.ident is None:
            self._thread.start()

    def others(self) -> dict[int, NodeReport]:
        """Return the newest known report of each other node, with ages as of now."""
        seconds = time.monotonic() - self._read_at
        return {node: aged(report, seconds) for node, report in self._reports.items()}

    def silent(self, seconds: float) -> list[int]:
        """Return the other nodes that run, and of which nothing was heard for so long."""
        ended = [node for node, report in self._reports.items() if report.code is not None]
        return [
            node
            for node in self._nodes
            if node not in ended and self._store.silence(node) > seconds
        ]

    def blocked_seconds(self) -> float:
        """Return for how long the disk has not answered."""
        began = self._task_began
        return 0.0 if began is None else time.monotonic() - began

    def flush(self, seconds: float) -> bool:
        """Wait for the tasks, but not longer; return whether all are done."""
        done = threading.Event()
        self.submit(done.set)
        return done.wait(seconds)

    def _work(self) -> None:
        while True:
            task = self._tasks.get()
            self._task_began = time.monotonic()
            try:
                task()
            except OSError as error:
                # Training goes on with a full disk; the other nodes see no new reports.
                if not self._has_warned:
                    logger.warning("%s", error)
                self._has_warned = True
            self._task_began = None

    def _exchange(self) -> None:
        report, self._newest = self._newest, None
        try:
            if report is not None:
                self._store.publish(report)
        finally:
            self._reports = self._store.read(self._nodes)
            self._read_at = time.monotonic()


def aged(report: NodeReport, seconds: float) -> NodeReport:
    """Return a report whose views are older by some seconds."""
    views = tuple(replace(view, age=view.age + seconds) for view in report.views)
    return replace(report, views=views)


def find_overdue(reports: Iterable[NodeReport]) -> str:
    """Return what is overdue by some nodes' reports, empty if nothing is."""
    pairs = [pair for report in reports for pair in zip(report.views, report.limits, strict=True)]
    return find_hang([view for view, _ in pairs], {view.rank: limit for view, limit in pairs})
