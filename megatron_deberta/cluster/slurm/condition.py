"""Condition of a run in one word: finished, failed, stalled, running, queued or stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_deberta.cluster.slurm.history import FINISHED
from megatron_deberta.cluster.watchdog.hang import Limits, find_hang
from megatron_deberta.cluster.watchdog.report_exchange import aged
from megatron_deberta.cluster.watchdog.report_store import FOLDER, ReportStore
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REQUEUE
from megatron_deberta.observe.console import format_duration

Word = Literal["finished", "failed", "stalled", "running", "queued", "stopped"]
WORDS: tuple[Word, ...] = ("finished", "failed", "stalled", "running", "queued", "stopped")
FRESH_SECONDS = 60.0
"""A node's report that is not older shows that its supervisor runs."""

Event = Mapping[str, Any]


class Condition(NamedTuple):
    """What a run does, and why if it does not run."""

    word: Word
    reason: str = ""


class Activity(NamedTuple):
    """What is known of a run's processes and of its progress."""

    holder: str
    """Process that trains; empty: none."""
    is_lost: bool
    """Whether the last process to train ended without releasing the lock."""
    ended: str
    """As in :class:`Holder`, of the last process."""
    state: str | None
    """State of its SLURM job; empty: there is none; None: unknown."""
    last_progress: float
    """Time of its last record, checkpoint or start, in seconds since the epoch."""
    record_seconds: float
    """Expected time between two records."""


def find_condition(
    folder: Path, events: Sequence[Event], over: str, activity: Activity, config: ClusterConfig
) -> Condition:
    """Return the condition of a run.

    Args:
        folder: folder of the run.
        events: job history of the last submission.
        over: why the run has ended; empty: it has not.
        activity: its processes and progress.
        config: its time-outs.
    """
    # A process may have been started after the end of a submission.
    if over == FINISHED or (over and not activity.holder):
        return _ended(events, over)
    attempts = [event for event in events if event["event"] in ("start", "end")]
    last = attempts[-1] if attempts else {}
    attempt = last["link"] if last.get("event") == "start" else ""
    reports = ReportFiles(folder, attempt)
    if activity.holder:
        late = _stalled_reason(reports, activity, config)
        return Condition("stalled", late) if late else Condition("running")
    state = activity.state or ""
    if state.startswith("PENDING"):
        return Condition("queued", state)
    if state or (attempt and _is_starting(reports, activity)):
        return Condition("running")
    if attempt:
        return Condition("stalled", f"attempt {attempt} was killed or lost; nothing continues it")
    if last.get("goes_on"):
        is_recent = time.time() - last["time"] < FRESH_SECONDS
        if activity.state is None or is_recent:
            return Condition("queued", "between two attempts")
        return Condition("stalled", f"nothing continues it after attempt {last['link']}")
    if activity.is_lost:
        return Condition("failed", "its process was killed or lost")
    if activity.ended in signal.Signals.__members__:
        return Condition("stopped", f"stopped by {activity.ended}")
    return Condition("failed", activity.ended) if activity.ended else Condition("stopped")


class ReportFiles:
    """Reports of an attempt's nodes as files, for a reader that comes by once.

    Args:
        folder: folder of the run.
        attempt: name of the attempt; empty: there is none.
    """

    def __init__(self, folder: Path, attempt: str) -> None:
        paths = list((folder / FOLDER / attempt).glob("node_*.json")) if attempt else []
        times = {int(path.stem.removeprefix("node_")): path.stat().st_mtime for path in paths}
        now = time.time()
        read = ReportStore(folder, attempt).read(times)
        self.age = min((max(0.0, now - when) for when in times.values()), default=float("inf"))
        """Age of the newest report in seconds."""
        self.reports = [aged(report, max(0.0, now - times[node])) for node, report in read.items()]


def _ended(events: Sequence[Event], over: str) -> Condition:
    if over == FINISHED:
        return Condition("finished")
    codes = [event.get("code") for event in events if event["event"] == "end"]
    wanted = (EXIT_DONE, EXIT_REQUEUE, EXIT_INTERRUPTED)
    is_stopped = over.startswith("cancelled") or (codes and codes[-1] in wanted)
    return Condition("stopped" if is_stopped else "failed", over)


def _is_starting(reports: ReportFiles, activity: Activity) -> bool:
    """Return whether an attempt without a lock is about to take it."""
    return min(reports.age, time.time() - activity.last_progress) < FRESH_SECONDS


def _stalled_reason(reports: ReportFiles, activity: Activity, config: ClusterConfig) -> str:
    """Return what is overdue in a run that is alive, empty if nothing is."""
    quiet = time.time() - activity.last_progress
    pairs = [
        pair for report in reports.reports for pair in zip(report.views, report.limits, strict=True)
    ]
    limits = {view.rank: limit for view, limit in pairs}
    overdue = find_hang([view for view, _ in pairs], limits)
    if overdue and quiet > max(limits.values()):
        return overdue
    if reports.age < FRESH_SECONDS:
        return ""
    # Nothing tells the section; this holds for the slowest one.
    longest = Limits(config).longest() + 2 * activity.record_seconds
    return f"no new record for {format_duration(quiet)}" if quiet > longest else ""
