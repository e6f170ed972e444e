"""Ranks forked from a server process that has imported all modules, which saves start-up time."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.jobs import RANK_IMPORTS, TIMEOUT, free_port, rank_variables

STACK_SECONDS = 1.0


def fork_server() -> ForkServerContext:
    """Return the context of the fork server, which starts with the first rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(RANK_IMPORTS))
    return context


def _become_rank(environment: dict[str, str], arguments: list[str], log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.environ.update(environment)
    faulthandler.register(signal.SIGQUIT)
    # The fork server ignores SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from megatron_deberta.cli.main import main

    code = 1
    try:
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    # Like the exit of an interpreter: multiprocessing would wait for loader processes, which end in
    # functions registered with atexit.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@dataclass
class Ranks:
    """The processes of one run."""

    processes: list[BaseProcess]
    log: Path

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank."""
        self.processes[rank].kill()

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def alive(self) -> list[int]:
        """Return the running ranks."""
        return [rank for rank, process in enumerate(self.processes) if process.is_alive()]

    def wait(self, seconds: float = TIMEOUT) -> list[int | None]:
        """Return exit codes by rank; a rank that still runs dumps its stack and returns None."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        for rank in self.alive():
            self.signal(rank, signal.SIGQUIT)
        time.sleep(STACK_SECONDS if None in codes else 0.0)
        for process in self.processes:
            process.kill()
            process.join()
        return codes


def start_ranks(
    context: ForkServerContext, run_yaml: Path, run_dir: Path, world_size: int, *overrides: str
) -> Ranks:
    """Start the ranks of a run like a launcher, with a log beside the run folder."""
    port = free_port()
    log = run_dir.with_name(f"{run_dir.name}.log")
    arguments = ["pretrain", str(run_yaml), f"train.run_dir={run_dir}", *overrides]
    processes = []
    for rank in range(world_size):
        environment = rank_variables(rank, world_size, port) | {"OMP_NUM_THREADS": "1"}
        process = context.Process(target=_become_rank, args=(environment, arguments, str(log)))
        process.start()
        processes.append(process)
    return Ranks(processes, log)
