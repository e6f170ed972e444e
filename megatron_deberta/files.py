"""Crash-safe files and folders: flushed to disk, and under their final name complete or absent."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sha256_file(path: str | Path) -> str:
    """Return the hexadecimal SHA-256 of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def fsync_path(path: str | Path) -> None:
    """Flush a file's content, or the names inside a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def adopt_mode(path: Path) -> None:
    """Give a file or folder the permissions of its parent, which follow the umask.

    safetensors and ``mkdtemp`` create files and folders for the owner only.
    """
    mode = path.parent.stat().st_mode
    path.chmod(mode & (0o777 if path.is_dir() else 0o666))


def temporary_name(final: str | Path) -> Path:
    """Return a temporary name beside ``final``, unique to this process."""
    return Path(f"{final}.{os.getpid()}.tmp")


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and flush it; the caller flushes its folder.

    Raises:
        OSError: the file exists, the disk is full or the folder not writable.
    """
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_atomically(final: str | Path, content: bytes, *, durable: bool = True) -> None:
    """Write ``content`` to ``final`` atomically; symbolic links are replaced, not followed.

    Args:
        final: the file.
        content: its new content.
        durable: flush it to disk, so that it outlives a power failure.

    Raises:
        OSError: the disk is full or the folder not writable; ``final`` is then unchanged.
    """
    temporary = temporary_name(final)
    # A killed process with the same id may have left one.
    temporary.unlink(missing_ok=True)
    try:
        if durable:
            write_durably(temporary, content)
        else:
            with temporary.open("xb") as stream:
                stream.write(content)
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        fsync_path(Path(final).parent)


@contextmanager
def published_folder(output: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``output`` if the block succeeds.

    Args:
        output: the final name; must not exist or be an empty folder.
        replace: replace an existing folder, which is unchanged if anything fails.

    Raises:
        OSError: the disk is full, or ``output`` exists or cannot be created.
    """
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent))
    fresh, old = staging / "new", staging / "old"
    try:
        fresh.mkdir()
        yield fresh
        for path in sorted(fresh.rglob("*")):
            adopt_mode(path)
            fsync_path(path)
        fsync_path(fresh)
        if replace and output.exists():
            output.rename(old)
        fresh.rename(output)
        fsync_path(output.parent)
    finally:
        if old.exists() and not output.exists():
            old.rename(output)
        shutil.rmtree(staging, ignore_errors=True)
