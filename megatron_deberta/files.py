"""Files and folders that survive crashes: flushed, and under their final name whole or not at all.

Owns flushing, renaming, temporary names and digests of files. Refuses to know what they hold;
what the disk refuses stays an ``OSError``, which callers put into their own words.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sha256_file(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def fsync_path(path: str | Path) -> None:
    """Make a file's content, or the names inside a folder, survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def adopt_mode(path: Path) -> None:
    """Give what was made for its owner only, as safetensors does, the permissions of its folder.

    A folder made by ``mkdir`` follows the umask, which cannot be read without setting it.
    """
    mode = path.parent.stat().st_mode
    path.chmod(mode & (0o777 if path.is_dir() else 0o666))


def temporary_name(final: str | Path) -> Path:
    """Return a name beside ``final``, unique to this process, for the unfinished file."""
    return Path(f"{final}.{os.getpid()}.tmp")


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and flush it; its name survives only once its folder is flushed too.

    Raises:
        OSError: the file exists, the disk is full or the folder not writable.
    """
    with path.open("xb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_atomically(final: str | Path, content: bytes) -> None:
    """Write ``content`` to ``final`` so that no reader ever sees part of it.

    Raises:
        OSError: the disk is full or the folder not writable; ``final`` is then as it was.
    """
    temporary = temporary_name(final)
    # Left by a process of the same number that was killed.
    temporary.unlink(missing_ok=True)
    try:
        write_durably(temporary, content)
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_path(Path(final).parent)


@contextmanager
def published_folder(output: Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a folder to fill, which appears as ``output`` only if the block ends without error.

    Args:
        output: the final name; nothing or an empty folder may be there.
        replace: a folder that is there is replaced, and stays as it was if anything fails.

    Raises:
        OSError: the disk is full, or ``output`` is in use or cannot be made.
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
        # If even this fails, the old folder stays in the hidden one.
        if old.exists() and not output.exists():
            old.rename(output)
        shutil.rmtree(staging, ignore_errors=True)
