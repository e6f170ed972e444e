"""Jobs of units on any executor: this process, worker processes, MPI, Dask, or a SLURM job array.

A job locks its folder, does the units that are left, and publishes the result.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar, cast

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.parsing import whole_number
from megatron_deberta.processes import die_with_parent
from megatron_deberta.text.jobs.folder import BusyError, JobFolder
from megatron_deberta.text.jobs.progress import Advance, Counts

Kind = Literal["local", "mpi", "dask", "slurm-array"]
KINDS: tuple[Kind, ...] = ("local", "mpi", "dask", "slurm-array")
_UNITS_AHEAD = 2
_CHECK_SECONDS = 5.0
_CONNECT_SECONDS = 30
_WORKERLESS_SECONDS = 300
_SECONDS_BETWEEN_LOOKS = 1.0
Result = TypeVar("Result")
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""Function and arguments of a unit; both must be picklable."""


class Share(NamedTuple):
    """One of the ``tasks`` of a job array."""

    task: int = 0
    tasks: int = 1


ONLY_TASK = Share()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorOptions:
    """Where units run; the result does not depend on it.

    Attributes:
        kind: ``local``: worker processes of this command; ``mpi``: the ranks of mpirun or srun;
            ``dask``: the workers of a Dask scheduler; ``slurm-array``: as ``local``, for one task
            of a job array, whose last task merges.
        workers: processes for ``local`` and ``slurm-array``; 0: this process.
        share: task of a job array.
        dask: address or scheduler file, or ``slurm``: start workers through dask-jobqueue.
        dask_jobs: number of SLURM jobs that dask-jobqueue starts.
    """

    kind: Kind = "local"
    workers: int = 0
    share: Share = ONLY_TASK
    dask: str = ""
    dask_jobs: int = 1


@dataclass(slots=True)
class Engine:
    """Open executor.

    Attributes:
        executor: runs units.
        workers: number of units that run at the same time; the result does not depend on it.
        count: called while units run, for ``workers``, if workers come and go; raises DataError if
            no unit can finish any more.
    """

    executor: Executor
    workers: int
    count: Callable[[], int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How a job is done; the result does not depend on it.

    Attributes:
        workers: worker processes; 0: this process.
        engine: runs the units instead, see ``remote_engine``.
        share: task of a job array; the last one to finish publishes.
        allow_bad: fraction of records that may be unusable; None: 0.1 %, and no damaged file.
        force: replace existing output.
        advance: shows progress.
    """

    workers: int = 0
    engine: Engine | None = None
    share: Share = ONLY_TASK
    allow_bad: float | None = None
    force: bool = False
    advance: Advance = lambda *_: None

    def open_engine(
        self, start_method: Literal["fork", "spawn"] = "fork"
    ) -> contextlib.AbstractContextManager[Engine]:
        """Return ``engine``, or else worker processes as ``local_engine`` starts them."""
        if self.engine is not None:
            return contextlib.nullcontext(self.engine)
        return local_engine(self.workers, start_method=start_method)


class SerialExecutor(Executor):
    """Executor that runs each call in ``submit``."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run the call and return its completed future."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def remote_engine(
    options: ExecutorOptions,
) -> contextlib.AbstractContextManager[Engine | None]:
    """Return an engine that other programs started; None for ``local`` and ``slurm-array``.

    Raises:
        ConfigError: when it is opened: an optional package is missing, or the engine cannot be
            reached.
        DataError: its workers died.
        SystemExit: this process is an MPI rank that has served the first one's units.
    """
    if options.kind == "mpi":
        return _mpi_engine()
    if options.kind == "dask":
        return _dask_engine(options.dask, options.dask_jobs)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _mpi_engine() -> Iterator[Engine]:
    """Yield the ranks of mpirun or srun on rank 0; other ranks run units and exit.

    A rank that dies is reported by the launcher, which ends the job.

    Raises:
        ConfigError: mpi4py or its MPI library is missing, or there is a single rank.
        SystemExit: all units are done, on ranks other than 0.
    """
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError) as error:
        # mpi4py without an MPI library raises a RuntimeError of many lines.
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--executor mpi: mpi4py cannot be imported ({reason}); pip install "
            "'megatron-deberta[mpi]' and an MPI library, or choose another executor"
        ) from error
    ranks = MPI.COMM_WORLD.Get_size()
    if ranks < 2:
        raise ConfigError(
            "--executor mpi: mpi4py sees a single rank, and needs one more than workers; start "
            "with mpirun -n N, or srun --mpi=pmix if mpi4py was built for it"
        )
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        if executor is not None:
            yield Engine(cast(Executor, executor), ranks - 1)
    if executor is None:
        sys.exit(0)


@contextlib.contextmanager
def _dask_engine(scheduler: str, jobs: int) -> Iterator[Engine]:
    """Yield the workers of a Dask scheduler; a dead worker's units run elsewhere.

    Args:
        scheduler: address as ``tcp://host:8786``, path of a scheduler file, or ``slurm``: start
            workers with dask-jobqueue as its configuration file says.
        jobs: number of SLURM jobs to start for ``slurm``.

    Raises:
        ConfigError: Dask is missing, or the scheduler or its first worker cannot be reached.
        DataError: the scheduler died, a unit killed several workers, or no worker is left.
    """
    try:
        from distributed import Client, KilledWorker
    except ImportError as error:
        raise ConfigError(
            f"--executor dask: dask.distributed cannot be imported ({error}); pip install "
            "'megatron-deberta[dask]', or choose another executor"
        ) from error
    with contextlib.ExitStack() as stack:
        try:
            if scheduler == "slurm":
                from dask_jobqueue.slurm import SLURMCluster

                cluster = stack.enter_context(SLURMCluster())
                cluster.scale(jobs=jobs)
                client = stack.enter_context(Client(cluster))
                logging.getLogger(__name__).info(
                    "--dask slurm: waiting for the first of %d jobs", jobs
                )
            elif os.path.exists(scheduler):
                client = Client(scheduler_file=scheduler, timeout=_CONNECT_SECONDS)
            else:
                client = Client(scheduler, timeout=_CONNECT_SECONDS)
            stack.enter_context(client)
            client.wait_for_workers(1, timeout=None if scheduler == "slurm" else _CONNECT_SECONDS)
        except (ImportError, OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"--dask {scheduler}: no scheduler with a worker ({error}); start `dask scheduler` "
                "and `dask worker`"
            ) from error
        try:
            count = _WorkerCount(client, scheduler)
            yield Engine(client.get_executor(pure=False), count(), count)
        except (KilledWorker, CancelledError) as error:
            raise DataError(_died(scheduler, error)) from error


def _died(scheduler: str, error: Exception) -> str:
    return (
        f"--dask {scheduler}: the scheduler died, or a unit's workers did "
        f"({str(error) or type(error).__name__}); run the same command again to go on"
    )


class _WorkerCount:
    """Counts the workers' threads; raises after ``_WORKERLESS_SECONDS`` without any."""

    def __init__(self, client: Any, scheduler: str) -> None:
        self._client = client
        self._scheduler = scheduler
        self._seen = time.monotonic()
        self._last_look = -_SECONDS_BETWEEN_LOOKS
        self._workers = 0

    def __call__(self) -> int:
        now = time.monotonic()
        if now - self._last_look >= _SECONDS_BETWEEN_LOOKS:
            self._last_look = now
            try:
                self._workers = sum(self._client.nthreads().values())
            except (OSError, ValueError, CancelledError) as error:
                raise DataError(_died(self._scheduler, error)) from error
        if self._workers:
            self._seen = now
        elif now - self._seen > _WORKERLESS_SECONDS:
            raise DataError(
                f"--executor dask: no worker for {_WORKERLESS_SECONDS} s; start workers and run "
                "the same command again to go on"
            )
        return self._workers


@contextlib.contextmanager
def local_engine(
    workers: int,
    *,
    start_method: Literal["fork", "spawn"] = "fork",
) -> Iterator[Engine]:
    """Start worker processes, which are killed if the block fails.

    Args:
        workers: processes; 0: run units in this process.
        start_method: forked processes share what is loaded, and must be started before threads.
    """
    if not workers:
        yield Engine(SerialExecutor(), 1)
        return
    context = multiprocessing.get_context(start_method)
    before = set(multiprocessing.active_children())
    # The collector would write to all memory that forked processes share, and so copy it.
    gc.freeze()
    pool = ProcessPoolExecutor(workers, context, _begin_worker)
    try:
        # Forked processes start now, before the caller starts a thread.
        pool.submit(os.getpid)
        yield Engine(pool, workers)
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def run_calls(
    engine: Engine,
    calls: Iterable[Call],
    on_result: Callable[[Any], None] = lambda _: None,
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Run calls, of which only a few per worker are submitted ahead.

    Args:
        engine: executor.
        calls: read as results come in.
        on_result: called in this process with each result, in any order.
        on_wait: called in this process whenever some results came in, and every few seconds.

    Raises:
        DataError: a worker process died, or as a call raised.
    """
    left, waiting = iter(calls), set[Future[Any]]()
    try:
        while True:
            if engine.count is not None:
                engine.workers = engine.count()
            window = _UNITS_AHEAD * engine.workers if engine.workers > 1 else 1
            while len(waiting) < window and (call := next(left, None)) is not None:
                waiting.add(engine.executor.submit(call[0], *call[1]))
            if not waiting:
                return
            finished, waiting = wait(waiting, _CHECK_SECONDS, FIRST_COMPLETED)
            for future in finished:
                on_result(future.result())
            on_wait()
    except BrokenProcessPool:
        raise DataError(
            "a worker process died (killed, or out of memory?); run the same command again to go "
            f"on, with less than --workers {engine.workers} for less memory"
        ) from None
    finally:
        for future in waiting:
            future.cancel()


def run_stage(
    engine: Engine,
    stage: str,
    size: int,
    calls: Sequence[Call],
    advance: Advance,
    record: Callable[[Any], Counts] = lambda found: found,
) -> None:
    """Run those calls of a stage that are left, as ``run_calls``, and show how much of it is done.

    Args:
        engine: executor.
        stage: its name, for the progress display.
        size: number of all calls of the stage.
        calls: those that are not done.
        advance: shows progress.
        record: called in this process with each result; returns what it counts.
    """
    done = itertools.count(size - len(calls))
    counts: Counter[str] = Counter()

    def on_result(result: Any) -> None:
        counts.update(record(result))
        advance(stage, size, next(done), counts)

    advance(stage, size, next(done), counts)
    run_calls(engine, calls, on_result)


def run_job(
    folder: JobFolder,
    options: RunOptions,
    *,
    find_result: Callable[[], Result | None],
    work: Callable[[], None],
    publish: Callable[[], Result | None],
) -> Result | None:
    """Do a job from wherever a killed run left it, alone or as a task of a job array.

    Args:
        folder: of the unfinished job.
        options: how it is done.
        find_result: returns the published result of the same job, if it is there.
        work: does the units that are left. Tasks of an array do so at the same time.
        publish: publishes the result, alone; None: units are left.

    Returns:
        The result; None: other array tasks still work, and the last one publishes.

    Raises:
        DataError: another process works in the folder.
    """
    folder.remove_leftovers()
    if (found := find_result()) is not None:
        if folder.path.exists():
            with folder.locked():
                folder.remove()
        return found
    is_shared = options.share.tasks > 1

    def finish() -> Result | None:
        found = find_result()
        found = publish() if found is None else found
        if found is not None:
            folder.remove()
        return found

    with folder.locked(shared=is_shared):
        # Another process may have published while this one waited for the lock.
        if find_result() is None:
            work()
        if not is_shared:
            return finish()
    try:
        with folder.locked(seconds=0):
            return finish()
    except BusyError:
        return None


def _begin_worker() -> None:
    # The sketches' library would start a thread per core in every process.
    os.environ["RAYON_NUM_THREADS"] = "1"
    # Ctrl-C reaches the whole group; the driver ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)


def array_task(given: str | None, env: Mapping[str, str]) -> Share:
    """Return the task of the job array.

    Args:
        given: ``K/N``; None: from the variables of SLURM, 0 and 1 without them.
        env: environment variables.

    Raises:
        ConfigError: ``given`` is malformed.
    """
    if given is not None:
        match = re.fullmatch(r"(\d+)/(\d+)", given)
        if match is None or not int(match[1]) < int(match[2]):
            raise ConfigError(f"--array-task {given}: must be K/N with K from 0 to N - 1")
        return Share(int(match[1]), int(match[2]))
    if not env.get("SLURM_ARRAY_TASK_ID", "").strip():
        return Share()
    task, first, step, count = (
        whole_number(env, f"SLURM_ARRAY_TASK_{name}", default)
        for name, default in (("ID", 0), ("MIN", 0), ("STEP", 1), ("COUNT", 1))
    )
    count = max(count, 1)
    return Share(min(max(task - first, 0) // max(step, 1), count - 1), count)


def order_tasks(tasks: int, share: Share) -> list[int]:
    """Return the order in which a task of a job array does units ``range(tasks)``.

    Its own share comes first, then those of the other array tasks from their ends, so that two
    processes meet in the middle. So no array task waits for another, or misses one that died.
    """
    own = range(tasks * share.task // share.tasks, tasks * (share.task + 1) // share.tasks)
    return [*own, *reversed(range(own.start)), *reversed(range(own.stop, tasks))]
