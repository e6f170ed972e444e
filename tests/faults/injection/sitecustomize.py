"""Python imports this first where this folder is on ``PYTHONPATH``: kills a run at a chosen point.

``PREPROCESS_KILL`` is JSON: ``phase``, ``entry`` (the how-manieth time it is entered), ``call``
(how many calls that change the disk later; 0: none), ``delay`` in seconds, ``target``
(``self`` or ``parent``), ``token`` (a file made by the one process that kills) and ``count``
(a file to which the numbers of entries and calls are written instead).
"""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable
from typing import Any

CALLS = ("fsync", "replace", "link", "rename", "unlink", "pwrite", "rmdir", "posix_fallocate")


class Injection:
    """Counts phases and calls of this process, and kills when both numbers are reached."""

    def __init__(self, plan: dict[str, Any]) -> None:
        """Wrap what is counted."""
        from megatron_deberta.text.preprocess.progress import ProgressCounters

        self.plan = plan
        self.phase = ""
        self.entries: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        enter = ProgressCounters.enter

        def entering(board: ProgressCounters, phase: str) -> None:
            enter(board, phase)
            self.phase = phase
            self.entries[phase] = self.entries.get(phase, 0) + 1
            self.strike(is_call=False)

        ProgressCounters.enter = entering  # type: ignore[method-assign]
        for name in CALLS:
            setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Count a call before it is done."""

        def function(*args: Any, **kwargs: Any) -> Any:
            self.calls[self.phase] = self.calls.get(self.phase, 0) + 1
            self.strike(is_call=True)
            return original(*args, **kwargs)

        return function

    def strike(self, *, is_call: bool) -> None:
        """Kill if this is the point."""
        plan = self.plan
        if "count" in plan:
            with open(plan["count"], "w") as stream:
                json.dump({"entries": self.entries, "calls": self.calls}, stream)
            return
        if self.phase != plan["phase"] or is_call != bool(plan["call"]):
            return
        reached = self.calls if is_call else self.entries
        if reached[self.phase] < (plan["call"] if is_call else plan["entry"]):
            return
        with contextlib.suppress(FileExistsError), open(plan["token"], "x") as stream:
            stream.write(str(os.getpid()))
            stream.flush()
            victim = os.getpid() if plan["target"] == "self" else os.getppid()
            if plan["delay"]:
                # From outside, so that no lock of the interpreter keeps it from its instant.
                script = f"sleep {plan['delay']}; kill -9 {victim}"
                subprocess.Popen(["sh", "-c", script], start_new_session=True)
            else:
                os.kill(victim, signal.SIGKILL)


if "PREPROCESS_KILL" in os.environ:
    Injection(json.loads(os.environ["PREPROCESS_KILL"]))
