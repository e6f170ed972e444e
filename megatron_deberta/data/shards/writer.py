"""Writes a shard: tokens to ``.bin``, their lengths and documents to ``.idx``.

Owns the atomic publication of the pair and the SHA-256 of what was written. Refuses empty
documents and tokens that do not fit the dtype. Memory does not grow with the shard: lengths and
document boundaries wait in temporary files until the index is put together.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.shards.format import (
    CODES_OF_DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    dtype_for_vocab,
)
from megatron_deberta.errors import DataError
from megatron_deberta.files import fsync_path, temporary_name, write_durably

__all__ = ["IndexedWriter", "ShardSummary", "dtype_for_vocab", "publish_shards"]

_CHUNK = 1 << 20
_FILES = ("bin", "idx", "manifest.json", "len", "doc")
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """What a finished writer holds.

    Attributes:
        dtype: numpy name of the token type.
        num_documents: documents.
        num_sequences: sentences (equal to documents where documents are not split).
        num_tokens: tokens, without special tokens.
        bin_sha256: hex digest of the ``.bin`` file.
        idx_sha256: hex digest of the ``.idx`` file.
    """

    dtype: str
    num_documents: int
    num_sequences: int
    num_tokens: int
    bin_sha256: str
    idx_sha256: str


class IndexedWriter:
    """Context manager that writes ``{prefix}.bin`` and ``{prefix}.idx``.

    Leaving it cleanly flushes both to disk and renames them into place; leaving it by an
    exception removes everything it wrote. ``publish_shards`` does so for several at once.

    Args:
        prefix: path of the shard without suffix; the folder is created.
        dtype: token type, see ``dtype_for_vocab``.

    Raises:
        DataError: the dtype has no code, the folder cannot be written, the disk is full, or
            nothing was added.
    """

    def __init__(self, prefix: str, dtype: npt.DTypeLike) -> None:
        """See the class."""
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODES_OF_DTYPES:
            raise DataError(f"{prefix}: no index code for dtype {self.dtype}; use uint16 or int32")
        self._limits = np.iinfo(self.dtype)
        self.num_documents = 0
        self.num_sequences = 0
        self.num_tokens = 0
        self._summary: ShardSummary | None = None
        self._published = False
        self._bin_hash = hashlib.sha256()
        self._temporaries = {name: temporary_name(f"{prefix}.{name}") for name in _FILES}
        self._streams: dict[str, IO[bytes]] = {}

    def finish(self) -> ShardSummary:
        """Put the index together and flush everything to disk, still under temporary names.

        No document can be added afterwards.

        Raises:
            DataError: the disk is full, or nothing was added.
        """
        if self._summary is None:
            if not self.num_documents:
                raise DataError(f"{self.prefix}: no documents; is the input empty?")
            try:
                self._summary = self._stage()
            except OSError as error:
                raise self._unwritable(error) from error
        return self._summary

    def add_manifest(self, content: bytes) -> None:
        """Take the sidecar that is to be published with the shard.

        Raises:
            DataError: the disk is full.
        """
        try:
            write_durably(self._temporaries["manifest.json"], content)
        except OSError as error:
            raise self._unwritable(error) from error

    def __enter__(self) -> IndexedWriter:
        """Create the temporary files."""
        try:
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            for name in ("bin", "len", "doc"):
                self._streams[name] = self._temporaries[name].open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            self._discard()
            raise self._unwritable(error) from error
        self._streams["doc"].write(np.int64(0).tobytes())
        return self

    def add_document(self, document: npt.NDArray[Any] | Sequence[npt.NDArray[Any]]) -> None:
        """Append one document.

        Args:
            document: token ids, 1-D of any integer dtype, or one such array a sentence.

        Raises:
            DataError: the document or a sentence is empty, or an id does not fit the dtype.
        """
        sentences = [document] if isinstance(document, np.ndarray) else list(document)
        if not sentences or any(sentence.size == 0 for sentence in sentences):
            raise DataError(f"{self.prefix}: document {self.num_documents} has no tokens; skip it")
        tokens = sentences[0] if len(sentences) == 1 else np.concatenate(sentences)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"{self.prefix}: document {self.num_documents} is {tokens.ndim}-D {tokens.dtype}; "
                "expected 1-D integers"
            )
        if tokens.min() < self._limits.min or tokens.max() > self._limits.max:
            raise DataError(
                f"{self.prefix}: ids {tokens.min()}..{tokens.max()} of document "
                f"{self.num_documents} do not fit {self.dtype}; use a wider dtype"
            )
        content = tokens.astype(self.dtype, copy=False).tobytes()
        lengths = np.fromiter((sentence.size for sentence in sentences), np.int32, len(sentences))
        self._bin_hash.update(content)
        self.num_sequences += len(sentences)
        try:
            self._streams["bin"].write(content)
            self._streams["len"].write(lengths.tobytes())
            self._streams["doc"].write(np.int64(self.num_sequences).tobytes())
        except OSError as error:
            raise self._unwritable(error) from error
        self.num_documents += 1
        self.num_tokens += tokens.size

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Publish the shard unless that was done, or remove it after an exception."""
        try:
            if kind is None and not self._published:
                publish_shards([self])
        finally:
            self._discard()

    def _stage(self) -> ShardSummary:
        for name in ("bin", "len", "doc"):
            stream = self._streams[name]
            stream.flush()
            if name == "bin":
                os.fsync(stream.fileno())
            stream.close()
        idx_hash = hashlib.sha256()
        with self._temporaries["idx"].open("wb") as stream:
            for piece in self._index_pieces():
                idx_hash.update(piece)
                stream.write(piece)
            stream.flush()
            os.fsync(stream.fileno())
        return ShardSummary(
            dtype=self.dtype.name,
            num_documents=self.num_documents,
            num_sequences=self.num_sequences,
            num_tokens=self.num_tokens,
            bin_sha256=self._bin_hash.hexdigest(),
            idx_sha256=idx_hash.hexdigest(),
        )

    def _give_name(self, name: str) -> None:
        """Rename one of the files into place; a manifest need not exist."""
        if self._temporaries[name].exists():
            os.replace(self._temporaries[name], f"{self.prefix}.{name}")

    def _remove_published(self, names: Sequence[str]) -> None:
        for name in names:
            Path(f"{self.prefix}.{name}").unlink(missing_ok=True)
        fsync_path(Path(self.prefix).parent)

    def _index_pieces(self) -> Iterator[bytes]:
        code = CODES_OF_DTYPES[self.dtype]
        yield HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1)
        yield from _chunks(self._temporaries["len"])
        offset = np.int64(0)
        for piece in _chunks(self._temporaries["len"]):
            ends = np.cumsum(np.frombuffer(piece, np.int32), dtype=np.int64) * self.dtype.itemsize
            starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]]) + offset
            yield starts.tobytes()
            offset += ends[-1]
        yield from _chunks(self._temporaries["doc"])

    def _unwritable(self, error: OSError) -> DataError:
        return DataError(f"{self.prefix}: cannot write shard: {error}; is the disk full?")

    def _discard(self) -> None:
        for stream in self._streams.values():
            # What closing would still flush is thrown away anyway.
            with contextlib.suppress(OSError):
                stream.close()
        for path in self._temporaries.values():
            path.unlink(missing_ok=True)


def publish_shards(writers: Sequence[IndexedWriter]) -> None:
    """Give shards their names, each its index last, and no index before all are complete.

    A shard without an index is none to any reader, so neither a crash nor an error leaves one
    without its manifest, or one of several keys, or old and new files as a pair.

    Args:
        writers: open ones; leaving them later only cleans up.

    Raises:
        DataError: the disk is full or nothing was added to one; none is published then.
    """
    for writer in writers:
        writer.finish()
    try:
        for writer in writers:
            writer._remove_published(("idx", "manifest.json"))
        for name in ("bin", "manifest.json", "idx"):
            for writer in writers:
                writer._give_name(name)
            for writer in writers:
                fsync_path(Path(writer.prefix).parent)
    except OSError as error:
        for each in writers:
            with contextlib.suppress(OSError):
                each._remove_published(("idx", "manifest.json", "bin"))
        raise writer._unwritable(error) from error
    for writer in writers:
        writer._published = True


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while piece := stream.read(_CHUNK):
            yield piece
