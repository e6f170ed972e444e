"""Puts a shard together out of parts, each written straight to its place.

Owns where the sequences, documents and tokens of each part go: an exclusive scan over the parts'
sizes, after which parts can be written in any order, by any number of processes on any number of
nodes, as often as anyone likes. Refuses to publish: see ``files`` and ``preprocess.merging``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.shards.format import CODES_OF_DTYPES, HEADER, MAGIC, VERSION

_COPY_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class PartSize:
    """What a part holds."""

    tokens: int
    sequences: int
    documents: int


class ShardLayout:
    """Where each part of a shard goes.

    Args:
        dtype: token type.
        parts: sizes of the parts, in order.
    """

    def __init__(self, dtype: npt.DTypeLike, parts: Sequence[PartSize]) -> None:
        """See the class."""
        self.dtype = np.dtype(dtype)
        self._tokens = [0, *accumulate(part.tokens for part in parts)]
        self._sequences = [0, *accumulate(part.sequences for part in parts)]
        self._documents = [0, *accumulate(part.documents for part in parts)]

    @property
    def total(self) -> PartSize:
        """What the whole shard holds."""
        return PartSize(self._tokens[-1], self._sequences[-1], self._documents[-1])

    @property
    def bin_bytes(self) -> int:
        """Size of the ``.bin`` file."""
        return self.total.tokens * self.dtype.itemsize

    @property
    def idx_bytes(self) -> int:
        """Size of the ``.idx`` file."""
        return HEADER.size + 12 * self.total.sequences + 8 * (self.total.documents + 1)

    def create(self, bin_file: Path, idx_file: Path) -> None:
        """Make both files in their full size, with the header and the first document's begin.

        Raises:
            OSError: the disk is full, or the folder not writable.
        """
        for path, size in ((bin_file, self.bin_bytes), (idx_file, self.idx_bytes)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                if size:
                    os.posix_fallocate(descriptor, 0, size)
                if path == idx_file:
                    code = CODES_OF_DTYPES[self.dtype]
                    total = self.total
                    os.pwrite(
                        descriptor,
                        HEADER.pack(MAGIC, VERSION, code, total.sequences, total.documents + 1),
                        0,
                    )
                    os.pwrite(descriptor, np.int64(0).tobytes(), self._documents_at(0) - 8)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def write_index(
        self,
        descriptor: int,
        part: int,
        lengths: npt.NDArray[np.int32],
        sequences_per_document: npt.NDArray[np.int32] | None,
    ) -> None:
        """Write a part's lengths, offsets and document boundaries into the ``.idx`` file.

        Args:
            descriptor: the file, open for writing.
            part: index of the part.
            lengths: tokens of each sequence.
            sequences_per_document: None where each document is one sequence.

        Raises:
            OSError: it cannot be written.
        """
        sequences, documents = self._sequences[part], self._documents[part]
        ends = np.cumsum(lengths, dtype=np.int64)
        starts = (ends - lengths + self._tokens[part]) * self.dtype.itemsize
        if sequences_per_document is None:
            boundaries = np.arange(1, len(lengths) + 1, dtype=np.int64)
        else:
            boundaries = np.cumsum(sequences_per_document, dtype=np.int64)
        boundaries += sequences
        _write_at(descriptor, lengths, HEADER.size + 4 * sequences)
        _write_at(descriptor, starts, HEADER.size + 4 * self.total.sequences + 8 * sequences)
        _write_at(descriptor, boundaries, self._documents_at(documents))

    def copy_tokens(self, descriptor: int, part: int, source: int) -> None:
        """Copy a part's tokens, from the beginning of ``source``, into the ``.bin`` file.

        Raises:
            OSError: it cannot be written.
        """
        begin = self._tokens[part] * self.dtype.itemsize
        left = (self._tokens[part + 1] - self._tokens[part]) * self.dtype.itemsize
        done = 0
        while done < left:
            piece = os.pread(source, min(_COPY_BYTES, left - done), done)
            if not piece:
                raise OSError(5, "a part is shorter than its record says")
            _write_at(descriptor, piece, begin + done)
            done += len(piece)

    def _documents_at(self, document: int) -> int:
        return HEADER.size + 12 * self.total.sequences + 8 * (document + 1)


def _write_at(descriptor: int, content: npt.NDArray[Any] | bytes, offset: int) -> None:
    view = memoryview(content if isinstance(content, bytes) else content.tobytes())
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
