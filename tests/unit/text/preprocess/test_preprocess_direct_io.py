"""Ranges of files, written and read past the page cache where the file system can."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_deberta.text.preprocess import direct_io, merging
from megatron_deberta.text.preprocess.direct_io import (
    DirectWriter,
    copy_direct,
    new_buffer,
    read_direct,
    sha256_direct,
)
from megatron_deberta.text.preprocess.pipeline import preprocess
from megatron_deberta.text.readers.sources import find_sources

BLOCK = 4096


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "BUFFER_BYTES", 2 * BLOCK)


def watch(monkeypatch: pytest.MonkeyPatch, *, refuses: int = 0) -> list[tuple[bool, int, int]]:
    """List the calls as (direct, place, size); with ``refuses`` the direct ones have this error."""
    calls = []

    def watched(original: Callable[..., int], size: Callable[[Any], int]) -> Callable[..., int]:
        def call(file: int, memory: Any, place: int) -> int:
            is_direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
            calls.append((is_direct, place, size(memory)))
            if is_direct and refuses:
                raise OSError(refuses, os.strerror(refuses))
            return original(file, memory, place)

        return call

    monkeypatch.setattr(os, "pwrite", watched(os.pwrite, len))
    monkeypatch.setattr(os, "preadv", watched(os.preadv, lambda memory: len(memory[0])))
    return calls


@pytest.mark.parametrize("offset", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 17])
@pytest.mark.parametrize("size", [0, 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK, 40_000])
@pytest.mark.parametrize("refuses", [0, errno.EINVAL])
def test_a_range_is_written_and_nothing_else(
    offset: int, size: int, refuses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    before = random.Random(0).randbytes(60_000)
    path.write_bytes(before)
    content = random.Random(1).randbytes(size)
    calls = watch(monkeypatch, refuses=refuses)
    with DirectWriter(path, new_buffer(), offset) as writer:
        begin = 0
        for length in (1, 3 * BLOCK, 5, BLOCK - 6, size):
            writer.write(content[begin : begin + length])
            begin += length
            if length == 5:
                writer.flush()  # in the middle of a block
        writer.flush()
    assert path.read_bytes() == before[:offset] + content + before[offset + size :]
    assert all(place % BLOCK == length % BLOCK == 0 for direct, place, length in calls if direct)
    if not refuses and any(direct for direct, _, _ in calls):
        assert all(direct or length < BLOCK for direct, _, length in calls)


@pytest.mark.parametrize("size", [0, 1, BLOCK, 3 * BLOCK + 5, 40_000])
@pytest.mark.parametrize("refuses", [0, errno.EINVAL])
def test_the_beginning_of_a_file_is_read(
    size: int, refuses: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    content = random.Random(0).randbytes(40_000)
    path.write_bytes(content)
    watch(monkeypatch, refuses=refuses)
    assert (
        b"".join(bytes(piece) for piece in read_direct(path, size, new_buffer())) == content[:size]
    )
    assert sha256_direct(path) == hashlib.sha256(content).hexdigest()


def test_copies_to_a_place(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(30_000)
    (tmp_path / "part").write_bytes(content)
    (tmp_path / "whole").write_bytes(b"-" * 50_000)
    buffers = new_buffer(), new_buffer()
    copy_direct(tmp_path / "part", 29_999, tmp_path / "whole", 7, buffers)
    expected = b"-" * 7 + content[:29_999] + b"-" * (50_000 - 29_999 - 7)
    assert (tmp_path / "whole").read_bytes() == expected


def test_what_is_missing_or_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(5000))
    with pytest.raises(OSError, match="shorter than the 5001 bytes"):
        list(read_direct(path, 5001, new_buffer()))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with DirectWriter(path, new_buffer()) as writer, pytest.raises(OSError, match="No space"):
        writer.write(bytes(3 * BLOCK))


def test_small_and_large_parts_make_the_same_shard(
    corpus: str, tokenizer_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = []

    def copy(*args: Any) -> None:
        copied.append(args)
        copy_direct(*args)

    shards = []
    for least in (1 << 20, 1):
        changed = {**vars(direct_io), "copy_direct": copy, "BUFFER_BYTES": least}
        monkeypatch.setattr(merging, "direct_io", SimpleNamespace(**changed))
        output = str(tmp_path / str(least) / "c")
        preprocess(find_sources([corpus]), tokenizer_dir, output, unit_bytes=5_000)
        shards.append(
            [Path(f"{output}_text_document.{end}").read_bytes() for end in ("bin", "idx")]
        )
        assert bool(copied) == (least == 1)
    assert len(copied) > 3
    assert shards[0] == shards[1]
