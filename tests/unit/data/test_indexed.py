"""Shard writer and reader, compared with megatron-core and tested against damage."""

import os
import pickle
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_deberta.data.dataset.corpus import open_shard
from megatron_deberta.data.shards.format import dtype_for_vocab
from megatron_deberta.data.shards.manifest import read_manifest, verify_hashes
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.data.shards.writer import write_shard as write_documents
from megatron_deberta.errors import DataError
from tests.support.shards import sentences

DOCUMENTS = [[[5, 6, 7], [8]], [[9, 10]], [[11], [12, 13], [14, 15, 16, 17]]]
BOUNDARIES = [0, 2, 3, 6]


def flat(document):
    return sum(document, [])


def write_sentences(prefix, dtype=np.int32):
    documents = [[np.array(sentence) for sentence in document] for document in DOCUMENTS]
    write_documents(prefix, documents, dtype)


@pytest.fixture
def prefix(tmp_path):
    return str(tmp_path / "shard")


@pytest.fixture
def megatron():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def test_round_trip(tmp_path):
    prefix = str(tmp_path / "new" / "shard")
    write_sentences(prefix)
    dataset = IndexedDataset(prefix)
    assert (len(dataset), dataset.num_sequences, dataset.num_tokens) == (3, 6, 13)
    for index, document in enumerate(DOCUMENTS):
        assert dataset.document(index).tolist() == flat(document)
        assert [sentence.tolist() for sentence in sentences(dataset, index)] == document
    with pytest.raises(IndexError):
        dataset.document(3)
    assert sorted(os.listdir(tmp_path / "new")) == ["shard.bin", "shard.idx"]


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_megatron_reads_ours(prefix, megatron, dtype):
    write_sentences(prefix, dtype)
    theirs = megatron.IndexedDataset(prefix)
    assert [row.tolist() for row in theirs] == [s for document in DOCUMENTS for s in document]
    assert theirs.document_indices.tolist() == BOUNDARIES
    assert theirs.index.dtype == dtype


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
def test_we_read_megatrons(prefix, megatron, dtype):
    builder = megatron.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(flat(document)), [len(s) for s in document])
    builder.finalize(f"{prefix}.idx")
    ours = IndexedDataset(prefix)
    assert [ours.document(i).tolist() for i in range(3)] == [flat(d) for d in DOCUMENTS]
    assert [s.tolist() for i in range(3) for s in sentences(ours, i)] == [
        s for document in DOCUMENTS for s in document
    ]
    copy = f"{prefix}-copy"
    write_sentences(copy, dtype)
    for suffix in (".bin", ".idx"):
        assert Path(prefix + suffix).read_bytes() == Path(copy + suffix).read_bytes()


def test_long_index_is_written_in_chunks(prefix, monkeypatch, random_documents):
    monkeypatch.setattr("megatron_deberta.data.shards.writer._CHUNK_ROWS", 16)
    monkeypatch.setattr("megatron_deberta.data.shards.reader._CHECK_CHUNK", 7)
    documents = random_documents(100)
    write_documents(prefix, documents, np.uint16)
    dataset = IndexedDataset(prefix)
    for index, document in enumerate(documents):
        np.testing.assert_array_equal(dataset.document(index), document)


def test_dtype_follows_megatrons_bound(megatron):
    for size in (100, 65_499, 65_500, 128_100):
        assert dtype_for_vocab(size) == megatron.DType.optimal_dtype(size)


def test_pickling_reopens_the_files(prefix):
    write_sentences(prefix)
    sent = pickle.dumps(IndexedDataset(prefix))
    assert len(sent) < 500
    assert pickle.loads(sent).document(1).tolist() == [9, 10]


@pytest.mark.parametrize("has_manifest", [False, True])
def test_identity_depends_on_the_contents_and_not_on_their_place(
    tmp_path, write_shard, has_manifest
):
    """Two shards of the same sizes and times, of which an index is not that of the other."""
    identities = []
    for name, border in (("a", 2), ("b", 3), ("c", 2)):
        tokens = np.arange(5, 10)
        documents = [tokens[:border], tokens[border:]]
        prefix = str(tmp_path / name)
        if has_manifest:
            write_shard(documents, name)
        else:
            write_documents(prefix, documents, np.uint16)
        for suffix in ("bin", "idx"):
            os.utime(f"{prefix}.{suffix}", ns=(10**18, 10**18))
        identities.append(IndexedDataset(prefix).identity)
    assert identities[0][:2] == identities[1][:2]
    assert identities[0] != identities[1]
    assert identities[0] == identities[2]


def test_exception_keeps_the_older_shard(tmp_path, write_shard):
    prefix = write_shard([np.array([5, 6])])
    with pytest.raises(DataError, match="is the input empty"):
        write_documents(prefix, [], np.int32)
    assert open_and_read(prefix) == [5, 6]
    assert len(os.listdir(tmp_path)) == 3


def open_and_read(prefix):
    return IndexedDataset(prefix).document(0).tolist()


def test_overwriting_drops_the_older_manifest(write_shard):
    prefix = write_shard([np.array([5, 6])])
    write_sentences(prefix)
    assert read_manifest(prefix) is None
    assert open_and_read(prefix) == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (np.array([], np.int64), "document 0 has no tokens"),
        ([], "document 0 has no tokens"),
        ([np.array([5]), np.array([], np.int64)], "document 0 has no tokens"),
        (np.array([65_536]), "not fit uint16"),
        (np.array([-1]), "not fit uint16"),
        (np.array([[5]]), "expected 1-D integers"),
        (np.array([5.0]), "expected 1-D integers"),
    ],
)
def test_writer_refuses(tmp_path, document, message):
    with pytest.raises(DataError, match=message):
        write_documents(str(tmp_path / "shard"), [document], np.uint16)
    assert os.listdir(tmp_path) == []


def test_writer_refuses_dtypes_and_places(tmp_path):
    with pytest.raises(DataError, match="no index code for dtype float32"):
        write_documents(str(tmp_path / "shard"), [np.array([5])], np.float32)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write the shard"):
        write_documents(str(tmp_path / "file" / "shard"), [np.array([5])], np.int32)


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device.*is the disk full"):
        write_sentences(str(tmp_path / "shard"))
    assert os.listdir(tmp_path) == []


def test_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.idx: No such file"):
        IndexedDataset(str(tmp_path / "absent"))
    write_sentences(str(tmp_path / "shard"))
    (tmp_path / "shard.bin").unlink()
    with pytest.raises(DataError, match=r"shard\.bin: No such file"):
        IndexedDataset(str(tmp_path / "shard"))


HEADER_DAMAGE = {
    "magic": (0, b"TNTIDX\x00\x00\x00", "magic"),
    "version": (9, struct.pack("<Q", 2), "version 2"),
    "float64 or float32": (17, b"\x06", "dtype code 6"),
    "float32 or float64": (17, b"\x07", "dtype code 7"),
    "unknown dtype": (17, b"\x09", "dtype code 9"),
    "dtype of another size": (17, b"\x08", "for sequence"),
    "sequences": (18, struct.pack("<Q", 7), "header .7 sequences"),
    "huge": (18, struct.pack("<Q", 2**63), "its header"),
    "documents": (26, struct.pack("<Q", 0), "its header"),
    "length": (34, struct.pack("<i", 4), "for sequence"),
    "negative length": (34, struct.pack("<i", -1), "has length -1 for sequence 0"),
    "offset": (34 + 6 * 4 + 8, struct.pack("<q", 4), "for sequence"),
    "first boundary": (34 + 6 * 12, struct.pack("<q", 1), "document boundaries 1..6"),
    "order of boundaries": (34 + 6 * 12 + 8, struct.pack("<q", 5), "decrease"),
    "last boundary": (34 + 6 * 12 + 24, struct.pack("<q", 5), "document boundaries 0..5"),
}


@pytest.mark.parametrize("name", HEADER_DAMAGE)
def test_damaged_index_is_refused_by_name(prefix, name):
    place, content, message = HEADER_DAMAGE[name]
    write_sentences(prefix)
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.seek(place)
        stream.write(content)
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert f"{prefix}.idx" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_manifest_round_trip(write_shard):
    prefix = write_shard([np.array([5, 6]), np.array([7])])
    manifest = read_manifest(prefix)
    assert manifest is not None
    assert (manifest.num_documents, manifest.num_tokens, manifest.dtype) == (2, 3, "uint16")
    assert manifest.sources == ("text.jsonl",)
    verify_hashes(prefix, manifest)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-5],
        lambda text: text.replace('"format_version": 1', '"format_version": 2'),
        lambda text: text.replace('"num_tokens": 2', '"num_tokens": "2"'),
        lambda text: text.replace('"num_tokens"', '"tokens"'),
        lambda text: "[]",
        lambda text: "\udcff",
    ],
)
def test_damaged_manifest_is_refused(write_shard, change):
    prefix = write_shard([np.array([5, 6])])
    path = Path(f"{prefix}.manifest.json")
    path.write_text(change(path.read_text()), errors="surrogateescape")
    with pytest.raises(DataError, match=r"manifest\.json"):
        read_manifest(prefix)


def test_open_shard_compares_the_manifest(write_shard, vocabulary):
    documents = [np.array([5, 6])]
    with pytest.raises(DataError, match="made with another tokenizer.*tokenizer-dir"):
        open_shard(write_shard(documents, fingerprint="another"), vocabulary)
    with pytest.raises(DataError, match="made with 201 pieces"):
        open_shard(write_shard(documents, vocab_size=201), vocabulary)
    prefix = write_shard(documents)
    path = Path(f"{prefix}.manifest.json")
    path.write_text(path.read_text().replace('"num_tokens": 2', '"num_tokens": 3'))
    with pytest.raises(DataError, match="are not the manifest's"):
        open_shard(prefix, vocabulary)
    path.unlink()
    open_shard(prefix, vocabulary)
    with pytest.raises(DataError, match="data.verify_hashes is true but there is no"):
        open_shard(prefix, vocabulary, hashes=True)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_is_too_long_is_refused(prefix, suffix):
    write_sentences(prefix)
    with Path(prefix + suffix).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError):
        IndexedDataset(prefix)
