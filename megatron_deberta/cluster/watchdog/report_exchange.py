"""Exchange of reports in a thread, so that a disk that does not answer never blocks a supervisor.

A read or write on a stale or frozen mount may block for any time, and is not interruptible.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from megatron_deberta.cluster.watchdog.report_store import NodeReport, ReportStore

logger = logging.getLogger("supervisor")


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
