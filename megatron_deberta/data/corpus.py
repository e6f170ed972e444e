"""Documents of one or more shards as one numbered sequence, or a part of it.

Owns opening shards with all checks that a run needs (manifest, tokenizer, hashes) and the
validation split. Refuses to know rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.indexed_dataset import IndexedDataset
from megatron_deberta.data.manifest import check_counts, read_manifest, verify_hashes
from megatron_deberta.data.randomness import Purpose, hash_indices, mix64
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.errors import DataError


class Corpus:
    """Non-empty documents of some shards, numbered 0..len-1 in shard order.

    Args:
        shards: where the documents are.
        documents: [D] int64 document numbers over all shards, ascending; None takes all.

    Attributes:
        lengths: [D] int64 tokens of each document.

    Raises:
        DataError: no document is left.
    """

    def __init__(
        self, shards: Sequence[IndexedDataset], documents: npt.NDArray[np.int64] | None = None
    ) -> None:
        """See the class."""
        self.shards = tuple(shards)
        sizes = np.cumsum([0] + [shard.num_tokens for shard in shards], dtype=np.int64)
        # Python integers, because bisect over an array converts at every comparison.
        self._first_tokens: list[int] = sizes.tolist()
        starts = np.concatenate(
            [shard.document_offsets[:-1] + base for shard, base in zip(shards, sizes, strict=False)]
        )
        lengths = np.concatenate([np.diff(shard.document_offsets) for shard in shards])
        self.document_numbers = np.flatnonzero(lengths) if documents is None else documents
        if not self.document_numbers.size:
            raise DataError(f"{self.name}: no documents with tokens; preprocess more text")
        self._starts = starts[self.document_numbers]
        self.lengths: npt.NDArray[np.int64] = lengths[self.document_numbers]

    @property
    def name(self) -> str:
        """The shards' prefixes, for messages."""
        return ", ".join(shard.prefix for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lengths)

    def starts(self, documents: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return where documents begin, for ``tokens``."""
        return self._starts[documents]

    def tokens(self, start: int, length: int) -> npt.NDArray[Any]:
        """Return tokens of one document, a read-only view.

        Args:
            start: from ``starts``, plus an offset inside the document.
            length: how many; must not leave the document.
        """
        shard = bisect_right(self._first_tokens, start) - 1
        local = start - self._first_tokens[shard]
        return self.shards[shard].tokens(local, local + length)


def open_shard(prefix: str, vocabulary: Vocabulary, hashes: bool = False) -> IndexedDataset:
    """Open a shard and check that it was made with this tokenizer.

    Args:
        prefix: path without suffix.
        vocabulary: of the run's tokenizer.
        hashes: compare both files with the manifest's SHA-256 as well.

    Raises:
        DataError: the shard is damaged, was made with another tokenizer or a larger vocabulary,
            contradicts its manifest, or ``hashes`` is asked of a shard without a manifest.
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
    if manifest.tokenizer_fingerprint != vocabulary.fingerprint:
        raise DataError(
            f"{prefix}: the tokenizer is not the shards' own: fingerprint "
            f"{vocabulary.fingerprint}, manifest {manifest.tokenizer_fingerprint} "
            f"({manifest.tokenizer_path}); set tokenizer.path to that, or preprocess again"
        )
    if manifest.vocab_size > vocabulary.size:
        raise DataError(
            f"{prefix}: made with {manifest.vocab_size} pieces, the tokenizer has "
            f"{vocabulary.size}; preprocess again"
        )
    check_counts(shard, manifest)
    if hashes:
        verify_hashes(prefix, manifest)
    return shard


def split_validation(
    shards: Sequence[IndexedDataset], fraction: float, seed: int
) -> tuple[Corpus, Corpus]:
    """Hold out the documents with the smallest hashes; a function of (seed, document number).

    Args:
        shards: training shards.
        fraction: share of documents held out, in (0, 1); at least one, never all.
        seed: of the run.

    Returns:
        Training and validation documents, without overlap.

    Raises:
        DataError: there are fewer than two documents.
    """
    everything = Corpus(shards)
    numbers = everything.document_numbers
    if len(everything) < 2:
        raise DataError(
            f"{everything.name}: one document cannot be split; set data.validation_fraction=0 or "
            "data.validation"
        )
    held_out = min(max(1, round(fraction * len(everything))), len(everything) - 1)
    hashes = hash_indices(mix64(seed, Purpose.SPLIT), int(numbers[-1]) + 1)[numbers]
    chosen = np.argpartition(hashes, held_out - 1)[:held_out]
    is_validation = np.zeros(len(everything), np.bool_)
    is_validation[chosen] = True
    return Corpus(shards, numbers[~is_validation]), Corpus(shards, numbers[is_validation])
