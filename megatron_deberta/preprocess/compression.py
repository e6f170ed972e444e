"""Bytes out of plain, gzip, zstandard, bzip2 and xz files, with damage found.

Owns decompression; the kind is told by the first bytes, not by the name. Refuses truncated
files: a stream reader would take the end of a broken ``.zst`` for the end of the text.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, BinaryIO, Final, Literal

import zstandard
from isal import isal_zlib

from megatron_deberta.errors import DataError

Compression = Literal["none", "gzip", "zstd", "bzip2", "xz"]

COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2", ".xz")
READ_BYTES = 1 << 18
_MAGIC: Final[Mapping[bytes, Compression]] = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    # Skippable frames, which may come first.
    **{bytes([low, 0x2A, 0x4D, 0x18]): "zstd" for low in range(0x50, 0x60)},
}
_LARGEST_WINDOW = 1 << 31
"""What ``zstd --long=31`` needs; the library's own bound is 128 MiB."""
_ERRORS: Final[Any] = (
    zlib.error,
    isal_zlib.IsalError,
    zstandard.ZstdError,
    lzma.LZMAError,
    OSError,
    EOFError,
)


class DamagedFileError(DataError):
    """Compressed data that is broken or ends early; what came before was good."""


def compression_of(head: bytes) -> Compression:
    """Tell by a file's first bytes how it is compressed."""
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "none")


def read_text_bytes(
    stream: BinaryIO, name: str, compression: Compression
) -> Iterator[tuple[bytes, int]]:
    """Read a file through, decompressing it where it is compressed.

    Members and frames may follow one another. Memory does not grow with what a few compressed
    bytes may unfold to.

    Args:
        stream: open binary file.
        name: what to call it in errors.
        compression: what is around the text, see ``compression_of``.

    Yields:
        Pieces of the text, and how many bytes of the file each took.

    Raises:
        DamagedFileError: compressed data is damaged or ends early; all before it was yielded.
        DataError: the file cannot be read.
    """
    head = _read(stream, name)
    if compression == "none":
        while head:
            yield head, len(head)
            head = _read(stream, name)
        return
    yield from _decompress(stream, name, head, _FRAMES[compression])


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


class _Gzip(_Bounded):
    def feed(self, data: bytes) -> Iterator[bytes]:
        while data and not self._frame.eof:
            yield self._frame.decompress(data, READ_BYTES)
            data = self._frame.unconsumed_tail
        while not self._frame.eof and (more := self._frame.decompress(b"", READ_BYTES)):
            yield more


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

_FRAMES: Final[Mapping[Compression, Callable[[], _Bounded]]] = {
    "gzip": lambda: _Gzip(isal_zlib.decompressobj(wbits=31)),
    "zstd": lambda: _Zstd(
        zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
    ),
    "bzip2": lambda: _Bounded(bz2.BZ2Decompressor()),
    "xz": lambda: _Bounded(lzma.LZMADecompressor(lzma.FORMAT_XZ)),
}


def _decompress(
    stream: BinaryIO, name: str, compressed: bytes, new_frame: Callable[[], _Bounded]
) -> Iterator[tuple[bytes, int]]:
    frame, begun = new_frame(), False
    while compressed:
        taken = len(compressed)
        while compressed:
            if not begun and not compressed.strip(b"\0"):
                # Padding behind a member, as gzip's and xz's own programs allow.
                break
            begun = True
            with _damage(name):
                for piece in frame.feed(compressed):
                    yield piece, taken
                    taken = 0
            compressed = b""
            if frame.eof:
                compressed = frame.rest
                frame, begun = new_frame(), False
        yield b"", taken
        compressed = _read(stream, name)
    if begun:
        raise DamagedFileError(f"{name}: compressed data ends early; the file is truncated")


@contextlib.contextmanager
def _damage(name: str) -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        raise DamagedFileError(f"{name}: compressed data is damaged ({error})") from error


def _read(stream: BinaryIO, name: str) -> bytes:
    try:
        return stream.read(READ_BYTES)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error})") from error
