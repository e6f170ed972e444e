"""Encoding of the units of the input, by chunks, in worker processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict

from megatron_deberta.data.shards.format import dtype_for_vocab
from megatron_deberta.errors import DataError
from megatron_deberta.files import HashedFile
from megatron_deberta.parsing import Count, read_json
from megatron_deberta.text.jobs.executors import Share, order_tasks
from megatron_deberta.text.jobs.folder import RESTART, JobFolder
from megatron_deberta.text.jobs.units import FileRange, Unit
from megatron_deberta.text.preprocess.encoding import (
    BatchEncoder,
    choose_encoder,
    sentencepiece_encoder,
    split_sentences,
)
from megatron_deberta.text.readers.reading import DocumentReader
from megatron_deberta.text.readers.records import EMPTY, Defect, Document, ReadOptions, RecordBatch
from megatron_deberta.text.readers.sources import Source
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer

# Of text that is encoded at once: its words repeat, and each is looked up once.
ENCODED_BYTES = 1 << 22
_CALLS_PER_WORKER = 4


class Chunk(NamedTuple):
    """What is encoded in one go: a whole unit, or ``unit_bytes`` of the text of a stream.

    Attributes:
        unit: index of the unit.
        number: of the chunk in the unit; how many a stream has shows at its end.
    """

    unit: int
    number: int

    @property
    def name(self) -> str:
        """Name of its files and records; names sort as chunks do."""
        return f"{self.unit:08d}-{self.number:06d}"


class ChunkSlice(NamedTuple):
    """Chunks of a unit that one call encodes: the ``first`` and every ``step``-th from there."""

    unit: int
    first: int
    step: int


class ChunkRecord(TypedDict):
    """Record of a chunk.

    Attributes:
        last: it is its unit's last.
        documents: records without defects.
        text_bytes: of its records.
        file_bytes: that were read for it.
        reasons: number of quarantined records by reason.
        sizes: tokens, sequences, documents and empty documents per key.
        pieces: file index, begin and lines of each range of a file.
        sha256: hexadecimal digests of tokens and index per key, then of the quarantine list.
    """

    last: bool
    documents: Count
    text_bytes: Count
    file_bytes: Count
    reasons: dict[str, Count]
    sizes: list[tuple[Count, Count, Count, Count]]
    pieces: list[tuple[Count, Count, Count]]
    sha256: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every process of a run agrees on.

    Attributes:
        sources: input files.
        unit_bytes: text a chunk of a stream holds.
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
        job_path: file with the ``Job`` as JSON.
        thread: identifier of the thread, as a Dask worker may have several.

    Raises:
        DataError: the tokenizer differs from the driver's, or a file cannot be read.
    """
    return UnitWorker(read_json(Path(job_path), Job, "a job", remedy=RESTART))


def encode_unit(job_path: str, unit: Unit, chunks: ChunkSlice) -> None:
    """Encode those chunks of a unit that are not done yet.

    Args:
        job_path: of the job.
        unit: part of the input.
        chunks: which of its chunks.

    Raises:
        DataError: a file cannot be read or written, or has changed since the job began.
    """
    try:
        open_worker(job_path, threading.get_ident()).encode(unit, chunks)
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

    def encode(self, unit: Unit, chunks: ChunkSlice) -> None:
        """Encode the chunks that are not done; arguments as in ``encode_unit``."""
        for number in itertools.count(chunks.first, chunks.step):
            chunk = Chunk(chunks.unit, number)
            record = self._folder.recorded(chunk.name, ChunkRecord)
            is_last = self._do(chunk, unit) if record is None else record["last"]
            if is_last is not False:
                break

    def _do(self, chunk: Chunk, unit: Unit) -> bool | None:
        """Do a chunk and return whether it is its unit's last; None: there is no such chunk."""
        job = self._job
        ranges = unit.ranges
        if unit.is_stream:
            begin = chunk.number * job.unit_bytes
            ranges = (FileRange(ranges[0].source, begin, begin + job.unit_bytes),)
        is_last = True
        with contextlib.closing(_Part(chunk, job, self._folder)) as part:
            for each in ranges:
                source = job.sources[each.source]
                reader = self._open(source)
                stream = reader.records if unit.is_stream else None
                if stream is not None:
                    stream.go_to(each.begin)
                    if stream.at_end:
                        return None
                self._read(reader, each, part)
                is_last = stream is None or stream.at_end
            part.commit(is_last=is_last)
        return is_last

    def _open(self, source: Source) -> DocumentReader:
        if self._reader is None or self._reader.source is not source:
            if self._reader is not None:
                self._reader.close()
            self._reader = DocumentReader(source, self._job.options)
        return self._reader

    def _read(self, reader: DocumentReader, file_range: FileRange, part: _Part) -> None:
        records = reader.records
        before = records.file_bytes if records else 0
        for batch in _together(reader.read(file_range.begin, file_range.end)):
            self._encode_batch(file_range.source, batch, part)
            part.text_bytes += batch.text_bytes
            part.file_bytes += 0 if records else batch.text_bytes
        part.file_bytes += records.file_bytes - before if records else 0
        part.end_range(file_range, records.line - 1 if records and records.can_seek else 0)

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
    """Files of a chunk: one per key, with tokens, lengths and counts; and quarantined records."""

    def __init__(self, chunk: Chunk, job: Job, folder: JobFolder) -> None:
        self._chunk = chunk
        self._folder = folder
        self._dtype = job.dtype
        self._counts_sequences = job.counts_sequences
        self._keeps_empty = job.keep_empty
        keys = len(job.options.keys)
        self._files = [HashedFile(folder.parts / f"{chunk.name}.{key}") for key in range(keys)]
        self._bad: HashedFile | None = None
        self._lengths: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(keys)]
        self._counts: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(keys)]
        self._tokens = [0] * keys
        self._reasons: Counter[str] = Counter()
        self._empty = [0] * keys
        self._ranges: list[tuple[int, int, int]] = []
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
            # Most chunks have none, and an empty file costs as much as any other.
            self._bad = HashedFile(self._folder.parts / f"{self._chunk.name}.bad")
        for defect in defects:
            assert self._bad is not None
            line = (source, len(self._ranges), *defect)
            self._bad.write(json.dumps(line).encode() + b"\n")
            if defect.reason != EMPTY:
                self._reasons[defect.reason] += 1

    def end_range(self, file_range: FileRange, lines: int) -> None:
        self._ranges.append((file_range.source, file_range.begin, lines))

    def commit(self, *, is_last: bool) -> None:
        """Flush and rename the files, then record the chunk."""
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
        record = ChunkRecord(
            last=is_last,
            documents=self.documents,
            text_bytes=self.text_bytes,
            file_bytes=self.file_bytes,
            reasons=self._reasons,
            sizes=sizes,
            pieces=self._ranges,
            sha256=digests,
        )
        self._folder.record(self._chunk.name, {**record})


def names_chunk(record: str) -> bool:
    """Return whether a record is a chunk's, by its name."""
    return len(record) == 15 and record[:8].isdigit()


def find_recorded(folder: JobFolder, units: Sequence[Unit]) -> list[list[Chunk] | None]:
    """Return the chunks of each unit in order; None: some are not done.

    Raises:
        DataError: a record is damaged.
    """
    numbers: list[set[int]] = [set() for _ in units]
    for name in filter(names_chunk, folder.records()):
        numbers[int(name[:8])].add(int(name[9:]))
    found: list[list[Chunk] | None] = []
    for index, (unit, done) in enumerate(zip(units, numbers, strict=True)):
        chunks = [Chunk(index, number) for number in sorted(done)]
        is_done = bool(chunks) and len(chunks) == chunks[-1].number + 1
        if is_done and unit.is_stream:
            is_done = bool(read_record(folder, chunks[-1])["last"])
        found.append(chunks if is_done else None)
    return found


def read_record(folder: JobFolder, chunk: Chunk) -> ChunkRecord:
    """Return the record of a chunk that is done.

    Raises:
        DataError: it is damaged or gone.
    """
    record: ChunkRecord | None = folder.recorded(chunk.name, ChunkRecord)
    if record is None:
        raise DataError(f"{folder.done}: the record of unit {chunk.name} is gone; {RESTART}")
    return record


def slice_units(units: Sequence[Unit], share: Share, workers: int) -> list[ChunkSlice]:
    """Divide units into calls, so that a stream is read by few processes and each one has work.

    Args:
        units: of the input.
        share: array task that does the calls, see ``order_tasks``.
        workers: of each task.
    """
    workers *= share.tasks
    streams = sum(unit.is_stream for unit in units)
    steps = 1
    if streams and workers > 1:
        steps = -(-(workers if workers >= streams else _CALLS_PER_WORKER * workers) // streams)
    slices = [
        ChunkSlice(index, first, step)
        for index, unit in enumerate(units)
        for step in [steps if unit.is_stream else 1]
        for first in range(step)
    ]
    return [slices[number] for number in order_tasks(len(slices), share)]
