"""Gloo ranks for tests: persistent processes that run test functions together.

Starting torch takes seconds per process, so tests share pools (fixtures ``two_ranks`` and
``four_ranks`` of ``tests/distributed/conftest.py``); ``run_ranks`` starts new processes. A function
for ranks is importable (module level), takes the rank as its first argument, and returns an object
that can be pickled.

    def summed(rank: int, start: int) -> float: ...

    def test_sum(two_ranks): assert two_ranks.run(summed, 3) == [7.0, 7.0]
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron_deberta.distributed.topology import ProcessGroups, build_grid, shutdown
from tests.support.jobs import fork_server

DEFAULT_TIMEOUT = 240.0
"""Maximum seconds of a function on all ranks."""
_GRACE_SECONDS = 1.0
"""Seconds to wait for the failures of other ranks."""


class RankError(AssertionError):
    """A rank raised, died or did not respond; the message contains each rank's traceback."""


class RankPool:
    """Processes of one gloo world that run functions one after another.

    After a failure all processes are killed; the next call starts new ones.

    Args:
        world_size: number of processes.
        start_distributed: start ``torch.distributed``; False leaves this to the functions.
    """

    def __init__(self, world_size: int, *, start_distributed: bool = True) -> None:
        self.world_size = world_size
        self._start_distributed = start_distributed
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = ""

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """Return process ids by rank; empty before the first ``run``."""
        return [process.pid or 0 for process in self._processes]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        """Call ``function(rank, *args)`` on every rank.

        Returns:
            The results by rank.

        Raises:
            RankError: a rank raised, died or took longer than ``timeout`` seconds.
        """
        if not self._processes:
            self._start()
        task = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(task)
        failures: dict[int, str] = {}
        results: dict[int, Any] = {}
        deadline = time.monotonic() + (timeout or DEFAULT_TIMEOUT)
        while len(results) + len(failures) < self.world_size:
            silent = [r for r in range(self.world_size) if r not in results and r not in failures]
            pipes = [self._pipes[rank] for rank in silent]
            ready = wait(pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                self._abort(failures, silent)
                break
            for rank in (r for r in silent if self._pipes[r] in ready):
                succeeded, value = self._receive(rank)
                (results if succeeded else failures)[rank] = value
            if failures:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if failures:
            self._kill()
            text = "\n".join(f"--- rank {rank} ---\n{failures[rank]}" for rank in sorted(failures))
            raise RankError(f"{len(failures)} of {self.world_size} ranks failed\n{text}")
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Stop the processes in order; kill those that do not end."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
        self._kill()

    def _start(self) -> None:
        context = fork_server()
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        for rank in range(self.world_size):
            pipe, child_pipe = context.Pipe()
            store = os.path.join(self._folder, "store") if self._start_distributed else ""
            # Not daemonic, so that data loaders can start worker processes.
            process = context.Process(
                target=_serve, args=(child_pipe, rank, self.world_size, store), daemon=False
            )
            process.start()
            child_pipe.close()
            self._processes.append(process)
            self._pipes.append(pipe)

    def _receive(self, rank: int) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            return False, f"died with exit code {self._processes[rank].exitcode}"
        return answer

    def _abort(self, failures: dict[int, str], ranks: list[int]) -> None:
        """Kill ranks that do not respond; if there is no other failure, dump their stacks first."""
        silent = not failures
        for rank in ranks:
            failures[rank] = "did not respond in time"
            if silent:
                failures[rank] += "; its stack is on standard error"
                os.kill(self.process_ids[rank], signal.SIGABRT)
        for rank in ranks:
            self._processes[rank].join(_GRACE_SECONDS if silent else 0)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float | None = None,
    start_distributed: bool = True,
) -> Any:
    """Call ``function(rank, *args)`` on new processes; see ``RankPool.run``."""
    with RankPool(world_size, start_distributed=start_distributed) as pool:
        return pool.run(function, *args, timeout=timeout)


@functools.cache
def grid(tp_size: int) -> ProcessGroups:
    """Return this rank's grid, built once per process; the first call is collective."""
    return build_grid(tp_size, torch.device("cpu"), datetime.timedelta(seconds=DEFAULT_TIMEOUT))


def _serve(pipe: Connection, rank: int, world_size: int, store: str) -> None:
    """Main function of a rank: run tasks until the pipe closes."""
    # DeepSpeed's full collections need not look at what was imported before the fork.
    gc.freeze()
    faulthandler.enable()  # SIGABRT prints the stack.
    torch.set_num_threads(1)
    try:
        if store:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=DEFAULT_TIMEOUT),
            )
        while True:
            try:
                task = pipe.recv_bytes()
            except EOFError:
                break
            pipe.send_bytes(_perform(task, rank))
    finally:
        shutdown()


def _perform(task: bytes, rank: int) -> bytes:
    try:
        function, args = pickle.loads(task)
        return pickle.dumps((True, function(rank, *args)))
    except BaseException:
        # Tests may raise any exception, and ``pytest.fail`` raises no subclass of Exception.
        return pickle.dumps((False, traceback.format_exc()))
