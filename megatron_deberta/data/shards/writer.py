"""Writer for shards in Megatron's indexed format.

The size of each part fixes its place in both files (``ShardLayout``), so parts can be written in
any order, by any number of threads or processes. ``preprocess`` and ``merge`` write many parts,
``write_shard`` a single one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_deberta.data import Integers
from megatron_deberta.data.shards.format import (
    CODES_OF_DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    bin_path,
    idx_path,
    manifest_path,
)
from megatron_deberta.data.shards.manifest import ShardManifest, encode_manifest
from megatron_deberta.errors import DataError
from megatron_deberta.files import fsync_path, write_durably

_CHUNK_BYTES = 1 << 23
_CHUNK_ROWS = 1 << 20
Document = npt.NDArray[Any] | Sequence[npt.NDArray[Any]]
PartIndex = tuple[npt.NDArray[np.int32], Integers | None]
"""Lengths of a part's sequences, and its document ends; None: each document is one sequence."""


class PartSize(NamedTuple):
    """Number of tokens, sequences and documents of a part."""

    tokens: int
    sequences: int
    documents: int


class ShardLayout:
    """Offsets of the parts of a shard: an exclusive scan over their sizes.

    Args:
        dtype: token type.
        parts: sizes of the parts, in order.
    """

    def __init__(self, dtype: npt.DTypeLike, parts: Sequence[PartSize]) -> None:
        """See the class."""
        self.dtype = np.dtype(dtype)
        sizes = np.array([PartSize(0, 0, 0), *parts], np.int64).cumsum(axis=0)
        self._begins = [PartSize(*size) for size in sizes.tolist()]

    @property
    def total(self) -> PartSize:
        """Size of the whole shard."""
        return self._begins[-1]

    def zoom(self, first: int, last: int) -> ShardLayout:
        """Return this layout with all parts before ``first`` as one, and all from ``last`` on."""
        zoomed = ShardLayout(self.dtype, [])
        begins = self._begins
        zoomed._begins = [begins[0], *begins[first : last + 1], begins[-1]]
        return zoomed

    @property
    def bin_bytes(self) -> int:
        """Size of the ``.bin`` file."""
        return self.total.tokens * self.dtype.itemsize

    @property
    def idx_bytes(self) -> int:
        """Size of the ``.idx`` file."""
        return HEADER.size + 12 * self.total.sequences + 8 * (self.total.documents + 1)

    def token_range(self, part: int) -> tuple[int, int]:
        """Return the bytes [begin, end) of a part's tokens in the ``.bin`` file."""
        begin, end = self._begins[part].tokens, self._begins[part + 1].tokens
        return begin * self.dtype.itemsize, end * self.dtype.itemsize

    def create(self, bin_file: str, idx_file: str) -> None:
        """Create both files with ``allocate`` and flush them.

        Raises:
            OSError: the disk is full, or the folder is not writable.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptors = [os.open(path, flags, 0o666) for path in (bin_file, idx_file)]
        try:
            self.allocate(*descriptors)
            for descriptor in descriptors:
                os.fsync(descriptor)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def allocate(self, bin_file: int, idx_file: int) -> None:
        """Allocate all blocks of two empty files; write the header and the first boundary.

        A full disk is thus found before anything is copied.

        Raises:
            OSError: the disk is full.
        """
        if self.bin_bytes:
            os.posix_fallocate(bin_file, 0, self.bin_bytes)
        os.posix_fallocate(idx_file, 0, self.idx_bytes)
        _write_at(idx_file, self._header(), 0)
        _write_at(idx_file, bytes(8), self._boundary_offset(0))

    def write_index(
        self,
        idx_file: int,
        part: int,
        lengths: npt.NDArray[np.int32],
        document_ends: Integers | None,
    ) -> None:
        """Write a part's lengths, offsets and document boundaries into the ``.idx`` file.

        Args:
            idx_file: descriptor, open for writing.
            part: index of the part.
            lengths: tokens of each sequence.
            document_ends: number of the part's sequences up to the end of each document; None:
                each document is one sequence.

        Raises:
            OSError: the disk is full.
        """
        tokens, sequences, first = self._begins[part]
        offset = tokens * self.dtype.itemsize
        offsets_begin = HEADER.size + 4 * self.total.sequences
        begin = sequences
        for starts, _ in self._chunk_offsets(lengths, offset):
            chunk = lengths[begin - sequences :][: len(starts)]
            _write_at(idx_file, chunk, HEADER.size + 4 * begin)
            _write_at(idx_file, starts, offsets_begin + 8 * begin)
            begin += len(starts)
        num_documents = self._begins[part + 1].documents - first
        if document_ends is None:
            document_ends = np.arange(1, num_documents + 1)
        for begin in range(0, num_documents, _CHUNK_ROWS):
            boundaries = document_ends[begin : begin + _CHUNK_ROWS] + sequences
            _write_at(idx_file, boundaries, self._boundary_offset(first + begin + 1))

    def idx_sha256(self, parts: Callable[[], Iterable[PartIndex]]) -> str:
        """Return the SHA-256 of the ``.idx`` file from what is to be written.

        Args:
            parts: called three times; yields each part's lengths and document ends, as for
                ``write_index``.
        """
        digest = hashlib.sha256(self._header())
        for lengths, _ in parts():
            digest.update(lengths.tobytes())
        offset = 0
        for lengths, _ in parts():
            for starts, end in self._chunk_offsets(lengths, offset):
                digest.update(starts.tobytes())
                offset = end
        digest.update(bytes(8))
        sequences = 0
        for lengths, document_ends in parts():
            ends = np.arange(1, len(lengths) + 1) if document_ends is None else document_ends
            digest.update((ends + sequences).tobytes())
            sequences += len(lengths)
        return digest.hexdigest()

    def _header(self) -> bytes:
        code, total = CODES_OF_DTYPES[self.dtype], self.total
        return HEADER.pack(MAGIC, VERSION, code, total.sequences, total.documents + 1)

    def _chunk_offsets(
        self, lengths: npt.NDArray[np.int32], offset: int
    ) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
        """Yield the byte offsets of sequences by chunks, and where each chunk ends."""
        for begin in range(0, len(lengths), _CHUNK_ROWS):
            chunk = lengths[begin : begin + _CHUNK_ROWS]
            ends = offset + np.cumsum(chunk, dtype=np.int64) * self.dtype.itemsize
            starts = np.concatenate([[offset], ends[:-1]])
            offset = int(ends[-1])
            yield starts, offset

    def copy_tokens(
        self,
        bin_file: int,
        part: int,
        source: int,
        on_chunk: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """Copy a part's tokens from the beginning of a file into the ``.bin`` file.

        Args:
            bin_file: descriptor, open for writing.
            part: index of the part.
            source: descriptor of the file with the tokens.
            on_chunk: called with each chunk that was copied.

        Raises:
            OSError: the disk is full, or ``source`` is too short.
        """
        begin, end = self.token_range(part)
        for offset in range(begin, end, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, end - offset)
            chunk = os.pread(source, size, offset - begin)
            if len(chunk) != size:
                raise OSError(5, "a part is shorter than its record says")
            _write_at(bin_file, chunk, offset)
            on_chunk(chunk)

    def _boundary_offset(self, document: int) -> int:
        return HEADER.size + 12 * self.total.sequences + 8 * document


@dataclass(frozen=True, slots=True)
class StagedShard:
    """The unfinished files of a shard, see ``staged_shard``.

    Attributes:
        prefix: path of the shard without suffix.
        layout: of the shard.
        bin_file: descriptor of the ``.bin`` file.
        idx_file: descriptor of the ``.idx`` file.
    """

    prefix: str
    layout: ShardLayout
    bin_file: int
    idx_file: int

    @property
    def bin_path(self) -> str:
        """Path of the unfinished ``.bin`` file."""
        return _unfinished_path(self.prefix, "bin")

    @property
    def idx_path(self) -> str:
        """Path of the unfinished ``.idx`` file."""
        return _unfinished_path(self.prefix, "idx")

    def publish(self, manifest: ShardManifest | None) -> None:
        """Flush the files and rename them; the index last, without which no reader sees a shard.

        Args:
            manifest: written beside the shard; None: no manifest.
        """
        folder = Path(self.prefix).parent
        staged = Path(_unfinished_path(self.prefix, "manifest.json"))
        os.fsync(self.bin_file)
        os.fsync(self.idx_file)
        try:
            staged.unlink(missing_ok=True)
            if manifest is not None:
                write_durably(staged, encode_manifest(manifest))
            remove_indices([self.prefix])
            os.replace(_unfinished_path(self.prefix, "bin"), bin_path(self.prefix))
            if manifest is not None:
                os.replace(staged, manifest_path(self.prefix))
            fsync_path(folder)
            os.replace(_unfinished_path(self.prefix, "idx"), idx_path(self.prefix))
            fsync_path(folder)
        finally:
            staged.unlink(missing_ok=True)


@contextmanager
def staged_shard(prefix: str, layout: ShardLayout) -> Iterator[StagedShard]:
    """Open the allocated files of a new shard under temporary names.

    They are locked, and removed at the end unless they have been published. Files that a killed
    process left are overwritten.

    Args:
        prefix: path of the shard without suffix; the folder is created.
        layout: of the shard.

    Raises:
        DataError: another process writes this shard, the folder is not writable or the disk full.
    """
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        with _unfinished(prefix, "bin") as bin_file, _unfinished(prefix, "idx") as idx_file:
            layout.allocate(bin_file, idx_file)
            yield StagedShard(prefix, layout, bin_file, idx_file)
    except OSError as error:
        raise DataError(f"{prefix}: cannot write the shard: {error}; is the disk full?") from error


def remove_indices(prefixes: Sequence[str]) -> None:
    """Remove the indices and manifests of shards, so that no old index meets new tokens."""
    for prefix in prefixes:
        for name in (idx_path(prefix), manifest_path(prefix)):
            Path(name).unlink(missing_ok=True)
    fsync_path(Path(prefixes[0]).parent)


def publish_shards(staged: Sequence[str], prefixes: Sequence[str]) -> None:
    """Rename the flushed files of shards, each index last; without it no reader sees a shard.

    Args:
        staged: temporary prefixes of the files. Files that are not there were renamed before.
        prefixes: final prefixes, in one folder.
    """
    folder = Path(prefixes[0]).parent
    for name in (bin_path, manifest_path, idx_path):
        if name is idx_path:
            fsync_path(folder)
        for source, prefix in zip(staged, prefixes, strict=True):
            rename_staged(name(source), name(prefix))
    fsync_path(folder)


def rename_staged(staged: str | Path, final: str) -> None:
    """Rename a file to its final name; no effect if it has been renamed already."""
    if os.path.exists(staged):
        os.replace(staged, final)


def write_shard(
    prefix: str,
    documents: Iterable[Document],
    dtype: npt.DTypeLike,
    *,
    tokenizer_fingerprint: str = "",
    tokenizer_path: str = "",
    vocab_size: int = 0,
    sources: tuple[str, ...] = (),
) -> None:
    """Write documents that fit into memory as a shard; an existing one is replaced.

    Args:
        prefix: path of the shard without suffix; the folder is created.
        documents: token ids of each, 1-D of any integer dtype, or one such array per sentence.
        dtype: token type, see ``dtype_for_vocab``.
        tokenizer_fingerprint: of the tokenizer that made the ids; empty: write no manifest.
        tokenizer_path: of that tokenizer.
        vocab_size: of that tokenizer.
        sources: input files, for the manifest.

    Raises:
        DataError: a document is empty, not 1-D integers or does not fit the dtype, the dtype has
            no code, there are no documents, or the files cannot be written.
    """
    dtype = np.dtype(dtype)
    if dtype not in CODES_OF_DTYPES:
        raise DataError(f"{prefix}: no index code for dtype {dtype}; use uint16 or int32")
    sentences: list[npt.NDArray[Any]] = []
    document_ends = []
    for number, document in enumerate(documents):
        added = [document] if isinstance(document, np.ndarray) else list(document)
        _check_document(f"{prefix}: document {number}", added, dtype)
        sentences += added
        document_ends.append(len(sentences))
    if not document_ends:
        raise DataError(f"{prefix}: no documents; is the input empty?")
    lengths = np.array([sentence.size for sentence in sentences], np.int32)
    tokens = np.concatenate(sentences).astype(dtype, copy=False)
    layout = ShardLayout(dtype, [PartSize(tokens.size, lengths.size, len(document_ends))])
    with staged_shard(prefix, layout) as shard:
        _write_at(shard.bin_file, tokens, 0)
        index = lengths, np.array(document_ends)
        layout.write_index(shard.idx_file, 0, *index)
        manifest = ShardManifest(
            tokenizer_fingerprint=tokenizer_fingerprint,
            tokenizer_path=tokenizer_path,
            vocab_size=vocab_size,
            dtype=dtype.name,
            num_documents=len(document_ends),
            num_sequences=lengths.size,
            num_tokens=tokens.size,
            bin_sha256=hashlib.sha256(tokens.tobytes()).hexdigest(),
            idx_sha256=layout.idx_sha256(lambda: [index]),
            sources=sources,
        )
        shard.publish(manifest if tokenizer_fingerprint else None)


def _check_document(name: str, sentences: list[npt.NDArray[Any]], dtype: np.dtype[Any]) -> None:
    if not sentences or any(sentence.size == 0 for sentence in sentences):
        raise DataError(f"{name} has no tokens; skip it")
    limits = np.iinfo(dtype)
    for sentence in sentences:
        if sentence.ndim != 1 or sentence.dtype.kind not in "iu":
            raise DataError(f"{name} is {sentence.ndim}-D {sentence.dtype}; expected 1-D integers")
        if sentence.min() < limits.min or sentence.max() > limits.max:
            raise DataError(
                f"{name} has ids {sentence.min()}..{sentence.max()}, which do not fit {dtype}; "
                "use a wider dtype"
            )


def _write_at(file: int, content: npt.NDArray[Any] | bytes, offset: int) -> None:
    view = memoryview(content if isinstance(content, bytes) else content.tobytes())
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _unfinished_path(prefix: str, end: str) -> str:
    return f"{prefix}.{end}.unfinished"


@contextmanager
def _unfinished(prefix: str, end: str) -> Iterator[int]:
    """Open, lock and empty a file under its temporary name."""
    path = _unfinished_path(prefix, end)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{path}: another process is writing it; wait for that one") from error
        try:
            os.ftruncate(file, 0)
            yield file
        finally:
            Path(path).unlink(missing_ok=True)
    finally:
        os.close(file)
