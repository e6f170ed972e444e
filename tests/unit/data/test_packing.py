"""Order, split and packing are pure functions of (seed, index)."""

from collections import Counter

import numpy as np
import pytest

from megatron_deberta.data.build import Corpora
from megatron_deberta.data.dataset.corpus import Corpus, split_validation
from megatron_deberta.data.dataset.index_cache import IndexCache
from megatron_deberta.data.dataset.packing import PackedRows
from megatron_deberta.data.randomness import (
    KeyedPermutation,
    Purpose,
    hash_values,
    keyed_generator,
    mix64,
)
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.errors import DataError
from megatron_deberta.train.data import _warn_of_shares


def numbered_documents(lengths):
    """Documents that tell where each token is from: document d holds 10 + 5 d, ... ."""
    return [np.full(length, 10 + number) for number, length in enumerate(lengths)]


def packed(corpus, vocabulary, length, packing, seed):
    return PackedRows(corpus, vocabulary, length, packing, mix64(seed, 0))


def row_of(rows, index):
    return rows.rows(np.array([index])).row(0)


def epoch_rows(rows, epoch=0):
    first = epoch * rows.rows_per_epoch
    return [row_of(rows, first + number) for number in range(rows.rows_per_epoch)]


def test_random_functions_never_change():
    """A change here would change the data of every run that resumes."""
    assert mix64(0) == 0xE220A8397B1DCDAF  # SplitMix64's published first value for seed 0
    assert mix64(1, 2, 3) == 7702586659592502839
    assert hash_values(mix64(4), np.arange(9))[8] == mix64(4, 8)
    assert keyed_generator(1, Purpose.ROW_ORDER, 5).integers(0, 1000, 4).tolist() == [
        428,
        283,
        636,
        336,
    ]
    assert [KeyedPermutation(10, 3)(i) for i in range(10)] == [3, 7, 4, 9, 8, 2, 1, 5, 6, 0]


@pytest.mark.parametrize("size", [*range(1, 40), 255, 256, 257, 1000])
def test_permutation_is_a_bijection(size):
    permutation = KeyedPermutation(size, key=11)
    assert sorted(permutation(i) for i in range(size)) == list(range(size))


def test_permutation_spreads_evenly():
    """Every value comes to the front equally often over keys (chi-squared, 7 degrees)."""
    counts = Counter(KeyedPermutation(8, key)(0) for key in range(4000))
    assert sum((counts[value] - 500) ** 2 / 500 for value in range(8)) < 24.3


@pytest.mark.parametrize("packing", ["full_sentences", "doc_sentences", "best_fit"])
def test_every_token_once_per_epoch(write_shard, random_documents, vocabulary, packing):
    documents = random_documents(40)
    corpus = Corpus([IndexedDataset(write_shard(documents))])
    rows = packed(corpus, vocabulary, 16, packing, seed=3)
    expected = Counter(np.concatenate(documents).tolist())
    for epoch in (0, 1, 5):
        found = Counter()
        for row in epoch_rows(rows, epoch):
            assert row.tokens[0] == vocabulary.cls_id
            assert row.tokens[-1] == vocabulary.sep_id
            assert row.tokens.size <= 16
            found.update(row.tokens[~vocabulary.is_special[row.tokens]].tolist())
        assert found == expected


def test_full_sentences_are_the_shuffled_documents_end_to_end(write_shard, vocabulary):
    lengths = [5, 1, 13, 30, 2, 8, 9, 4]
    corpus = Corpus([IndexedDataset(write_shard(numbered_documents(lengths)))])
    rows = packed(corpus, vocabulary, 12, "full_sentences", seed=5)
    order = keyed_generator(mix64(5, 0), Purpose.DOCUMENT_ORDER, 0).permutation(len(lengths))
    stream = []
    for document in order.tolist():
        stream += [10 + document] * lengths[document] + [vocabulary.sep_id]
    stream.pop()
    contents = [stream[i : i + 10] for i in range(0, len(stream), 10)]
    expected = []
    for content in contents:
        content = content[1:] if content[0] == vocabulary.sep_id else content
        content = content[:-1] if content[-1] == vocabulary.sep_id else content
        expected.append([vocabulary.cls_id, *content, vocabulary.sep_id])
    found = [row.tokens.tolist() for row in epoch_rows(rows)]
    assert sorted(found) == sorted(expected)


def test_rows_are_full(write_shard, random_documents, vocabulary):
    corpus = Corpus([IndexedDataset(write_shard(random_documents(300)))])
    rows = packed(corpus, vocabulary, 64, "full_sentences", seed=1)
    sizes = sorted(row.tokens.size for row in epoch_rows(rows))
    assert sizes[1] >= 62
    assert rows.rows_per_epoch == -(-(corpus.num_tokens + len(corpus) - 1) // 62)


def test_document_starts(write_shard, vocabulary):
    corpus = Corpus([IndexedDataset(write_shard(numbered_documents([3, 4, 5, 6] * 4)))])
    for row in epoch_rows(packed(corpus, vocabulary, 12, "full_sentences", seed=5)):
        starts = [0] + [i + 1 for i in range(1, row.tokens.size - 1) if row.tokens[i] == 2]
        assert row.document_starts == starts


def test_doc_sentences_stay_inside_documents(write_shard, vocabulary):
    lengths = [5, 25, 10, 11]
    corpus = Corpus([IndexedDataset(write_shard(numbered_documents(lengths)))])
    rows = packed(corpus, vocabulary, 12, "doc_sentences", seed=5)
    found = Counter()
    for row in epoch_rows(rows):
        assert len({*row.tokens[1:-1].tolist()}) == 1
        assert row.document_starts == [0]
        found[int(row.tokens[1]), row.tokens.size - 2] += 1
    assert found == {(10, 5): 1, (11, 10): 2, (11, 5): 1, (12, 10): 1, (13, 10): 1, (13, 1): 1}


def test_epochs_and_seeds_differ_but_repeat(write_shard, random_documents, vocabulary):
    corpus = Corpus([IndexedDataset(write_shard(random_documents(30)))])

    def epoch(seed, number):
        rows = packed(corpus, vocabulary, 16, "full_sentences", seed)
        return [row.tokens.tolist() for row in epoch_rows(rows, number)]

    assert epoch(1, 0) == epoch(1, 0)
    assert epoch(1, 0) != epoch(1, 1)
    assert epoch(1, 0) != epoch(2, 0)


def test_several_shards_are_one_corpus(write_shard, random_documents, vocabulary):
    documents = random_documents(20)
    whole = Corpus([IndexedDataset(write_shard(documents, "whole"))])
    parts = [write_shard(documents[:7], "a"), write_shard(documents[7:], "b")]
    split = Corpus([IndexedDataset(part) for part in parts])
    for index in range(30):
        first, second = (
            row_of(packed(corpus, vocabulary, 16, "full_sentences", 1), index)
            for corpus in (whole, split)
        )
        np.testing.assert_array_equal(first.tokens, second.tokens)


def test_one_short_document(write_shard, vocabulary):
    corpus = Corpus([IndexedDataset(write_shard([np.array([9])]))])
    rows = packed(corpus, vocabulary, 4, "full_sentences", 1)
    assert [row_of(rows, index).tokens.tolist() for index in range(3)] == [[1, 9, 2]] * 3
    with pytest.raises(DataError, match="sequence_length is 3"):
        packed(corpus, vocabulary, 3, "full_sentences", 1)


def test_id_outside_the_vocabulary_names_the_shard(write_shard, vocabulary):
    corpus = Corpus([IndexedDataset(write_shard([np.array([5, 200, 6])]))])
    with pytest.raises(
        DataError, match=r"shard\.bin: byte 2: id 200 is outside the vocabulary of 2"
    ):
        row_of(packed(corpus, vocabulary, 16, "full_sentences", 1), 0)


@pytest.mark.parametrize("fraction", [0.001, 0.05, 0.5, 0.999])
def test_split_is_disjoint_and_complete(write_shard, random_documents, fraction):
    shards = [
        IndexedDataset(write_shard(random_documents(60), "a")),
        IndexedDataset(write_shard(random_documents(41, 1), "b")),
    ]
    train, validation = split_validation(shards, fraction, seed=4)

    def starts(corpus):
        return corpus.starts(np.arange(len(corpus))).tolist()

    assert sorted(starts(train) + starts(validation)) == starts(Corpus(shards))
    assert len(validation) == min(max(1, round(101 * fraction)), 100)
    # The rule, in one line: the documents with the smallest hashes.
    hashes = hash_values(mix64(4, Purpose.SPLIT), np.arange(101))
    everything = np.array(starts(Corpus(shards)))
    assert starts(validation) == everything[np.sort(np.argsort(hashes)[: len(validation)])].tolist()
    again, _ = split_validation(shards, fraction, seed=4)
    other, _ = split_validation(shards, fraction, seed=5)
    assert starts(again) == starts(train)
    assert starts(other) != starts(train)


def test_one_document_cannot_be_split(write_shard):
    shards = [IndexedDataset(write_shard([np.array([5, 6])]))]
    with pytest.raises(DataError, match="validation_fraction=0"):
        split_validation(shards, 0.05, seed=1)


def test_a_split_of_few_long_documents_names_its_share_of_the_tokens(write_shard, tmp_path, caplog):
    long = IndexedDataset(write_shard(numbered_documents([30, 30, 20, 10, 10, 40, 20]), "novels"))
    short = IndexedDataset(write_shard(numbered_documents([10] * 100), "pages"))
    for shard, warned in ((short, False), (long, True)):
        train, validation = split_validation([shard], 0.05, seed=1)
        share = validation.num_tokens / (train.num_tokens + validation.num_tokens)
        _warn_of_shares(Corpora((train,), (1.0,), validation, IndexCache(tmp_path)), 0.05)
        assert bool(caplog.messages) is warned
    assert f"holds out 1 of 7 documents, which are {share:.1%}".replace("%", " %") in caplog.text
