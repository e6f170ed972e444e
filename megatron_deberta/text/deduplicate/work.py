"""Stages of a run and the folder that holds their results.

Every task fills a folder under a temporary name, flushes it and renames it; the folder's existence
records that the task is done, so that a run may be killed at any instant and resumes there.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import fsync_path, temporary_path, write_atomically
from megatron_deberta.parsing import read_json
from megatron_deberta.text.deduplicate.settings import Settings
from megatron_deberta.text.deduplicate.units import WorkUnit
from megatron_deberta.text.jobs.executors import Engine, run_calls
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.preprocess.units import Piece
from megatron_deberta.text.readers.reading import READING_VERSION
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import PLAN, Source

Array = npt.NDArray[Any]


class NoDocumentsError(DataError):
    """The result would be empty; the same command again would end the same way."""


class Work:
    """One run's folder, as every process sees it.

    Args:
        folder: of a plan, made by ``begin_work``.

    Raises:
        DataError: the plan has changed.

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
        content = (folder.parent / PLAN).read_bytes()
        self.plan_sha256 = hashlib.sha256(content).hexdigest()
        if not self.plan_sha256.startswith(folder.name):
            raise DataError(f"{folder.parent}: this run was restarted with another plan")
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
        fresh = temporary_path(final)
        fresh.mkdir(parents=True)
        try:
            yield fresh
            for path in fresh.iterdir():
                fsync_path(path)
            fsync_path(fresh)
            # Another attempt at the task, which an engine may run at the same time, was faster.
            if not final.exists():
                fresh.rename(final)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
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
def begin_work(folder: JobFolder, plan: bytes) -> Iterator[Work]:
    """Open a run's folder, new or as a killed run of the same plan left it, for this process only.

    Raises:
        ConfigError: the folder is another plan's, or somebody's own.
        DataError: another process works in it.
    """
    folder.refuse_foreign()
    with folder.locked():
        path = folder.path / PLAN
        if not path.exists():
            write_atomically(path, plan)
        elif path.read_bytes() != plan:
            raise ConfigError(
                f"{folder.path}: unfinished work on other files or with other options; finish that "
                "first, or add --restart"
            )
        folder.open(hashlib.sha256(plan).hexdigest())
        folder.work.mkdir(exist_ok=True)
        fsync_path(folder.path)
        yield Work(folder.work)


class StageRunner:
    """Runs stages of tasks on an engine.

    Args:
        work: the run's folder.
        engine: runs the tasks.
        advance: called with (stage, tasks, done) when a stage begins and after every task.
    """

    def __init__(
        self, work: Work, engine: Engine, advance: Callable[[str, int, int], None]
    ) -> None:
        """See the class."""
        self._work = work
        self._engine = engine
        self._advance = advance

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
        for unfinished in (work.folder / stage).glob(".*.tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)
        left = [task for task in range(tasks) if not work.task_folder(stage, task).exists()]
        done = itertools.count(tasks - len(left))
        self._advance(stage, tasks, next(done))
        run_calls(
            self._engine,
            ((_run_task_in, (str(work.folder), stage, function, task)) for task in left),
            lambda _: self._advance(stage, tasks, next(done)),
        )


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


def _run_task_in(
    folder: str, stage: str, function: Callable[[Work, int, Path], None], task: int
) -> None:
    # The sketches' library would start a thread per core in every process.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    run_task(_open_work(folder), stage, function, task)


@lru_cache(maxsize=1)
def _open_work(folder: str) -> Work:
    # The folder's name has the plan's hash.
    return Work(Path(folder))
