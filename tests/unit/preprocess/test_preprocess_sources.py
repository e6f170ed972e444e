"""Files in, whole records out; damaged files are named."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.preprocess import sources as sources_module
from megatron_deberta.preprocess.records import parse_documents
from megatron_deberta.preprocess.sources import Source, find_sources, iter_blocks

TEXTS = [f"Document {index}: äöü " + "word " * (index % 50) for index in range(3000)]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def read(path: Path, block_bytes: int = 1 << 20, **options: str) -> list[str]:
    blocks = iter_blocks(Source(str(path), 0), block_bytes=block_bytes, **options)  # type: ignore[arg-type]
    return [text for block in blocks for (text,) in parse_documents(block, ["text"])]


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def zstd_stream(content: bytes) -> bytes:
    """A frame that does not state its size, as ``zstd < in > out`` writes it."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(content) + compressor.flush()


SKIPPABLE_FRAME = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "plain": lambda content: content,
    "gzip": gzip.compress,
    "two gzip members": lambda c: gzip.compress(c[:1000]) + gzip.compress(c[1000:]),
    "zstd": zstd,
    "zstd stream": zstd_stream,
    "two zstd frames": lambda c: zstd(c[:1000]) + zstd_stream(c[1000:]),
    "pzstd": lambda c: SKIPPABLE_FRAME + zstd(c[:777]) + SKIPPABLE_FRAME + zstd(c[777:]),
}


@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 20])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_compression_gives_every_document(
    encoding: str, block_bytes: int, tmp_path: Path
) -> None:
    path = write(tmp_path, "data", ENCODINGS[encoding](JSONL))
    assert read(path, block_bytes) == TEXTS


def test_missing_newline_at_the_end_and_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", b"\xef\xbb\xbf" + JSONL.rstrip(b"\n"))
    assert read(path) == TEXTS
    path = write(tmp_path, "a.txt", b"\xef\xbb\xbffirst\n\nsecond")
    assert read(path) == ["first", "second"]


@pytest.mark.parametrize("encoding", ["gzip", "two gzip members", "zstd", "zstd stream", "pzstd"])
def test_truncated_file_is_an_error(encoding: str, tmp_path: Path) -> None:
    whole = ENCODINGS[encoding](JSONL)
    for size in (len(whole) - 1, len(whole) - 5, len(whole) // 2, 20):
        path = write(tmp_path, "cut", whole[:size])
        with pytest.raises(DataError, match=r"cut: compressed data (ends early|is damaged)"):
            read(path)


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_damaged_or_followed_by_garbage_is_an_error(encoding: str, tmp_path: Path) -> None:
    whole = ENCODINGS[encoding](JSONL)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0xFF
    for content in (bytes(flipped), whole + b"garbage"):
        with pytest.raises(DataError, match=r"(damaged|not JSON|not UTF-8)"):
            read(write(tmp_path, "bad", content))


def test_formats_by_name_content_and_option(tmp_path: Path) -> None:
    text = b'{"text": "one"}\n\n\ntwo\r\n \r\nthree\nmore\n'
    assert read(write(tmp_path, "a.txt", text)) == ['{"text": "one"}', "two", "three\nmore"]
    lines = read(tmp_path / "a.txt", text_mode="line")
    assert lines == ['{"text": "one"}', "two", "three", "more"]
    assert read(write(tmp_path, "unknown", b' \n{"text": "one"}\n')) == ["one"]
    assert read(write(tmp_path, "unknown", b"one\n\ntwo")) == ["one", "two"]
    assert read(write(tmp_path, "b.json.gz", gzip.compress(b'\n{"text": "x"}'))) == ["x"]
    assert read(write(tmp_path, "c.txt", b'{"text": "y"}'), file_format="jsonl") == ["y"]
    assert read(write(tmp_path, "empty.jsonl", b"")) == []


@pytest.mark.parametrize("block_bytes", [1, 50, 500, 1 << 20])
def test_paragraphs_do_not_depend_on_blocks(block_bytes: int, tmp_path: Path) -> None:
    paragraphs = [f"paragraph {index}\nits second line" for index in range(500)]
    gaps = ["\n\n", "\n \n", "\n\n\n\n", "\r\n\r\n"]
    text = "".join(paragraph + gaps[i % 4] for i, paragraph in enumerate(paragraphs))
    path = write(tmp_path, "a.txt", text.encode())
    assert read(path, block_bytes) == paragraphs


def test_record_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "MOST_RECORD_BYTES", 100_000)
    path = write(tmp_path, "a.jsonl", b'{"text": "ok"}\n' + b"x" * 1_000_000)
    with pytest.raises(DataError, match="line 2 begins a record of more than"):
        read(path, block_bytes=10)


def test_find_sources(tmp_path: Path) -> None:
    (tmp_path / "sub" / ".hidden").mkdir(parents=True)
    wanted = ["a.jsonl", "b.txt.gz", "sub/c.json.zst"]
    for name in [*wanted, "README.md", ".d.jsonl", "sub/.hidden/e.jsonl"]:
        write(tmp_path, name, b"x")
    expected = [str(tmp_path / name) for name in wanted]
    assert [source.path for source in find_sources([str(tmp_path)])] == expected
    globbed = find_sources([f"{tmp_path}/**/*.json*", expected[0]])
    assert [source.path for source in globbed] == [expected[0], expected[2]]
    assert find_sources([expected[1]]) == [Source(expected[1], 1)]
    assert find_sources(["-"])[0].name == "standard input"


def test_unusable_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        find_sources([str(tmp_path / "nowhere.jsonl")])
    with pytest.raises(DataError, match="matches no file"):
        find_sources([f"{tmp_path}/*.jsonl"])
    with pytest.raises(DataError, match=r"no file ending in \.jsonl"):
        find_sources([str(tmp_path)])
    with pytest.raises(ConfigError, match="cannot be combined"):
        find_sources(["-", str(tmp_path)])
    source = find_sources([str(write(tmp_path, "a.jsonl", b"x"))])[0]
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="No such file"):
        list(iter_blocks(source))
