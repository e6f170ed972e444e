"""Folder of an unfinished job: plan, lock and durable results of units.

Results of units are written under temporary names, hashed while they are written, flushed and
renamed. A unit may run twice, even at the same time, because both attempts write the same bytes.
Only the process that holds the lock merges and publishes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import FileLock, fsync_path, temporary_path, write_durably
from megatron_deberta.parsing import Scalar, read_json
from megatron_deberta.text.readers.sources import PLAN, SPOOLED_INPUT

RESTART = "begin again with --restart"
LOCK = "lock"
# What ``JobFolder.remove`` renames a folder to.
_REMOVED = re.compile(r"\..+\.unfinished\.[0-9a-f]{32}\.removed", re.DOTALL)
# Marks a job that ended with an error: one with another plan replaces it.
_FAILED = "failed"
# Workers of a killed driver release the lock with their own end.
_LOCK_SECONDS = 3.0

_File = Annotated[list[Scalar], Field(min_length=1)]
_Plan = TypedDict("_Plan", {"--input": list[_File]})
"""Part of a plan that is read, besides the comparison with another plan."""


class BusyError(DataError):
    """Another process works in the folder."""


class JobFolder:
    """``{output}.unfinished``: plan, lock, and a folder per plan with parts and records.

    A late attempt of another plan's unit cannot reach this plan's folder.

    Args:
        output: prefix or folder that the job writes.
    """

    def __init__(self, output: str | Path) -> None:
        """See the class."""
        self.path = Path(f"{output}.unfinished")
        self._lock: FileLock | None = None
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
        mine = (SPOOLED_INPUT, PLAN, f".{PLAN}.", LOCK, _FAILED)
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
            ConfigError: see ``refuse_foreign``.
            OSError: the folder cannot be written.
        """
        self.refuse_foreign()
        deadline = time.monotonic() + seconds
        lock = FileLock(self.path / LOCK)
        self.path.mkdir(parents=True, exist_ok=True)
        while not lock.acquire(shared=shared):
            if time.monotonic() >= deadline:
                raise BusyError(f"{self.path}: another process works there; wait for it or end it")
            time.sleep(0.05)
            self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock
        try:
            yield
        finally:
            self._lock = None
            if not self.exists() and lock.is_held() and (not shared or lock.make_exclusive()):
                # No job has begun, or another array task has finished it.
                (self.path / LOCK).unlink()
                with contextlib.suppress(OSError):
                    self.path.rmdir()
            lock.release()

    def check_lock(self) -> None:
        """Check before publishing that the folder is still this process's.

        Raises:
            DataError: another process has finished or restarted the job meanwhile.
        """
        if self._lock is None or not self._lock.is_held():
            raise DataError(
                f"{self.path}: another process has finished or restarted this job; nothing was "
                "published by this one"
            )

    def mark_failed(self) -> None:
        """Let a job with another plan replace this one; one with the same plan continues it.

        For jobs whose work is soon done again; the lock must be held.
        """
        (self.path / _FAILED).touch()

    def _discard_failed(self, plan: bytes) -> None:
        """Remove the plan and the work of a job that failed, unless this one is the same."""
        mark = self.path / _FAILED
        if not mark.exists():
            return
        if self.exists() and (self.path / PLAN).read_bytes() != plan:
            (self.path / PLAN).unlink()
            for entry in self.path.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
        mark.unlink()

    def _write_plan(self, plan: bytes) -> None:
        """Write the plan unless there is one."""
        temporary = temporary_path(self.path / PLAN)
        try:
            write_durably(temporary, plan)
            with contextlib.suppress(FileExistsError):
                os.link(temporary, self.path / PLAN)
        finally:
            temporary.unlink(missing_ok=True)

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
        self._discard_failed(_encode_plan(plan))
        self._write_plan(_encode_plan(plan))
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
        old, new = _flatten(found), _flatten(plan)
        for name in {**old, **new}:
            if old.get(name) == new.get(name):
                continue
            if name == "--input":
                changed = _changed_files(old[name], new[name])
                what = f"--input is not what it was when this run began: {changed}"
            else:
                before, now = _first_difference(old.get(name), new.get(name))
                what = f"{name} was {before} when this run began and is {now} now"
            raise ConfigError(f"{self.path}: {what}; undo the change, or {RESTART}")

    def remove_attempts(self) -> None:
        """Remove temporary files of attempts that were killed; no worker may run."""
        for path in self.work.glob("*/.*.tmp"):
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
        """Remove what interrupted removals of any job left beside it, as large as a corpus.

        The job that was removed had ended, so its own command may never run again.
        """
        with contextlib.suppress(OSError):
            for gone in list(self.path.parent.iterdir()):
                if _REMOVED.fullmatch(gone.name):
                    shutil.rmtree(gone, ignore_errors=True)


def plan_digest(plan: dict[str, Any]) -> str:
    """Return the hexadecimal SHA-256 of a plan."""
    return hashlib.sha256(_encode_plan(plan)).hexdigest()


def _encode_plan(plan: dict[str, Any]) -> bytes:
    return json.dumps(plan, sort_keys=True).encode()


def _flatten(plan: dict[str, Any]) -> dict[str, Any]:
    parameters = plan.get("parameters")
    return {**plan, **(parameters if isinstance(parameters, dict) else {}), "parameters": None}


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
