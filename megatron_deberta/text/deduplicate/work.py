"""Stages of a job, whose tasks each write a folder.

A task's folder is written under a temporary name, flushed and renamed; a folder with its final name
is complete. Files are hashed while they are written; the last stage compares them with the hashes.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
import zstandard

from megatron_deberta.errors import DataError, MalformedInputError
from megatron_deberta.files import (
    HashedFile,
    fsync_path,
    sha256_file,
    temporary_path,
    write_durably,
)
from megatron_deberta.parsing import read_json
from megatron_deberta.text.deduplicate.settings import Settings
from megatron_deberta.text.deduplicate.units import WorkUnit
from megatron_deberta.text.jobs.executors import ONLY_TASK, Engine, Share, order_tasks, run_calls
from megatron_deberta.text.jobs.folder import RESTART, BusyError, JobFolder, plan_digest
from megatron_deberta.text.jobs.progress import Advance, Counts
from megatron_deberta.text.preprocess.units import Piece
from megatron_deberta.text.readers.reading import plan_input, planned_input
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import PLAN, Source

Array = npt.NDArray[Any]
Task = Callable[["Work", int, "TaskFolder"], None]
_HASHES, _CHECK = "sha256.json", "check"


class NoDocumentsError(MalformedInputError):
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
        self.sources, self.options = planned_input(plan)
        self.units: list[WorkUnit] = [
            tuple(Piece(*piece) for piece in unit) for unit in plan["units"]
        ]
        self.compression: str = plan["--compress"]

    @cached_property
    def settings(self) -> Settings:
        """How documents are compared."""
        return Settings(**self.parameters)

    def task_folder(self, stage: str, task: int) -> Path:
        """Return the folder of a task's results once it is done."""
        return self.folder / stage / f"{task:06d}"

    @contextmanager
    def new_task_folder(self, stage: str, task: int) -> Iterator[TaskFolder]:
        """Open a folder to fill; it becomes the task's if the block ends without an error."""
        final = self.task_folder(stage, task)
        fresh = TaskFolder(temporary_path(final))
        # Not the folders above: an attempt that comes late finds them removed, and ends.
        fresh.path.mkdir()
        try:
            yield fresh
            fresh.finish()
            try:
                fresh.path.rename(final)
            except OSError:
                # Another attempt at the task, at the same time, may have been faster.
                if not final.exists():
                    raise
        finally:
            shutil.rmtree(fresh.path, ignore_errors=True)
        fsync_path(final.parent)

    def load(self, stage: str, task: int, name: str) -> Array:
        """Memory-map an array that a task saved.

        Args:
            stage: name of the stage.
            task: number of the task in the stage.
            name: of the array.
        """
        return load_array(self.task_folder(stage, task) / f"{name}.npy")

    def info(self, stage: str, task: int) -> dict[str, Any]:
        """Read a task's numbers."""
        path = self.task_folder(stage, task) / "info.json"
        return read_json(path, dict[str, Any], "a record", remedy="remove its folder")


@dataclass(slots=True)
class TaskFolder:
    """Folder that a task fills; its files are hashed while they are written.

    Attributes:
        path: the folder. Files ``*.tmp`` in it are removed when the task is done.
        counts: what the task has read, for the progress display.
    """

    path: Path
    counts: Counts = field(default_factory=dict)
    _sha256: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def open(self, name: str, compression: str = "none") -> Iterator[Any]:
        """Open a new file for writing bytes; its content depends on what is written only.

        Args:
            name: of the file.
            compression: ``none``, ``gz`` or ``zst``.
        """
        file = HashedFile(self.path / name)
        try:
            if compression == "gz":
                with gzip.GzipFile("", "wb", 6, cast(BinaryIO, file), mtime=0) as compressed:
                    yield compressed
            elif compression == "zst":
                compressor = zstandard.ZstdCompressor(level=3)
                with compressor.stream_writer(cast(BinaryIO, file), closefd=False) as compressed:
                    yield compressed
            else:
                yield file
            self._sha256[name] = file.take_digest()
            file.commit()
        finally:
            file.close()

    def save_array(self, name: str, array: Array) -> None:
        """Save an array that ``Work.load`` maps."""
        with self.open(f"{name}.npy") as stream:
            np.save(stream, array, allow_pickle=False)

    def new_map(self, name: str, dtype: npt.DTypeLike, *shape: int) -> Array:
        """Map a temporary file of zeros, which takes space only where it is written."""
        shape = (max(shape[0], 1), *shape[1:])
        return np.memmap(self.path / f"{name}.tmp", dtype, mode="w+", shape=shape)

    def save_json(self, name: str, content: Any) -> None:
        """Save ``{name}.json``; ``Work.info`` reads that of the name ``info``."""
        with self.open(f"{name}.json") as stream:
            stream.write(json.dumps(content, sort_keys=True).encode())

    def finish(self) -> None:
        """Write the hashes and flush the folder."""
        for path in self.path.glob("*.tmp"):
            path.unlink()
        write_durably(self.path / _HASHES, json.dumps(self._sha256).encode())
        fsync_path(self.path)


def check_task(work: Work, task: int, folder: TaskFolder) -> None:
    """Compare the files of all stages' tasks of this number with their hashes.

    Args:
        work: the run.
        task: number of the task in the stage.
        folder: filled by the task; becomes its result.

    Raises:
        DataError: a file is not what was written.
    """
    for path in sorted(work.folder.glob(f"*/{task:06d}/{_HASHES}")):
        recorded = read_json(path, dict[str, str], "a record", remedy=RESTART)
        for name, sha256 in recorded.items():
            if sha256_file(path.with_name(name)) != sha256:
                raise DataError(f"{path.with_name(name)}: is not what was written; {RESTART}")


def load_array(path: Path) -> Array:
    """Map a saved array; one without elements cannot be mapped and is read."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    except ValueError:
        return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]


def make_plan(
    parameters: dict[str, Any],
    options: ReadOptions,
    sources: Sequence[Source],
    units: Sequence[WorkUnit],
    compression: str,
) -> dict[str, Any]:
    """Return the plan of a run; equal plans give equal results.

    Args:
        parameters: of the command.
        options: how documents are read.
        sources: files of the input.
        units: parts of the input.
        compression: of the files that are written.
    """
    return {
        **plan_input(sources, options),
        "parameters": parameters,
        "--compress": compression,
        "units": [[list(astuple(piece)) for piece in unit] for unit in units],
    }


@contextmanager
def begin_work(folder: JobFolder, plan: dict[str, Any], *, shared: bool = False) -> Iterator[Work]:
    """Open a run's folder, new or as a killed run of the same plan left it.

    Args:
        folder: of the run.
        plan: see ``make_plan``.
        shared: other tasks of a job array may work in it too.

    Raises:
        ConfigError: the folder is another plan's, or was not made by a job.
        DataError: another process works in it.
    """
    with suppress(BusyError, FileNotFoundError), folder.locked(seconds=0):
        # Files may have been damaged since an earlier process compared them with their hashes. A
        # late array task may do so just before the others publish, and then publishes itself.
        folder.open(plan_digest(plan))
        (folder.work / _CHECK).rename(temporary_path(folder.work / _CHECK))
    with folder.locked(shared=shared):
        folder.begin(plan)
        yield Work(folder.work)


@dataclass(slots=True)
class StageRunner:
    """Runs stages of tasks on an engine.

    Attributes:
        work: the run's folder.
        engine: runs the tasks.
        advance: called when a stage begins and after every task.
        share: task of a job array. It does its share of each stage first and then what the others
            have not finished, so that none waits for another.
    """

    work: Work
    engine: Engine
    advance: Advance
    share: Share = ONLY_TASK
    _most_tasks: int = 0

    def run(self, stage: str, function: Task, tasks: int) -> None:
        """Run the tasks of a stage that are not done yet.

        Args:
            stage: name of the stage's folder.
            function: does one task: (work, task, folder to fill).
            tasks: how many.

        Raises:
            DataError: a task failed, or a worker died.
        """
        work = self.work
        (work.folder / stage).mkdir(exist_ok=True)
        self._most_tasks = max(self._most_tasks, tasks)
        if self.share.tasks == 1:
            for unfinished in (work.folder / stage).glob(".*.tmp"):
                shutil.rmtree(unfinished, ignore_errors=True)
        order = order_tasks(tasks, self.share)
        left = [task for task in order if not work.task_folder(stage, task).exists()]
        done = itertools.count(tasks - len(left))
        counts: Counter[str] = Counter()

        def on_result(found: Counts) -> None:
            counts.update(found)
            self.advance(stage, tasks, next(done), counts)

        on_result({})
        run_calls(
            self.engine,
            ((_run_task_in, (str(work.folder), stage, function, task)) for task in left),
            on_result,
        )

    def check(self) -> None:
        """Compare the results of all stages with their hashes, as a last stage.

        Raises:
            DataError: a file is not what was written.
        """
        self.run(_CHECK, check_task, self._most_tasks)


def _run_task_in(folder: str, stage: str, function: Task, task: int) -> Counts:
    """Do one task in this process; return what it counted.

    Raises:
        DataError: the input cannot be read, or the disk is full.
    """
    # The sketches' library would start a thread per core in every process.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    work = _open_work(folder)
    # Another task of a job array may have done it since this call was submitted.
    if work.task_folder(stage, task).exists():
        return {}
    try:
        with work.new_task_folder(stage, task) as fresh:
            function(work, task, fresh)
            return fresh.counts
    except OSError as error:
        raise DataError(f"{work.folder}: {stage}: {error}; is the disk full?") from error


@lru_cache(maxsize=1)
def _open_work(folder: str) -> Work:
    # The folder's name has the plan's hash.
    return Work(Path(folder))
