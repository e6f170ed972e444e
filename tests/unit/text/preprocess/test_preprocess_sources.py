"""Every kind of file gives its documents; damaged files are named and lose nothing before."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import re
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.text.jobs.units import FileRange, plan_units
from megatron_deberta.text.readers.checks import check_input
from megatron_deberta.text.readers.reading import DocumentReader, read_documents
from megatron_deberta.text.readers.records import DAMAGED, Defect, Document, ReadOptions
from megatron_deberta.text.readers.sources import find_sources

TEXTS = [f"Document {index}: äöü " + "word " * (index % 50) for index in range(3000)]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def read(path: Path, **options: str) -> list[str]:
    sources = find_sources([str(path)], **options)  # type: ignore[arg-type]
    texts = []
    for _, record in read_documents(sources, ReadOptions()):
        if isinstance(record, Defect):
            raise DataError(f"line {record.line}: {record.reason}: {record.detail}")
        texts.append(record.texts[0])
    return texts


def records(path: Path) -> tuple[list[str], list[Defect]]:
    documents, defects = [], []
    for _, record in read_documents(find_sources([str(path)]), ReadOptions()):
        if isinstance(record, Document):
            documents.append(record.texts[0])
        else:
            defects.append(record)
    return documents, defects


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
    "padded gzip": lambda c: gzip.compress(c[:1000]) + gzip.compress(c[1000:]) + b"\0" * 512,
    "zstd": zstd,
    "zstd stream": zstd_stream,
    "two zstd frames": lambda c: zstd(c[:1000]) + zstd_stream(c[1000:]),
    "pzstd": lambda c: SKIPPABLE_FRAME + zstd(c[:777]) + SKIPPABLE_FRAME + zstd(c[777:]),
    "bzip2": lambda c: bz2.compress(c[:5000]) + bz2.compress(c[5000:]),
    "padded xz": lambda c: lzma.compress(c[:5000]) + b"\0" * 8 + lzma.compress(c[5000:]),
    "xz": lambda c: lzma.compress(c[:5000]) + lzma.compress(c[5000:]),
}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_compression_gives_every_document(encoding: str, tmp_path: Path) -> None:
    assert read(write(tmp_path, "data", ENCODINGS[encoding](JSONL))) == TEXTS


@pytest.mark.parametrize("encoding", ["gzip", "zstd", "bzip2", "xz"])
def test_a_bomb_takes_little_memory(encoding: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", ENCODINGS[encoding](b" " * (1 << 25) + b"\n" + JSONL))
    tracemalloc.start()
    options = ReadOptions(longest_bytes=100_000)
    found = [record for _, record in read_documents(find_sources([str(path)]), options)]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    (defect,) = [record for record in found if isinstance(record, Defect)]
    assert (defect.line, defect.offset, defect.reason) == (1, 0, "document too long")
    assert len(found) == 1 + len(TEXTS)
    # zstandard's library gives all that its few bytes unfold to at once.
    assert most < (140 if encoding == "zstd" else 25) * 1e6


def test_missing_newline_at_the_end_and_byte_order_mark(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", b"\xef\xbb\xbf" + JSONL.rstrip(b"\n"))
    assert read(path) == TEXTS
    path = write(tmp_path, "a.txt", b"\xef\xbb\xbffirst\n\nsecond")
    assert read(path) == ["first", "second"]


@pytest.mark.parametrize("encoding", [name for name in ENCODINGS if name not in ("plain",)])
def test_a_cut_anywhere_is_a_defect_and_loses_nothing_before(encoding: str, tmp_path: Path) -> None:
    whole = ENCODINGS[encoding](JSONL)
    sizes = [len(whole) - 520, len(whole) - 1000, len(whole) // 2, len(whole) // 3, 20]
    if "padded gzip" != encoding:
        sizes += [len(whole) - less for less in (1, 2, 4, 7)]
    for size in sizes:
        path = write(tmp_path, "cut.jsonl", whole[:size])
        documents, defects = records(path)
        assert documents == TEXTS[: len(documents)]
        last = defects[-1]
        assert [defect.reason for defect in defects] == [DAMAGED]
        assert last.line == len(documents) + 1
        assert last.offset == sum(len(x) + 1 for x in JSONL.split(b"\n")[: len(documents)])
        with pytest.raises(DataError, match=r"line \d+: damaged file: compressed data"):
            read(path)


def test_a_wrong_checksum_is_a_defect(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(JSONL))
    assert zlib.crc32(JSONL).to_bytes(4, "little") == bytes(whole[-8:-4])
    whole[-8] ^= 1
    documents, defects = records(write(tmp_path, "a.jsonl.gz", bytes(whole)))
    assert [defect.reason for defect in defects] == [DAMAGED]
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(JSONL))
    frame[-1] ^= 1
    documents, defects = records(write(tmp_path, "a.jsonl.zst", bytes(frame)))
    assert [defect.reason for defect in defects] == [DAMAGED]


def test_garbage_behind_a_member_is_a_defect(tmp_path: Path) -> None:
    for encoding in ("gzip", "zstd", "bzip2", "xz"):
        path = write(tmp_path, "a.jsonl", ENCODINGS[encoding](JSONL) + b"garbage, not a member")
        documents, defects = records(path)
        assert documents == TEXTS
        assert [defect.reason for defect in defects] == [DAMAGED]


def table(rows: int = 1000) -> pyarrow.Table:
    return pyarrow.table(
        {
            "id": list(range(rows)),
            "text": pyarrow.array([None if i == 7 else TEXTS[i] for i in range(rows)]),
            "raw": pyarrow.array([b"\xff" if i == 8 else b"x" for i in range(rows)]),
        }
    )


def arrow_stream(content: pyarrow.Table) -> bytes:
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, content.schema) as writer:
        writer.write_table(content, max_chunksize=100)
    return sink.getvalue()


def test_parquet_and_arrow_give_rows(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(table(), tmp_path / "a.parquet", row_group_size=300)
    write(tmp_path, "b.arrow", arrow_stream(table()))
    with pyarrow.ipc.new_file(str(tmp_path / "c.arrow"), table().schema) as writer:
        writer.write_table(table(), max_chunksize=100)
    for name in ("a.parquet", "b.arrow", "c.arrow"):
        documents, defects = records(tmp_path / name)
        assert documents == [text for index, text in enumerate(TEXTS[:1000]) if index != 7]
        assert defects == [Defect(8, -1, "not a string", "column 'text' is null")]
    sources = find_sources([str(tmp_path / "a.parquet")])
    found = list(read_documents(sources, ReadOptions(keys=("raw", "id"))))
    assert {record.reason for _, record in found} == {"not a string", "invalid UTF-8"}  # type: ignore[union-attr]
    found = list(read_documents(sources, ReadOptions(keys=("title",))))
    assert {record.reason for _, record in found} == {"missing key"}  # type: ignore[union-attr]


def test_small_row_groups_are_read_together(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table(), path, row_group_size=10)
    sources = find_sources([str(path)])
    (whole,) = plan_units(sources, 1 << 30)
    assert whole.ranges == (FileRange(0, 0, 100),)
    ranges = [each for unit in plan_units(sources, 20_000) for each in unit.ranges]
    assert 5 < len(ranges) < 100
    assert [each.begin for each in ranges[1:]] == [each.end for each in ranges[:-1]]
    assert (ranges[0].begin, ranges[-1].end) == (0, 100)


def test_every_kind_of_text_column_is_text(tmp_path: Path) -> None:
    texts = pyarrow.array(["one", "two", "one"])
    for name, column in (
        ("a", texts.dictionary_encode()),
        ("b", texts.cast(pyarrow.string_view())),
        ("c", texts.cast(pyarrow.large_string())),
    ):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / f"{name}.parquet")
        write(tmp_path, f"{name}.arrow", arrow_stream(pyarrow.table({"text": column})))
        for suffix in ("parquet", "arrow"):
            assert records(tmp_path / f"{name}.{suffix}") == (["one", "two", "one"], [])
    twice = pyarrow.Table.from_arrays([texts, texts], ["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "d.parquet")
    for path in (tmp_path / "d.parquet", write(tmp_path, "d.arrow", arrow_stream(twice))):
        with pytest.raises(DataError, match="2 columns are named 'text'"):
            records(path)


def test_a_broken_table_is_an_error(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(table(), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for damaged in (whole[:-100], whole.replace(b"text", b"t\xffxt")):
        path = write(tmp_path, "b.parquet", damaged)
        with pytest.raises(DataError, match=r"b\.parquet: damaged parquet file \([^\n]*\)$"):
            read(path)


def test_a_dataset_on_disk_gives_its_own_files_only(tmp_path: Path) -> None:
    folder = tmp_path / "corpus" / "train"
    folder.mkdir(parents=True)
    write(tmp_path / "corpus", "dataset_dict.json", b'{"splits": ["train"]}')
    write(folder, "data-00000-of-00001.arrow", arrow_stream(table()))
    write(folder, "cache-1234.arrow", arrow_stream(table()))
    write(folder, "state.json", b'{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    write(folder, "dataset_info.json", b"{}")
    for path in (tmp_path / "corpus", folder):
        documents, defects = records(path)
        assert len(documents) == 999
        assert [defect.detail for defect in defects] == ["column 'text' is null"]
    for state in (b"{}", rb'{"_data_files": [{"filename": "a\u0000b"}]}'):
        write(folder, "state.json", state)
        with pytest.raises(DataError, match="not a Hugging Face dataset"):
            find_sources([str(folder)])


def test_format_is_told_by_suffix_then_by_content(tmp_path: Path) -> None:
    text = b"{not json} \nsame document\n\nnext\n"
    assert read(write(tmp_path, "a.txt", text)) == ["{not json} \nsame document", "next"]
    assert read(write(tmp_path, "b.txt.gz", gzip.compress(text)), text_mode="line")[0][0] == "{"
    assert read(write(tmp_path, "c", b'\n {"text": "x"}\n')) == ["x"]
    assert read(write(tmp_path, "d", b"plain\n")) == ["plain"]
    assert read(write(tmp_path, "e.txt", b'{"text": "x"}'), file_format="jsonl") == ["x"]
    assert read(write(tmp_path, "f.jsonl", b"x"), file_format="text") == ["x"]


def test_find_sources(tmp_path: Path) -> None:
    (tmp_path / "sub" / ".hidden").mkdir(parents=True)
    wanted = ["a.jsonl", "b.txt.gz", "sub/c.json.zst", "sub/d.txt.xz"]
    for name in [*wanted, "README.md", ".d.jsonl", "sub/.hidden/e.jsonl"]:
        write(tmp_path, name, b"x")
    expected = [str(tmp_path / name) for name in wanted]
    assert [source.path for source in find_sources([str(tmp_path)])] == expected
    globbed = find_sources([f"{tmp_path}/**/*.json*", expected[0]])
    assert [source.path for source in globbed] == [expected[0], expected[2]]
    (source,) = find_sources([expected[1]])
    assert (source.path, source.size_bytes, source.text_format) == (expected[1], 1, "paragraph")


def test_links_are_followed_and_keep_their_names(tmp_path: Path) -> None:
    """As the cache of Hugging Face's hub has them: what they lead to has no suffix."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "in" / "real").mkdir(parents=True)
    blob = write(tmp_path / "blobs", "abc", b'[1]\n{"text": "hello"}\n')
    (tmp_path / "in" / "a.jsonl").symlink_to(blob)
    documents, defects = records(tmp_path / "in" / "a.jsonl")
    assert (documents, [defect.reason for defect in defects]) == (["hello"], ["not a JSON object"])
    (tmp_path / "more").mkdir()
    write(tmp_path / "more", "b.jsonl", b"x")
    (tmp_path / "in" / "more").symlink_to(tmp_path / "more")
    (tmp_path / "more" / "again").symlink_to(tmp_path / "in")
    write(tmp_path / "in" / "real", "c.jsonl", b"x")
    found = [source.path for source in find_sources([str(tmp_path / "in")])]
    assert found == [
        str(tmp_path / "in" / name) for name in ("a.jsonl", "more/b.jsonl", "real/c.jsonl")
    ]
    # A glob means what a shell makes of it; a file named twice counts once.
    names = sorted(str(path) for path in (tmp_path / "in").iterdir())
    assert (
        find_sources([f"{tmp_path}/in/*"]) == find_sources(names) == find_sources([*names, *names])
    )


def test_nothing_is_left_out_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.jsonl", b"x")

    def refuse(root: str, onerror: Callable[[OSError], None], **_: object) -> Iterator[Any]:
        # What a folder does that may not be read; root may read any.
        onerror(PermissionError(13, "Permission denied", root))
        yield from ()

    with monkeypatch.context() as patch:
        patch.setattr("megatron_deberta.text.readers.sources.os.walk", refuse)
        with pytest.raises(DataError, match="Permission denied; check --input"):
            find_sources([str(tmp_path)])
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="not a regular file; pipe what it gives in"):
        find_sources([str(tmp_path / "pipe.jsonl")])
    odd = os.fsencode(tmp_path) + b"/z\xff.jsonl"
    Path(os.fsdecode(odd)).write_bytes(b"x")
    with pytest.raises(DataError, match="its name is not UTF-8"):
        find_sources([os.fsdecode(odd)])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_that_grows_is_an_error(name: str, tmp_path: Path) -> None:
    content = gzip.compress(JSONL) if name.endswith("gz") else JSONL
    (source,) = find_sources([str(write(tmp_path, name, content))])
    reader = DocumentReader(source, ReadOptions())
    batches = reader.read()
    next(batches)
    with open(source.path, "ab") as stream:
        stream.write(content)
    with pytest.raises(DataError, match="changed while it was read"):
        list(batches)
    batches = DocumentReader(find_sources([source.path])[0], ReadOptions()).read()
    next(batches)
    os.unlink(source.path)
    with pytest.raises(DataError, match="No such file or directory while it was read"):
        list(batches)


def test_standard_input_of_two_runs_is_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for content in (b'{"text": "one"}\n', b'{"text": "two"}\n', b'{"text": "one"}\n'):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        found += find_sources(["-"], spool=tmp_path / "spool")
        # Also while others are kept beside it.
        assert Path(found[0].path).read_bytes() == b'{"text": "one"}\n'
    assert found[0] == found[2] != found[1]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_file_of_a_directory_is_a_document(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", b"\xef\xbb\xbf one\n\ntwo\n\n")
    write(tmp_path, "b.text.gz", gzip.compress(b"three\n\nfour"))
    write(tmp_path, "c.txt", b"")
    write(tmp_path, "d.jsonl", b'{"text": "five\\n\\nsix"}\n')
    whole = ["one\n\ntwo", "three\n\nfour", "five\n\nsix"]
    assert read(tmp_path) == whole
    assert read(tmp_path, text_mode="paragraph") == ["one", "two", "three", "four", whole[2]]
    # A file that is named may hold a corpus.
    assert read(path) == ["one", "two"]
    assert read(path, text_mode="file") == [whole[0]]


def test_a_file_that_is_too_long_or_cut_is_a_defect(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", b"x\n" * 50_000)
    write(tmp_path, "b.txt.gz", gzip.compress(b"y\n" * 9_000)[:-9])
    write(tmp_path, "c.txt", b"fine")
    options = ReadOptions(longest_bytes=100_000)
    found = [record for _, record in read_documents(find_sources([str(tmp_path)]), options)]
    assert [record.offset for record in found] == [0, 0, 0]
    assert found[0][2:] == (
        "document too long",
        "100000 bytes; --text-mode paragraph makes each paragraph a document",
    )
    assert found[1][2:] == (
        "damaged file",
        "compressed data ends early; the file is truncated",
    )
    assert found[2][2:] == (("fine",),)


def test_short_documents_of_plain_text_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = write(tmp_path, "short.txt", b"Yes, she said, and closed the door.\n\n" * 30)
    long = write(tmp_path, "long.txt", (b"word " * 100 + b"\n\n") * 30)
    lines = write(tmp_path, "short.jsonl", b'{"text": "Yes"}\n' * 30)
    for path in (long, lines, tmp_path):
        check_input(find_sources([str(path)]), ReadOptions())
    check_input(find_sources([str(short)]), ReadOptions(), warn_short=False)
    assert not caplog.messages
    check_input(find_sources([str(short)]), ReadOptions())
    (message,) = caplog.messages
    assert "at most 35 characters" in message
    assert "--text-mode file" in message


def test_keys_that_a_file_lacks_are_found_in_its_first_records(tmp_path: Path) -> None:
    rows = {"body": ["one", "two"], "n": [1, 2]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "t.parquet")
    path = write(tmp_path, "c.jsonl", b'[1]\n{\n{"n": 1}\n{"body": "x", "text": 3}\n' * 2000)
    for name, present in (("t.parquet", "body, n"), ("c.jsonl", "body")):
        sources = find_sources([str(tmp_path / name)])
        message = f"of {tmp_path / name}; choose from: {present}"
        with pytest.raises(ConfigError, match=re.escape(message)):
            check_input(sources, ReadOptions())
        check_input(sources, ReadOptions(keys=("body",)))
        # Who accepts bad records may have files without the key, in this share.
        check_input(sources, ReadOptions(), max_bad_fraction=1.0)
    # One good record is enough; the rest is counted later.
    path.write_bytes(path.read_bytes()[:60] + b'\n{"text": "y"}\n')
    check_input(find_sources([str(path)]), ReadOptions())


RECORDS = [{"text": f"Nummer {index}: äöü"} for index in range(50)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", json.dumps(RECORDS).encode(), "is one JSON array, .* jq -c '.\\[\\]'"),
        ("a.jsonl", json.dumps(RECORDS, indent=1).encode(), "is one JSON array"),
        ("a", json.dumps(RECORDS).encode(), "is one JSON array"),
        ("a.json", json.dumps(RECORDS * 2000).encode(), "is one JSON array"),
        ("a.json", json.dumps(RECORDS[0], indent=2).encode(), "span several lines, .* jq -c "),
        ("a.json", b'\n{"text": "x",\n "id": 1}\n{"text": "y",\n "id": 2}\n', "span several lines"),
        ("a.json", b'{"text": "x"}{"text": "y"}\n', "stand side by side in a line, .* jq -c "),
        ("a.jsonl", JSONL.replace(b"\n", b"\r"), "stand side by side in a line"),
        ("a.jsonl", b"PK\x03\x04" + bytes(50), "is a ZIP archive, .* unpack it"),
        ("a.tar", b"a.jsonl".ljust(257, b"\0") + b"ustar\0" + JSONL, "is a tar archive"),
        ("a.txt", b"%PDF-1.7\n%", "is a PDF file"),
        ("a.jsonl", JSONL.decode().encode("utf-16"), "is UTF-16, .* iconv -f UTF-16 -t UTF-8"),
        ("a.jsonl", JSONL.decode().encode("utf-16-be"), "is UTF-16BE"),
        ("a.txt", "Einige Wörter.\n".encode("utf-16"), "is UTF-16,"),
        ("a.txt", b"A line of text.\n".decode().encode("utf-16-le"), "is UTF-16LE"),
        ("a.txt", "Einige Wörter.\n".encode("utf-32"), "is UTF-32"),
    ],
)
@pytest.mark.parametrize("compress", [False, True])
def test_other_forms_name_their_cause(
    name: str, content: bytes, message: str, compress: bool, tmp_path: Path
) -> None:
    if compress:
        name, content = f"{name}.gz", gzip.compress(content)
    path = write(tmp_path, name, content)
    with pytest.raises(ConfigError, match=message):
        check_input(find_sources([str(path)]), ReadOptions())


@pytest.mark.parametrize("name", ["a.csv", "a.TSV", "a.csv.gz"])
def test_lines_of_tables_are_no_text_unless_so_said(name: str, tmp_path: Path) -> None:
    content = b"text,label\nA line.,good\n"
    path = write(tmp_path, name, gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(ConfigError, match="is a table by its suffix"):
        find_sources([str(path)])
    (source,) = find_sources([str(path)], file_format="text")
    assert source.text_format == "paragraph"


def test_one_odd_first_line_refuses_no_file(tmp_path: Path) -> None:
    for first in (
        b'{"text": "x"} y\n',
        b"[1, 2]\n",
        b'{"text": "x"\n',
        b"{broken\n",
        b"\xef\xbb\xbf",
        b"\0\n",
    ):
        check_input(find_sources([str(write(tmp_path, "a.jsonl", first + JSONL))]), ReadOptions())


def test_unusable_inputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        find_sources([str(tmp_path / "nowhere.jsonl")])
    with pytest.raises(DataError, match="matches no file"):
        find_sources([f"{tmp_path}/*.jsonl"])
    with pytest.raises(DataError, match=r"no file ending in \.jsonl"):
        find_sources([str(tmp_path)])
    with pytest.raises(ConfigError, match="cannot be combined"):
        find_sources(["-", str(tmp_path)])
    with pytest.raises(ConfigError, match="needs files"):
        find_sources(["-"])
    sources = find_sources([str(write(tmp_path, "a.jsonl", b"x"))])
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="No such file"):
        list(read_documents(sources, ReadOptions()))
