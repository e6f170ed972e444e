"""``inspect shards``: statistics compared with hand counts and with the packings."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.data.dataset.corpus import Corpus
from megatron_deberta.data.dataset.packing import PackedRows
from megatron_deberta.data.shards import statistics as shard_statistics
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.data.shards.statistics import (
    PACKINGS,
    count_shards,
    document_lengths,
)


@pytest.fixture
def shards(write_shard, random_documents):
    documents = random_documents(300, seed=1), random_documents(50, seed=2)
    prefixes = [write_shard(each, name=f"s{n}") for n, each in enumerate(documents)]
    return prefixes, [*documents[0], *documents[1]]


def test_counts_are_those_of_the_documents(shards, monkeypatch):
    prefixes, documents = shards
    monkeypatch.setattr(shard_statistics, "_CHUNK_TOKENS", 700)
    statistics = count_shards([IndexedDataset(p) for p in prefixes], 10**9)
    lengths = sorted(map(len, documents))
    assert statistics.num_documents == 350
    assert statistics.num_tokens == sum(lengths) == statistics.tokens_counted
    assert (statistics.shortest, statistics.longest) == (lengths[0], lengths[-1])
    assert statistics.quantiles[3] == lengths[round(0.5 * 349)]
    expected = Counter(length.bit_length() - 1 for length in lengths)
    assert dict(enumerate(statistics.histogram.tolist())) == {n: expected[n] for n in range(6)}
    tokens = Counter(np.concatenate(documents).tolist())
    assert {n: c for n, c in enumerate(statistics.token_counts.tolist()) if c} == tokens


def test_a_sample_of_tokens_is_spread_over_all(shards, monkeypatch):
    prefixes, _ = shards
    monkeypatch.setattr(shard_statistics, "_CHUNK_TOKENS", 100)
    statistics = count_shards([IndexedDataset(p) for p in prefixes], 1000)
    assert 900 <= statistics.tokens_counted <= 1000
    assert statistics.token_counts.sum() == statistics.tokens_counted


@pytest.mark.parametrize("length", [16, 64])
def test_packing_is_what_the_packer_does(shards, vocabulary, length):
    opened = [IndexedDataset(prefix) for prefix in shards[0]]
    lengths = document_lengths(opened)
    for kind, count in PACKINGS.items():
        packed = PackedRows(Corpus(opened), vocabulary, length, kind, 3)
        found = count(lengths, length)
        numbers = range(packed.rows_per_epoch)
        rows = [packed.rows(np.array([number])).row(0).tokens.size for number in numbers]
        assert found.rows == packed.rows_per_epoch
        # A separator that meets a row's edge is left out.
        assert found.filled == pytest.approx(sum(rows) / (len(rows) * length), abs=0.01)


def test_command(shards, tmp_path, cli):
    prefixes, documents = shards
    plot = tmp_path / "plots" / "lengths.png"
    arguments = ["inspect", "shards", *prefixes, "--sequence-length", "32", "--num-samples", "2"]
    for prefix in prefixes:
        Path(f"{prefix}.manifest.json").unlink()
    output = cli(*arguments, "--plot", str(plot), "--top", "3")
    assert "2 shards: 350 documents, 350 sequences" in output
    assert re.search(r"16-31 +\d+  #+", output)
    assert re.search(r"full_sentences +[\d,]+ rows an epoch, 9\d\.\d\d% filled", output)
    (most,) = Counter(np.concatenate(documents).tolist()).most_common(1)
    assert re.search(rf"^ +{most[0]} +{most[1] / sum(map(len, documents)):.3%}", output, re.M)
    assert "document 0" in output
    assert "give --tokenizer to see text" in output
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list(plot.parent.iterdir()) == [plot]


def test_refusals(shards, capsys):
    assert main(["inspect", "shards"]) == 2
    assert main(["inspect", "shards", shards[0][0], "--sequence-length", "2"]) == 2
    assert capsys.readouterr().err.count("\n") == 2
