"""What a run records about its job attempts, and whether another one follows.

A job attempt is one start of a SLURM job; a requeued job starts again under the same number.
``chain.jsonl`` in the run folder has one line per event: a submission, its job numbers, the start
and end of each attempt, the position from which its ranks resume and that of each checkpoint, a
stop signal, a cancellation, a change of the stragglers, a verdict about faulty devices.
``bad_nodes.jsonl`` has the failures of nodes, which later attempts exclude. Lines outlive a crash:
each is flushed, and damaged ones are skipped.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field
from typing_extensions import Required, TypedDict

from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.cluster.watchdog.detection import Diagnosis
from megatron_deberta.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NEVER_REQUEUE,
    EXIT_REQUEUE,
    EXIT_USAGE,
    DataError,
)
from megatron_deberta.files import MAX_RECORD_BYTES, read_regular
from megatron_deberta.observe.metrics import append_line
from megatron_deberta.parsing import Count, Number, Seconds, parse_json

logger = logging.getLogger("job")

T = TypeVar("T")
FILE_NAME = "chain.jsonl"
BAD_NODES_FILE = "bad_nodes.jsonl"
BAD_WEIGHT = 2
"""A node is bad from this sum of weights on: two killed ranks, or one certain failure."""
EXIT_SECONDS = 10.0
"""From the checkpoint to the end of an attempt, until a run has measured it."""
MAX_STALLED_ATTEMPTS = 3
"""A run ends after this many consecutive attempts without progress."""
MAX_STARTUP_STOPS = 20
"""A run ends after this many consecutive attempts that were told to stop during start-up."""

HARMLESS = (EXIT_DONE, EXIT_REQUEUE, EXIT_INTERRUPTED)
"""Exit codes of ranks and attempts that did not fail."""
FINISHED = "finished"
_FINAL = {
    EXIT_DONE: FINISHED,
    EXIT_NEVER_REQUEUE: "failed in a way that would repeat; see the logs",
    EXIT_USAGE: "configuration, data or checkpoint are refused; see the logs",
    EXIT_INTERRUPTED: "stopped by Ctrl-C (SIGINT)",
}
ProgressEvent = Literal["resume", "checkpoint"]
Event = (
    Literal["submit", "jobs", "start", "end", "cancel", "slow", "signal", "fault"] | ProgressEvent
)


JobNumber = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.+]{1,64}$")]
"""SLURM's number of a job, as commands take it."""


class SlowRank(TypedDict):
    """A straggler in a ``slow`` event."""

    rank: int
    host: str
    part: str
    factor: Number
    lost_seconds: Number


class FaultyRank(TypedDict):
    """A suspect in a ``fault`` event."""

    rank: int
    host: str
    device: str


class EventRecord(TypedDict, total=False):
    """A line of the file; which keys it has depends on the event."""

    event: Required[Event]
    time: Seconds
    link: str
    step: Count
    nodes: str | Count
    links: Count
    jobs: list[JobNumber]
    code: int | None
    goes_on: bool
    reason: str
    ranks: list[SlowRank]
    samples: Count
    starting: bool
    signal: str
    save_seconds: Seconds
    step_seconds: Seconds
    verdict: str
    places: list[FaultyRank]


_REQUIRED: dict[Event, set[str]] = {
    "jobs": {"jobs"},
    "start": {"link", "step", "nodes"},
    "end": {"link", "goes_on"},
    "resume": {"samples"},
    "checkpoint": {"samples"},
    "signal": {"starting"},
    "slow": {"link", "ranks"},
    "fault": {"verdict", "places"},
}
"""Keys that are read from events of a kind."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The exit code of a job attempt, and what follows it."""

    continues: bool
    code: int
    reason: str


@dataclass(slots=True)
class _Attempt:
    """What the history says about an attempt; positions count samples, None: unknown."""

    step: int
    """Newest committed step at its start."""
    resumed: int | None = None
    saved: int | None = None
    code: int | None = None
    was_starting: bool = False
    """A stop signal came before its first step."""
    signal: str = ""
    """The last stop signal."""

    def stopped_early(self) -> bool:
        """Return whether it was told to stop before its first step, if it has not progressed."""
        return self.was_starting or self.code == EXIT_REQUEUE

    def has_progressed(self, following: Sequence[_Attempt], step: int) -> bool:
        """Return whether the run got further than the state from which this attempt started.

        A rollback lowers the step, but not the number of samples. A checkpoint counts only if a
        later attempt, if there is one, could resume from it.

        Args:
            following: the later attempts.
            step: the newest committed step.
        """
        if self.resumed is None:
            return (following[0].step if following else step) > self.step
        later = [attempt.resumed for attempt in following if attempt.resumed is not None]
        reached = later[0] if later else self.saved
        return reached is not None and reached > self.resumed


class JobHistory:
    """Job history of one run.

    Args:
        run_dir: folder of the run.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / FILE_NAME

    def append(self, event: Event, **values: Any) -> None:
        """Append an event durably."""
        append_event(self.path, {"event": event, "time": round(time.time(), 3), **values})

    def forget(self, size: int) -> None:
        """Remove the events after the first ``size`` bytes of the file."""
        if size:
            os.truncate(self.path, size)
        else:
            self.path.unlink(missing_ok=True)

    def records(self) -> list[dict[str, Any]]:
        """Return all events, oldest first, without lines that a crash has cut short."""
        return [
            {"time": 0.0, **record}
            for record in read_events(self.path, EventRecord, ignore_unknown=True)
            if _REQUIRED.get(record["event"], set()) <= record.keys()
        ]

    def current(self) -> list[dict[str, Any]]:
        """Return the events since the last submission, including it."""
        return self.submissions()[-1]

    def submissions(self) -> list[list[dict[str, Any]]]:
        """Return the events of each submission, oldest first; at least one list.

        The end of an attempt that was recorded after the start of its successor does not count:
        SLURM had taken its node for dead.
        """
        found: list[list[dict[str, Any]]] = [[]]
        starts: list[str] = []
        for record in self.records():
            if record["event"] == "submit" and found[-1]:
                found.append([])
                starts = []
            if record["event"] == "start":
                starts.append(record["link"])
            has_successor = record.get("link") in starts and record["link"] != starts[-1]
            if record["event"] != "end" or not has_successor:
                found[-1].append(record)
        return found

    def submitted_jobs(self) -> list[str]:
        """Return the job numbers of the last submission."""
        records = [record for record in self.current() if record["event"] == "jobs"]
        return [str(job) for record in records for job in record["jobs"]]

    def committed_step(self) -> int:
        """Return the step of the newest committed checkpoint, 0 if there is none."""
        return max(committed_steps(self.run_dir), default=0)

    def stalled_attempts(self, code: int | None = None) -> tuple[int, int]:
        """Count the consecutive attempts, up to the newest, without progress.

        Args:
            code: exit code of the ranks of the newest attempt; None: unknown, or recorded.

        Returns:
            Those that failed, and those that were told to stop before their first step.
        """
        attempts, step = self._attempts(), self.committed_step()
        if attempts and code is not None:
            attempts[-1].code = code
        failed = stopped = 0
        for number in reversed(range(len(attempts))):
            if attempts[number].has_progressed(attempts[number + 1 :], step):
                break
            stopped += attempts[number].stopped_early()
            failed += not attempts[number].stopped_early()
        return failed, stopped

    def _attempts(self) -> list[_Attempt]:
        """Return the attempts of the last submission."""
        attempts: list[_Attempt] = []
        for record in self.current():
            if record["event"] == "start":
                attempts.append(_Attempt(record["step"]))
            elif not attempts:
                continue
            elif record["event"] == "resume":
                attempts[-1].resumed = record["samples"]
            elif record["event"] == "checkpoint":
                attempts[-1].saved = record["samples"]
            elif record["event"] == "signal":
                attempts[-1].was_starting |= record["starting"]
                attempts[-1].signal = str(record.get("signal") or attempts[-1].signal)
            elif record["event"] == "end":
                attempts[-1].code = record.get("code")
        return attempts

    def is_superseded(self, attempt: str) -> bool:
        """Return whether another attempt has started after this one."""
        starts = [record["link"] for record in self.current() if record["event"] == "start"]
        # Its own start may be missing because the disk was full.
        return attempt in starts[:-1] and starts[-1] != attempt

    def stall_reason(self, code: int | None = None) -> str:
        """Return why the run ends for lack of progress, empty if it goes on.

        Args:
            code: see ``stalled_attempts``.
        """
        failed, stopped = self.stalled_attempts(code)
        if failed >= MAX_STALLED_ATTEMPTS:
            return f"{failed} consecutive job attempts made no progress"
        if stopped >= MAX_STARTUP_STOPS:
            return (
                f"{stopped} consecutive job attempts were told to stop before their first step; "
                "raise the time limit"
            )
        return ""

    def is_cancelled(self) -> bool:
        """Return whether the last submission was cancelled."""
        return any(record["event"] == "cancel" for record in self.current())

    def end_reason(self) -> str:
        """Return why no further attempt follows, empty if one may."""
        if self.is_cancelled():
            return "cancelled"
        ends = [record for record in self.current() if record["event"] == "end"]
        return "" if not ends or ends[-1]["goes_on"] else str(ends[-1].get("reason"))

    def unfinished_attempt(self) -> dict[str, Any] | None:
        """Return the start of the newest attempt if it has not recorded its end."""
        records = [r for r in self.current() if r["event"] in ("start", "end")]
        return records[-1] if records and records[-1]["event"] == "start" else None

    def start_attempt(self, attempt: str, nodes: str) -> None:
        """Record the start of an attempt, unless the disk is full."""
        self._try_append("start", link=attempt, step=self.committed_step(), nodes=nodes)

    def end_attempt(self, attempt: str, decision: Decision, code: int | None) -> None:
        """Record the end of an attempt, unless the disk is full; what follows is done anyway.

        Args:
            attempt: its name.
            decision: what follows.
            code: exit code of its ranks; None: they were not started.
        """
        self._try_append(
            "end", link=attempt, step=self.committed_step(), code=code,
            goes_on=decision.continues, reason=decision.reason,
        )  # fmt: skip

    def _try_append(self, event: Event, **values: Any) -> None:
        try:
            self.append(event, **values)
        except OSError as error:
            logger.warning("%s: not recorded: %s", self.path, error)

    def decide(self, code: int, diagnosis: str = "") -> Decision:
        """Decide what follows an attempt.

        Args:
            code: largest exit code of the nodes; negative: a signal killed srun.
            diagnosis: cause of the failure, where the supervisors found one.
        """
        if code in _FINAL:
            return Decision(False, code, _FINAL[code])
        if self.is_cancelled():
            return Decision(False, EXIT_DONE, "cancelled")
        if stalled := self.stall_reason(code):
            last = f" (last: {diagnosis})" if diagnosis else ""
            reason = f"{stalled}{last}; see the logs, then start the run again"
            return Decision(False, EXIT_NEVER_REQUEUE, reason)
        if code == EXIT_REQUEUE:
            _, stopped = self.stalled_attempts(code)
            how = "before the first step" if stopped else "with a checkpoint"
            attempts = self._attempts()
            by = f" by {attempts[-1].signal}" if attempts and attempts[-1].signal else ""
            return Decision(True, EXIT_REQUEUE, f"stopped{by} {how}")
        return Decision(True, EXIT_REQUEUE, diagnosis or f"failed with exit code {code}")


@dataclass(frozen=True, slots=True)
class StopTime:
    """Longest measured time from a stop signal to the end of an attempt, by part, in seconds.

    A signal that arrives just after a step costs the next step and a save; a save under way is the
    last one, and a validation is interrupted after a batch.
    """

    step: float
    save: float
    exit: float

    @property
    def total(self) -> float:
        """Longest time from a signal to the end of the attempt."""
        return self.step + self.save + self.exit

    def __str__(self) -> str:
        """Return the total and its parts in seconds."""
        return (
            f"{self.total:.1f} s (longest step {self.step:.1f} s, save {self.save:.1f} s, exit "
            f"{self.exit:.1f} s)"
        )


def measured_stop_time(events: Sequence[Mapping[str, Any]]) -> StopTime | None:
    """Return the worst case according to a job history; None before the first checkpoint."""
    measured = ("save_seconds", "step_seconds")
    saves = [event for event in events if all(key in event for key in measured)]
    if not saves:
        return None
    exits = []
    saved_at: float | None = None
    for event in events:
        if event["event"] == "end" and event.get("code") == EXIT_REQUEUE and saved_at is not None:
            exits.append(event["time"] - saved_at)
        if event["event"] in ("start", "checkpoint"):
            saved_at = event["time"] if event["event"] == "checkpoint" else None
    return StopTime(
        step=max(event["step_seconds"] for event in saves),
        save=max(event["save_seconds"] for event in saves),
        exit=max(exits, default=EXIT_SECONDS),
    )


@dataclass(frozen=True, slots=True)
class NodeFailure:
    """One failure of a node; a line of the file."""

    node: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,255}$")]
    reason: str
    time: Seconds
    """Since the epoch."""
    weight: Literal[1, 2]


class BadNodes:
    """Failures of nodes in one run.

    Args:
        run_dir: folder of the run.
        hours: age after which a failure no longer counts.
    """

    def __init__(self, run_dir: str | os.PathLike[str], hours: float) -> None:
        self.path = Path(run_dir) / BAD_NODES_FILE
        self._seconds = 3600 * hours

    def add(self, node: str, reason: str, *, certain: bool) -> None:
        """Record a failure, unless the disk is full.

        Args:
            node: SLURM's name of the node.
            reason: for people.
            certain: this failure alone makes the node bad.
        """
        failure = NodeFailure(node, reason, round(time.time(), 3), 2 if certain else 1)
        try:
            append_event(self.path, asdict(failure))
        except OSError as error:
            logger.warning("%s: not recorded: %s", self.path, error)

    def record_failure(self, diagnosis: Diagnosis) -> str:
        """Record the failure of a job attempt if it is clear which node caused it.

        All ranks run the same code, so a hang of one is most often its node's fault, and a spare
        node costs little. A rank that a signal killed counts half; one that ended with an error
        does not count.

        Returns:
            The node, if it is bad now; else an empty string.
        """
        is_hang = diagnosis.kind == "hang"
        counts = is_hang or " was killed by signal " in diagnosis.reason
        if len(diagnosis.hosts) != 1 or not counts:
            return ""
        node = diagnosis.hosts[0]
        self.add(node, diagnosis.reason, certain=is_hang)
        return node if node in self.current() else ""

    def current(self) -> dict[str, NodeFailure]:
        """Return the last failure of each bad node, oldest first."""
        weights: dict[str, int] = {}
        last: dict[str, NodeFailure] = {}
        for failure in read_events(self.path, NodeFailure):
            if failure.time + self._seconds > time.time():
                weights[failure.node] = weights.get(failure.node, 0) + failure.weight
                last.pop(failure.node, None)
                last[failure.node] = failure
        return {node: failure for node, failure in last.items() if weights[node] >= BAD_WEIGHT}


def append_event(path: Path, event: Mapping[str, Any]) -> None:
    """Append a line durably, and as a whole beside those of other processes.

    Raises:
        OSError: the disk is full or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, json.dumps(event).encode(), is_shared=True)


def read_events(path: Path, schema: type[T], *, ignore_unknown: bool = False) -> list[T]:
    """Return the events of a file in order, without lines that a crash has cut short.

    Args:
        path: the file; without it there are no events.
        schema: type of an event; other lines are skipped.
        ignore_unknown: keep events with keys that a ``TypedDict`` does not have.
    """
    events = []
    if path.exists():
        for number, line in enumerate(read_regular(path, MAX_RECORD_BYTES).splitlines(), start=1):
            try:
                event = parse_json(
                    line, schema, f"{path}:{number}", "an event",
                    remedy="the line is ignored", ignore_unknown=ignore_unknown,
                )  # fmt: skip
            except DataError as error:
                logger.debug("%s", error)
                continue
            events.append(event)
    return events
