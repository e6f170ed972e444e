"""Open executors of ``concurrent.futures``, and submit a bounded number of units ahead."""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.parsing import whole_number
from megatron_deberta.processes import die_with_parent
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.jobs.progress import Advance

Kind = Literal["local", "mpi", "dask", "slurm-array"]
KINDS: tuple[Kind, ...] = ("local", "mpi", "dask", "slurm-array")
_UNITS_AHEAD = 2
_CHECK_SECONDS = 5.0
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


@contextlib.contextmanager
def remote_engine(options: ExecutorOptions) -> Iterator[Engine | None]:
    """Open an engine that other programs started; None for ``local`` and ``slurm-array``.

    Raises:
        ConfigError: an optional package is missing, or the engine cannot be reached.
        DataError: its workers died.
        SystemExit: this process is an MPI rank that has served the first one's units.
    """
    if options.kind == "mpi":
        from megatron_deberta.text.jobs.mpi import mpi_executor

        with mpi_executor() as (executor, workers):
            yield Engine(executor, workers)
    elif options.kind == "dask":
        from megatron_deberta.text.jobs.dask import dask_executor

        with dask_executor(options.dask, options.dask_jobs) as (executor, count):
            yield Engine(executor, count(), count)
    else:
        yield None


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


def run_recorded(
    engine: Engine, folder: JobFolder, calls: Mapping[str, Call], stage: str, advance: Advance
) -> None:
    """Run those calls that have no record in a folder, as ``run_calls``; record their results.

    Args:
        engine: executor.
        folder: locked by this process.
        calls: by name of the record; each returns its content, of which ``text_bytes`` is shown.
        stage: name of the stage, for the progress display.
        advance: shows progress.
    """
    left = {name: call for name, call in calls.items() if not folder.is_recorded(name)}
    done = itertools.count(len(calls) - len(left))
    counts: Counter[str] = Counter()

    def on_result(result: tuple[str, dict[str, Any]]) -> None:
        folder.record(*result)
        counts["text_bytes"] += result[1].get("text_bytes", 0)
        advance(stage, len(calls), next(done), counts)

    advance(stage, len(calls), next(done), counts)
    run_calls(engine, ((_named, (name, *call)) for name, call in left.items()), on_result)


def _named(name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    return name, function(*arguments)


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
