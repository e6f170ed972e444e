"""Memory-mapped reader for shards in Megatron's indexed format.

The structure of both files is checked on opening; content hashes are checked in ``manifest.py``.
"""

from __future__ import annotations

import glob
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.data import Integers
from megatron_deberta.data.shards.format import (
    DTYPE_CODES,
    HEADER,
    MAGIC,
    VERSION,
    bin_path,
    idx_path,
    manifest_path,
)
from megatron_deberta.errors import DataError, MissingInputError
from megatron_deberta.files import did_you_mean, sha256_file

_CHECK_CHUNK = 1 << 22


class IndexedDataset:
    """A read-only shard in Megatron's indexed format.

    Args:
        prefix: path of the shard without ``.bin``/``.idx``.

    Attributes:
        prefix: as given.
        dtype: token type.
        num_sequences: number of sentences.
        num_documents: number of documents.
        num_tokens: number of tokens.
        sequence_lengths: [sequences] int32 tokens of each sequence.
        sequence_offsets: [sequences] int64 first byte of each sequence in ``.bin``.
        document_boundaries: [documents + 1] int64, first sequence of each document, then
            num_sequences.

    Raises:
        DataError: a file is missing, unreadable, truncated, too long, of another format, version
            or dtype, or its offsets or boundaries contradict the lengths.
    """

    def __init__(self, prefix: str) -> None:
        """See the class."""
        self.prefix = prefix
        index = _map_file(idx_path(prefix), np.dtype(np.uint8))
        self.dtype, num_sequences, num_boundaries = _read_header(prefix, index)
        ends = np.cumsum([HEADER.size, 4 * num_sequences, 8 * num_sequences, 8 * num_boundaries])
        self.sequence_lengths: npt.NDArray[np.int32] = index[ends[0] : ends[1]].view("<i4")
        self.sequence_offsets: Integers = index[ends[1] : ends[2]].view("<i8")
        self.document_boundaries: Integers = index[ends[2] : ends[3]].view("<i8")
        self.num_sequences = num_sequences
        self.num_documents = num_boundaries - 1
        self.num_tokens = self._check_lengths()
        self._check_boundaries()
        self._tokens = self._map_tokens()

    def __len__(self) -> int:
        """Return the number of documents."""
        return self.num_documents

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        """Pickle the prefix only; unpickling reopens the files."""
        return IndexedDataset, (self.prefix,)

    def document(self, index: int) -> npt.NDArray[Any]:
        """Return the tokens of a document, a read-only 1-D view of the file.

        Raises:
            IndexError: there is no such document.
        """
        if not 0 <= index < self.num_documents:
            raise IndexError(f"{self.prefix}: document {index} of {self.num_documents}")
        start, end = self.document_range(index, index + 1).tolist()
        return self._tokens[start:end]

    @cached_property
    def identity(self) -> list[Any]:
        """Size and modification time of both files, and a SHA-256 of the contents.

        A copy may have preserved the times of other contents. The SHA-256 is that of the manifest,
        which has those of both files, or else of the index, which has the documents' borders.
        """
        paths = (idx_path(self.prefix), bin_path(self.prefix))
        stats = [os.stat(path) for path in paths]
        manifest = manifest_path(self.prefix)
        digest = sha256_file(manifest if os.path.exists(manifest) else paths[0])
        return [*([stat.st_size, stat.st_mtime_ns] for stat in stats), digest]

    @property
    def document_offsets(self) -> Integers:
        """[documents + 1] int64, first token of each document, then num_tokens; computed anew."""
        return self.document_range(0, self.num_documents)

    def document_range(self, first: int, stop: int) -> Integers:
        """Return [stop - first + 1] int64 first token of each document, then the last end."""
        sequences = self.document_boundaries[first : stop + 1]
        inside = np.minimum(sequences, max(self.num_sequences - 1, 0))
        offsets: Integers = self.sequence_offsets[inside] // self.dtype.itemsize
        offsets[sequences == self.num_sequences] = self.num_tokens
        return offsets

    def sentence_lengths(
        self, first: int, documents: Integers
    ) -> tuple[npt.NDArray[np.int32], Integers]:
        """Return the lengths of the non-empty sentences of some documents.

        Args:
            first: number of a document.
            documents: [D] ascending, relative to ``first``.

        Returns:
            [S] int32 tokens of each sentence, and [D] int64 cumulative sentences per document.
        """
        begins = self.document_boundaries[first + documents]
        counts = self.document_boundaries[first + documents + 1] - begins
        shift = begins - (np.cumsum(counts) - counts)
        lengths = self.sequence_lengths[np.repeat(shift, counts) + np.arange(int(counts.sum()))]
        up_to = np.append(0, np.cumsum(lengths > 0))[np.cumsum(counts)]
        return lengths[lengths > 0], up_to

    def tokens(self, start: int, end: int) -> npt.NDArray[Any]:
        """Return tokens ``[start, end)`` of the whole shard, a read-only 1-D view of the file."""
        return self._tokens[start:end]

    def _check_lengths(self) -> int:
        """Compare offsets with lengths and return the number of tokens."""
        total = 0
        for begin in range(0, self.num_sequences, _CHECK_CHUNK):
            lengths = self.sequence_lengths[begin : begin + _CHECK_CHUNK].astype(np.int64)
            if lengths.min() < 0:
                place = begin + int(np.argmax(lengths < 0))
                raise self._damaged(
                    f"has length {self.sequence_lengths[place]} for sequence {place}"
                )
            ends = total + np.cumsum(lengths)
            starts = (ends - lengths) * self.dtype.itemsize
            found = self.sequence_offsets[begin : begin + _CHECK_CHUNK]
            if not np.array_equal(found, starts):
                place = int(np.argmax(found != starts))
                raise self._damaged(
                    f"has offset {found[place]} for sequence {begin + place}, where the lengths "
                    f"before it add up to {starts[place]}"
                )
            total = int(ends[-1])
        if total == 0:
            raise self._damaged("holds no tokens")
        return total

    def _check_boundaries(self) -> None:
        boundaries = self.document_boundaries
        if boundaries[0] != 0 or boundaries[-1] != self.num_sequences:
            raise self._damaged(
                f"has document boundaries {boundaries[0]}..{boundaries[-1]} for sequences "
                f"0..{self.num_sequences}"
            )
        for begin in range(0, self.num_documents, _CHECK_CHUNK):
            part = boundaries[begin : begin + _CHECK_CHUNK + 1]
            decreasing = np.flatnonzero(part[1:] < part[:-1])
            if decreasing.size:
                number = begin + decreasing[0]
                raise self._damaged(f"has boundaries that decrease after document {number}")

    def _map_tokens(self) -> npt.NDArray[Any]:
        path = bin_path(self.prefix)
        expected = self.num_tokens * self.dtype.itemsize
        try:
            size = os.path.getsize(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; give the prefix without .bin") from error
        if size != expected:
            what = "truncated" if size < expected else "too long"
            raise DataError(
                f"{path}: {what}: {size} bytes, its index says {expected}; preprocess again"
            )
        return _map_file(path, self.dtype)

    def _damaged(self, what: str) -> DataError:
        return DataError(f"{idx_path(self.prefix)}: {what}; preprocess again")


def _map_file(path: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        # A plain array: slicing a memmap costs several times as much.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    except OSError as error:
        # ``preprocess --output books`` makes books_text_document.
        similar = sorted(glob.glob(f"{glob.escape(os.path.splitext(path)[0])}_*.idx"))
        remedy = f"; did you mean {similar[0]}?" if similar else did_you_mean(Path(path), ".idx")
        if os.path.isfile(source := path.removesuffix(".idx")):
            remedy = f"; {source} is no shard; make one of text with preprocess"
        # If another file of the shard is there, it is damaged.
        is_absent = not glob.glob(f"{glob.escape(os.path.splitext(path)[0])}.*")
        kind = MissingInputError if is_absent else DataError
        remedy = remedy or "; give the shard's prefix"
        raise kind(f"{path}: {error.strerror}{remedy}") from error
    except ValueError as error:
        raise DataError(f"{path}: {error}; preprocess again") from error


def _read_header(prefix: str, index: npt.NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    path = idx_path(prefix)
    if index.size < HEADER.size:
        raise DataError(f"{path}: truncated: {index.size} bytes; preprocess again")
    magic, version, code, num_sequences, num_boundaries = HEADER.unpack(
        index[: HEADER.size].tobytes()
    )
    if magic != MAGIC:
        raise DataError(f"{path}: magic {magic!r} is not Megatron's mmap format {MAGIC!r}")
    if version != VERSION:
        raise DataError(f"{path}: version {version} is not {VERSION}")
    if code not in DTYPE_CODES:
        known = ", ".join(f"{number} {dtype}" for number, dtype in DTYPE_CODES.items())
        raise DataError(f"{path}: dtype code {code} is not one of {known}; preprocess again")
    expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if index.size != expected or num_boundaries < 1:
        raise DataError(
            f"{path}: {index.size} bytes, its header ({num_sequences} sequences, "
            f"{num_boundaries} boundaries) says {expected}; preprocess again"
        )
    return DTYPE_CODES[code], num_sequences, num_boundaries
