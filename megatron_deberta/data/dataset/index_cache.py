"""Cache of large indices: built once, kept on disk and memory-mapped by every process.

A small index is built in memory by each process. A large one is a folder ``{name}-{hash}``, whose
hash covers everything it depends on. Processes wait for the finished folder, not in a collective,
so no time-out applies. The builder holds a lock file. A dead builder's lock is taken over, at once
on its own machine, elsewhere when it has not been touched for ``patience`` seconds. Folders appear
atomically, so two concurrent builders cost only time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from megatron_deberta.errors import DataError
from megatron_deberta.files import fsync_path, write_durably
from megatron_deberta.parsing import Count, read_json

T = TypeVar("T")
Arrays = dict[str, npt.NDArray[Any]]
# Parts of one-dimensional arrays, by name; the first part of an array sets its dtype.
Parts = Iterator[tuple[str, npt.NDArray[Any]]]
FORMAT = 1
# Minimum number of entries of an index kept on disk.
WORTH_KEEPING = 1 << 20
_DESCRIPTION = "index.json"


@dataclass(frozen=True, slots=True)
class _ArrayDescription:
    dtype: Annotated[str, Field(pattern=r"^[<|][buif][1248]$")]
    size: Count


@dataclass(frozen=True, slots=True)
class _Description:
    """Content of ``index.json``."""

    digest: str
    arrays: dict[Annotated[str, Field(pattern=r"^\w+$")], _ArrayDescription]


class LatestTwo(Generic[T]):
    """Function of a block or epoch that keeps its results for two of them, the later ones.

    Loaders are at most one epoch ahead of the slowest sample in flight, and a batch spans at most
    two blocks. Unlike ``functools.lru_cache`` it can be pickled.

    Args:
        compute: computes a result.
    """

    def __init__(self, compute: Callable[[int], T]) -> None:
        """See the class."""
        self._compute = compute
        self.kept: dict[int, T] = {}

    def __call__(self, number: int) -> T:
        """Return the result for a block or epoch."""
        if number not in self.kept:
            if len(self.kept) > 1:
                del self.kept[min(self.kept)]
            self.kept[number] = self._compute(number)
        return self.kept[number]


class IndexCache:
    """Cache of indices, keyed by what they depend on.

    Args:
        directory: folder of large indices; empty: keep all in memory.
        patience: seconds after which a lock that is not touched counts as abandoned.
    """

    def __init__(self, directory: str | Path = "", *, patience: float = 300.0) -> None:
        """See the class."""
        self._directory = Path(directory) if str(directory) else None
        self._patience = patience

    def get(self, name: str, identity: Any, num_entries: int, build: Callable[[], Parts]) -> Arrays:
        """Return an index; build it if necessary.

        Args:
            name: kind of index, part of the folder's name.
            identity: everything the index depends on, as JSON.
            num_entries: approximate size.
            build: yields the parts of the index's arrays.

        Raises:
            DataError: the folder is damaged or cannot be written.
        """
        if self._directory is None or num_entries < WORTH_KEEPING:
            parts: dict[str, list[npt.NDArray[Any]]] = defaultdict(list)
            for array, values in build():
                parts[array].append(values)
            return {array: np.concatenate(values) for array, values in parts.items()}
        content = json.dumps([FORMAT, name, identity], sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()
        folder = self._directory.absolute() / f"{name}-{digest[:20]}"
        try:
            while not folder.exists():
                self._build_or_wait(folder, digest, build)
            return _read(folder, digest)
        except OSError as error:
            raise DataError(
                f"{folder}: cannot keep the index: {error.strerror or error}; free space, or name "
                "another folder in data.index_cache"
            ) from error

    def _build_or_wait(self, folder: Path, digest: str, build: Callable[[], Parts]) -> None:
        """Build the folder if the lock is free; otherwise wait for the folder or the lock."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = Path(f"{folder}.lock")
        owner = f"{platform.node()} {os.getpid()} {uuid.uuid4().hex}"
        try:
            write_durably(lock, owner.encode())
        except FileExistsError:
            self._wait(folder, lock)
            return
        staging = _staging(folder, owner)
        try:
            if folder.exists():
                return
            staging.mkdir()
            with _touching(lock, self._patience / 10):
                _write(staging, digest, build())
            try:
                staging.rename(folder)
            except OSError:
                # Another process took the lock over and finished first.
                if not folder.exists():
                    raise
            fsync_path(folder.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            if _owner(lock) == owner:
                lock.unlink(missing_ok=True)

    def _wait(self, folder: Path, lock: Path) -> None:
        """Wait until the lock or the folder changes; remove a dead builder's lock."""
        owner, touched, since = _owner(lock), _touched(lock), time.monotonic()
        while owner is not None and _owner(lock) == owner and not folder.exists():
            if _touched(lock) != touched:
                # Compare changes only: clocks of machines differ.
                touched, since = _touched(lock), time.monotonic()
            if _is_dead(owner) or time.monotonic() - since > self._patience:
                shutil.rmtree(_staging(folder, owner), ignore_errors=True)
                if _owner(lock) == owner:
                    lock.unlink(missing_ok=True)
                return
            time.sleep(0.1)


def _write(folder: Path, digest: str, parts: Parts) -> None:
    """Write arrays with ``write``, which reports a full disk; a memory map gets SIGBUS."""
    arrays: dict[str, dict[str, Any]] = {}
    for name, values in parts:
        known = arrays.setdefault(name, {"dtype": values.dtype.str, "size": 0})
        with (folder / f"{name}.bin").open("ab") as stream:
            stream.write(np.ascontiguousarray(values, known["dtype"]).data)
        known["size"] += values.size
    for name in arrays:
        fsync_path(folder / f"{name}.bin")
    description = {"digest": digest, "arrays": arrays}
    write_durably(folder / _DESCRIPTION, json.dumps(description).encode())
    fsync_path(folder)


def _read(folder: Path, digest: str) -> Arrays:
    try:
        description = read_json(
            folder / _DESCRIPTION, _Description, "an index", remedy="remove the folder"
        )
        if description.digest != digest:
            raise ValueError("another index under this name")
        return {
            name: _map(folder / f"{name}.bin", np.dtype(array.dtype), array.size)
            for name, array in description.arrays.items()
        }
    except (ValueError, TypeError) as error:
        raise DataError(f"{folder}: damaged index ({error}); remove the folder") from error


def _map(path: Path, dtype: np.dtype[Any], size: int) -> npt.NDArray[Any]:
    if path.stat().st_size != size * dtype.itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes")
    if size == 0:
        return np.empty(0, dtype)
    # A plain array: slicing a memmap costs several times as much.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _staging(folder: Path, owner: str) -> Path:
    return folder.parent / f".{folder.name}.{owner.rsplit(' ', 1)[-1]}.tmp"


def _owner(lock: Path) -> str | None:
    """Return the lock's holder (machine, process id, token); None: no lock."""
    try:
        return lock.read_text()
    except FileNotFoundError:
        return None


def _touched(lock: Path) -> int:
    try:
        return lock.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _is_dead(owner: str) -> bool:
    """Tell whether the builder was a process of this machine that has ended."""
    machine, _, rest = owner.rpartition(" ")[0].rpartition(" ")
    if machine != platform.node() or not rest.isdigit():
        return False
    try:
        os.kill(int(rest), 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False


@contextmanager
def _touching(lock: Path, interval: float) -> Iterator[None]:
    """Touch the lock from a thread while the block runs."""
    done = threading.Event()

    def touch() -> None:
        while not done.wait(interval):
            if lock.exists():
                os.utime(lock)

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
