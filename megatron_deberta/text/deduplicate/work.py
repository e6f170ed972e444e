"""The folder in which an unfinished run keeps what it has, and the stages that fill it.

Owns durability: every task writes a folder under a temporary name, flushes it and renames it; the
folder's existence is the record that the task is done. So a run may be killed at any instant and
goes on from there. Refuses to share a folder between two runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import fsync_path, temporary_name, write_atomically
from megatron_deberta.parsing import read_json
from megatron_deberta.processes import die_with_parent
from megatron_deberta.text.deduplicate.settings import Settings
from megatron_deberta.text.deduplicate.units import WorkUnit
from megatron_deberta.text.preprocess.units import Piece
from megatron_deberta.text.readers.reading import READING_VERSION
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import PLAN, SPOOLED_INPUT, Source

_LOCK = "lock"
_TASKS_AHEAD = 2

Array = npt.NDArray[Any]


class NoDocumentsError(DataError):
    """The result would be empty; the same command again would end the same way."""


class Work:
    """One run's folder, as every process sees it.

    Args:
        folder: made by ``begin_work``.

    Attributes:
        parameters: what is to be done, as the command has it.
        options: how documents are read.
        units: parts of the input.
        sources: files of the input.
        compression: of the files that are written.
        plan_sha256: identifies all of these.
    """

    def __init__(self, folder: Path) -> None:
        """See the class."""
        self.folder = folder
        content = (folder / PLAN).read_bytes()
        self.plan_sha256 = hashlib.sha256(content).hexdigest()
        plan = json.loads(content)
        self.parameters: dict[str, Any] = plan["parameters"]
        self.options = ReadOptions(**{**plan["options"], "keys": tuple(plan["options"]["keys"])})
        self.sources = [Source(**source) for source in plan["sources"]]
        self.units: list[WorkUnit] = [
            tuple(Piece(**piece) for piece in unit) for unit in plan["units"]
        ]
        self.compression: str = plan["compression"]

    @cached_property
    def settings(self) -> Settings:
        """How documents are compared."""
        return Settings(**self.parameters)

    def task_folder(self, stage: str, task: int) -> Path:
        """Where a task's results are once it is done."""
        return self.folder / stage / f"{task:06d}"

    @contextmanager
    def new_task_folder(self, stage: str, task: int) -> Iterator[Path]:
        """Give a folder to fill, which becomes the task's if the block ends without error."""
        final = self.task_folder(stage, task)
        fresh = temporary_name(final)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        yield fresh
        for path in fresh.iterdir():
            fsync_path(path)
        fsync_path(fresh)
        fresh.rename(final)
        fsync_path(final.parent)

    def load(self, stage: str, task: int, name: str) -> Array:
        """Map an array that a task saved."""
        return load_array(self.task_folder(stage, task) / f"{name}.npy")

    def info(self, stage: str, task: int) -> dict[str, Any]:
        """Read a task's numbers."""
        path = self.task_folder(stage, task) / "info.json"
        return read_json(path, dict[str, Any], "a record", remedy="remove its folder")


def save_array(folder: Path, name: str, array: Array) -> None:
    """Save an array that ``Work.load`` maps."""
    np.save(folder / f"{name}.npy", array, allow_pickle=False)


def load_array(path: Path) -> Array:
    """Map a saved array; one without elements cannot be mapped and is read."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except ValueError:
        return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]


def save_info(folder: Path, content: dict[str, Any]) -> None:
    """Save a task's numbers for ``Work.info``."""
    (folder / "info.json").write_text(json.dumps(content, sort_keys=True), encoding="utf-8")


def make_plan(
    parameters: dict[str, Any],
    options: ReadOptions,
    sources: Sequence[Source],
    units: Sequence[WorkUnit],
    compression: str,
) -> bytes:
    """Return what a run is to do, as JSON; equal plans give equal results."""
    plan = {
        "version": 1,
        "reading": READING_VERSION,
        "parameters": parameters,
        "options": asdict(options),
        "compression": compression,
        "sources": [asdict(source) for source in sources],
        "units": [[asdict(piece) for piece in unit] for unit in units],
    }
    return json.dumps(plan, sort_keys=True).encode()


@contextmanager
def begin_work(folder: Path, plan: bytes) -> Iterator[Work]:
    """Open a run's folder, new or as a killed run of the same plan left it, for this process only.

    Raises:
        ConfigError: the folder is another plan's, or somebody's own.
        DataError: another process works in it.
    """
    refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        path = folder / PLAN
        if not path.exists():
            write_atomically(path, plan)
        elif path.read_bytes() != plan:
            raise ConfigError(
                f"{folder}: unfinished work on other files or with other options; finish that "
                "first, or add --restart"
            )
        yield Work(folder)


def refuse_foreign(folder: Path) -> None:
    """Refuse a folder that no run has made, as it would be removed in the end.

    Raises:
        ConfigError: it holds something and no plan.
    """
    if not folder.is_dir() or (folder / PLAN).exists():
        return
    mine = (PLAN, _LOCK, SPOOLED_INPUT)
    names = (path.name for path in folder.iterdir())
    foreign = next((name for name in names if not name.startswith(mine)), None)
    if foreign is not None:
        raise ConfigError(
            f"{folder}: holds {foreign} and no {PLAN}, so it is no unfinished work; rename it or "
            "choose another --output"
        )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a run's folder for this process; the lock ends with the process.

    Raises:
        DataError: another process has it.
    """
    with (folder / _LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{folder}: another process works there; wait for it") from error
        yield


class StageRunner(AbstractContextManager["StageRunner"]):
    """Runs stages of tasks on worker processes that live as long as the run.

    Args:
        work: the run's folder.
        workers: processes; 0 works in this one.
        advance: told (stage, tasks, done) when a stage begins and after every task.
    """

    def __init__(self, work: Work, workers: int, advance: Callable[[str, int, int], None]) -> None:
        """See the class."""
        self._work = work
        self._advance = advance
        self._workers = workers
        self._pool: ProcessPoolExecutor | None = None
        if workers:
            # A forked copy of a process that runs threads, as the display does, can deadlock.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(workers, context, _begin_worker)

    def __exit__(self, *_: object) -> None:
        """End the workers."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, stage: str, function: Callable[[Work, int, Path], None], tasks: int) -> None:
        """Run the tasks of a stage that are not done yet.

        Args:
            stage: name of the stage's folder.
            function: does one task: (work, task, folder to fill).
            tasks: how many.

        Raises:
            DataError: a task failed, or a worker died.
        """
        work = self._work
        (work.folder / stage).mkdir(exist_ok=True)
        for unfinished in (work.folder / stage).glob("*.tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)
        left = [task for task in range(tasks) if not work.task_folder(stage, task).exists()]
        done = tasks - len(left)
        self._advance(stage, tasks, done)
        if self._pool is None:
            for task in left:
                run_task(work, stage, function, task)
                done += 1
                self._advance(stage, tasks, done)
            return
        waiting: set[Future[None]] = set()
        try:
            while left or waiting:
                while left and len(waiting) < _TASKS_AHEAD * self._workers:
                    arguments = (str(work.folder), stage, function, left.pop(0))
                    waiting.add(self._pool.submit(_run_in_worker, *arguments))
                finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in finished:
                    future.result()
                done += len(finished)
                self._advance(stage, tasks, done)
        except BrokenProcessPool as error:
            raise DataError(
                "a worker process died (killed, or out of memory?); start the same command again "
                f"to go on, with fewer than --workers {self._workers} if memory was short"
            ) from error


def run_task(
    work: Work, stage: str, function: Callable[[Work, int, Path], None], task: int
) -> None:
    """Do one task in this process.

    Raises:
        DataError: the input cannot be read, or the disk is full.
    """
    try:
        with work.new_task_folder(stage, task) as fresh:
            function(work, task, fresh)
    except OSError as error:
        raise DataError(f"{work.folder}: {stage}: {error}; is the disk full?") from error


def _run_in_worker(
    folder: str, stage: str, function: Callable[[Work, int, Path], None], task: int
) -> None:
    run_task(_open_work(folder), stage, function, task)


@lru_cache(maxsize=1)
def _open_work(folder: str) -> Work:
    # A worker lives as long as its run, so the plan cannot change.
    return Work(Path(folder))


def _begin_worker() -> None:
    # The sketches' library would start a thread for every core in every process.
    os.environ["RAYON_NUM_THREADS"] = "1"
    # Ctrl-C reaches the whole group; the first process ends the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        # Nobody else would end this worker when the first process is killed.
        die_with_parent(parent.pid)
