"""Parts of local checkpoints: the files of one rank, in a folder of a node.

A part holds the tensor files that the rank would write to a shared checkpoint, a manifest and
``COMMITTED``, which contains the manifest's SHA-256 and is written last. A node's folder holds the
parts of its own ranks and replicas of a neighbour's. Calls on a disk that may hang have a time
limit (``within``).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from megatron_deberta.checkpoint.layout import (
    COMMITTED_FILE,
    MANIFEST_FILE,
    CheckpointMetadata,
    FileEntry,
    Fragment,
    commit_mark,
    tensor_file,
)
from megatron_deberta.errors import CheckpointError
from megatron_deberta.files import fsync_path, sha256_file, write_durably
from megatron_deberta.parsing import Count, parse_json
from megatron_deberta.processes import call_in_thread

FILE_BYTES = 64 * 2**20
"""Bytes of tensors at which a file is complete; bounds the memory of a transfer."""
LISTING_SECONDS = 30.0
"""Limit of listing or deleting the parts on a node."""
SLOWEST_BYTES_PER_SECOND = 10e6
"""Slower reads of parts count as hung."""
_PART_NAME = re.compile(r"(\d{5,})-step_(\d{8})-rank_(\d{5})")
_T = TypeVar("_T")


@dataclass(frozen=True, order=True, slots=True)
class SaveId:
    """Identity of a local save.

    Attributes:
        generation: number of the uninterrupted stretch of training, see ``history``.
        step: completed optimizer steps.
    """

    generation: Count
    step: Count


@dataclass(frozen=True, slots=True)
class PartManifest:
    """Content of a part besides its tensors.

    Attributes:
        save: the save.
        rank: rank that the part is of.
        world_size: number of parts of the save.
        metadata: state of the run.
        parameters: logical shape by canonical name, of the whole model.
        files: the tensor files.
        fragments: what they contain.
    """

    save: SaveId
    rank: Count
    world_size: Count
    metadata: CheckpointMetadata
    parameters: dict[str, tuple[Count, ...]]
    files: tuple[FileEntry, ...]
    fragments: tuple[Fragment, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of what is the same in all parts of a save."""
        return hashlib.sha256(json.dumps(asdict(self.metadata)).encode()).hexdigest()

    def to_json(self) -> bytes:
        """Return the content of the part's manifest."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes, source: object) -> PartManifest:
        """Parse the content of a part's manifest.

        Raises:
            CheckpointError: it is not one.
        """
        manifest = parse_json(
            content, cls, source, "a manifest of a local checkpoint", error=CheckpointError,
            remedy="delete the folder",
        )  # fmt: skip
        expected = tuple(tensor_file(manifest.rank, n) for n in range(len(manifest.files)))
        if tuple(entry.name for entry in manifest.files) != expected:
            raise CheckpointError(f"{source}: files are not named {', '.join(expected)}")
        return manifest


class PartWriter:
    """Writes a part under a node's folder; a failure of the disk is recorded, not raised.

    Args:
        folder: the node's folder.
        save: the save.
        rank: rank that the part is of.

    Attributes:
        error: the first failure; nothing is left on disk after it.
        num_bytes: bytes written.
    """

    def __init__(self, folder: Path, save: SaveId, rank: int) -> None:
        self._path = part_dir(folder, save, rank)
        self._rank = rank
        self._digests: list[str] = []
        self.error: OSError | None = None
        self.num_bytes = 0
        try:
            make_private(folder)
            _remove(self._path)
            self._path.mkdir(mode=0o700)
        except OSError as error:
            self.error = error

    def add(self, content: bytes) -> FileEntry:
        """Write the next tensor file."""
        name = tensor_file(self._rank, len(self._digests))
        digest = hashlib.sha256(content).hexdigest()
        self._digests.append(digest)
        self._write(name, content)
        return FileEntry(name, len(content), digest)

    def commit(self, content: bytes) -> bool:
        """Write the manifest and commit the part; return whether it is on disk.

        Raises:
            CheckpointError: the manifest lists other files than those that were added.
        """
        manifest = PartManifest.from_json(content, self._path)
        if [entry.sha256 for entry in manifest.files] != self._digests:
            self.discard()
            raise CheckpointError(f"{self._path}: files differ from their manifest")
        self._write(MANIFEST_FILE, content)
        if self.error is None:
            try:
                fsync_path(self._path)
            except OSError as error:
                self._fail(error)
        self._write(COMMITTED_FILE, commit_mark(content))
        return self.error is None

    def discard(self) -> None:
        """Delete the part."""
        with suppress(OSError):
            _remove(self._path)

    def _write(self, name: str, content: bytes) -> None:
        if self.error is not None:
            return
        try:
            write_durably(self._path / name, content)
            self.num_bytes += len(content)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.error = error
        self.discard()


def part_dir(folder: Path, save: SaveId, rank: int) -> Path:
    """Return the folder of a rank's part of a local save.

    Args:
        folder: the node's folder.
        save: the save.
        rank: rank that the part is of.
    """
    return folder / f"{save.generation:05d}-step_{save.step:08d}-rank_{rank:05d}"


def held_parts(folder: Path) -> list[PartManifest]:
    """Return the manifests of committed parts under a node's folder; damaged ones are left out."""
    found = []
    for path in part_folders(folder):
        try:
            content = (path / MANIFEST_FILE).read_bytes()
            if (path / COMMITTED_FILE).read_bytes() != commit_mark(content):
                continue
            manifest = PartManifest.from_json(content, path)
        except (OSError, CheckpointError):
            continue
        if part_dir(folder, manifest.save, manifest.rank) == path:
            found.append(manifest)
    return found


def is_intact(folder: Path, part: PartManifest) -> bool:
    """Return whether the tensor files of a part have the SHA-256 of its manifest."""
    path = part_dir(folder, part.save, part.rank)
    try:
        return all(sha256_file(path / entry.name) == entry.sha256 for entry in part.files)
    except OSError:
        return False


def part_folders(folder: Path) -> list[Path]:
    """List the folders of parts, committed or not."""
    try:
        make_private(folder)
        return sorted(path for path in folder.iterdir() if _PART_NAME.fullmatch(path.name))
    except OSError:
        return []


def make_private(folder: Path) -> None:
    """Create a folder that only this user can read.

    Raises:
        OSError: it cannot be created, or is another user's or a symbolic link.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} is a symbolic link or belongs to another user")


def delete_parts(folder: Path, ranks: Iterable[int], keep: SaveId | None) -> None:
    """Delete the parts of some ranks except those of one save; failures are ignored.

    Args:
        folder: the node's folder.
        ranks: ranks whose parts are deleted.
        keep: the save whose parts are kept; None: none.
    """
    wanted = set(ranks)
    for path in part_folders(folder):
        match = _PART_NAME.fullmatch(path.name)
        assert match is not None
        generation, step, rank = map(int, match.groups())
        if rank in wanted and SaveId(generation, step) != keep:
            with suppress(OSError):
                _remove(path)


def _remove(path: Path) -> None:
    """Delete a part, first its mark, so that a kill leaves none that is committed but partial."""
    (path / COMMITTED_FILE).unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)


def within(seconds: float, call: Callable[[], _T], default: _T) -> _T:
    """Return the result of a call, or ``default`` if it takes longer than ``seconds``.

    The call goes on in a daemon thread, because a system call cannot be interrupted.

    Args:
        seconds: time limit in seconds.
        call: function to call.
        default: result if the call takes longer.

    Raises:
        Exception: what the call raised in time.
    """
    future = call_in_thread(call, "disk")
    wait([future], seconds)
    return future.result() if future.done() else default
