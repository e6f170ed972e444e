"""Documents to rows of a fixed length.

Owns which tokens make up sample i, as a pure function of (seed, i). Refuses to mask them.
The random order of documents is drawn anew each epoch; the order of rows too, so neighbouring
rows of a long document do not meet in a batch.

Source: Liu et al. 2019 (RoBERTa), arXiv:1907.11692, section 4.2. Deviation: rows are cut at token
boundaries, not at sentence ends, as the released DeBERTa data is, so that no row is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.corpus import Corpus
from megatron_deberta.data.randomness import KeyedPermutation, Purpose, keyed_generator, mix64
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.errors import DataError

_FRAME_TOKENS = 2
"""[CLS] and the last [SEP]."""


class Piece(NamedTuple):
    """A run of tokens of one document inside a row."""

    start: int
    """For ``Corpus.tokens``."""
    length: int
    """Tokens; 0 where the row before took them all and only the separator is left."""


@dataclass(frozen=True, slots=True)
class Row:
    """One sample before masking.

    Attributes:
        tokens: [n] int64, n <= sequence_length, framed by [CLS] and [SEP].
        document_starts: row positions at which documents begin, the first 0.
    """

    tokens: npt.NDArray[np.int64]
    document_starts: list[int]


class RowSource(Protocol):
    """An endless sequence of rows; index i means the same row for ever."""

    def row(self, index: int) -> Row:
        """Return row ``index`` >= 0."""


class _Layout(Protocol):
    num_rows: int

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        """Return what row ``row`` in [0, num_rows) of an epoch holds."""


class _FullSentences:
    """Rows cut from the epoch's documents laid end to end, a separator between them."""

    def __init__(self, corpus: Corpus, content_length: int, key: int) -> None:
        self._corpus = corpus
        self._content_length = content_length
        self._key = key
        self._stream_length = corpus.num_tokens + len(corpus) - 1
        self.num_rows = -(-self._stream_length // content_length)
        self._epochs: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def prepare(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return an epoch's document order and, in that order, where each ends, separator too."""
        if epoch not in self._epochs:
            if len(self._epochs) > 1:
                # Loaders work at most one epoch ahead of the slowest sample in flight.
                del self._epochs[min(self._epochs)]
            generator = keyed_generator(self._key, Purpose.DOCUMENT_ORDER, epoch)
            order = generator.permutation(len(self._corpus))
            self._epochs[epoch] = order, np.cumsum(self._corpus.lengths[order] + 1)
        return self._epochs[epoch]

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        order, ends = self.prepare(epoch)
        begin = row * self._content_length
        end = min(begin + self._content_length, self._stream_length)
        first, last = np.searchsorted(ends, (begin, end - 1), side="right").tolist()
        documents = order[first : last + 1]
        pieces = []
        for source, length, stop in zip(
            self._corpus.starts(documents).tolist(),
            self._corpus.lengths[documents].tolist(),
            ends[first : last + 1].tolist(),
            strict=True,
        ):
            document_begin = stop - 1 - length
            skipped = max(begin - document_begin, 0)
            taken = min(end - document_begin, length) - skipped
            pieces.append(Piece(source + skipped, taken))
        return pieces


class _DocSentences:
    """Rows that end with their document; a long document has several."""

    def __init__(self, corpus: Corpus, content_length: int) -> None:
        self._corpus = corpus
        self._content_length = content_length
        self._row_ends = np.cumsum(-(-corpus.lengths // content_length))
        self.num_rows = int(self._row_ends[-1])

    def pieces(self, epoch: int, row: int) -> list[Piece]:
        document = np.searchsorted(self._row_ends, [row], side="right")
        length = int(self._corpus.lengths[document[0]])
        rows_left = int(self._row_ends[document[0]]) - row
        skipped = (-(-length // self._content_length) - rows_left) * self._content_length
        taken = min(self._content_length, length - skipped)
        source = int(self._corpus.starts(document)[0])
        return [Piece(source + skipped, taken)]


class PackedRows:
    """The endless rows of a corpus, epoch after epoch.

    Args:
        corpus: the documents.
        vocabulary: special ids and size.
        sequence_length: N, tokens a row with special tokens.
        packing: ``full_sentences`` or ``doc_sentences``.
        seed: of the run.
        component: number in a blend, so that equal corpora differ in order.

    Attributes:
        rows_per_epoch: the same for every epoch.

    Raises:
        DataError: ``sequence_length`` leaves no room for text.
    """

    def __init__(
        self,
        corpus: Corpus,
        vocabulary: Vocabulary,
        sequence_length: int,
        packing: str,
        seed: int,
        component: int = 0,
    ) -> None:
        """See the class."""
        content_length = sequence_length - _FRAME_TOKENS
        if content_length < 2:
            raise DataError(f"data.sequence_length is {sequence_length}; it must be at least 4")
        self._corpus = corpus
        self._vocabulary = vocabulary
        self._sequence_length = sequence_length
        self._key = mix64(seed, component)
        self._layout: _Layout
        if packing == "full_sentences":
            self._layout = _FullSentences(corpus, content_length, self._key)
        else:
            self._layout = _DocSentences(corpus, content_length)
        self.rows_per_epoch = self._layout.num_rows
        self._order = self._row_order(0)

    def row(self, index: int) -> Row:
        """Return row ``index`` >= 0.

        Raises:
            DataError: the shard holds an id outside the vocabulary.
        """
        epoch, number = divmod(index, self.rows_per_epoch)
        if epoch != self._order[0]:
            self._order = self._row_order(epoch)
        return self._assemble(self._layout.pieces(epoch, self._order[1](number)))

    def _row_order(self, epoch: int) -> tuple[int, KeyedPermutation]:
        key = mix64(self._key, Purpose.ROW_ORDER, epoch)
        return epoch, KeyedPermutation(self.rows_per_epoch, key)

    def _assemble(self, pieces: list[Piece]) -> Row:
        vocabulary = self._vocabulary
        tokens = np.empty(self._sequence_length, np.int64)
        tokens[0] = vocabulary.cls_id
        used = 1
        document_starts = [0]
        for piece in pieces:
            if piece.length == 0 and used == 1:
                # A separator that fell to the row's start separates nothing.
                continue
            tokens[used : used + piece.length] = self._corpus.tokens(piece.start, piece.length)
            used += piece.length
            if piece is not pieces[-1]:
                tokens[used] = vocabulary.sep_id
                used += 1
                document_starts.append(used)
        # A separator at the row's end and the frame's own are one.
        tokens[used] = vocabulary.sep_id
        tokens = tokens[: used + 1]
        if int(tokens.max()) >= vocabulary.size or int(tokens.min()) < 0:
            raise DataError(
                f"{self._corpus.name}: id {int(tokens.max())} (smallest {int(tokens.min())}) is "
                f"outside the vocabulary of {vocabulary.size}; preprocess with this tokenizer"
            )
        return Row(tokens, document_starts)
