"""Encoding of units in a worker process."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.shards.format import dtype_for_vocab
from megatron_deberta.errors import DataError
from megatron_deberta.files import HashedFile
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.preprocess.encoding import (
    BatchEncoder,
    choose_encoder,
    sentencepiece_encoder,
    split_sentences,
)
from megatron_deberta.text.preprocess.units import Lane, Piece, Segment, UnitRecord, WorkUnit
from megatron_deberta.text.readers.reading import DocumentReader
from megatron_deberta.text.readers.records import EMPTY, Defect, Document, ReadOptions, RecordBatch
from megatron_deberta.text.readers.sources import Source
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer

# Of text that is encoded at once: its words repeat, and each is looked up once.
ENCODED_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every process of a run agrees on.

    Attributes:
        sources: input files.
        unit_bytes: text a unit of a stream holds.
        options: what is read of them.
        vocab_size: decides the token type.
        language: sentences are kept apart, as this language ends them; empty: they are not.
        output: beginning of the shards' names.
        digest: of all that decides the result, for the manifest.
        tokenizer_fingerprint: identifies the tokenizer.
        tokenizer_path: where it was.
        eod: id appended to each document that has tokens; None: nothing is appended.
        keep_empty: records without tokens are documents without sequences; else they are left out.
        use_sentencepiece: encode with the SentencePiece library.
    """

    sources: tuple[Source, ...]
    unit_bytes: int
    options: ReadOptions
    vocab_size: int
    language: str
    output: str
    digest: str
    tokenizer_fingerprint: str
    tokenizer_path: str
    eod: int | None = None
    keep_empty: bool = False
    use_sentencepiece: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """Token type."""
        return dtype_for_vocab(self.vocab_size)

    def write(self, path: Path) -> None:
        """Write the job for ``read``; array tasks do so at the same time."""
        with contextlib.closing(HashedFile(path)) as file:
            file.write(json.dumps(asdict(self)).encode())
            file.commit()

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read a job that ``write`` wrote."""
        found = json.loads(path.read_bytes())
        options = {**found["options"], "keys": tuple(found["options"]["keys"])}
        sources = tuple(Source(**source) for source in found["sources"])
        return cls(**{**found, "sources": sources, "options": ReadOptions(**options)})

    def choose_encoder(self) -> BatchEncoder:
        """Load the tokenizer and choose how to encode.

        Raises:
            DataError: the tokenizer is not the driver's.
        """
        tokenizer = load_once(self.tokenizer_path)
        if tokenizer.fingerprint != self.tokenizer_fingerprint:
            raise DataError(
                f"{self.tokenizer_path}: another tokenizer than where the run was started; put it "
                "on a file system that all nodes share"
            )
        if self.use_sentencepiece:
            return sentencepiece_encoder(tokenizer)
        return choose_encoder(tokenizer, self.sources, self.options)

    @property
    def counts_sequences(self) -> bool:
        """Whether a document may have any number of sequences, rather than one."""
        return bool(self.language) or self.keep_empty


@lru_cache(maxsize=1)
def load_once(path: str) -> Tokenizer:
    """Load a tokenizer that this process, and those forked from it, may need again."""
    tokenizer = load_tokenizer(path)
    _ = tokenizer.caches_words  # Makes the encoder by words before processes are forked.
    return tokenizer


@lru_cache(maxsize=16)
def open_worker(job_path: str, thread: int) -> UnitWorker:
    """Return the encoder of a job, which stays open between the calls of a thread.

    Args:
        job_path: file written by ``Job.write``.
        thread: identifier of the thread, as a Dask worker may have several.

    Raises:
        DataError: the tokenizer differs from the driver's, or a file cannot be read.
    """
    return UnitWorker(Job.read(Path(job_path)))


def encode_segment(job_path: str, segment: Segment, lane: Lane) -> None:
    """Encode the units of a lane of a segment that are not done yet.

    Args:
        job_path: of the job.
        segment: part of the input.
        lane: which of its units.

    Raises:
        DataError: a file cannot be read or written, or has changed since the job began.
    """
    try:
        open_worker(job_path, threading.get_ident()).encode(segment, lane)
    except OSError as error:
        raise DataError(f"{job_path}: cannot write shard: {error}; is the disk full?") from error


class UnitWorker:
    """Encodes units in one process.

    Args:
        job: of the run.
    """

    def __init__(self, job: Job) -> None:
        """See the class."""
        self._job = job
        self._folder = JobFolder(job.output)
        self._folder.open(job.digest)
        self._encode = job.choose_encoder()
        self._reader: DocumentReader | None = None

    def encode(self, segment: Segment, lane: Lane) -> None:
        """Encode the units of a lane that are not done; arguments as in ``encode_segment``."""
        for number in itertools.count(lane.first, lane.step):
            unit = WorkUnit(lane.segment, number)
            record = self._folder.recorded(unit.name, UnitRecord)
            is_last = self._do(unit, segment) if record is None else record["last"]
            if is_last is not False:
                break

    def _do(self, unit: WorkUnit, segment: Segment) -> bool | None:
        """Do a unit and return whether it is its segment's last; None: there is no such unit."""
        job = self._job
        pieces = segment.pieces
        if segment.is_stream:
            begin = unit.number * job.unit_bytes
            pieces = (Piece(pieces[0].source, begin, begin + job.unit_bytes),)
        is_last = True
        with contextlib.closing(_Part(unit, job, self._folder)) as part:
            for piece in pieces:
                source = job.sources[piece.source]
                reader = self._open(source)
                stream = reader.records if segment.is_stream else None
                if stream is not None:
                    stream.go_to(piece.begin)
                    if stream.at_end:
                        return None
                self._read(reader, piece, part)
                is_last = stream is None or stream.at_end
            part.commit(is_last=is_last)
        return is_last

    def _open(self, source: Source) -> DocumentReader:
        if self._reader is None or self._reader.source is not source:
            if self._reader is not None:
                self._reader.close()
            self._reader = DocumentReader(source, self._job.options)
        return self._reader

    def _read(self, reader: DocumentReader, piece: Piece, part: _Part) -> None:
        records = reader.records
        before = records.file_bytes if records else 0
        for batch in _together(reader.read(piece.begin, piece.end)):
            self._encode_batch(piece.source, batch, part)
            part.text_bytes += batch.text_bytes
            part.file_bytes += 0 if records else batch.text_bytes
        part.file_bytes += records.file_bytes - before if records else 0
        part.end_piece(piece, records.line - 1 if records and records.can_seek else 0)

    def _encode_batch(self, source: int, batch: RecordBatch, part: _Part) -> None:
        part.add_defects(source, batch.defects)
        documents = batch.documents
        for key_index, key in enumerate(self._job.options.keys):
            texts = [document.texts[key_index] for document in documents]
            if self._job.language:
                ids, lengths, counts = self._encode_sentences(texts)
            else:
                ids, lengths = self._encode(texts)
                counts = (lengths > 0).astype(np.int32)
            lengths = lengths[lengths > 0]
            if self._job.eod is not None:
                ids, lengths = append_to_documents(ids, lengths, counts, self._job.eod)
            part.add(key_index, ids, lengths, counts)
            for index in [] if self._job.keep_empty else np.flatnonzero(counts == 0):
                document = documents[index]
                detail = f"key {key!r} gives no token"
                part.add_defects(source, [Defect(document.line, document.offset, EMPTY, detail)])
        part.documents += len(documents)

    def _encode_sentences(
        self, texts: Sequence[str]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        sentences = [split_sentences(text, self._job.language) for text in texts]
        ids, lengths = self._encode([sentence for each in sentences for sentence in each])
        owner = np.repeat(np.arange(len(texts)), [len(each) for each in sentences])
        counts = np.bincount(owner[lengths > 0], minlength=len(texts)).astype(np.int32)
        return ids, lengths, counts


def append_to_documents(
    ids: npt.NDArray[Any],
    lengths: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int32],
    token: int,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Append a token to the last sequence of each document that has one.

    Args:
        ids: [tokens] of all sequences.
        lengths: [sequences] tokens of each, none of them 0.
        counts: [documents] sequences of each document.
        token: the id.

    Returns:
        The ids and lengths with the tokens appended.
    """
    last = np.cumsum(counts, dtype=np.int64)[counts > 0] - 1
    longer = lengths.copy()
    longer[last] += 1
    return np.insert(ids, np.cumsum(lengths)[last], token), longer


def _together(batches: Iterable[RecordBatch]) -> Iterator[RecordBatch]:
    """Put small batches together."""
    documents: list[Document] = []
    defects: list[Defect] = []
    size = 0
    for batch in batches:
        documents += batch.documents
        defects += batch.defects
        size += batch.text_bytes
        if size >= ENCODED_BYTES:
            yield RecordBatch(documents, defects, size)
            documents, defects, size = [], [], 0
    if size or documents or defects:
        yield RecordBatch(documents, defects, size)


class _Part:
    """Files of a unit: one per key, with tokens, lengths and counts; and quarantined records."""

    def __init__(self, unit: WorkUnit, job: Job, folder: JobFolder) -> None:
        self._unit = unit
        self._folder = folder
        self._dtype = job.dtype
        self._counts_sequences = job.counts_sequences
        self._keeps_empty = job.keep_empty
        keys = len(job.options.keys)
        self._files = [HashedFile(folder.parts / f"{unit.name}.{key}") for key in range(keys)]
        self._bad: HashedFile | None = None
        self._lengths: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(keys)]
        self._counts: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(keys)]
        self._tokens = [0] * keys
        self._reasons: Counter[str] = Counter()
        self._empty = [0] * keys
        self._pieces: list[tuple[int, int, int]] = []
        self.documents = self.text_bytes = self.file_bytes = 0

    def close(self) -> None:
        """Remove files that were not committed."""
        for file in [*self._files, *([self._bad] if self._bad else [])]:
            file.close()

    def add(
        self,
        key: int,
        ids: npt.NDArray[Any],
        lengths: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int32],
    ) -> None:
        self._files[key].write(np.ascontiguousarray(ids, self._dtype).data)
        if lengths.size and lengths.max() > np.iinfo(np.int32).max:
            raise DataError(f"a document of {lengths.max()} tokens does not fit the index")
        self._lengths[key].append(lengths.astype(np.int32))
        if self._counts_sequences:
            self._counts[key].append(counts if self._keeps_empty else counts[counts > 0])
        self._tokens[key] += ids.size
        if not self._keeps_empty:
            self._empty[key] += int((counts == 0).sum())

    def add_defects(self, source: int, defects: Sequence[Defect]) -> None:
        if defects and self._bad is None:
            # Most units have none, and an empty file costs as much as any other.
            self._bad = HashedFile(self._folder.parts / f"{self._unit.name}.bad")
        for defect in defects:
            assert self._bad is not None
            line = (source, len(self._pieces), *defect)
            self._bad.write(json.dumps(line).encode() + b"\n")
            if defect.reason != EMPTY:
                self._reasons[defect.reason] += 1

    def end_piece(self, piece: Piece, lines: int) -> None:
        self._pieces.append((piece.source, piece.begin, lines))

    def commit(self, *, is_last: bool) -> None:
        """Flush and rename the files, then record the unit."""
        sizes, digests = [], []
        for key, file in enumerate(self._files):
            digests.append(file.take_digest())
            lengths = np.concatenate([np.empty(0, np.int32), *self._lengths[key]])
            counts = np.concatenate([np.empty(0, np.int32), *self._counts[key]])
            file.write(lengths.tobytes())
            file.write(counts.tobytes())
            digests.append(file.take_digest())
            documents = counts.size if self._counts_sequences else lengths.size
            sizes.append((self._tokens[key], lengths.size, documents, self._empty[key]))
            file.commit()
        digests.append(self._bad.take_digest() if self._bad else "")
        if self._bad:
            self._bad.commit()
        record = UnitRecord(
            last=is_last,
            documents=self.documents,
            text_bytes=self.text_bytes,
            file_bytes=self.file_bytes,
            reasons=self._reasons,
            sizes=sizes,
            pieces=self._pieces,
            sha256=digests,
        )
        self._folder.record(self._unit.name, {**record})
