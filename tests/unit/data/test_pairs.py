"""Segment and sentence pairs: content, labels, epochs, truncation."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from megatron_deberta.data.dataset import pairs as pairs_module
from megatron_deberta.data.dataset.corpus import Corpus, split_validation
from megatron_deberta.data.dataset.packing import PackedRows
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.errors import DataError
from tests.support.shards import sentences

PACKINGS = ["segment_pair", "sentence_pair"]


@pytest.fixture
def corpus(write_sentences):
    """60 documents of 1 to 11 sentences; every sentence of its own tokens where ids suffice."""
    return Corpus([IndexedDataset(write_sentences(60))])


def packed(corpus, vocabulary, packing, length=32, key=5, **options):
    return PackedRows(corpus, vocabulary, length, packing, key, **options)


def epoch_rows(rows, epoch=0):
    first = epoch * rows.rows_per_epoch
    batch = rows.rows(np.arange(first, first + rows.rows_per_epoch))
    return [batch.row(number) for number in range(rows.rows_per_epoch)]


def halves(row):
    """Both halves without special tokens."""
    second = row.document_starts[1]
    return tuple(row.tokens[1 : second - 1].tolist()), tuple(row.tokens[second:-1].tolist())


def documents_of(corpus):
    """Documents as lists of sentences, as tuples."""
    (shard,) = corpus.shards
    return [
        [tuple(sentence.tolist()) for sentence in sentences(shard, number)]
        for number in range(len(shard))
    ]


def runs_of(document):
    """Every run of whole sentences of a document, joined -> where it begins and ends."""
    return {
        sum(document[begin:end], ()): (begin, end)
        for begin in range(len(document))
        for end in range(begin + 1, len(document) + 1)
    }


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_row_is_two_framed_halves(corpus, vocabulary, packing):
    for row in epoch_rows(packed(corpus, vocabulary, packing)):
        assert row.tokens.size <= 32
        assert row.tokens[0] == vocabulary.cls_id
        assert row.tokens[row.document_starts[1] - 1] == row.tokens[-1] == vocabulary.sep_id
        assert (row.tokens == vocabulary.sep_id).sum() == 2
        assert row.is_random_next in (0, 1)
        assert all(halves(row))


@pytest.mark.parametrize("packing", PACKINGS)
def test_halves_are_whole_sentences_and_labels_are_true(corpus, vocabulary, packing):
    """Long rows, so that nothing is cut: label 0 goes on in the same document, 1 is of another."""
    documents = documents_of(corpus)
    where = {}
    for number, document in enumerate(documents):
        for run, place in runs_of(document).items():
            where.setdefault(run, set()).add((number, *place))
    for row in epoch_rows(packed(corpus, vocabulary, packing, length=64)):
        first, second = (where[half] for half in halves(row))
        goes_on = any(a[0] == b[0] and a[2] == b[1] for a in first for b in second)
        elsewhere = any(a[0] != b[0] for a in first for b in second)
        assert elsewhere if row.is_random_next else goes_on
        if packing == "sentence_pair":
            assert min(end - begin for _, begin, end in first) == 1
            assert min(end - begin for _, begin, end in second) == 1


@pytest.mark.parametrize("packing", PACKINGS)
def test_every_sentence_is_used_once_per_epoch(corpus, vocabulary, packing):
    """First halves and second halves that go on make up the text, each sentence once."""
    rows = packed(corpus, vocabulary, packing, length=64)
    for epoch in (0, 3):
        pairs = rows._packing
        index = pairs._pairs(epoch)
        begins = index["begins"]
        used = Counter()
        for begin, size in zip(begins, index["firsts"] + index["seconds"], strict=True):
            used.update(range(begin, begin + int(size)))
        assert used == Counter(range(corpus.sentences(pairs._cache).ends.size - 1))
        assert (np.diff(begins) > 0).all()


@pytest.mark.parametrize("packing", PACKINGS)
def test_half_of_the_pairs_are_consecutive(write_sentences, vocabulary, packing):
    corpus = Corpus([IndexedDataset(write_sentences(400, most=30))])
    labels = [row.is_random_next for row in epoch_rows(packed(corpus, vocabulary, packing))]
    # The last sentence of a document, if it is left alone, cannot go on.
    assert 0.48 < np.mean(labels) < 0.6


def test_segments_fill_the_row(write_sentences, vocabulary):
    corpus = Corpus([IndexedDataset(write_sentences(12, most=500))])
    sizes = [row.tokens.size for row in epoch_rows(packed(corpus, vocabulary, "segment_pair", 128))]
    assert np.mean(sizes) > 0.85 * 128


@pytest.mark.parametrize("packing", PACKINGS)
def test_epochs_and_keys_differ_but_repeat(corpus, vocabulary, packing):
    def epoch(key, number):
        rows = packed(corpus, vocabulary, packing, key=key)
        return [(row.tokens.tolist(), row.is_random_next) for row in epoch_rows(rows, number)]

    assert epoch(1, 0) == epoch(1, 0)
    assert epoch(1, 0) != epoch(1, 1)
    assert epoch(1, 0) != epoch(2, 0)
    # More than another order: other pairs.
    assert {str(row) for row in epoch(1, 0)} != {str(row) for row in epoch(1, 1)}


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_do_not_depend_on_order_and_batch(corpus, vocabulary, packing, monkeypatch):
    rows = packed(corpus, vocabulary, packing)
    count = 3 * rows.rows_per_epoch + 5
    forward = rows.rows(np.arange(count))
    monkeypatch.setattr(pairs_module, "_DOCUMENTS_AT_ONCE", 7)
    again = packed(corpus, vocabulary, packing)
    order = np.random.default_rng(0).permutation(count)
    for part in np.array_split(order, 9):
        batch = again.rows(part)
        for place, index in enumerate(part.tolist()):
            found, expected = batch.row(place), forward.row(index)
            np.testing.assert_array_equal(found.tokens, expected.tokens)
            assert found.document_starts == expected.document_starts
            assert found.is_random_next == expected.is_random_next


def test_long_sentences_are_cut_to_fit(write_shard, vocabulary):
    draw = np.random.default_rng(0)
    documents = [
        [draw.integers(4, 180, int(draw.integers(1, 90))) for _ in range(6)] for _ in range(9)
    ]
    corpus = Corpus([IndexedDataset(write_shard(documents, "long_sentence"))])
    sentences = [sentence.tolist() for document in documents for sentence in document]
    for row in epoch_rows(packed(corpus, vocabulary, "sentence_pair", 32)):
        first, second = halves(row)
        assert row.tokens.size <= 32
        for half in (first, second):
            assert any(
                list(half) == sentence[start : start + len(half)]
                for sentence in sentences
                for start in range(len(sentence) - len(half) + 1)
            )
        if row.tokens.size == 32 and min(len(first), len(second)) < 14:
            # The longer one gave way.
            assert len(first) + len(second) == 29


def test_static_masks_cut_rows_once(corpus, vocabulary):
    rows = packed(corpus, vocabulary, "segment_pair", static_masks=3)
    batches = [
        rows.rows(np.arange(epoch * rows.rows_per_epoch, (epoch + 1) * rows.rows_per_epoch))
        for epoch in range(7)
    ]
    contents = [
        sorted(
            (batch.row(number).tokens.tolist(), int(batch.mask_ids[number]))
            for number in range(rows.rows_per_epoch)
        )
        for batch in batches
    ]
    for epoch, later in ((0, 3), (1, 4), (2, 5), (0, 6)):
        assert contents[epoch] == contents[later]
    for earlier, later in pairwise(contents):
        assert [tokens for tokens, _ in earlier] == [tokens for tokens, _ in later]
        assert {mask for _, mask in earlier}.isdisjoint({mask for _, mask in later})


def test_split_documents_keep_their_sentences(write_sentences, vocabulary):
    shard = IndexedDataset(write_sentences(60))
    train, validation = split_validation([shard], 0.3, seed=1)
    everything = {sum(document, ()) for document in documents_of(Corpus([shard]))}
    for corpus in (train, validation):
        ends, bounds = corpus.sentences(packed(corpus, vocabulary, "segment_pair")._packing._cache)
        assert bounds.size == len(corpus) + 1
        np.testing.assert_array_equal(np.diff(ends[bounds]), corpus.lengths)
        for row in epoch_rows(packed(corpus, vocabulary, "sentence_pair", 64)):
            assert any(str(halves(row)[0])[1:-1].strip(",") in str(text) for text in everything)


def test_shards_without_sentences_are_refused(write_shard, random_documents, vocabulary):
    plain = Corpus([IndexedDataset(write_shard(random_documents(5)))])
    with pytest.raises(DataError, match="sentence splitting"):
        packed(plain, vocabulary, "segment_pair")
    one = Corpus([IndexedDataset(write_shard([[np.array([5, 6]), np.array([7])]], "one"))])
    with pytest.raises(DataError, match="there is only one"):
        packed(one, vocabulary, "sentence_pair")
