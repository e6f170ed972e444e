"""Kill a run at a chosen point; Python imports this file if the folder is on ``PYTHONPATH``.

``PREPROCESS_KILL`` is JSON: ``phase``, ``entry`` (number of the entry into the phase), ``call``
(number of the call in the phase that changes the disk; 0: none), ``delay`` in seconds, ``target``
(``self`` or ``parent``), ``token`` (file created by the process that kills) and ``count`` (file for
the numbers of entries and calls; nothing is killed).
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
        """Wrap the counted functions."""
        from megatron_deberta.text.preprocess.progress import ProgressCounters

        self.plan = plan
        self.phase = ""
        self.entries: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        enter = ProgressCounters.enter

        def entering(counters: ProgressCounters, phase: str) -> None:
            enter(counters, phase)
            self.phase = phase
            self.entries[phase] = self.entries.get(phase, 0) + 1
            self.kill_if_reached(is_call=False)

        ProgressCounters.enter = entering  # type: ignore[method-assign]
        for name in CALLS:
            setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a counter before the call."""

        def function(*args: Any, **kwargs: Any) -> Any:
            self.calls[self.phase] = self.calls.get(self.phase, 0) + 1
            self.kill_if_reached(is_call=True)
            return original(*args, **kwargs)

        return function

    def kill_if_reached(self, *, is_call: bool) -> None:
        """Kill if the chosen point is reached."""
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
                # From another process, so that the interpreter lock does not delay it.
                script = f"sleep {plan['delay']}; kill -9 {victim}"
                subprocess.Popen(["sh", "-c", script], start_new_session=True)
            else:
                os.kill(victim, signal.SIGKILL)


if "PREPROCESS_KILL" in os.environ:
    Injection(json.loads(os.environ["PREPROCESS_KILL"]))
