"""Bytes out of plain, gzip and zstandard files, with damage found.

Owns decompression; the kind is told by the first bytes, not by the name. Refuses truncated
files: a stream reader would take the end of a broken ``.zst`` for the end of the text.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import zstandard

from megatron_deberta.errors import DataError

_READ_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = tuple(bytes([low, 0x2A, 0x4D, 0x18]) for low in range(0x50, 0x60))
_LARGEST_WINDOW = 1 << 31
"""What ``zstd --long=31`` needs; the library's own bound is 128 MiB."""


def read_text_bytes(stream: BinaryIO, name: str) -> Iterator[tuple[bytes, int]]:
    """Read a file through, decompressing it where it is compressed.

    Args:
        stream: open binary file.
        name: what to call it in errors.

    Yields:
        Pieces of the text, and how many bytes of the file each took.

    Raises:
        DataError: the file cannot be read, or its compressed data is damaged or ends early.
    """
    head = _read(stream, name)
    if head.startswith(_GZIP_MAGIC):
        yield from _decompress(stream, name, head, lambda: zlib.decompressobj(wbits=31))
    elif head.startswith((_ZSTD_MAGIC, *_ZSTD_SKIPPABLE)):
        decompressor = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        yield from _decompress(stream, name, head, decompressor.decompressobj)
    else:
        while head:
            yield head, len(head)
            head = _read(stream, name)


def _decompress(
    stream: BinaryIO, name: str, compressed: bytes, new_frame: Callable[[], Any]
) -> Iterator[tuple[bytes, int]]:
    frame = new_frame()
    begun = False
    while compressed:
        taken = len(compressed)
        pieces = []
        while compressed:
            try:
                pieces.append(frame.decompress(compressed))
            except (zlib.error, zstandard.ZstdError) as error:
                raise DataError(f"{name}: compressed data is damaged ({error})") from error
            begun = True
            compressed = frame.unused_data
            if frame.eof:
                frame, begun = new_frame(), False
        yield b"".join(pieces), taken
        compressed = _read(stream, name)
    if begun:
        raise DataError(f"{name}: compressed data ends early; the file is truncated")


def _read(stream: BinaryIO, name: str) -> bytes:
    try:
        return stream.read(_READ_BYTES)
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror or error})") from error
