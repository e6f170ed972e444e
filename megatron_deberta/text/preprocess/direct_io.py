"""Files written and read past the page cache, whose copies cost more than byte pairs do.

Owns alignment: whole blocks go straight between memory and disk, the rest through the page cache,
and so does everything where a file system can do no better. Refuses to name or publish files.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

BUFFER_BYTES = 1 << 20
# What places, sizes and addresses are multiples of, to suit any disk.
_BLOCK = 4096


def new_buffer() -> memoryview:
    """Return memory to read or write with; to be used again, as fresh memory costs time.

    It is mapped, so aligned, and private, since processes are forked.
    """
    return memoryview(mmap.mmap(-1, BUFFER_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class DirectWriter(AbstractContextManager["DirectWriter"]):
    """Writes a range of a file, from its beginning on.

    Args:
        path: made if it does not exist; what is outside the range stays.
        buffer: of ``new_buffer``, for this writer alone while it is open.
        offset: where in the file the range begins.
    """

    def __init__(self, path: Path, buffer: memoryview, offset: int = 0) -> None:
        """See the class."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        self._buffer = buffer
        # The buffer begins at a whole block of the file, so that aligned here is aligned there.
        self._place = offset // _BLOCK * _BLOCK
        self._begin = self._end = offset % _BLOCK

    def write(self, content: bytes | memoryview) -> None:
        """Write behind what was written before.

        Raises:
            OSError: the disk is full or broken.
        """
        left = memoryview(content).cast("B")
        while left:
            now = left[: len(self._buffer) - self._end]
            self._buffer[self._end : self._end + len(now)] = now
            self._end += len(now)
            left = left[len(now) :]
            if self._end == len(self._buffer):
                self._write_out()

    def flush(self) -> None:
        """Write all to the file; it survives a power loss only after ``os.fsync``.

        Raises:
            OSError: the disk is full or broken.
        """
        if self._begin < self._end:
            self._write_out()

    def fileno(self) -> int:
        """Return the file's descriptor."""
        return self._file

    def close(self) -> None:
        """Close the file, if it is open; what was not written is lost."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __exit__(self, *_: object) -> None:
        """See ``close``."""
        self.close()

    def _write_out(self) -> None:
        first = min(-(-self._begin // _BLOCK) * _BLOCK, self._end)
        last = max(self._end // _BLOCK * _BLOCK, first)
        for begin, end in ((self._begin, first), (first, last), (last, self._end)):
            is_direct = begin % _BLOCK == 0 and end % _BLOCK == 0
            while begin < end:
                view = self._buffer[begin:end]
                begin += _transfer(os.pwrite, self._file, view, self._place + begin, is_direct)
        self._place += self._end // _BLOCK * _BLOCK
        self._begin = self._end = self._end % _BLOCK


def read_direct(path: Path, size: int, buffer: memoryview) -> Iterator[memoryview]:
    """Read the first bytes of a file, each piece into the same buffer, of ``new_buffer``.

    Raises:
        OSError: it cannot be read, or is shorter.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        place = 0
        while place < size:
            read = _transfer(os.preadv, file, [buffer], place, place % _BLOCK == 0)
            if not read:
                raise OSError(errno.EIO, f"shorter than the {size} bytes that were written", path)
            yield buffer[: min(read, size - place)]
            place += read
    finally:
        os.close(file)


def copy_direct(
    source: Path, size: int, destination: Path, offset: int, buffers: tuple[memoryview, memoryview]
) -> None:
    """Copy the first bytes of a file to a place in another, which is not flushed.

    Args:
        source: file to read.
        size: how much of it.
        destination: file to write to.
        offset: where in it.
        buffers: two of ``new_buffer``.

    Raises:
        OSError: one cannot be read, or is shorter, or the other not written.
    """
    with DirectWriter(destination, buffers[1], offset) as writer:
        for piece in read_direct(source, size, buffers[0]):
            writer.write(piece)
        writer.flush()


def sha256_direct(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    for piece in read_direct(path, path.stat().st_size, new_buffer()):
        digest.update(piece)
    return digest.hexdigest()


def _transfer(
    call: Callable[[int, Any, int], int], file: int, memory: Any, place: int, is_direct: bool
) -> int:
    """Read or write past the page cache, or through it where the file system refuses."""
    if is_direct:
        try:
            _set_direct(file, True)
            return call(file, memory, place)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    _set_direct(file, False)
    return call(file, memory, place)


def _set_direct(file: int, is_direct: bool) -> None:
    flags = fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT
    fcntl.fcntl(file, fcntl.F_SETFL, flags | (os.O_DIRECT if is_direct else 0))
