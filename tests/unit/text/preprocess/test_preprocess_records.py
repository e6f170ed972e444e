"""Every record is a document or a defect, whatever the ranges in which a file is read."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from megatron_deberta.text.readers import reading
from megatron_deberta.text.readers.reading import DocumentReader, RecordReader
from megatron_deberta.text.readers.records import Defect, Document, ReadOptions, parse_records
from megatron_deberta.text.readers.sources import Source, find_sources

GOOD = b'{"text": "fine"}\n'
BAD_LINES = {
    b"{broken": ("malformed JSON", ""),
    b'{"text": "never ends': ("malformed JSON", ""),
    b'{"text": NaN}': ("not a string", "key 'text' is a number"),
    b'{"text": 5, "ppl": NaN}': ("not a string", "key 'text' is a number"),
    b'{"ppl": NaN, "text": "\\ud800"}': ("lone surrogate", "\\ud800"),
    b'{"ppl": NaN, "text": "\xe4"}': ("invalid UTF-8", ""),
    b'{"text": "x", "deep": ' + b"[" * 1100 + b"}" * 1100 + b"}": ("malformed JSON", ""),
    b'{"text": "x", "ppl": nan}': ("malformed JSON", ""),
    b"[" * 100_000: ("malformed JSON", ""),
    b'["text"]': ("not a JSON object", "an array"),
    b'"text"': ("not a JSON object", "a string"),
    b"3": ("not a JSON object", "a number"),
    b'{"body": "x", "id": 1}': ("missing key", "no key 'text' (keys: body, id)"),
    b"{}": ("missing key", "no key 'text' (keys: none)"),
    b'{"text": null}': ("not a string", "key 'text' is null"),
    b'{"text": ["a"]}': ("not a string", "key 'text' is an array"),
    b'{"text": 5}': ("not a string", "key 'text' is a number"),
    b'{"text": true}': ("not a string", "key 'text' is a boolean"),
    b'{"text": "\\ud800"}': ("lone surrogate", "\\ud800"),
    b'{"text": "\\udc00\\ud800"}': ("lone surrogate", "\\udc00"),
    b'{"text": "\xed\xa0\x80"}': ("lone surrogate", "byte 0xed at offset 45"),
    b'{"text": "\xe4"}': ("invalid UTF-8", "byte 0xe4 at offset 45"),
    b'{"text": "\\u0000"}': ("NUL character", "at character 0 of key 'text'"),
    b'{"text": "\0"}': ("malformed JSON", ""),
    b'{"text": "' + b"x" * 200_000 + b'"}': ("document too long", "200012 bytes"),
}
OPTIONS = ReadOptions(longest_bytes=200_000)


def read(path: Path, options: ReadOptions = OPTIONS, **how: str) -> list[Document | Defect]:
    (source,) = find_sources([str(path)], **how)  # type: ignore[arg-type]
    batches = DocumentReader(source, options).read()
    return [record for batch in batches for record in (*batch.documents, *batch.defects)]


def texts(path: Path, **how: str) -> list[str]:
    return [record.texts[0] for record in read(path, **how) if isinstance(record, Document)]


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: repr(line[:20]))
def test_bad_lines_are_defects_with_their_place(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD + line + b"\n" + GOOD)
    records = read(path)
    (defect,) = [record for record in records if isinstance(record, Defect)]
    reason, detail = BAD_LINES[line]
    assert (defect.line, defect.offset, defect.reason) == (4, 2 * len(GOOD) + 1, reason)
    assert defect.detail.startswith(detail)
    assert [record.line for record in records if isinstance(record, Document)] == [1, 3, 5]


@pytest.mark.parametrize(
    "other",
    [
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"9" * 5000,
        b'"\\ud800"',
        b'"\xff"',
        b"[" * 1100 + b'"]"' + b"]" * 1100,
        b'{"a": ' * 1100 + b'"\\"}"' + b"}" * 1100,
    ],
    ids=lambda other: repr(other[:12]),
)
def test_faults_of_other_keys_do_not_lose_the_text(other: bytes, tmp_path: Path) -> None:
    """As ``json.dumps`` and pandas write them."""
    path = tmp_path / "odd.jsonl"
    path.write_bytes(
        b'{"text": "first \\u00e9", "other": %s}\n{"other": %s, "text": "second"}\n'
        % (other, other)
    )
    assert texts(path) == ["first \u00e9", "second"]


def test_the_quick_way_finds_what_the_slow_one_finds() -> None:
    good = [GOOD, b'{"text": ""}\n', '{"a": [1], "text": "\u00e4 \\n"}\r\n'.encode(), b" \n", b"\n"]
    contents = [*good, *(line + end for line in BAD_LINES for end in (b"", b"\n"))]
    records = [(line, 100 * line, content) for line, content in enumerate(contents)]
    quick = parse_records(records, "jsonl", ReadOptions())
    documents, defects = parse_records(records, "jsonl", ReadOptions(keys=("text", "text")))
    assert quick == ([(*at, texts[:1]) for *at, texts in documents], defects)
    # The longest line is fine for who does not ask for its length.
    assert [len(each) for each in quick] == [3 + 2, 2 * (len(BAD_LINES) - 1)]


def test_a_whole_paragraph_before_damage_is_kept(tmp_path: Path) -> None:
    paragraphs = [b"first\nof two lines", b"second", b"third, which is cut off"]
    whole = b"\n\n".join(paragraphs)
    # Stored, not compressed, so that the file can be cut anywhere.
    folded = gzip.compress(whole, compresslevel=0)
    begins = [folded.index(paragraph) for paragraph in paragraphs]
    for end, kept in ((begins[2], 2), (begins[2] + 9, 2), (begins[1] + 3, 1)):
        path = tmp_path / f"{end}.txt.gz"
        path.write_bytes(folded[:end])
        *documents, defect = read(path, text_mode="paragraph")
        assert [each.texts[0].encode() for each in documents] == paragraphs[:kept]  # type: ignore[union-attr]
        lost = len(b"\n\n".join([*paragraphs[:kept], b""]))
        assert isinstance(defect, Defect)
        assert (defect.reason, defect.offset) == ("damaged file", lost)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bad_bytes_cost_one_document(mark: bytes, tmp_path: Path) -> None:
    before = mark + b"good \xc3\xa4\n\n" * 7000
    path = tmp_path / "bad.txt"
    path.write_bytes(before + b"bad: \xe4\n\nlast\n")
    records = read(path)
    (defect,) = [record for record in records if isinstance(record, Defect)]
    assert (defect.line, defect.offset) == (14_001, len(before))
    assert defect.detail.startswith(f"byte 0xe4 at offset {len(before) + 5}")
    assert len(records) == 7002


def test_several_keys_in_their_order_and_normalized(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"b": "2", "a": "e\u0301 \ufb01", "c": 3}\r\n'.encode())
    for form, expected in (("none", "e\u0301 ﬁ"), ("nfc", "é ﬁ"), ("nfkc", "é fi")):
        options = ReadOptions(keys=("a", "b"), normalization=form)  # type: ignore[arg-type]
        assert read(path, options) == [Document(1, 0, (expected, "2"))]


def test_unicode_line_separators_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("one\u2028still one\x0bone\ntwo".encode())
    assert texts(path, text_mode="line") == ["one\u2028still one\x0bone", "two"]


def hostile_text(seed: int) -> bytes:
    generator = random.Random(seed)
    pieces = [
        b"\n",
        b"\n\n",
        b" \n",
        b"\n \t\n",
        b"a",
        b"bc d",
        b"\r\n",
        b"x" * 40,
        b" ",
        b"\n\n\n",
    ]
    return b"".join(generator.choices(pieces, k=generator.randint(0, 60)))


@pytest.mark.parametrize("text_mode", ["file", "line", "paragraph"])
@pytest.mark.parametrize("compressed", [False, True])
def test_ranges_hold_every_record_once(
    text_mode: str, compressed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_deberta.text.readers.compression.READ_BYTES", 7)
    monkeypatch.setattr(reading, "_SKIPPED_BYTES", 16)
    options = ReadOptions(longest_bytes=30)
    for seed in range(150):
        content = hostile_text(seed)
        path = tmp_path / f"{seed}.txt"
        path.write_bytes(gzip.compress(content) if compressed else content)
        (source,) = find_sources([str(path)], text_mode=text_mode)  # type: ignore[arg-type]
        whole = list_records(source, options, [(0, 1 << 40)])
        assert all(text.encode() in content for _, text in whole if text)
        generator = random.Random(seed)
        cuts = sorted(
            generator.randint(0, len(content) + 3) for _ in range(generator.randint(0, 6))
        )
        edges = [0, *cuts, len(content) + 4]
        ranges = list(zip(edges, edges[1:], strict=False))
        assert list_records(source, options, ranges) == whole
        # Apart, in any order, as several workers read them.
        apart = [list_records(source, options, [each]) for each in reversed(ranges)]
        assert [record for records in reversed(apart) for record in records] == whole


def list_records(
    source: Source, options: ReadOptions, ranges: list[tuple[int, int]]
) -> list[tuple[int, str]]:
    records = RecordReader(source, block_bytes=16, longest_bytes=options.longest_bytes)
    found = []
    for begin, end in ranges:
        for block in records.blocks(begin, end):
            documents, defects = parse_records(block.records, source.text_format, ReadOptions())
            found += [(document.offset, document.texts[0]) for document in documents]
            found += [(defect.offset, "") for defect in (*defects, block.defect) if defect]
    return sorted(found)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("read_bytes", [1, 5, 1 << 18])
@pytest.mark.parametrize(("text_mode", "between"), [("line", b"\n"), ("paragraph", b"\n\n")])
def test_what_is_too_long_does_not_depend_on_how_it_is_read(
    text_mode: str,
    between: bytes,
    read_bytes: int,
    mark: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("megatron_deberta.text.readers.compression.READ_BYTES", read_bytes)
    monkeypatch.setattr(reading, "_SKIPPED_BYTES", 7)
    pieces = [b"x" * size for size in (29, 30, 28, 31, 29, 200)] + [b" " * 31, b"y" * 30]
    for first in range(len(pieces)):
        path = tmp_path / f"{first}.txt"
        path.write_bytes(mark + between.join(pieces[first:]))
        records = read(path, ReadOptions(longest_bytes=30), text_mode=text_mode)
        offsets = {record.offset - len(mark) for record in records}
        assert offsets == {len(between.join([*pieces[first:i], b""])) for i in range(first, 8)}
        good = [record.texts[0] for record in records if isinstance(record, Document)]
        assert good == [piece.decode() for piece in pieces[first:] if len(piece) < 30]
        bad = [record.detail for record in records if isinstance(record, Defect)]
        assert bad == [f"{len(piece)} bytes" for piece in pieces[first:] if len(piece) >= 30]


def test_lines_are_counted_from_where_reading_began(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(GOOD * 100)
    (source,) = find_sources([str(path)])
    records = RecordReader(source)
    first = [block for block in records.blocks(0, 500)]
    lines = records.line - 1
    assert lines == len(first[0].records) == 30
    apart = RecordReader(source)
    assert next(iter(apart.blocks(500))).records[0][0] == 1
