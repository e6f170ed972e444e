"""The history of a run's jobs, and whether it goes on.

Owns ``chain.jsonl`` in the run folder: one line when a link (one start of a job) begins, one when
it ends, one for each submission and its job numbers, one if somebody cancels, one when other ranks
than before are slow. Refuses to act: ``link.py`` does what ``decide`` says.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.errors import EXIT_DONE, EXIT_NEVER_REQUEUE, EXIT_REQUEUE, EXIT_USAGE

FILE_NAME = "chain.jsonl"
MAX_STALLED_LINKS = 3
"""After so many links in a row without a new checkpoint, a run is stopped."""

Event = Literal["submit", "jobs", "start", "end", "cancel", "slow"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows a link."""

    goes_on: bool
    """Another link shall continue."""
    code: int
    """What this one exits with."""
    reason: str
    """In words, for people."""


class JobHistory:
    """The history of one run.

    Args:
        run_dir: folder of the run.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / FILE_NAME

    def append(self, event: Event, **values: Any) -> None:
        """Add a line; it survives a crash right after."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def records(self) -> list[dict[str, Any]]:
        """All lines, oldest first; what a crash has torn is left out."""
        if not self.path.exists():
            return []
        records = []
        for line in self.path.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "event" in record:
                records.append(record)
        return records

    def current(self) -> list[dict[str, Any]]:
        """Lines since the last submission, that included."""
        records = self.records()
        submitted = [i for i, record in enumerate(records) if record["event"] == "submit"]
        return records[submitted[-1] if submitted else 0 :]

    def committed_step(self) -> int:
        """Step of the newest committed checkpoint; 0 if there is none."""
        return max(committed_steps(self.run_dir), default=0)

    def stalled_links(self) -> int:
        """How many links in a row have begun at the present step, and so got no further."""
        step, count = self.committed_step(), 0
        for record in reversed(self.current()):
            if record["event"] != "start":
                continue
            if record["step"] < step:
                break
            count += 1
        return count

    def is_over(self) -> str:
        """Why no further link shall start; empty if one may."""
        records = self.current()
        if any(record["event"] == "cancel" for record in records):
            return "cancelled"
        ends = [record for record in records if record["event"] == "end"]
        return "" if not ends or ends[-1]["goes_on"] else str(ends[-1]["reason"])

    def is_running(self) -> bool:
        """Whether the newest link has begun and not said how it ended."""
        records = [r for r in self.current() if r["event"] in ("start", "end")]
        return bool(records) and records[-1]["event"] == "start"

    def decide(self, code: int, cause: str = "") -> Decision:
        """What follows a link whose ranks ended with this code.

        Args:
            code: the largest exit code of the nodes; negative: srun was killed by that signal.
            cause: what the supervisors found out, if they did.
        """
        if code == EXIT_DONE:
            return Decision(False, EXIT_DONE, "finished")
        if code == EXIT_NEVER_REQUEUE:
            return Decision(False, code, "the ranks say that it would end the same way again")
        if code == EXIT_USAGE:
            return Decision(False, code, "the configuration is wrong")
        if any(record["event"] == "cancel" for record in self.current()):
            return Decision(False, EXIT_DONE, "cancelled")
        if (stalled := self.stalled_links()) >= MAX_STALLED_LINKS:
            last = f" (last: {cause})" if cause else ""
            reason = (
                f"{stalled} links in a row made no progress{last}; see the logs, then submit again"
            )
            return Decision(False, EXIT_NEVER_REQUEUE, reason)
        failed = cause or f"failed with {code}"
        reason = "stopped with a checkpoint" if code == EXIT_REQUEUE else failed
        return Decision(True, EXIT_REQUEUE, reason)
