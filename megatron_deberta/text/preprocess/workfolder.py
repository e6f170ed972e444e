"""The folder in which a run keeps what is done, shared by all its processes on all nodes.

Owns durable records and claims. A record says that something is complete and flushed; a claim
only keeps two processes from doing the same work, and correctness never hangs on it: whoever does
a thing twice writes the same bytes. Refuses locks and barriers, which a dead process could hold.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from megatron_deberta.errors import ConfigError
from megatron_deberta.files import fsync_path, write_durably
from megatron_deberta.parsing import Count, Scalar, read_json
from megatron_deberta.text.readers.sources import PLAN, SPOOLED_INPUT

_RESTART = "begin again with --restart"


_File = Annotated[list[Scalar], Field(min_length=1)]
_Plan = TypedDict("_Plan", {"--input": list[_File]})
"""What is read from a plan besides its equality with another one."""


class _UnitRecord(TypedDict):
    """Record of a unit."""

    last: bool
    documents: Count
    reasons: dict[str, Count]
    sizes: list[list[Count]]
    pieces: list[tuple[Count, Count, Count]]


class _StepRecord(TypedDict, total=False):
    """Record of a step after the units."""

    documents: Count
    reasons: dict[str, Count]
    sizes: list[list[list[Count]]]
    sha256: str


HEARTBEAT_SECONDS = 5.0
# A claim that has not been renewed for so long belongs to a process that is gone.
LEASE_SECONDS = 60.0


class WorkFolder:
    """``{output}.unfinished``: the plan, finished parts, records and claims.

    Args:
        output: beginning of the shards' names.
    """

    def __init__(self, output: str) -> None:
        """See the class."""
        self.path = Path(f"{output}.unfinished")
        self.parts = self.path / "parts"
        self.staged = self.path / "staged"
        self._done = self.path / "done"
        self._claims = self.path / "claims"
        self._owner = _identify_process()
        self._seen: dict[str, tuple[bytes, float]] = {}
        self._held: set[Path] = set()

    def exists(self) -> bool:
        """Tell whether a run is under way or was broken off."""
        return (self.path / PLAN).exists()

    def refuse_foreign(self) -> None:
        """Refuse a folder of this name that no run has made, as it would be removed in the end.

        Raises:
            ConfigError: it holds files and no plan.
        """
        mine = (SPOOLED_INPUT, f".{PLAN}.")
        names = (name for _, _, names in os.walk(self.path) for name in names)
        foreign = next((name for name in names if not name.startswith((*mine, PLAN))), None)
        # A run that ends just now takes plan and folder away together.
        if foreign is not None and not self.exists() and self.path.exists():
            raise ConfigError(
                f"{self.path}: holds {foreign} and no {PLAN}, so it is no unfinished run; rename "
                "it or choose another --output"
            )

    def begin(self, plan: dict[str, Any]) -> None:
        """Start a run, or join the one that is under way.

        Args:
            plan: all that decides the result, JSON values by the option's name.

        Raises:
            ConfigError: the run under way has another plan.
            OSError: the folder cannot be written.
        """
        for folder in (self.parts, self.staged, self._done, self._claims):
            folder.mkdir(parents=True, exist_ok=True)
        with self.appearing(self.path / PLAN) as mine:
            mine.unlink(missing_ok=True)
            write_durably(mine, json.dumps(plan).encode())
        fsync_path(self.path)
        self._refuse_another(plan)

    def _refuse_another(self, plan: dict[str, Any]) -> None:
        schema: Any = _Plan
        found: dict[str, Any] = read_json(
            self.path / PLAN, schema, "a plan", remedy=_RESTART, ignore_unknown=True
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
            raise ConfigError(
                f"{self.path}: {what}; undo the change, or begin again with --restart"
            )

    def record(self, name: str, content: dict[str, Any]) -> None:
        """Say durably that something is complete; its data must be flushed before.

        Raises:
            OSError: the folder cannot be written.
        """
        final = self._done / f"{name}.json"
        temporary = self.temporary(final)
        temporary.unlink(missing_ok=True)
        write_durably(temporary, json.dumps(content).encode())
        os.replace(temporary, final)
        fsync_path(self._done)

    def temporary(self, final: Path) -> Path:
        """Return a hidden name beside ``final`` that no other process uses."""
        return final.with_name(f".{final.name}.{self._owner.replace(' ', '.')}")

    @contextlib.contextmanager
    def appearing(self, final: Path) -> Iterator[Path]:
        """Give a name to write a file under, which becomes ``final`` unless there is one.

        One that is there is whole, and others may already work on it.
        """
        temporary = self.temporary(final)
        try:
            yield temporary
            with contextlib.suppress(FileExistsError):
                os.link(temporary, final)
        finally:
            temporary.unlink(missing_ok=True)

    def flush_parts(self) -> None:
        """Make the names of finished parts survive a power loss."""
        fsync_path(self.parts)

    def recorded(self, name: str) -> dict[str, Any] | None:
        """Return a record; None where there is none yet."""
        try:
            schema: Any = _UnitRecord if name[:8].isdigit() else _StepRecord
            path = self._done / f"{name}.json"
            record: dict[str, Any] = read_json(path, schema, "a record", remedy=_RESTART)
        except FileNotFoundError:
            return None
        return record

    def records(self) -> set[str]:
        """Names of all records."""
        names = os.listdir(self._done)
        return {name.removesuffix(".json") for name in names if not name.startswith(".")}

    def claim(self, name: str) -> bool:
        """Try to take something on; False where a living process has it."""
        path = self._claims / name
        for _ in range(2):
            try:
                with path.open("x") as stream:
                    stream.write(self._owner)
            except FileExistsError:
                if not self._is_abandoned(path):
                    return False
                # Only one of those who find it abandoned succeeds.
                grave = self.temporary(path)
                with contextlib.suppress(FileNotFoundError):
                    os.rename(path, grave)
                    grave.unlink()
                continue
            self._held.add(path)
            return True
        return False

    def release(self, name: str) -> None:
        """Give a claim back; what it was for is recorded, or may be done by another."""
        path = self._claims / name
        self._held.discard(path)
        path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Renew the claims of this process while the block runs."""
        stop = threading.Event()

        def renew() -> None:
            while not stop.wait(HEARTBEAT_SECONDS):
                for path in list(self._held):
                    with contextlib.suppress(OSError):
                        os.utime(path)

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def remove(self) -> None:
        """Take the folder away; ``remove_leftovers`` ends a removal that was broken off."""
        gone = self.temporary(self.path).with_suffix(".removed")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, gone)
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Take away what removals left behind."""
        for gone in self.path.parent.glob(f".{glob.escape(self.path.name)}.*.removed"):
            shutil.rmtree(gone, ignore_errors=True)

    def _is_abandoned(self, path: Path) -> bool:
        try:
            owner, renewed = path.read_text(), path.stat().st_mtime_ns
        except FileNotFoundError:
            return True
        host, _, process = owner.rpartition(" ")
        my_host, _, my_process = self._owner.rpartition(" ")
        if host == my_host:
            return process == my_process or not _is_alive(process)
        # The clocks of two nodes may differ, so the age is what this process has seen.
        state = f"{owner} {renewed}".encode()
        seen, since = self._seen.get(path.name, (b"", 0.0))
        if seen != state:
            self._seen[path.name] = state, time.monotonic()
            return False
        return time.monotonic() - since > LEASE_SECONDS


def _changed_files(before: list[list[Any]], now: list[list[Any]]) -> str:
    """Name the first file that came, went or changed; entries begin with a file's name."""
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


def _identify_process() -> str:
    """Name this process: host (with its boot and process namespace), and number with start."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = "-".join(
        (
            socket.gethostname(),
            boot.read_text().strip()[:8] if boot.exists() else "",
            os.readlink("/proc/self/ns/pid").strip("pid:[]"),
        )
    )
    return f"{host} {os.getpid()}-{_state_and_start(os.getpid())[1]}"


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return a process's state, and when it was started, in ticks since boot."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


def _is_alive(process: str) -> bool:
    pid, _, started = process.partition("-")
    try:
        state, start = _state_and_start(int(pid))
    except (OSError, ValueError):
        return False
    # A zombie does nothing any more.
    return start == started and state not in "ZX"
