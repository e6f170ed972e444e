"""Writer for shards in Megatron's indexed format.

The size of each part fixes its place in both files (``ShardLayout``), so parts can be written in
any order, by any number of threads or processes. ``preprocess`` and ``merge`` write many parts,
``write_shard`` a single one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
from megatron_deberta.files import FileLock, fsync_path, write_durably

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

    def token_offset(self, part: int) -> int:
        """Return the first byte of a part's tokens in the ``.bin`` file."""
        return self._begins[part].tokens * self.dtype.itemsize

    def create(self, bin_file: str, idx_file: str) -> None:
        """Create both files with all their blocks, the header and the first boundary; flush them.

        A full disk is thus found before anything is copied.

        Raises:
            OSError: the disk is full, or the folder is not writable.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with open_flushed(bin_file, idx_file, flags=flags) as (tokens, index):
            if self.bin_bytes:
                os.posix_fallocate(tokens, 0, self.bin_bytes)
            os.posix_fallocate(index, 0, self.idx_bytes)
            write_at(index, self._header(), 0)
            write_at(index, bytes(8), self._boundary_offset(0))

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
        for offset, chunks in self._sections(part, lengths, document_ends):
            for chunk in chunks:
                write_at(idx_file, chunk, offset)
                offset += chunk.nbytes

    def idx_sha256(self, parts: Callable[[], Iterable[PartIndex]]) -> str:
        """Return the SHA-256 of the ``.idx`` file from what is to be written.

        Args:
            parts: called three times; yields each part's lengths and document ends, as for
                ``write_index``.
        """
        digest = hashlib.sha256(self._header())
        for section in range(3):
            if section == 2:
                digest.update(bytes(8))
            for part, index in enumerate(parts()):
                for chunk in self._sections(part, *index)[section][1]:
                    digest.update(chunk.tobytes())
        return digest.hexdigest()

    def _header(self) -> bytes:
        code, total = CODES_OF_DTYPES[self.dtype], self.total
        return HEADER.pack(MAGIC, VERSION, code, total.sequences, total.documents + 1)

    def _sections(
        self, part: int, lengths: npt.NDArray[np.int32], document_ends: Integers | None
    ) -> list[tuple[int, Iterator[npt.NDArray[Any]]]]:
        """Return a part's lengths, offsets and boundaries: first byte in ``.idx``, and chunks."""
        _, sequences, first = self._begins[part]

        def offsets() -> Iterator[npt.NDArray[Any]]:
            begin = self.token_offset(part)
            for chunk in _chunks(lengths):
                ends = begin + np.cumsum(chunk, dtype=np.int64) * self.dtype.itemsize
                yield np.concatenate([[begin], ends[:-1]])
                begin = int(ends[-1])

        def boundaries() -> Iterator[npt.NDArray[np.int64]]:
            ends = np.arange(1, len(lengths) + 1) if document_ends is None else document_ends
            for chunk in _chunks(ends):
                yield chunk + sequences

        offsets_begin = HEADER.size + 4 * self.total.sequences
        return [
            (HEADER.size + 4 * sequences, _chunks(lengths)),
            (offsets_begin + 8 * sequences, offsets()),
            (self._boundary_offset(first + 1), boundaries()),
        ]

    def _boundary_offset(self, document: int) -> int:
        return HEADER.size + 12 * self.total.sequences + 8 * document


def _chunks(values: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    return (values[begin : begin + _CHUNK_ROWS] for begin in range(0, len(values), _CHUNK_ROWS))


@contextmanager
def open_flushed(*paths: str, flags: int = os.O_WRONLY) -> Iterator[list[int]]:
    """Open files and yield their descriptors; the files are flushed at the end and closed.

    Args:
        paths: the files.
        flags: as for ``os.open``.

    Raises:
        OSError: a file cannot be opened or flushed.
    """
    with ExitStack() as stack:
        descriptors = []
        for path in paths:
            descriptors.append(os.open(path, flags, 0o666))
            stack.callback(os.close, descriptors[-1])
        yield descriptors
        for descriptor in descriptors:
            os.fsync(descriptor)


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
    index = lengths, np.array(document_ends)
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
    with _staged(prefix) as staged:
        files = bin_path(staged), idx_path(staged)
        layout.create(*files)
        with open_flushed(*files) as (bin_file, idx_file):
            write_at(bin_file, tokens, 0)
            layout.write_index(idx_file, 0, *index)
        if tokenizer_fingerprint:
            write_durably(Path(manifest_path(staged)), encode_manifest(manifest))
        remove_indices([prefix])
        publish_shards([staged], [prefix])


@contextmanager
def _staged(prefix: str) -> Iterator[str]:
    """Yield a temporary prefix, in a folder that is locked, emptied before and removed at the end.

    Raises:
        DataError: another process writes this shard, the folder is not writable or the disk full.
    """
    staging, lock_path = Path(f"{prefix}.shard.unfinished"), Path(f"{prefix}.lock")
    lock = FileLock(lock_path)
    try:
        staging.parent.mkdir(parents=True, exist_ok=True)
        if not lock.acquire():
            raise DataError(f"{prefix}: another process is writing it; wait for that one")
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            yield str(staging / "0")
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            lock_path.unlink(missing_ok=True)
            lock.release()
    except OSError as error:
        raise DataError(f"{prefix}: cannot write the shard: {error}; is the disk full?") from error


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


def write_at(file: int, content: npt.NDArray[Any] | bytes, offset: int) -> None:
    """Write bytes at a place of a file.

    Args:
        file: descriptor, open for writing.
        content: all of it is written.
        offset: first byte.

    Raises:
        OSError: the disk is full.
    """
    view = memoryview(content if isinstance(content, bytes) else content.tobytes())
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
