"""Files that appear under their final name whole or not at all.

Owns temporary names, flushing and renaming. Refuses to know what the files hold.
"""

from __future__ import annotations

import os
from pathlib import Path


def temporary_name(final: str | Path) -> Path:
    """Return a name beside ``final``, unique to this process, for the unfinished file."""
    return Path(f"{final}.{os.getpid()}.tmp")


def fsync_directory(directory: str | Path) -> None:
    """Make renames and removals inside ``directory`` survive a power loss."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(final: str | Path, content: bytes) -> None:
    """Write ``content`` to ``final`` so that no reader ever sees part of it.

    Raises:
        OSError: the disk is full or the folder not writable; ``final`` is then as it was.
    """
    temporary = temporary_name(final)
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    fsync_directory(Path(final).parent)
