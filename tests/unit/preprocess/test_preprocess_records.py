"""A bad record is named by file, line and reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_deberta.errors import DataError
from megatron_deberta.preprocess.records import parse_documents
from megatron_deberta.preprocess.sources import Source, iter_blocks

GOOD = b'{"text": "fine"}\n'
BAD_LINES = {
    b"{broken": "not JSON",
    b'{"text": "never ends': "not JSON",
    b'["text"]': "an array, not a JSON object",
    b'"text"': "a string, not a JSON object",
    b"3": "a number, not a JSON object",
    b'{"body": "x", "id": 1}': r"no key 'text' \(keys: body, id\); set --input-key",
    b"{}": r"no key 'text' \(keys: none\)",
    b'{"text": null}': "key 'text' is null, not text",
    b'{"text": ["a"]}': "key 'text' is an array, not text",
    b'{"text": 5}': "key 'text' is a number, not text",
    b'{"text": true}': "key 'text' is a boolean, not text",
    b'{"text": "\\ud800"}': "not JSON",
    b'{"text": NaN}': "not JSON",
}


def parse(path: Path, block_bytes: int = 1, **options: str) -> list[tuple[str, ...]]:
    blocks = iter_blocks(Source(str(path), 0), block_bytes=block_bytes, **options)  # type: ignore[arg-type]
    return [texts for block in blocks for texts in parse_documents(block, ["text"])]


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_json_lines(line: bytes, block_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD + line + b"\n" + GOOD)
    with pytest.raises(DataError, match=rf"bad\.jsonl: line 4: .*{BAD_LINES[line]}"):
        parse(path, block_bytes)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_bytes_that_are_no_utf8_are_found(mark: bytes, block_bytes: int, tmp_path: Path) -> None:
    for name, before, after in (
        ("bad.jsonl", mark + GOOD * 70_000 + b'{"text": "', b'x"}\n'),
        ("bad.txt", mark + b"good \xc3\xa4\n\n" * 70_000 + b"bad: ", b"\n"),
    ):
        path = tmp_path / name
        path.write_bytes(before + b"\xe4" + after)
        line = before.count(b"\n") + 1
        reason = f"line {line}: byte 0xe4 at offset {len(before)} is not UTF-8"
        with pytest.raises(DataError, match=reason):
            parse(path, block_bytes)


def test_a_file_in_utf16_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes("some text".encode("utf-16"))
    with pytest.raises(DataError, match="byte 0xff at offset 0 is not UTF-8"):
        parse(path)


def test_several_keys_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"b": "2", "a": "1", "c": 3}\r\n')
    block = next(iter_blocks(Source(str(path), 0)))
    assert list(parse_documents(block, ["a", "b"])) == [("1", "2")]


def test_unicode_line_separators_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\u2028still one\x0bone\ntwo".encode())
    assert parse(path, text_mode="line") == [("one\u2028still one\x0bone",), ("two",)]
