"""Documents of one or more shards as one numbered sequence, and the validation split."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_deberta.data import Bits, Integers
from megatron_deberta.data.dataset.index_cache import IndexCache, Parts
from megatron_deberta.data.randomness import Purpose, hash_values, mix64
from megatron_deberta.data.shards.format import bin_path
from megatron_deberta.data.shards.manifest import (
    ShardManifest,
    check_counts,
    read_manifest,
    verify_hashes,
)
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.errors import DataError

_CHUNK = 1 << 20


class Split(NamedTuple):
    """One side of a validation split: a shard's documents with hashes above or up to a bound.

    Attributes:
        side: which of the two.
        key: key of the hash of document numbers.
        bound: largest hash of a validation document.
        first: number of the shard's first document.
    """

    side: Literal["training", "validation"]
    key: int
    bound: int
    first: int


class Sentences(NamedTuple):
    """Sentence boundaries of all documents, laid end to end.

    Attributes:
        ends: [S + 1] int64 tokens before each sentence, then their number.
        bounds: [D + 1] int64 sentences before each document, then their number.
    """

    ends: Integers
    bounds: Integers


class _Chunk(NamedTuple):
    """Consecutive documents of one shard.

    Attributes:
        shard: the shard.
        first: number of the first document in its shard.
        kept: documents that belong to the corpus, relative to ``first``.
        starts: their first tokens, for ``Corpus.tokens``.
        lengths: their numbers of tokens.
    """

    shard: IndexedDataset
    first: int
    kept: Integers
    starts: Integers
    lengths: Integers


class Corpus:
    """Non-empty documents of some shards, numbered 0..len-1 in shard order.

    Args:
        shards: shards with the documents.
        splits: side of the validation split, per shard; None: all documents.
        cache: of indices.

    Attributes:
        shards: as given.
        splits: as given.
        identity: identifies the documents, as JSON.
        lengths: [D] integers, tokens of each document.
        num_tokens: tokens of all documents.

    Raises:
        DataError: no document is left.
    """

    def __init__(
        self,
        shards: Sequence[IndexedDataset],
        splits: Sequence[Split] | None = None,
        cache: IndexCache | None = None,
    ) -> None:
        """See the class."""
        self.shards = tuple(shards)
        self.splits = None if splits is None else tuple(splits)
        self.identity = [[shard.identity for shard in shards], self.splits]
        sizes = np.cumsum([0] + [shard.num_tokens for shard in shards], dtype=np.int64)
        # Python integers, because bisect over an array converts at every comparison.
        self._first_tokens: list[int] = sizes.tolist()
        num_documents = sum(len(shard) for shard in shards)
        arrays = (cache or IndexCache()).get(
            "documents", self.identity, num_documents, self._list_documents
        )
        self._starts: Integers = arrays["starts"]
        self.lengths: npt.NDArray[Any] = arrays["lengths"]
        if not self.lengths.size:
            raise DataError(f"{self.name}: no documents with tokens; preprocess more text")
        self.num_tokens = int(self.lengths.sum(dtype=np.int64))

    @property
    def name(self) -> str:
        """The shards' prefixes, for error messages."""
        return ", ".join(shard.prefix for shard in self.shards)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lengths)

    def starts(self, documents: npt.NDArray[Any]) -> Integers:
        """Return the first tokens of documents, for ``tokens``."""
        begins: Integers = self._starts[documents]
        return begins

    def tokens(self, start: int, length: int) -> npt.NDArray[Any]:
        """Return tokens of one document, a read-only view.

        Args:
            start: from ``starts``, plus an offset inside the document.
            length: number of tokens, all inside the document.
        """
        shard, local = self._locate(start)
        return shard.tokens(local, local + length)

    def gather(
        self, starts: Integers, lengths: npt.NDArray[Any], vocab_size: int
    ) -> npt.NDArray[Any]:
        """Return the tokens of several spans, concatenated.

        Args:
            starts: ``[P]`` first token of each span, as in ``tokens``.
            lengths: ``[P]`` numbers of tokens.
            vocab_size: size of the vocabulary.

        Raises:
            DataError: an id is outside the vocabulary; the message names the file and the byte.
        """
        spans = zip(starts.tolist(), lengths.tolist(), strict=True)
        if len(self.shards) == 1:
            tokens = self.shards[0].tokens
            text = np.concatenate([tokens(start, start + length) for start, length in spans])
        else:
            text = np.concatenate([self.tokens(start, length) for start, length in spans])
        if text.size and (int(text.max()) >= vocab_size or int(text.min()) < 0):
            place = int(np.flatnonzero((text < 0) | (text >= vocab_size))[0])
            ends = np.cumsum(lengths, dtype=np.int64)
            span = int(ends.searchsorted(place, side="right"))
            shard, local = self._locate(int(starts[span]) + place - int(ends[span] - lengths[span]))
            raise DataError(
                f"{bin_path(shard.prefix)}: byte {local * shard.dtype.itemsize}: id {text[place]} "
                f"is outside the vocabulary of {vocab_size}; preprocess with this tokenizer"
            )
        return text

    def _locate(self, token: int) -> tuple[IndexedDataset, int]:
        """Return the shard of a token and the token's number in it."""
        number = bisect_right(self._first_tokens, token) - 1
        return self.shards[number], token - self._first_tokens[number]

    def sentences(self, cache: IndexCache) -> Sentences:
        """Return the boundaries of the documents' non-empty sentences."""
        num_sentences = sum(shard.num_sequences for shard in self.shards)
        arrays = cache.get("sentences", self.identity, num_sentences, self._list_sentences)
        return Sentences(arrays["ends"], arrays["bounds"])

    def _list_documents(self) -> Parts:
        for chunk in self.chunks():
            yield "starts", chunk.starts
            yield "lengths", _narrowed(chunk.lengths)

    def _list_sentences(self) -> Parts:
        tokens = sentences = 0
        yield "ends", np.zeros(1, np.int64)
        yield "bounds", np.zeros(1, np.int64)
        for chunk in self.chunks():
            lengths, bounds = chunk.shard.sentence_lengths(chunk.first, chunk.kept)
            yield "ends", tokens + np.cumsum(lengths, dtype=np.int64)
            yield "bounds", sentences + bounds
            tokens += int(lengths.sum(dtype=np.int64))
            sentences += lengths.size

    def chunks(self) -> Iterator[_Chunk]:
        """Yield the documents in chunks of bounded size."""
        splits = self.splits or (None,) * len(self.shards)
        for shard, base, split in zip(self.shards, self._first_tokens, splits, strict=False):
            for first in range(0, len(shard), _CHUNK):
                offsets = shard.document_range(first, min(first + _CHUNK, len(shard)))
                lengths = np.diff(offsets)
                kept = np.flatnonzero(lengths)
                if split is not None:
                    hashes = hash_values(split.key, split.first + first + kept)
                    held_out = hashes <= np.uint64(split.bound)
                    kept = kept[held_out == (split.side == "validation")]
                yield _Chunk(shard, first, kept, base + offsets[kept], lengths[kept])


def _narrowed(lengths: Integers) -> npt.NDArray[np.uint32]:
    if lengths.size and int(lengths.max()) >= 1 << 32:
        raise DataError(
            f"a document has {int(lengths.max())} tokens; split it before preprocessing"
        )
    return lengths.astype(np.uint32)


def open_shard(prefix: str, vocabulary: Vocabulary, hashes: bool = False) -> IndexedDataset:
    """Open a shard and check that it was made with this tokenizer.

    Args:
        prefix: path without suffix.
        vocabulary: of the run's tokenizer.
        hashes: compare both files with the manifest's SHA-256 as well.

    Raises:
        DataError: the shard is damaged, was made with another tokenizer or a larger vocabulary,
            contradicts its manifest, or has no manifest although ``hashes`` is true.
    """
    shard = IndexedDataset(prefix)
    manifest = read_manifest(prefix)
    if manifest is None:
        if hashes:
            raise DataError(
                f"{prefix}: data.verify_hashes is true but there is no {prefix}.manifest.json; "
                "set it to false"
            )
        return shard
    check_tokenizer(prefix, manifest, vocabulary.fingerprint)
    if manifest.vocab_size > vocabulary.size:
        raise DataError(
            f"{prefix}: made with {manifest.vocab_size} pieces, the tokenizer has "
            f"{vocabulary.size}; preprocess again"
        )
    check_counts(shard, manifest)
    if hashes:
        verify_hashes(prefix, manifest)
    return shard


def check_tokenizer(prefix: str, manifest: ShardManifest, fingerprint: str) -> None:
    """Check that a shard was made with the tokenizer that has this fingerprint.

    Args:
        prefix: path of the shard without suffix.
        manifest: of the shard.
        fingerprint: of the tokenizer.

    Raises:
        DataError: it was made with another one.
    """
    if manifest.tokenizer_fingerprint != fingerprint:
        raise DataError(
            f"{prefix}: the shard was made with another tokenizer: fingerprint "
            f"{fingerprint[:12]}, manifest {manifest.tokenizer_fingerprint[:12]} "
            f"({manifest.tokenizer_path}); set tokenizer.path to that, or preprocess again"
        )


def split_validation(
    shards: Sequence[IndexedDataset], fraction: float, seed: int, cache: IndexCache | None = None
) -> tuple[Corpus, Corpus]:
    """Hold out the documents with the smallest hashes of (seed, document number).

    Args:
        shards: training shards.
        fraction: share of documents held out, in (0, 1); at least one, never all.
        seed: of the run.
        cache: of indices.

    Returns:
        Disjoint training and validation documents.

    Raises:
        DataError: there are fewer than two documents.
    """
    everything = Corpus(shards, cache=cache)
    if len(everything) < 2:
        raise DataError(
            f"{everything.name}: one document cannot be split; set data.validation_fraction=0 or "
            "data.validation"
        )
    held_out = min(max(1, round(fraction * len(everything))), len(everything) - 1)
    key = mix64(seed, Purpose.SPLIT)
    firsts = np.cumsum([0] + [len(shard) for shard in shards])[:-1].tolist()
    bound = _smallest_hash(everything, firsts, key, held_out)
    training = [Split("training", key, bound, first) for first in firsts]
    validation = [Split("validation", key, bound, first) for first in firsts]
    return Corpus(shards, training, cache), Corpus(shards, validation, cache)


def _smallest_hash(everything: Corpus, firsts: Sequence[int], key: int, rank: int) -> int:
    """Return the ``rank``-th smallest hash of the non-empty documents, in bounded memory."""
    first_of = dict(zip(everything.shards, firsts, strict=True))

    def hashes() -> Iterator[Bits]:
        for chunk in everything.chunks():
            yield hash_values(key, first_of[chunk.shard] + chunk.first + chunk.kept)

    counts = np.zeros(1 << 16, np.int64)
    for part in hashes():
        counts += np.bincount((part >> np.uint64(48)).astype(np.int64), minlength=counts.size)
    before = np.cumsum(counts)
    bucket = int(np.searchsorted(before, rank))
    inside = [part[part >> np.uint64(48) == bucket] for part in hashes()]
    place = rank - int(before[bucket] - counts[bucket]) - 1
    return int(np.partition(np.concatenate(inside), place)[place])
