"""Folder of an unfinished job: plan, lock and durable results of units.

Results of units are written under temporary names, hashed while they are written, flushed and
renamed. A unit may run twice, even at the same time, because both attempts write the same bytes.
Only the process that holds the lock merges and publishes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import fsync_path, write_durably
from megatron_deberta.parsing import Scalar, read_json
from megatron_deberta.text.readers.sources import PLAN, SPOOLED_INPUT

RESTART = "begin again with --restart"
LOCK = "lock"
# Workers of a killed driver release the lock with their own end.
_LOCK_SECONDS = 3.0
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

_File = Annotated[list[Scalar], Field(min_length=1)]
_Plan = TypedDict("_Plan", {"--input": list[_File]})
"""Part of a plan that is read, besides the comparison with another plan."""


class BusyError(DataError):
    """Another process works in the folder."""


class HashedFile:
    """New file whose SHA-256 is computed from what is written, not read back.

    Args:
        final: name after ``commit``; the temporary name is unique to this attempt.
    """

    def __init__(self, final: Path) -> None:
        """See the class."""
        self._final = final
        self._temporary = temporary_path(final)
        self._file = self._temporary.open("xb")
        self._digest = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> None:
        """Append to the file.

        Raises:
            OSError: the disk is full or broken.
        """
        self._digest.update(content)
        self._file.write(content)

    def take_digest(self) -> str:
        """Return the hexadecimal SHA-256 of what was written since the last call."""
        digest, self._digest = self._digest.hexdigest(), hashlib.sha256()
        return digest

    def commit(self) -> None:
        """Flush the file and give it its final name; the caller flushes the folder."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._final)

    def close(self) -> None:
        """Remove the file unless it was committed."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


class JobFolder:
    """``{output}.unfinished``: plan, lock, and a folder per plan with parts and records.

    A late attempt of another plan's unit cannot reach this plan's folder.

    Args:
        output: prefix or folder that the job writes.
    """

    def __init__(self, output: str | Path) -> None:
        """See the class."""
        self.path = Path(f"{output}.unfinished")
        self._lock = -1
        self.open("none")

    def open(self, digest: str) -> None:
        """Set the folders of a plan's parts and records; a worker does so without ``begin``."""
        self.work = self.path / digest[:16]
        self.parts, self.staged, self.done = (
            self.work / name for name in ("parts", "staged", "done")
        )

    def exists(self) -> bool:
        """Return whether a job runs or was interrupted."""
        return (self.path / PLAN).exists()

    def refuse_foreign(self) -> None:
        """Refuse a folder of this name that no job has made, as it would be removed at the end.

        Raises:
            ConfigError: it holds files and no plan.
        """
        mine = (SPOOLED_INPUT, PLAN, f".{PLAN}.", LOCK)
        names = (name for _, _, names in os.walk(self.path) for name in names)
        foreign = next((name for name in names if not name.startswith(mine)), None)
        # A job that ends now removes plan and folder together.
        if foreign is not None and not self.exists() and self.path.exists():
            raise ConfigError(
                f"{self.path}: holds {foreign} and no {PLAN}, so it is no unfinished run; rename "
                "it or choose another --output"
            )

    @contextlib.contextmanager
    def locked(self, *, shared: bool = False, seconds: float = _LOCK_SECONDS) -> Iterator[None]:
        """Hold the folder's lock, which ends with the process.

        Args:
            shared: exclude only processes that merge and publish.
            seconds: time to wait for the lock.

        Raises:
            BusyError: another process has it.
            OSError: the folder cannot be written.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if self._try_lock(file, shared) and self._is_current(file):
                    self._lock = file
                    try:
                        yield
                    finally:
                        self._lock = -1
                        if not (shared or self.exists()) and self._is_current(file):
                            # No job has begun.
                            (self.path / LOCK).unlink()
                            with contextlib.suppress(OSError):
                                self.path.rmdir()
                    return
            finally:
                os.close(file)
            if time.monotonic() >= deadline:
                raise BusyError(f"{self.path}: another process works there; wait for it or end it")
            time.sleep(0.05)

    def _try_lock(self, file: int, shared: bool) -> bool:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logging.getLogger(__name__).warning(
                "%s: the file system has no locks; start only one command at a time", self.path
            )
        return True

    def _is_current(self, file: int) -> bool:
        """Return whether the open lock file is the folder's, not one of a folder since removed."""
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path / LOCK))
        except FileNotFoundError:
            return False

    def check_lock(self) -> None:
        """Check before publishing that the folder is still this process's.

        Raises:
            DataError: another process has finished or restarted the job meanwhile.
        """
        if self._lock < 0 or not self._is_current(self._lock):
            raise DataError(
                f"{self.path}: another process has finished or restarted this job; nothing was "
                "published by this one"
            )

    def begin(self, plan: dict[str, Any]) -> str:
        """Start the job, or continue it if it was interrupted; the lock must be held.

        Args:
            plan: all that determines the result, JSON values by option name.

        Returns:
            Hexadecimal SHA-256 of the plan.

        Raises:
            ConfigError: the unfinished job has another plan.
            OSError: the folder cannot be written.
        """
        digest = plan_digest(plan)
        temporary = temporary_path(self.path / PLAN)
        try:
            write_durably(temporary, json.dumps(plan).encode())
            with contextlib.suppress(FileExistsError):
                os.link(temporary, self.path / PLAN)
        finally:
            temporary.unlink(missing_ok=True)
        self._refuse_another(plan)
        self.open(digest)
        for folder in (self.parts, self.staged, self.done):
            folder.mkdir(parents=True, exist_ok=True)
            fsync_path(folder.parent)
        fsync_path(self.path)
        return digest

    def _refuse_another(self, plan: dict[str, Any]) -> None:
        schema: Any = _Plan
        found: dict[str, Any] = read_json(
            self.path / PLAN, schema, "a plan", remedy=RESTART, ignore_unknown=True
        )
        for name in {**found, **plan}:
            if found.get(name) == plan.get(name):
                continue
            if name == "--input":
                changed = _changed_files(found[name], plan[name])
                what = f"--input is not what it was when this run began: {changed}"
            else:
                before, now = _first_difference(found.get(name), plan.get(name))
                what = f"{name} was {before} when this run began and is {now} now"
            raise ConfigError(f"{self.path}: {what}; undo the change, or {RESTART}")

    def remove_attempts(self) -> None:
        """Remove temporary files of attempts that were killed; no worker may run."""
        for folder in (self.parts, self.done, self.staged):
            for path in folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)

    def record(self, name: str, content: dict[str, Any]) -> None:
        """Record durably that a unit is done; its files must be renamed before.

        Raises:
            OSError: the folder cannot be written.
        """
        fsync_path(self.parts)
        temporary = temporary_path(self.done / f"{name}.json")
        try:
            write_durably(temporary, json.dumps(content).encode())
            os.replace(temporary, self.done / f"{name}.json")
        finally:
            temporary.unlink(missing_ok=True)
        fsync_path(self.done)

    def recorded(self, name: str, schema: Any) -> Any:
        """Return a record; None: the unit is not done.

        Raises:
            DataError: the record is damaged.
        """
        with contextlib.suppress(FileNotFoundError):
            return read_json(self.done / f"{name}.json", schema, "a record", remedy=RESTART)
        return None

    def is_recorded(self, name: str) -> bool:
        """Return whether a unit is done."""
        return (self.done / f"{name}.json").exists()

    def records(self) -> set[str]:
        """Return the names of all records; none before the job began."""
        with contextlib.suppress(FileNotFoundError):
            return {n.removesuffix(".json") for n in os.listdir(self.done) if n[0] != "."}
        return set()

    def discard(self, name: str) -> None:
        """Remove the record of a unit whose files are damaged, so that it is done again."""
        (self.done / f"{name}.json").unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder; ``remove_leftovers`` ends a removal that was interrupted."""
        gone = temporary_path(self.path).with_suffix(".removed")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, gone)
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove what interrupted removals left."""
        for gone in self.path.parent.glob(f".{glob.escape(self.path.name)}.*.removed"):
            shutil.rmtree(gone, ignore_errors=True)


def temporary_path(final: Path) -> Path:
    """Return a hidden name beside ``final`` that no other attempt uses."""
    return final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")


def plan_digest(plan: dict[str, Any]) -> str:
    """Return the hexadecimal SHA-256 of a plan."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()


def _changed_files(before: list[list[Any]], now: list[list[Any]]) -> str:
    """Return the first file that was added, removed or changed; entries begin with its name."""
    old, new = ({name: rest for name, *rest in entries} for entries in (before, now))
    for name, rest in {**old, **new}.items():
        if name not in new:
            return f"{name} is gone"
        if name not in old:
            return f"{name} is new"
        if old[name] != rest:
            return f"{name} has changed"
    return "the order of files has changed"


def _first_difference(before: object, now: object) -> tuple[object, object]:
    """Go down to the entry that differs."""
    if isinstance(before, list) and isinstance(now, list):
        if len(before) == len(now):
            different = ((x, y) for x, y in zip(before, now, strict=True) if x != y)
            return _first_difference(*next(different))
        return f"{len(before)} entries", f"{len(now)} entries"
    return json.dumps(before), json.dumps(now)
