"""Merge encoded units into shards; the driver process publishes them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from typing_extensions import TypedDict

from megatron_deberta.data.shards.manifest import ShardManifest
from megatron_deberta.data.shards.merge import (
    DamagedPartError,
    ShardHashes,
    ShardPart,
    check_part,
    shard_layout,
)
from megatron_deberta.data.shards.writer import PartIndex, PartSize
from megatron_deberta.errors import DataError, MalformedInputError
from megatron_deberta.files import HashedFile, fsync_path
from megatron_deberta.parsing import parse_json
from megatron_deberta.text.jobs.executors import Engine, RunOptions
from megatron_deberta.text.jobs.folder import RESTART, JobFolder
from megatron_deberta.text.jobs.shards import StagedShards
from megatron_deberta.text.preprocess.units import WorkUnit, read_record
from megatron_deberta.text.preprocess.worker import Job
from megatron_deberta.text.readers.checks import refuse_bad
from megatron_deberta.text.readers.records import Defect

_QUARANTINE = "bad"


class _QuarantineRecord(TypedDict):
    """Record of the list of quarantined records."""

    sha256: str


def shard_prefixes(output: str, keys: Sequence[str], language: str) -> list[str]:
    """Return the prefixes of the shards of all keys, named as Megatron names them.

    Args:
        output: prefix of all shards.
        keys: of the documents.
        language: of the sentence splitter; empty: documents are not split.
    """
    kind = "sentence" if language else "document"
    return [f"{output}_{key}_{kind}" for key in keys]


def quarantine_path(output: str) -> str:
    """Return the name of the list of records that were set aside."""
    return f"{output}.quarantine.jsonl"


class Merger:
    """Merges the units of a run.

    Args:
        job: what was encoded.
        units: all units in order.
        folder: holds their parts; locked by this process.

    Raises:
        DataError: a record is damaged.
    """

    def __init__(self, job: Job, units: list[WorkUnit], folder: JobFolder) -> None:
        """See the class."""
        self._job = job
        self._folder = folder
        self._units = units
        self._reasons: Counter[str] = Counter()
        self._documents = 0
        self._empty: Counter[int] = Counter()
        parts: list[list[ShardPart]] = [[] for _ in job.options.keys]
        self._shards = StagedShards(
            folder=folder,
            prefixes=shard_prefixes(job.output, job.options.keys, job.language),
            dtype=job.dtype,
            parts=parts,
            read_index=partial(_read_index, job.dtype.name, job.counts_sequences),
            others={_QUARANTINE: quarantine_path(job.output)},
        )
        for unit in units:
            record = read_record(folder, unit)
            self._reasons.update(record["reasons"])
            self._documents += record["documents"]
            for key, (*size, empty) in enumerate(record["sizes"]):
                digests = record["sha256"][2 * key], record["sha256"][2 * key + 1]
                path = str(folder.parts / f"{unit.name}.{key}")
                parts[key].append(ShardPart(unit.name, PartSize(*size), path, digests))
                self._empty[key] += empty

    def run(self, engine: Engine, options: RunOptions) -> None:
        """Merge and publish.

        Args:
            engine: runs copies and hashes.
            options: of the run.

        Raises:
            DataError: too many records are bad, a key has no text, or a part is damaged.
            OSError: the disk is full.
        """
        try:
            found = self._folder.recorded("quarantine", _QuarantineRecord)
            listed = found or self._list_quarantined()
            self._refuse_bad(options.allow_bad)
            self._shards.merge(engine, options.advance, partial(self._describe, listed["sha256"]))
        except DamagedPartError as error:
            self._folder.discard(error.part)
            raise DataError(f"{error}; run the same command again to repeat this unit") from error

    def _list_quarantined(self) -> _QuarantineRecord:
        quarantine = HashedFile(self._folder.staged / _QUARANTINE)
        try:
            lines: Counter[int] = Counter()
            for unit in self._units:
                record = read_record(self._folder, unit)
                bases = []
                for source, begin, piece_lines in record["pieces"]:
                    if begin == 0:
                        lines[source] = 0
                    bases.append(lines[source])
                    lines[source] += piece_lines
                if record["sha256"][-1]:
                    for line in self._quarantined(unit, record["sha256"][-1], bases):
                        quarantine.write(line)
            listed = _QuarantineRecord(sha256=quarantine.take_digest())
            quarantine.commit()
        finally:
            quarantine.close()
        fsync_path(self._folder.staged)
        self._folder.record("quarantine", {**listed})
        return listed

    def _quarantined(self, unit: WorkUnit, sha256: str, bases: list[int]) -> Iterator[bytes]:
        path = self._folder.parts / f"{unit.name}.bad"
        check_part(unit.name, path, hashlib.sha256(path.read_bytes()).hexdigest(), sha256)
        with path.open("rb") as stream:
            for entry in stream:
                source, piece, line, offset, reason, detail = parse_json(
                    entry, tuple[int, int, int, int, str, str], unit.name, "a bad record",
                    remedy=RESTART,
                )  # fmt: skip
                defect = Defect(line, offset, reason, detail)
                yield defect.describe(self._job.sources[source].name, bases[piece])

    def _refuse_bad(self, allow_bad: float | None) -> None:
        records = self._documents + self._reasons.total()
        refuse_bad(self._reasons, records, allow_bad, self._folder.staged / _QUARANTINE)
        for key, parts in zip(self._job.options.keys, self._shards.parts, strict=True):
            if not any(part.size.tokens for part in parts):
                raise MalformedInputError(
                    f"no text under key {key!r} in {len(self._job.sources)} input file(s)"
                )

    def _describe(self, quarantine_sha256: str, key: int, hashes: ShardHashes) -> ShardManifest:
        quarantined = self._reasons.total()
        total = shard_layout(self._job.dtype, self._shards.parts[key]).total
        return ShardManifest(
            tokenizer_fingerprint=self._job.tokenizer_fingerprint,
            tokenizer_path=self._job.tokenizer_path,
            vocab_size=self._job.vocab_size,
            dtype=self._job.dtype.name,
            num_documents=total.documents,
            num_sequences=total.sequences,
            num_tokens=total.tokens,
            **hashes,
            sources=tuple(source.name for source in self._job.sources),
            documents_in=self._documents + quarantined,
            documents_empty=self._empty[key],
            documents_quarantined=quarantined,
            quarantine=dict(sorted(self._reasons.items())),
            quarantine_sha256=quarantine_sha256,
            plan_sha256=self._job.digest,
        )


def _read_index(dtype: str, counts_sequences: bool, part: ShardPart) -> PartIndex:
    """Return a part's index, stored after its tokens: lengths, and ends of documents."""
    with open(part.path, "rb") as stream:
        stream.seek(part.size.tokens * np.dtype(dtype).itemsize)
        content = stream.read()
    check_part(part.name, part.path, hashlib.sha256(content).hexdigest(), part.sha256[1])
    values = np.frombuffer(content, np.int32)
    lengths, counts = values[: part.size.sequences], values[part.size.sequences :]
    return lengths, np.cumsum(counts, dtype=np.int64) if counts_sequences else None
