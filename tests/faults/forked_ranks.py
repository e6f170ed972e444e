"""A supervisor whose ranks are forked from a process that has imported all modules.

This saves the start of four Python processes with torch and DeepSpeed per case. Processes,
signals, heartbeats and the ranks' program are unchanged.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_deberta.cluster.watchdog.ranks import NodePlan
from megatron_deberta.cluster.watchdog.supervisor import FORWARDED, Supervisor
from megatron_deberta.processes import die_with_parent
from tests.support.jobs import RANK_IMPORTS

PLAN_VARIABLE = "MEGATRON_DEBERTA_TEST"
"""The fault of a rank, as JSON; see ``inject_fault``."""


def preload() -> None:
    """Import what ranks import; call it before the first fork, without threads."""
    for name in RANK_IMPORTS:
        importlib.import_module(name)


class Fork:
    """A forked process with the interface of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for the end."""
        return self._wait(0)

    def send_signal(self, number: int) -> None:
        """Send a signal if the process runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class ForkingSupervisor(Supervisor):
    """Runs ``megatron-deberta`` in forks of this process.

    Args:
        plan: what to run; its command are the arguments.
        on_start: called in a thread once all ranks run, with their processes and the folder of
            their heartbeats.
    """

    def __init__(self, plan: NodePlan, on_start: Callable[[list[int], Path], None]) -> None:
        super().__init__(plan)
        self._arguments = plan.command
        self._on_start = on_start

    def _popen(self, environment: Mapping[str, str], output: int | None) -> Any:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _run_rank(parent, self._arguments, environment, output)
        return Fork(pid)

    def _watch(self) -> int:
        pids = [rank.process.pid for rank in self._ranks]
        threading.Thread(target=self._on_start, args=(pids, self._folder), daemon=True).start()
        return super()._watch()


def _run_rank(
    parent: int, arguments: tuple[str, ...], environment: Mapping[str, str], output: int | None
) -> None:
    """Run the command as a rank; never returns."""
    code = 1
    try:
        os.setsid()
        die_with_parent(parent)
        for number in (*FORWARDED, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        if output is not None:
            # The streams of a parent that writes to a regular file would seek in the new files.
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout = open(1, "w", closefd=False)
            sys.stderr = open(2, "w", closefd=False)
        os.environ.clear()
        os.environ.update(environment)
        if plan := os.environ.get(PLAN_VARIABLE):
            inject_fault(json.loads(plan))
        from megatron_deberta.cli.main import main

        code = main(arguments)
        atexit._run_exitfuncs()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def inject_fault(plan: Mapping[str, Any]) -> None:
    """Inject a fault into the data or forward passes of one rank.

    Args:
        plan: ``rank`` and ``how``: ``slow`` with ``part`` and ``seconds``, or ``read``.
    """
    if int(os.environ["RANK"]) == plan["rank"]:
        (_slow_down if plan["how"] == "slow" else _block_reads)(plan)


def _slow_down(plan: Mapping[str, Any]) -> None:
    """Delay each forward pass, or each wait for a batch, by a number of seconds."""
    import megatron_deberta.model.encoder as encoder
    import megatron_deberta.train.prefetch as prefetch

    owner: Any = encoder.Encoder if plan["part"] == "forward" else prefetch.InputQueue
    name = "forward" if plan["part"] == "forward" else "take"
    original = getattr(owner, name)

    def late(*args: Any) -> Any:
        time.sleep(plan["seconds"])
        return original(*args)

    setattr(owner, name, late)


def _block_reads(plan: Mapping[str, Any]) -> None:
    """Block one read of a rank's data forever.

    Args:
        plan: ``call`` (number of the batch), ``worker`` (in the loader process instead of the
            rank), ``fifo`` (the file to read) and ``stamp`` (a file written before blocking).
    """
    import megatron_deberta.data.loader as loader
    import megatron_deberta.train.prefetch as prefetch

    owner = loader._MicroBatches if plan["worker"] else prefetch.InputQueue
    name = "__getitem__" if plan["worker"] else "take"
    original = getattr(owner, name)
    parent, calls = os.getpid(), 0

    def blocked(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == plan["call"] and (os.getpid() != parent) == plan["worker"]:
            Path(plan["stamp"]).write_text(str(time.monotonic()))
            # Also open for writing, so that the read blocks and not the open.
            os.read(os.open(plan["fifo"], os.O_RDWR), 1)
        return original(self, *args)

    setattr(owner, name, blocked)
