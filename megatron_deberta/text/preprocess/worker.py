"""One process's share of the work: takes units, reads, encodes, keeps the parts.

Owns the loop and a unit's files. Refuses to know how many processes there are: it goes on until
every unit is recorded, whoever did it.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.shards.format import dtype_for_vocab
from megatron_deberta.errors import DataError
from megatron_deberta.text.preprocess.direct_io import DirectWriter, new_buffer
from megatron_deberta.text.preprocess.encoding import BatchEncoder, split_sentences
from megatron_deberta.text.preprocess.progress import ProgressCounters
from megatron_deberta.text.preprocess.units import Piece, Segment, UnitQueue, WorkUnit
from megatron_deberta.text.preprocess.workfolder import WorkFolder
from megatron_deberta.text.readers.reading import DocumentReader
from megatron_deberta.text.readers.records import EMPTY, Defect, Document, ReadOptions, RecordBatch
from megatron_deberta.text.readers.sources import Source

# Of text that is encoded at once: its words repeat, and each is looked up once.
ENCODED_BYTES = 5 << 19
_LONGEST_WAIT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What every process of a run agrees on.

    Attributes:
        sources: input files.
        segments: how they are cut.
        unit_bytes: text a unit of a stream holds.
        options: what is read of them.
        vocab_size: decides the token type.
        language: sentences are kept apart, as this language ends them; empty: they are not.
        output: beginning of the shards' names.
        digest: of all that decides the result, for the manifest.
        tokenizer_fingerprint: identifies the tokenizer.
        tokenizer_path: where it was.
        allow_bad: share of records that may be bad; None: the usual, and no file may be damaged.
        eod: id appended to each document that has tokens; None: nothing is appended.
        keep_empty: records without tokens are documents without sequences; else they are left out.
    """

    sources: tuple[Source, ...]
    segments: tuple[Segment, ...]
    unit_bytes: int
    options: ReadOptions
    vocab_size: int
    language: str
    output: str
    digest: str
    tokenizer_fingerprint: str
    tokenizer_path: str
    allow_bad: float | None
    eod: int | None = None
    keep_empty: bool = False

    @property
    def counts_sequences(self) -> bool:
        """Whether a document may have any number of sequences, rather than one."""
        return bool(self.language) or self.keep_empty


def encode_units(
    job: Job, folder: WorkFolder, queue: UnitQueue, encode: BatchEncoder, board: ProgressCounters
) -> None:
    """Do units until all are recorded, by this process or by others.

    Raises:
        DataError: a file cannot be read, or is no longer what the run began with.
        OSError: the disk is full.
    """
    worker = _UnitWorker(job, folder, encode, board)
    wait = 0.01
    while not queue.is_finished():
        unit = queue.take()
        if unit is None:
            board.enter("waiting")
            time.sleep(wait)
            wait = min(1.2 * wait, _LONGEST_WAIT_SECONDS)
            queue.refresh()
            continue
        wait = 0.01
        try:
            is_last = worker.do(unit)
        finally:
            folder.release(unit.name)
        if is_last is None:
            queue.ends_before(unit)
        else:
            queue.mark(unit, is_last=is_last)


class _UnitWorker:
    def __init__(
        self, job: Job, folder: WorkFolder, encode: BatchEncoder, board: ProgressCounters
    ) -> None:
        self._job = job
        self._folder = folder
        self._encode = encode
        self._board = board
        self._reader: DocumentReader | None = None
        # One for each file of a unit: its keys, and what is set aside.
        self._buffers = [new_buffer() for _ in range(len(job.options.keys) + 1)]

    def do(self, unit: WorkUnit) -> bool | None:
        """Do a unit and tell whether it is its segment's last; None where there is no such."""
        job = self._job
        segment = job.segments[unit.segment]
        pieces = segment.pieces
        if segment.is_stream:
            begin = unit.number * job.unit_bytes
            pieces = (Piece(pieces[0].source, begin, begin + job.unit_bytes),)
        is_last = False
        with _Part(unit, job, self._folder, self._buffers) as part:
            for piece in pieces:
                source = job.sources[piece.source]
                self._board.enter("reading")
                reader = self._open(source)
                stream = reader.records if segment.is_stream else None
                if stream is not None:
                    stream.go_to(piece.begin)
                    if stream.at_end:
                        return None
                self._read(reader, piece, part)
                is_last = stream is None or stream.at_end
            self._board.enter("committing")
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
            tokens = self._encode_batch(piece.source, batch, part)
            after = records.file_bytes if records else before + batch.text_bytes
            self._board.add(
                file_bytes=after - before,
                text_bytes=batch.text_bytes,
                tokens=tokens,
                documents=len(batch.documents),
                quarantined=len(batch.defects),
            )
            before = after
            self._board.enter("reading")
        part.end_piece(piece, records.line - 1 if records and records.can_seek else 0)

    def _encode_batch(self, source: int, batch: RecordBatch, part: _Part) -> int:
        self._board.enter("tokenizing")
        part.add_defects(source, batch.defects)
        documents = batch.documents
        tokens = 0
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
            tokens += ids.size
        part.documents += len(documents)
        return tokens

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
    """The files of a unit while it is done: one a key, and what was set aside."""

    def __init__(
        self, unit: WorkUnit, job: Job, folder: WorkFolder, buffers: Sequence[memoryview]
    ) -> None:
        self._unit = unit
        self._folder = folder
        self._dtype = dtype_for_vocab(job.vocab_size)
        self._counts_sequences = job.counts_sequences
        self._keeps_empty = job.keep_empty
        keys = len(job.options.keys)
        names = [f"{unit.name}.{index}" for index in range(keys)] + [f"{unit.name}.bad"]
        self._paths = [folder.parts / name for name in names]
        self._temporary = [folder.temporary(path) for path in self._paths]
        self._buffers = buffers
        self._streams: list[DirectWriter] = []
        self._lengths: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(keys)]
        self._counts: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(keys)]
        self._tokens = [0] * keys
        self._reasons: Counter[str] = Counter()
        self._empty = [0] * keys
        self._pieces: list[tuple[int, int, int]] = []
        self.documents = 0

    def __enter__(self) -> _Part:
        for path in self._temporary:
            # Left by a process of the same number that was killed.
            path.unlink(missing_ok=True)
        while len(self._streams) < len(self._temporary) - 1:
            self._open_next()
        return self

    def _open_next(self) -> None:
        index = len(self._streams)
        self._streams.append(DirectWriter(self._temporary[index], self._buffers[index]))

    def __exit__(self, *_: object) -> None:
        for stream, path in zip(self._streams, self._temporary, strict=False):
            stream.close()
            path.unlink(missing_ok=True)

    def add(
        self,
        key: int,
        ids: npt.NDArray[Any],
        lengths: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int32],
    ) -> None:
        self._streams[key].write(np.ascontiguousarray(ids, self._dtype).data)
        if lengths.size and lengths.max() > np.iinfo(np.int32).max:
            raise DataError(f"a document of {lengths.max()} tokens does not fit the index")
        self._lengths[key].append(lengths.astype(np.int32))
        if self._counts_sequences:
            self._counts[key].append(counts if self._keeps_empty else counts[counts > 0])
        self._tokens[key] += ids.size
        if not self._keeps_empty:
            self._empty[key] += int((counts == 0).sum())

    def add_defects(self, source: int, defects: Sequence[Defect]) -> None:
        if defects and len(self._streams) < len(self._temporary):
            # Most units have none, and a file for nothing costs as much as any other.
            self._open_next()
        for defect in defects:
            line = (source, len(self._pieces), *defect)
            self._streams[-1].write(json.dumps(line).encode() + b"\n")
            if defect.reason != EMPTY:
                self._reasons[defect.reason] += 1

    def end_piece(self, piece: Piece, lines: int) -> None:
        self._pieces.append((piece.source, piece.begin, lines))

    def commit(self, *, is_last: bool) -> None:
        """Flush the files, then record the unit."""
        sizes = []
        for key, stream in enumerate(self._streams[: len(self._tokens)]):
            lengths = np.concatenate([np.empty(0, np.int32), *self._lengths[key]])
            counts = np.concatenate([np.empty(0, np.int32), *self._counts[key]])
            stream.write(lengths.tobytes())
            stream.write(counts.tobytes())
            documents = counts.size if self._counts_sequences else lengths.size
            sizes.append((self._tokens[key], lengths.size, documents, self._empty[key]))
        files = zip(self._streams, self._temporary, self._paths, strict=False)
        for stream, temporary, path in files:
            stream.flush()
            os.fsync(stream.fileno())
            stream.close()
            os.replace(temporary, path)
        self._folder.flush_parts()
        self._folder.record(
            self._unit.name,
            {
                "last": is_last,
                "documents": self.documents,
                "reasons": self._reasons,
                "sizes": sizes,
                "pieces": self._pieces,
            },
        )
