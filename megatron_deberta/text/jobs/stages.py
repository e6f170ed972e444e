"""Jobs in stages, whose tasks each write a folder, and whose result is a folder.

A task's folder is written under a temporary name, flushed and renamed; a folder with its final name
is complete. Files are hashed while they are written; the last stage compares them with the hashes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

import numpy as np
import numpy.typing as npt
import zstandard

from megatron_deberta.errors import ConfigError, DataError, MalformedInputError
from megatron_deberta.files import (
    HashedFile,
    fsync_path,
    sha256_file,
    temporary_path,
    write_durably,
)
from megatron_deberta.parsing import read_json
from megatron_deberta.text.jobs.executors import (
    ONLY_TASK,
    Call,
    Engine,
    RunOptions,
    Share,
    order_tasks,
    run_job,
    run_stage,
)
from megatron_deberta.text.jobs.folder import RESTART, BusyError, JobFolder, plan_digest
from megatron_deberta.text.jobs.progress import Advance
from megatron_deberta.text.jobs.units import FileRange, UnitReader, plan_units
from megatron_deberta.text.readers.checks import refuse_bad
from megatron_deberta.text.readers.reading import plan_input, planned_input
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import PLAN, SUMMARY, Source

Array = npt.NDArray[Any]
Compression = Literal["none", "gz", "zst"]
Task = Callable[["Work", int, "TaskFolder"], None]
QUARANTINE = "quarantine.jsonl"
SUFFIXES: Mapping[str, str] = {"none": "", "gz": ".gz", "zst": ".zst"}
_HASHES, _CHECK = "sha256.json", "check"
_HEADERS = threading.Lock()
# In the summary: size of each other file of the result.
_FILES = "files"


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
        units: parts of the input, each of ranges of files.
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
        self.units = [[FileRange(*each) for each in ranges] for ranges in plan["units"]]
        self.compression: str = plan["--compress"]

    def read(
        self,
        unit: int,
        folder: TaskFolder,
        quarantine: HashedFile | None = None,
        lines_before: Mapping[str, int] | None = None,
    ) -> UnitReader:
        """Return the reader of a unit; see its attributes.

        Args:
            unit: number of the unit.
            folder: of the task, which counts what is read.
            quarantine: gets a line for each record that cannot be used.
            lines_before: line ends of each file before the unit; None: they are unknown.
        """
        return UnitReader(
            self.units[unit], self.sources, self.options, folder.counts, quarantine, lines_before
        )

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
    counts: Counter[str] = field(default_factory=Counter)
    _sha256: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def open(self, name: str, compression: str = "none") -> Iterator[Any]:
        """Open a new file for writing bytes; its content depends on what is written only.

        Args:
            name: of the file.
            compression: ``none``, ``gz`` or ``zst``.
        """
        with closing(HashedFile(self.path / name)) as file:
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
    # numpy parses headers with `ast`, which in Python 3.11 fails at times in several threads.
    with _HEADERS:
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
        except ValueError:
            return np.load(path, allow_pickle=False)  # type: ignore[no-any-return]


def make_plan(
    parameters: dict[str, Any],
    options: ReadOptions,
    sources: Sequence[Source],
    unit_bytes: int,
    compression: str = "none",
) -> dict[str, Any]:
    """Return the plan of a run; equal plans give equal results.

    What is kept of each record is written as it comes, so the size of a unit does not matter: a
    file that can only be read from its beginning is a unit of its own.

    Args:
        parameters: of the command.
        options: how documents are read.
        sources: files of the input.
        unit_bytes: size of the units.
        compression: of the files that are written.
    """
    units = plan_units(sources, unit_bytes)
    return {
        **plan_input(sources, options),
        "parameters": parameters,
        "--compress": compression,
        "units": [[list(astuple(each)) for each in unit.ranges] for unit in units],
    }


def begin_work(folder: JobFolder, plan: dict[str, Any]) -> Work:
    """Begin a run, or go on where a killed run of the same plan stopped; the lock must be held.

    Args:
        folder: of the run.
        plan: see ``make_plan``.

    Raises:
        ConfigError: the folder is another plan's.
    """
    folder.begin(plan)
    return Work(folder.work)


def check_again(folder: JobFolder, plan: dict[str, Any]) -> None:
    """Let the files of an unfinished run be compared with their hashes again.

    They may have been damaged since an earlier process did so. A late array task may do this just
    before the others publish, and then publishes itself.

    Args:
        folder: of the run.
        plan: see ``make_plan``.

    Raises:
        ConfigError: the folder was not made by a job.
    """
    if not folder.exists():
        return
    with suppress(BusyError, FileNotFoundError), folder.locked(seconds=0):
        folder.open(plan_digest(plan))
        (folder.work / _CHECK).rename(temporary_path(folder.work / _CHECK))


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
        calls: list[Call] = [(_run_task_in, (work.folder, stage, function, task)) for task in left]
        run_stage(self.engine, stage, tasks, calls, self.advance)

    def check(self) -> None:
        """Compare the results of all stages with their hashes, as a last stage.

        Raises:
            DataError: a file is not what was written.
        """
        self.run(_CHECK, check_task, self._most_tasks)


def _run_task_in(folder: Path, stage: str, function: Task, task: int) -> Counter[str]:
    """Do one task in this process; return what it counted.

    Raises:
        DataError: the input cannot be read, or the disk is full.
    """
    # The sketches' library would start a thread per core in every process.
    os.environ.setdefault("RAYON_NUM_THREADS", "1")
    work = _open_work(folder)
    # Another task of a job array may have done it since this call was submitted.
    if work.task_folder(stage, task).exists():
        return Counter()
    try:
        with work.new_task_folder(stage, task) as fresh:
            function(work, task, fresh)
            return fresh.counts
    except OSError as error:
        raise DataError(f"{work.folder}: {stage}: {error}; is the disk full?") from error


# The folder's name has the plan's hash.
_open_work = lru_cache(maxsize=1)(Work)


def refuse_inputs(output: Path, sources: Sequence[Source]) -> None:
    """Raise ConfigError if the folder to write holds an input, which replacing it would remove."""
    folder = Path(os.path.realpath(output))
    for source in sources:
        if folder in Path(os.path.realpath(source.path)).parents:
            raise ConfigError(
                f"--output {output}: holds the input {source.path}; choose another folder"
            )


def fill_folder(
    output: Path,
    plan: dict[str, Any],
    run_stages: Callable[[Work, StageRunner], None],
    gather: Callable[[Work, Path], dict[str, Any]],
    options: RunOptions,
) -> dict[str, Any]:
    """Do what a plan says, from wherever a killed run left it, and publish the result.

    Args:
        output: folder that appears when everything is done.
        plan: see ``make_plan``.
        run_stages: does all work but the last.
        gather: puts the result together in a folder and returns its summary.
        options: of the run.

    Returns:
        The summary; empty if other array tasks still work.

    Raises:
        ConfigError: ``output`` exists, or is damaged, or unfinished work of another plan exists.
        DataError: the disk is full, or what the stages raise.
    """
    folder = JobFolder(output)

    def work() -> None:
        if os.path.lexists(output) and not options.force:
            raise ConfigError(f"--output {output}: exists; choose another or add --force")
        begun = begin_work(folder, plan)
        # Spawned: numpy may have started threads.
        with options.open_engine("spawn") as engine:
            runner = StageRunner(begun, engine, options.advance, options.share)
            run_stages(begun, runner)
            runner.check()

    try:
        check_again(folder, plan)
        summary = run_job(
            folder,
            options,
            find_result=lambda: _finished(output, plan, options),
            work=work,
            publish=lambda: _publish(folder, output, gather, options.allow_bad),
        )
    except NoDocumentsError:
        # Other options are wanted, which unfinished work would refuse.
        if options.share.tasks == 1:
            folder.remove()
        raise
    except OSError as error:
        raise DataError(f"{folder.path}: {error}; is the disk full?") from error
    return summary or {}


def _publish(
    folder: JobFolder,
    output: Path,
    gather: Callable[[Work, Path], dict[str, Any]],
    allow_bad: float | None,
) -> dict[str, Any]:
    """Give the result its name; may be killed at any point and called again."""
    folder.check_lock()
    work = Work(folder.work)
    staged = work.folder / "output"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    summary = {**gather(work, staged), "plan_sha256": work.plan_sha256}
    listed = staged / QUARANTINE
    refuse_bad(summary["quarantined"], summary["documents"], allow_bad, listed)
    files = sorted(path for path in staged.rglob("*") if path.is_file())
    summary[_FILES] = {str(path.relative_to(staged)): path.stat().st_size for path in files}
    (staged / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for path in staged.rglob("*"):
        fsync_path(path)
    fsync_path(staged)
    folder.check_lock()
    if output.exists():
        output.rename(work.folder / "replaced")
    staged.rename(output)
    fsync_path(output.parent)
    folder.remove()
    return summary


def _finished(output: Path, plan: dict[str, Any], options: RunOptions) -> dict[str, Any] | None:
    """Return the summary of a result that is there, if it is this plan's; None: do the work.

    Raises:
        ConfigError: files of it are missing or cut off, and it is not to be replaced.
    """
    try:
        summary = read_json(output / SUMMARY, dict[str, Any], "a summary", remedy="remove it")
    except (OSError, DataError):
        return None
    if summary.get("plan_sha256") != plan_digest(plan):
        return None
    # Summaries of earlier releases list no files.
    files = summary.get(_FILES)
    for name, size in files.items() if isinstance(files, dict) else ():
        path = output / name
        if path.is_file() and path.stat().st_size == size:
            continue
        if not options.force:
            raise ConfigError(
                f"{path} is missing or cut off since the result was published; remove {output}, or "
                "add --force"
            )
        return None
    return summary


def take_parts(work: Work, name: str, folder: Path) -> None:
    """Link the units' files of documents into the output; empty ones are left out.

    Args:
        work: the run.
        name: of the file in the folders of tasks.
        folder: of the output.
    """
    for task in range(len(work.units)):
        if work.info("write", task).get(Path(name).stem):
            target = folder / f"part-{task:06d}.jsonl{SUFFIXES[work.compression]}"
            os.link(work.task_folder("write", task) / name, target)


def concatenate(work: Work, stage: str, name: str, folder: Path) -> None:
    """Concatenate the units' files of one name.

    Args:
        work: the run.
        stage: whose tasks wrote the files.
        name: of the file in the folders of tasks, and of the result.
        folder: of the output.
    """
    with (folder / name).open("wb") as stream:
        for task in range(len(work.units)):
            with (work.task_folder(stage, task) / name).open("rb") as part:
                shutil.copyfileobj(part, stream)


def add_counts(work: Work) -> tuple[Counter[str], Counter[str]]:
    """Add up what the units wrote, and by reason what they set aside."""
    counts: Counter[str] = Counter()
    quarantined: Counter[str] = Counter()
    for task in range(len(work.units)):
        info = work.info("write", task)
        quarantined.update(info.pop("quarantined"))
        counts.update(info)
    return counts, quarantined
