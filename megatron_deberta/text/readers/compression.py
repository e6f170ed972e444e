"""Text of plain, gzip, zstandard, bzip2 and xz files, told apart by their first bytes.

Truncated and damaged files are detected.
"""

from __future__ import annotations

import bz2
import io
import lzma
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import zstandard
from isal import igzip_lib

from megatron_deberta.errors import DataError

Compression = Literal["none", "gzip", "zstd", "bzip2", "xz"]

COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
READ_BYTES = 1 << 18
_ZSTD_FRAME = b"\x28\xb5\x2f\xfd"
_MAGIC: Final[Mapping[bytes, Compression]] = {
    b"\x1f\x8b": "gzip",
    _ZSTD_FRAME: "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    # Skippable frames, which may come first.
    **{bytes([low, 0x2A, 0x4D, 0x18]): "zstd" for low in range(0x50, 0x60)},
}
_ERRORS: Any = (igzip_lib.IsalError, zstandard.ZstdError, lzma.LZMAError, OSError, EOFError)


def window_fault(head: bytes) -> str:
    """Return what is wrong with the window of a zstandard file; empty: nothing.

    Args:
        head: the first 18 bytes of a file.
    """
    if not head.startswith(_ZSTD_FRAME):
        return ""
    try:
        window: int = zstandard.get_frame_parameters(head).window_size
    except zstandard.ZstdError:  # which reading reports
        return ""
    if window <= _ZSTD_WINDOW_BYTES:
        return ""
    return (
        f"its zstandard window of {window >> 20:,} MiB exceeds {_ZSTD_WINDOW_BYTES >> 20} MiB, the "
        "memory that reading may take; compress it again: zstd -dc --long=31 FILE | zstd --long=27"
    )


def compression_of(head: bytes) -> Compression:
    """Return how a file is compressed, by its first bytes."""
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "none")


class TextStream(io.BufferedReader):
    """The text of a file, decompressed where it is compressed.

    Members and frames may follow one another. Memory does not grow with what a few compressed
    bytes may unfold to. Where compressed data is damaged or ends early, the text ends.

    Args:
        file: open binary file, without a buffer; closed with this.
        name: what to call it in errors.
        compression: what is around the text, see ``compression_of``.

    Raises:
        DataError: while reading: the file cannot be read.
    """

    def __init__(self, file: io.RawIOBase, name: str, compression: Compression) -> None:
        """See the class."""
        new_frame = _FRAMES.get(compression)
        self._text = _FoldedText(file, name, new_frame) if new_frame else _PlainText(file, name)
        super().__init__(self._text, READ_BYTES)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file that were read."""
        return self._text.file_bytes

    @property
    def damage(self) -> str:
        """What is wrong with the compressed data; empty while nothing was found."""
        return self._text.damage


class _PlainText(io.RawIOBase):
    def __init__(self, file: io.RawIOBase, name: str) -> None:
        self._file = file
        self._name = name
        self.file_bytes = 0
        self.damage = ""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            size = self._file.readinto(buffer) or 0
        except OSError as error:
            reason = error.strerror or error
            raise DataError(f"{self._name}: cannot be read ({reason})") from error
        self.file_bytes += size
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


class _FoldedText(_PlainText):
    def __init__(self, file: io.RawIOBase, name: str, new_frame: Callable[[], _Bounded]) -> None:
        super().__init__(file, name)
        self._pieces = self._unfold(new_frame)
        self._piece = memoryview(b"")

    def readinto(self, buffer: Any) -> int:
        while not self._piece:
            try:
                self._piece = memoryview(next(self._pieces))
            except StopIteration:
                return 0
            except _ERRORS as error:
                self.damage = f"compressed data is damaged ({error})"
                if "too much memory" in str(error):
                    self.damage = "its window exceeds 128 MiB; compress with at most zstd --long=27"
                return 0
        size = min(len(self._piece), len(buffer))
        buffer[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size

    def _unfold(self, new_frame: Callable[[], _Bounded]) -> Iterator[bytes]:
        folded = memoryview(bytearray(READ_BYTES))
        frame, begun = new_frame(), False
        while size := super().readinto(folded):
            compressed = bytes(folded[:size])
            while compressed:
                # Zeros behind a member are padding, as gzip's and xz's own programs allow.
                compressed = compressed if begun else compressed.lstrip(b"\0")
                if not compressed:
                    break
                begun = True
                yield from frame.feed(compressed)
                compressed = b""
                if frame.eof:
                    compressed = frame.rest
                    frame, begun = new_frame(), False
        if begun:
            self.damage = "compressed data ends early; the file is truncated"


class _Bounded:
    """One member of a library that bounds its output: ``decompress(data, max_length)``."""

    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def feed(self, data: bytes) -> Iterator[bytes]:
        yield self._frame.decompress(data, READ_BYTES)
        while not self._frame.eof and not self._frame.needs_input:
            yield self._frame.decompress(b"", READ_BYTES)

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def rest(self) -> bytes:
        return bytes(self._frame.unused_data)


class _Zstd(_Bounded):
    def feed(self, data: bytes) -> Iterator[bytes]:
        # This library cannot bound its output, so it gets little input at a time.
        for begin in range(0, len(data), _ZSTD_BYTES):
            if self._frame.eof:
                self._left = data[begin:]
                return
            yield self._frame.decompress(data[begin : begin + _ZSTD_BYTES])
        self._left = b""

    @property
    def rest(self) -> bytes:
        return bytes(self._frame.unused_data) + self._left


_ZSTD_BYTES = 1 << 12
# Memory that a file can ask for: the library's own bound, and that of ``zstd`` without ``--long``.
_ZSTD_WINDOW_BYTES = 1 << 27

_FRAMES: Final[Mapping[Compression, Callable[[], _Bounded]]] = {
    "gzip": lambda: _Bounded(igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)),
    "zstd": lambda: _Zstd(
        zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
    ),
    "bzip2": lambda: _Bounded(bz2.BZ2Decompressor()),
    "xz": lambda: _Bounded(lzma.LZMADecompressor(lzma.FORMAT_XZ)),
}
