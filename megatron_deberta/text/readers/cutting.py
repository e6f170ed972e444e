"""Records of a file, from any offset to any other; a record belongs to the range of its first byte.

Memory is bounded by the longest record allowed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from megatron_deberta.errors import DataError
from megatron_deberta.text.readers.compression import TextStream
from megatron_deberta.text.readers.records import DAMAGED, LONG, Defect, Record
from megatron_deberta.text.readers.sources import BYTE_ORDER_MARK, Source

_BLANKS = b" \t\r\n"
# Of a line that nobody wants, read at a time.
_SKIPPED_BYTES = 1 << 16
ENDLESS = 1 << 62


class TextBlock(NamedTuple):
    """Some records that follow one another.

    Attributes:
        records: those that are whole, blank ones too.
        defect: what is behind them and is no record: too long, or lost to damage.
        size_bytes: bytes they stand for.
    """

    records: list[Record]
    defect: Defect | None
    size_bytes: int


class RecordReader:
    """Reads the records of one file, range after range; going on where it stands costs nothing.

    Args:
        source: file of lines or paragraphs.
        block_bytes: a block ends behind the record with which it has this size.
        longest_bytes: records of this size and more are passed over.

    Attributes:
        can_seek: reading can begin anywhere, and lines are counted from there.
        line: number of the next record's first line.
        offset: where the next record begins in the uncompressed file.
        at_end: the file has no more records.
    """

    def __init__(
        self, source: Source, *, block_bytes: int = 1 << 18, longest_bytes: int = 100_000_000
    ) -> None:
        """See the class."""
        self._source = source
        self._block_bytes = block_bytes
        self._longest = longest_bytes
        readers = {"paragraph": self._read_paragraphs, "file": self._read_file}
        self._read_block = readers.get(source.text_format, self._read_lines)
        self.can_seek = source.text_format not in readers and source.compression == "none"
        self._stream: TextStream | None = None
        self._file_bytes_before = 0
        self._passed = 0
        self._rewind(0)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file read so far, each time it was opened."""
        return self._file_bytes_before + (self._stream.file_bytes if self._stream else 0)

    def blocks(self, begin: int, end: int = ENDLESS) -> Iterator[TextBlock]:
        """Read the records that begin in ``[begin, end)``, offsets into the uncompressed text.

        Raises:
            DataError: the file cannot be read, or is not the one that was found.
        """
        self.go_to(begin)
        yield from self._blocks(end)

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._file_bytes_before += self._stream.file_bytes
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
            # The byte before tells whether a record begins here; its rest is another range's.
            self._rewind(begin - 1)
            self.offset += self._whole_size(self._next_line(_SKIPPED_BYTES))[0]
            self._passed = begin
        else:
            if begin < self._passed:
                self._rewind(0)
            for _ in self._blocks(begin):
                pass
        if self.can_seek:
            self.line = 1

    def _rewind(self, offset: int) -> None:
        self.close()
        self.offset, self.line = offset, 1
        self._passed = offset
        self.at_end = False
        self._ahead = b""

    @property
    def _text(self) -> TextStream:
        if self._stream is None:
            self._stream = self._open()
        return self._stream

    def _open(self) -> TextStream:
        source = self._source
        try:
            file = open(source.path, "rb", buffering=0)
            status = os.fstat(file.fileno())
            file.seek(self.offset if self.can_seek else 0)
        except OSError as error:
            raise DataError(f"{source.path}: {error.strerror}; check --input") from error
        self._refuse_changed(status)
        return TextStream(file, source.name, source.compression)

    def _refuse_changed(self, status: os.stat_result) -> None:
        source = self._source
        # What is kept of standard input is not told by its time.
        is_older = source.label or status.st_mtime_ns == source.modified_ns
        if source.modified_ns and not (status.st_size == source.size_bytes and is_older):
            raise DataError(f"{source.path}: changed while it was read; begin again")

    def _blocks(self, end: int) -> Iterator[TextBlock]:
        self._passed = ENDLESS
        while not self.at_end and self.offset < end:
            block = self._read_block(min(end, self.offset + self._block_bytes))
            if block.size_bytes or block.defect:
                yield block
        self._passed = end

    def _next_line(self, size: int) -> bytes:
        """Return what was read ahead, or the next line or its first ``size`` bytes."""
        line, self._ahead = self._ahead, b""
        if line:
            return line
        line = self._text.readline(size)
        if self.offset == 0 and line.startswith(BYTE_ORDER_MARK):
            self.offset = len(BYTE_ORDER_MARK)
            line = line[self.offset :]
            if not line.endswith(b"\n"):
                line += self._text.readline(self.offset)
        return line

    def _whole_size(self, line: bytes) -> tuple[int, bool]:
        """Pass over the rest of a line; return the size of all of it, and whether it ends."""
        size = len(line)
        while line and not line.endswith(b"\n"):
            line = self._text.readline(_SKIPPED_BYTES)
            size += len(line)
        return size, bool(line)

    def _read_lines(self, stop: int) -> TextBlock:
        records: list[Record] = []
        begin, longest = self.offset, self._longest
        content = self._next_line(longest + 1)
        offset, line, readline = self.offset, self.line, self._text.readline
        while content:
            size = len(content)
            if size >= longest and size - content.endswith(b"\n") >= longest:
                break
            records.append((line, offset, content))
            offset += size
            line += 1
            content = readline(longest + 1) if offset < stop else b""
        self.offset, self.line = offset, line
        defect = None
        is_unended = bool(records) and not records[-1][2].endswith(b"\n")
        if content:
            size, is_ended = self._whole_size(content)
            self.offset += size
            self.line += is_ended
            defect = Defect(line, offset, LONG, f"{size - is_ended} bytes")
        elif offset < stop or is_unended:
            if is_unended and self._text.damage:
                line, offset, _ = records.pop()
            defect = self._end(line, offset)
        return TextBlock(records, defect, self.offset - begin)

    def _read_file(self, stop: int) -> TextBlock:
        """Read the whole file as one record."""
        begin = self.offset
        content = self._next_line(self._longest + 1)
        line, offset = self.line, self.offset
        content += self._text.read(self._longest + 1 - len(content))
        size = len(content)
        while rest := self._text.read(_SKIPPED_BYTES):
            size += len(rest)
        self.offset += size
        self.line += content.count(b"\n")
        defect = self._end(line, offset)
        if defect is None and size >= self._longest:
            detail = f"{size} bytes; --text-mode paragraph makes each paragraph a document"
            defect = Defect(line, offset, LONG, detail)
        records = [(line, offset, content)] if content and defect is None else []
        return TextBlock(records, defect, self.offset - begin)

    def _read_paragraphs(self, stop: int) -> TextBlock:
        records: list[Record] = []
        defect = None
        begin = self.offset
        self._pass_blanks()
        while defect is None and not self.at_end and (self.offset < stop or not self._ahead):
            line, offset = self.line, self.offset
            found = self._next_paragraph() if self._ahead else None
            if found is None:
                defect = self._end(line, offset)
            elif isinstance(found, Defect):
                defect = found
            else:
                records.append(found)
        return TextBlock(records, defect, self.offset - begin)

    def _next_paragraph(self) -> Record | Defect | None:
        """Read a paragraph and the blank lines behind it; None where damage cuts it off."""
        line, offset, size = self.line, self.offset, 0
        longest, readline = self._longest, self._text.readline
        lines: list[bytes] = []
        content = self._ahead
        # Only what may be blank is worth a call.
        while content and not (content.isspace() and self._is_blank(content)):
            length, is_ended = len(content), content.endswith(b"\n")
            if not is_ended:
                length, is_ended = self._whole_size(content)
            if size <= longest:
                lines.append(content)
            size += length
            self.line += is_ended
            content = readline(longest + 1)
        self.offset += size
        is_whole = bool(content)
        self._ahead = content
        self._pass_blanks()
        size -= is_ended
        if size >= longest:
            return Defect(line, offset, LONG, f"{size} bytes")
        if self._text.damage and not is_whole:
            return None
        return line, offset, b"".join(lines)

    def _pass_blanks(self) -> None:
        """Go to the next line that is not blank, and read it ahead."""
        while (line := self._next_line(self._longest + 1)) and self._is_blank(line):
            self.offset += len(line)
            self.line += 1
        self._ahead = line

    def _is_blank(self, line: bytes) -> bool:
        # What looks blank may be the beginning of a line that is not.
        return line.isspace() and not line.strip(_BLANKS) and len(line) <= self._longest

    def _end(self, line: int, offset: int) -> Defect | None:
        """Close the file; where it is damaged, what is left from a place on is no record."""
        damage = self._text.damage
        try:
            self._refuse_changed(os.stat(self._source.path))
        except OSError as error:
            raise DataError(f"{self._source.path}: {error.strerror} while it was read") from error
        self.at_end = True
        self.close()
        return Defect(line, offset, DAMAGED, damage) if damage else None
