"""Merging: the result holds all documents in order, or does not exist; a killed merge goes on."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.data.shards import merge as merge_module
from megatron_deberta.data.shards import writer as writer_module
from megatron_deberta.data.shards.manifest import read_manifest, verify_hashes
from megatron_deberta.data.shards.writer import write_shard
from megatron_deberta.errors import DataError
from megatron_deberta.text.jobs.executors import RunOptions
from megatron_deberta.text.merge import merge_shards
from tests.support.megatron import megatron_dataset

MANIFEST = {"tokenizer_fingerprint": "tiny", "tokenizer_path": "tokenizer", "vocab_size": 190}


def write_sentences(prefix, seed, dtype=np.uint16, **manifest):
    """Documents of one to three sentences; returns their tokens."""
    generator = np.random.default_rng(seed)
    documents = []
    for _ in range(generator.integers(1, 200)):
        sentences = [
            generator.integers(0, 190, generator.integers(1, 30))
            for _ in range(generator.integers(1, 4))
        ]
        documents.append(sentences)
    sources = (f"text-{seed}.jsonl", "shared.jsonl")
    write_shard(prefix, documents, dtype, **{**MANIFEST, **manifest}, sources=sources)
    return documents


@pytest.fixture
def parts(tmp_path):
    prefixes = [str(tmp_path / f"part-{number}") for number in range(5)]
    documents = [
        document
        for number, prefix in enumerate(prefixes)
        for document in write_sentences(prefix, number)
    ]
    return prefixes, documents


def contents(prefix):
    return [Path(prefix + end).read_bytes() for end in (".bin", ".idx", ".manifest.json")]


@pytest.mark.parametrize("workers", [0, 3])
def test_merging_is_writing_all_documents_at_once(parts, tmp_path, workers, monkeypatch):
    # Several chunks a shard.
    monkeypatch.setattr(merge_module, "_CHUNK_BYTES", 900)
    monkeypatch.setattr(writer_module, "_CHUNK_ROWS", 7)
    prefixes, documents = parts
    whole, merged = str(tmp_path / "whole"), str(tmp_path / "out" / "merged")
    sources = ("text-0.jsonl", "shared.jsonl", *(f"text-{n}.jsonl" for n in range(1, 5)))
    write_shard(whole, documents, np.uint16, **MANIFEST, sources=sources)
    copied = []
    run = RunOptions(
        workers=workers, advance=lambda *shown: copied.append(shown[3].get("text_bytes", 0))
    )
    # A copy per shard.
    monkeypatch.setattr(merge_module, "_COPY_BYTES", 1)
    manifest = merge_shards(prefixes, merged, run=run)
    assert manifest == read_manifest(whole)
    assert contents(merged) == contents(whole)
    assert copied[-1] == os.path.getsize(f"{merged}.bin")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "merged.bin",
        "merged.idx",
        "merged.manifest.json",
    ]
    verify_hashes(merged, manifest)
    megatron = megatron_dataset(str(merged))
    assert megatron.document_indices[-1] == len(megatron) == sum(map(len, documents))
    assert megatron[len(documents[0])].tolist() == documents[1][0].tolist()


def test_command(parts, tmp_path, cli):
    prefixes, documents = parts
    output = str(tmp_path / "merged")
    arguments = ["merge", *(f"{prefix}.idx" for prefix in prefixes), "--output", output]
    assert f"{len(documents)} documents" in cli(*arguments)
    before = contents(output)
    assert "exists; choose another --output or add --force" in cli.errors(2, *arguments)
    assert main([*arguments, "--force"]) == 0
    assert contents(output) == before
    assert "is one of the inputs" in cli.errors(
        2, "merge", output, prefixes[0], "--output", output, "--force"
    )
    assert contents(output) == before


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"dtype": np.int32}, "token type int32 is not that of"),
        ({"tokenizer_fingerprint": "another"}, "tokenizer another is not that of"),
    ],
)
def test_incompatible_shards_are_refused(parts, tmp_path, other, message):
    write_sentences(str(tmp_path / "other"), 9, **other)
    with pytest.raises(DataError, match=message):
        merge_shards([*parts[0], str(tmp_path / "other")], str(tmp_path / "merged"))
    assert not list(tmp_path.glob("merged*"))


def test_sentences_and_documents_are_not_mixed(tmp_path):
    texts = [np.arange(4, length) for length in range(5, 25)]

    def write(texts, name):
        write_shard(str(tmp_path / name), texts, np.uint16, **MANIFEST)
        return str(tmp_path / name)

    documents = write(texts, "a_text_document")
    # Documents of one sentence each: only the name tells.
    short = write(texts, "b_text_sentence")
    sentences = write([[text, text] for text in texts], "c")
    output = str(tmp_path / "merged")
    for mixed in ([documents, short], [sentences, documents], [short, sentences, documents]):
        with pytest.raises(DataError, match=f"{documents}: holds whole documents.* --sentences"):
            merge_shards(mixed, output)
    assert not list(tmp_path.glob("merged*"))
    assert merge_shards([short, sentences], output).num_sequences == 60
    other = write(texts, "plain")
    merged = merge_shards([documents, other], output, run=RunOptions(force=True))
    assert merged.num_sequences == 40


def test_duplicate_shard_is_refused(parts, tmp_path, cli):
    first, second = parts[0][:2]
    output = str(tmp_path / "merged")
    again = f"{tmp_path}/../{tmp_path.name}/part-0"
    for twice in ([first, second, first], [first, again]):
        assert f"is listed twice (as {first}); name each" in cli.errors(
            2, "merge", *twice, "--output", output
        )
    assert not list(tmp_path.glob("merged*"))
    # A glob names all files of each.
    files = sorted(str(path) for path in tmp_path.glob("part-[01].*"))
    assert len(files) == 6
    assert "from 2 shards" in cli("merge", *files, "--output", output)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: flip(Path(f"{p}.bin"), 5), "part-3.bin: damaged since it was written"),
        (lambda p: flip(Path(f"{p}.idx"), -1), "part-3.idx: (damaged since|has|document)"),
        (lambda p: Path(f"{p}.bin").write_bytes(b"ab"), "part-3.bin: truncated"),
        (lambda p: flip(Path(f"{p}.idx"), 40), "part-3.idx: has"),
        (lambda p: Path(f"{p}.manifest.json").unlink(), "part-3.manifest.json: missing"),
    ],
)
def test_damaged_shard_is_named_and_nothing_appears(parts, tmp_path, damage, message):
    damage(parts[0][3])
    with pytest.raises(DataError, match=message):
        merge_shards(parts[0], str(tmp_path / "merged"))
    assert [path.name for path in tmp_path.glob("merged*")] in ([], ["merged.unfinished"])


def test_full_disk_leaves_no_shard(parts, tmp_path, monkeypatch):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match="No space left"):
        merge_shards(parts[0], str(tmp_path / "merged"))
    assert [path.name for path in tmp_path.glob("merged*")] == ["merged.unfinished"]
    monkeypatch.undo()
    merge_shards(parts[0], str(tmp_path / "merged"))
    assert not list(tmp_path.glob("*.unfinished"))


def test_an_interrupted_merge_copies_only_what_is_left(parts, tmp_path, monkeypatch, cli):
    prefixes, _ = parts
    reference, output = str(tmp_path / "reference"), str(tmp_path / "merged")
    merge_shards(prefixes, reference)
    monkeypatch.setattr(merge_module, "_COPY_BYTES", 1)

    def stop(stage, size, done, counts):
        assert size == 6
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_shards(prefixes, output, run=RunOptions(advance=stop))
    # The hash and three copies are recorded.
    assert [path.name for path in tmp_path.glob("merged*")] == ["merged.unfinished"]
    call = ["merge", *prefixes[:4], "--output", output, "--workers", "0"]
    assert f"{prefixes[4]} is gone; undo the change, or begin again" in cli.errors(2, *call)
    copied = []
    copy = merge_module.copy_parts
    monkeypatch.setattr(merge_module, "copy_parts", lambda *a: (copied.append(a[2]), copy(*a))[1])
    shown = []
    merge_shards(prefixes, output, run=RunOptions(advance=lambda *each: shown.append(each[2])))
    assert shown == [4, 5, 6]
    assert [part.name for (part,) in copied] == prefixes[3:]
    assert contents(output) == contents(reference)
    assert not list(tmp_path.glob("*.unfinished"))


def test_counts_of_the_input_add_up(parts, tmp_path):
    for number, prefix in enumerate(parts[0]):
        path = Path(f"{prefix}.manifest.json")
        fields = json.loads(path.read_text())
        fields |= {"documents_in": 100 + number, "documents_quarantined": 1}
        fields |= {"quarantine": {"empty": 1, f"reason {number % 2}": 2}}
        fields |= {"quarantine_sha256": "ab", "plan_sha256": "cd"}
        path.write_text(json.dumps(fields))
    merge_shards(parts[0], str(tmp_path / "merged"))
    fields = json.loads((tmp_path / "merged.manifest.json").read_text())
    assert fields["num_documents"] == len(parts[1])
    assert fields["documents_in"] == 510
    assert fields["documents_quarantined"] == 5
    assert fields["quarantine"] == {"empty": 5, "reason 0": 6, "reason 1": 4}
    assert fields["quarantine_sha256"] == fields["plan_sha256"] == ""


@pytest.mark.parametrize("end", ["bin", "idx"])
def test_hashes_are_of_what_was_meant_to_be_written(parts, tmp_path, monkeypatch, end):
    pwrite, flipped = os.pwrite, []

    def damage(file, content, offset):
        name = os.readlink(f"/proc/self/fd/{file}")
        if not flipped and offset and name.endswith((f"staged/0.{end}", f".unfinished/0.{end}")):
            flipped.append(offset)
            content = bytes([content[0] ^ 1]) + bytes(content[1:])
        return pwrite(file, content, offset)

    prefixes, documents = parts
    merged, written = str(tmp_path / "merged"), str(tmp_path / "written")
    monkeypatch.setattr(os, "pwrite", damage)
    merge_shards(prefixes, merged)
    assert flipped
    if end == "idx":
        flipped.clear()
        write_shard(written, documents, np.uint16, **MANIFEST)
    monkeypatch.undo()
    for prefix in [merged, *([written] if end == "idx" else [])]:
        with pytest.raises(DataError, match=f"{end}: SHA-256"):
            verify_hashes(prefix, read_manifest(prefix))
