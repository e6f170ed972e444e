"""Cache of large indices: built once, kept on disk and memory-mapped by every process.

A small index is built in memory by each process. A large one is a folder ``{name}-{hash}``, whose
hash covers everything it depends on. One process builds it under a lock that the kernel releases
when the process ends; the others wait for the folder, not in a collective, so no time-out applies.
Folders appear atomically, so that two builders on a file system without locks cost only time.
Arrays are hashed while they are written, and each process that opens them checks the hashes.
"""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from megatron_deberta.errors import DataError
from megatron_deberta.files import (
    FileLock,
    HashedFile,
    fsync_path,
    temporary_path,
    write_durably,
)
from megatron_deberta.parsing import Count, read_json

T = TypeVar("T")
Arrays = dict[str, npt.NDArray[Any]]
# Parts of one-dimensional arrays, by name; the first part of an array sets its dtype.
Parts = Iterator[tuple[str, npt.NDArray[Any]]]
FORMAT = 2
# Minimum number of entries of an index kept on disk.
WORTH_KEEPING = 1 << 20
_DESCRIPTION = "index.json"
_SECONDS_BETWEEN_ATTEMPTS = 0.1


@dataclass(frozen=True, slots=True)
class _ArrayDescription:
    dtype: Annotated[str, Field(pattern=r"^[<|][buif][1248]$")]
    size: Count
    sha256: str


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
    """

    def __init__(self, directory: str | Path = "") -> None:
        """See the class."""
        self._directory = Path(directory) if str(directory) else None

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
                _build_or_wait(folder, digest, build)
            return _read(folder, digest)
        except OSError as error:
            raise DataError(
                f"{folder}: cannot keep the index: {error.strerror or error}; free space, or name "
                "another folder in data.index_cache"
            ) from error


def _build_or_wait(folder: Path, digest: str, build: Callable[[], Parts]) -> None:
    """Build the folder if the lock is free; otherwise wait a moment."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = Path(f"{folder}.lock")
    lock = FileLock(path)
    if not lock.acquire():
        time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
        return
    try:
        if folder.exists():
            return
        if lock.is_supported:
            for left in folder.parent.glob(f".{glob.escape(folder.name)}.*.tmp"):
                shutil.rmtree(left, ignore_errors=True)
        staging = temporary_path(folder)
        try:
            staging.mkdir()
            _write(staging, digest, build())
            try:
                staging.rename(folder)
            except OSError:
                # Without locks, another process may have finished first.
                if not folder.exists():
                    raise
            fsync_path(folder.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def _write(folder: Path, digest: str, parts: Parts) -> None:
    """Write arrays with ``write``, which reports a full disk; a memory map gets SIGBUS."""
    files: dict[str, HashedFile] = {}
    arrays: dict[str, dict[str, Any]] = {}
    try:
        for name, values in parts:
            if name not in files:
                files[name] = HashedFile(folder / f"{name}.bin")
                arrays[name] = {"dtype": values.dtype.str, "size": 0}
            files[name].write(np.ascontiguousarray(values, arrays[name]["dtype"]).data)
            arrays[name]["size"] += values.size
        for name, file in files.items():
            arrays[name]["sha256"] = file.take_digest()
            file.commit()
    finally:
        for file in files.values():
            file.close()
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
            name: _map(folder / f"{name}.bin", array) for name, array in description.arrays.items()
        }
    except (ValueError, TypeError) as error:
        raise DataError(f"{folder}: damaged index ({error}); remove the folder") from error


def _map(path: Path, described: _ArrayDescription) -> npt.NDArray[Any]:
    dtype = np.dtype(described.dtype)
    if path.stat().st_size != described.size * dtype.itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes")
    if described.size:
        # A plain array: slicing a memmap costs several times as much.
        array = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    else:
        array = np.empty(0, dtype)
    if hashlib.sha256(array.data).hexdigest() != described.sha256:
        raise ValueError(f"{path.name} is not what was written: its SHA-256 differs")
    return array
