"""Job history of a run (``chain.jsonl`` in the run folder), and whether another attempt follows.

A job attempt is one start of a SLURM job; a requeued job starts again under the same number. The
file has one line per event: a submission, its job numbers, the start and end of each attempt, a
cancellation, a change of the stragglers.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.cluster.event_log import append_event, read_events
from megatron_deberta.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NEVER_REQUEUE,
    EXIT_REQUEUE,
    EXIT_USAGE,
)

FILE_NAME = "chain.jsonl"
MAX_STALLED_ATTEMPTS = 3
"""A run ends after this many consecutive attempts without a new checkpoint."""

FINISHED = "finished"
_FINAL = {
    EXIT_DONE: FINISHED,
    EXIT_NEVER_REQUEUE: "failed in a way that would repeat; see the logs",
    EXIT_USAGE: "configuration, data or checkpoint are refused; see the logs",
    EXIT_INTERRUPTED: "stopped by Ctrl-C (SIGINT)",
}
Event = Literal["submit", "jobs", "start", "end", "cancel", "slow"]


@dataclass(frozen=True, slots=True)
class Decision:
    """The exit code of a job attempt, and what follows it."""

    continues: bool
    code: int
    reason: str


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
        return [record for record in read_events(self.path) if "event" in record]

    def current(self) -> list[dict[str, Any]]:
        """Return the events since the last submission, including it."""
        records = self.records()
        submissions = [i for i, record in enumerate(records) if record["event"] == "submit"]
        return records[submissions[-1] if submissions else 0 :]

    def submitted_jobs(self) -> list[str]:
        """Return the job numbers of the last submission."""
        records = [record for record in self.current() if record["event"] == "jobs"]
        return [str(job) for record in records for job in record["jobs"]]

    def committed_step(self) -> int:
        """Return the step of the newest committed checkpoint, 0 if there is none."""
        return max(committed_steps(self.run_dir), default=0)

    def stalled_attempts(self) -> int:
        """Count the consecutive attempts, up to the newest, that started at the present step."""
        step, count = self.committed_step(), 0
        for record in reversed(self.current()):
            if record["event"] != "start":
                continue
            if record["step"] < step:
                break
            count += 1
        return count

    def is_cancelled(self) -> bool:
        """Return whether the last submission was cancelled."""
        return any(record["event"] == "cancel" for record in self.current())

    def end_reason(self) -> str:
        """Return why no further attempt follows, empty if one may."""
        if self.is_cancelled():
            return "cancelled"
        ends = [record for record in self.current() if record["event"] == "end"]
        return "" if not ends or ends[-1]["goes_on"] else str(ends[-1]["reason"])

    def unfinished_attempt(self) -> dict[str, Any] | None:
        """Return the start of the newest attempt if it has not recorded its end."""
        records = [r for r in self.current() if r["event"] in ("start", "end")]
        return records[-1] if records and records[-1]["event"] == "start" else None

    def is_running(self) -> bool:
        """Return whether the newest attempt has started and not recorded its end."""
        return self.unfinished_attempt() is not None

    def start_attempt(self, attempt: str, nodes: str) -> None:
        """Record the start of an attempt."""
        self.append("start", link=attempt, step=self.committed_step(), nodes=nodes)

    def end_attempt(self, attempt: str, decision: Decision, code: int | None) -> None:
        """Record the end of an attempt.

        Args:
            attempt: its name.
            decision: what follows.
            code: exit code of its ranks; None: they were not started.
        """
        self.append(
            "end", link=attempt, step=self.committed_step(), code=code,
            goes_on=decision.continues, reason=decision.reason,
        )  # fmt: skip

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
        if (stalled := self.stalled_attempts()) >= MAX_STALLED_ATTEMPTS:
            last = f" (last: {diagnosis})" if diagnosis else ""
            reason = (
                f"{stalled} consecutive job attempts made no new checkpoint{last}; see the logs, "
                "then submit again"
            )
            return Decision(False, EXIT_NEVER_REQUEUE, reason)
        if code == EXIT_REQUEUE:
            return Decision(True, EXIT_REQUEUE, "stopped with a checkpoint")
        return Decision(True, EXIT_REQUEUE, diagnosis or f"failed with exit code {code}")
