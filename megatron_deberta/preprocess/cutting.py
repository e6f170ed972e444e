"""Cuts a file's text into blocks of whole records, from any offset to any other.

Owns positions: a record belongs to the range in which it begins, so that ranges beside each other
hold every record once. Refuses to hold a record beyond the limit in memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from megatron_deberta.errors import DataError
from megatron_deberta.preprocess.compression import DamagedFileError, read_text_bytes
from megatron_deberta.preprocess.sources import Source

_BLANKS = b" \t\r\n"
_PARAGRAPH_END = re.compile(rb"\n[ \t\r]*\n[ \t\r\n]*")
_KEPT_BYTES = 1 << 10
"""Of a record that is passed over; a longer run of blanks does not end it."""
_COUNTED_BYTES = 1 << 16
TOO_LONG = "too long"
ENDLESS = 1 << 62


@dataclass(frozen=True, slots=True)
class Block:
    """Some whole records.

    Attributes:
        content: all that was read at once, which several blocks share; empty where ``defect`` tells
            of bytes that are no record.
        begin: where in ``content`` the records begin.
        first_line: number of the first line, from 1; where reading can begin anywhere
            (``RecordReader.can_seek``), counted from the beginning of the range.
        offset_bytes: where it begins in the uncompressed file.
        defect: why there is no content: ``TOO_LONG``, or how the file is damaged.
        size_bytes: bytes it stands for.
    """

    content: bytes
    begin: int
    first_line: int
    offset_bytes: int
    defect: str
    size_bytes: int

    @property
    def end(self) -> int:
        """Where in ``content`` the records end."""
        return self.begin + self.size_bytes


class RecordReader:
    """Reads the records of one file, range after range; going on where it stands costs nothing.

    Args:
        source: file of lines or paragraphs.
        block_bytes: a block ends at the last record boundary once it has this size.
        longest_bytes: records of this size and more are passed over.

    Attributes:
        can_seek: reading can begin anywhere, and lines are counted from there.
        line: number of the next record's first line.
        offset: where the next record begins in the uncompressed file.
        file_bytes: bytes of the file read so far.
        at_end: the file has no more records.
    """

    def __init__(
        self, source: Source, *, block_bytes: int = 1 << 18, longest_bytes: int = 100_000_000
    ) -> None:
        """See the class."""
        self._source = source
        self._block_bytes = block_bytes
        self._longest = longest_bytes
        self._by_line = source.text_format != "paragraph"
        self.can_seek = self._by_line and source.compression == "none"
        self.file_bytes = 0
        self._stream: BinaryIO | None = None
        self._buffer = b""
        self._rewind(0)

    def blocks(self, begin: int, end: int = ENDLESS) -> Iterator[Block]:
        """Read the records that begin in ``[begin, end)``, offsets into the uncompressed text.

        Raises:
            DataError: the file cannot be read, or is not the one that was found.
        """
        self.go_to(begin)
        yield from self._blocks(end)

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def go_to(self, begin: int) -> None:
        """Pass over the records that begin before an offset.

        Raises:
            DataError: the file cannot be read, or is not the one that was found.
        """
        if self._passed <= begin <= self.offset:
            pass  # the next record is the first from there
        elif self.can_seek and begin:
            self._seek(begin)
        else:
            if begin < self._passed:
                self._rewind(0)
            for _ in self._blocks(begin):
                pass
        if self.can_seek:
            self.line = 1

    def _seek(self, begin: int) -> None:
        # The byte before tells whether a record begins here; its rest is another range's.
        self._rewind(begin - 1)
        while not (size := self._boundary(1)):
            self._drop(self._left)
            if not self._fill():
                self.at_end = True
                break
        self._drop(size)
        self._passed = begin

    def _rewind(self, offset: int) -> None:
        self.close()
        self.offset, self.line = offset, 1
        self._passed = offset
        self.at_end = False
        self._damage = ""
        self._buffer = b""
        self._begin = self._searched = 0

    @property
    def _left(self) -> int:
        """Bytes of the buffer that are no part of an earlier block."""
        return len(self._buffer) - self._begin

    def _open(self) -> None:
        source = self._source
        try:
            self._stream = open(source.path, "rb")
            status = os.fstat(self._stream.fileno())
            self._stream.seek(self.offset if self.can_seek else 0)
        except OSError as error:
            raise DataError(f"{source.path}: {error.strerror}; check --input") from error
        if source.modified_ns and not source.label:
            found = (status.st_size, status.st_mtime_ns)
            if found != (source.size_bytes, source.modified_ns):
                raise DataError(f"{source.path}: changed while it was read; begin again")
        self._pieces = read_text_bytes(self._stream, source.name, source.compression)

    def _blocks(self, end: int) -> Iterator[Block]:
        self._passed = ENDLESS
        while not self.at_end and self.offset < end:
            reaches_end = self.offset + self._left >= end
            if not reaches_end and self._left < self._block_bytes and self._fill():
                continue
            size = self._boundary(end - self.offset) if reaches_end else 0
            size = size or self._last_boundary()
            if size:
                yield self._emit(size)
            elif self._left >= self._longest:
                yield self._pass_over()
            elif not self._fill():
                yield from self._finish()
        self._passed = end

    def _fill(self) -> bool:
        """Read a block, or as much as is there already (a long record); False at the end."""
        size = self._left
        least = max(self._block_bytes, min(2 * size, self._longest))
        pieces: list[bytes | memoryview] = [memoryview(self._buffer)[self._begin :]]
        # Joined once: a buffer that grows piece by piece is copied again and again.
        while (size < least or len(pieces) == 1) and (piece := self._next_piece()) is not None:
            pieces.append(piece)
            size += len(piece)
        self._buffer = b"".join(pieces)
        self._searched -= self._begin
        self._begin = 0
        return len(pieces) > 1

    def _next_piece(self) -> bytes | None:
        if self._stream is None:
            self._open()
        try:
            piece, taken = next(self._pieces, (None, 0))
        except DamagedFileError as error:
            self._damage = str(error).removeprefix(f"{self._source.name}: ")
            return None
        self.file_bytes += taken
        return piece

    def _boundary(self, least: int) -> int:
        """Return how many bytes, ``least`` or more, end with a record; 0 where none is seen."""
        if self._by_line:
            first = max(self._begin + least - 1, self._searched)
            return max(self._buffer.find(b"\n", first) + 1 - self._begin, 0)
        return next((size for size in self._paragraph_sizes() if size >= least), 0)

    def _last_boundary(self) -> int:
        if self._by_line:
            size = max(self._buffer.rfind(b"\n", self._searched) + 1 - self._begin, 0)
        else:
            size = max(self._paragraph_sizes(), default=0)
        if not size:
            self._searched = len(self._buffer)
        return size

    def _paragraph_sizes(self) -> Iterator[int]:
        first = self._searched
        while first > self._begin and self._buffer[first - 1] in _BLANKS:
            first -= 1
        for match in _PARAGRAPH_END.finditer(self._buffer, first):
            # Blanks that reach the end may go on.
            if match.end() < len(self._buffer):
                yield match.end() - self._begin

    def _emit(self, size: int) -> Block:
        block = Block(self._buffer, self._begin, self.line, self.offset, "", size)
        self._drop(size)
        return block

    def _drop(self, size: int) -> None:
        self.line += _count_lines(self._buffer, self._begin, size)
        self.offset += size
        self._begin += size
        if self._begin > 4 * self._block_bytes:
            # Nobody waits for the next read to get the memory of a long record back.
            self._buffer = self._buffer[self._begin :]
            self._begin = 0
        self._searched = self._begin

    def _pass_over(self) -> Block:
        """Leave out the record whose beginning fills the buffer."""
        line, offset = self.line, self.offset
        while not (size := self._boundary(1)):
            # Some bytes stay: a boundary may lie across two pieces.
            self._drop(max(self._left - _KEPT_BYTES, 0))
            if not self._fill():
                size = self._left
                break
        self._drop(size)
        return Block(b"", 0, line, offset, TOO_LONG, self.offset - offset)

    def _finish(self) -> Iterator[Block]:
        """Give what is left at the end; behind damage it is no whole record."""
        if self._damage:
            line, offset, size = self.line, self.offset, self._left
            self._drop(size)
            yield Block(b"", 0, line, offset, self._damage, size)
        elif self._left:
            yield self._emit(self._left)
        self.at_end = True
        self.close()


def _count_lines(content: bytes, begin: int, size: int) -> int:
    """Count line ends in a range, several times as fast as ``bytes.count``."""
    codes = np.frombuffer(content, np.uint8)[begin : begin + size]
    # Piece by piece, since a large array would be fresh memory each time.
    return sum(
        int(np.count_nonzero(codes[first : first + _COUNTED_BYTES] == ord("\n")))
        for first in range(0, size, _COUNTED_BYTES)
    )
