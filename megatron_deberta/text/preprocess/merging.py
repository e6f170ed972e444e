"""Merge encoded units into shards; the driver process publishes them.

Copies and hashes are units. Hashes are of what units wrote, not of a shard's file read back.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from megatron_deberta.data.shards.format import bin_path, idx_path, manifest_path
from megatron_deberta.data.shards.manifest import ShardManifest, encode_manifest
from megatron_deberta.data.shards.writer import PartIndex, PartSize, ShardLayout
from megatron_deberta.errors import DataError
from megatron_deberta.files import HashedFile, fsync_path, temporary_path, write_durably
from megatron_deberta.parsing import parse_json
from megatron_deberta.text.jobs.executors import Call, Engine, RunOptions, run_calls
from megatron_deberta.text.jobs.folder import RESTART, JobFolder
from megatron_deberta.text.preprocess.units import UnitRecord, WorkUnit, read_record
from megatron_deberta.text.preprocess.worker import Job
from megatron_deberta.text.readers.checks import refuse_bad

_COPY_BYTES = 1 << 28
_MOST_COPIES = 1024
_CHUNK_BYTES = 1 << 20


class _HashRecord(TypedDict):
    """Digests of a shard."""

    bin_sha256: str
    idx_sha256: str


class _LayoutRecord(TypedDict):
    """Record that the shards' files have been allocated."""

    quarantine_sha256: str


@dataclass(slots=True)
class Part:
    """Result of one unit for one key.

    Attributes:
        unit: name of the unit.
        size: tokens, sequences and documents.
        sha256: digests of its tokens and of its index.
    """

    unit: str
    size: tuple[int, int, int]
    sha256: tuple[str, str]


def shard_prefixes(output: str, keys: Sequence[str], language: str) -> list[str]:
    """Return Megatron's names of the shards of all keys."""
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
        self._prefixes = shard_prefixes(job.output, job.options.keys, job.language)
        self._units = units
        self._reasons: Counter[str] = Counter()
        self._documents = 0
        self._empty: Counter[int] = Counter()
        self._parts: list[list[Part]] = [[] for _ in job.options.keys]
        for unit in units:
            self._add(unit, read_record(folder, unit))

    def _add(self, unit: WorkUnit, record: UnitRecord) -> None:
        self._reasons.update(record["reasons"])
        self._documents += record["documents"]
        for key, parts in enumerate(self._parts):
            tokens, sequences, documents, empty = record["sizes"][key]
            digests = record["sha256"][2 * key], record["sha256"][2 * key + 1]
            parts.append(Part(unit.name, (tokens, sequences, documents), digests))
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
        layout = self._folder.recorded("layout", _LayoutRecord)
        if layout is None:
            layout = self._lay_out()
        self._refuse_bad(options.allow_bad)
        if not self._folder.is_recorded("manifests"):
            calls = list(self._calls())
            done = itertools.count()
            options.advance("merge", len(calls), next(done), {})
            run_calls(engine, calls, lambda _: options.advance("merge", len(calls), next(done), {}))
            self._write_manifests(layout["quarantine_sha256"])
        self._folder.check_lock()
        if not self._folder.is_recorded("cleared"):
            self._clear()
        self._publish()

    def _lay_out(self) -> _LayoutRecord:
        """Allocate the shards' files and list the quarantined records."""
        quarantine = HashedFile(self._folder.staged / "bad")
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
            digest = quarantine.take_digest()
            quarantine.commit()
        finally:
            quarantine.close()
        for key, parts in enumerate(self._parts):
            files = [self._folder.staged / f"{key}.{end}" for end in ("bin", "idx")]
            _layout(self._job, parts).create(*files)
        self._folder.record("layout", {"quarantine_sha256": digest})
        return {"quarantine_sha256": digest}

    def _quarantined(self, unit: WorkUnit, sha256: str, bases: list[int]) -> Iterator[bytes]:
        path = self._folder.parts / f"{unit.name}.bad"
        _check_part(self._folder, unit.name, path, hashlib.sha256(path.read_bytes()), sha256)
        with path.open("rb") as stream:
            for entry in stream:
                source, piece, line, offset, reason, detail = parse_json(
                    entry, tuple[int, int, int, int, str, str], unit.name, "a bad record",
                    remedy=RESTART,
                )  # fmt: skip
                content = {
                    "file": self._job.sources[source].name,
                    "line": bases[piece] + line,
                    "offset": offset if offset >= 0 else None,
                    "reason": reason,
                    "detail": detail,
                }
                yield json.dumps(content, ensure_ascii=False).encode("utf-8", "replace") + b"\n"

    def _refuse_bad(self, allow_bad: float | None) -> None:
        records = self._documents + self._reasons.total()
        refuse_bad(self._reasons, records, allow_bad, self._folder.staged / "bad")
        for key, parts in zip(self._job.options.keys, self._parts, strict=True):
            if not any(part.size[0] for part in parts):
                raise DataError(
                    f"no text under key {key!r} in {len(self._job.sources)} input file(s)"
                )

    def _calls(self) -> Iterator[Call]:
        """Yield the hashes, which take longest, and copies that are worth a flush each."""
        job_path = str(job_file(self._folder))
        for key, parts in enumerate(self._parts):
            if not self._folder.is_recorded(f"hash-{key}"):
                yield hash_shard, (job_path, key, parts)
        for key, parts in enumerate(self._parts):
            layout = _layout(self._job, parts)
            size = layout.bin_bytes + layout.idx_bytes
            copies = max(1, min(len(parts), size // _COPY_BYTES, _MOST_COPIES))
            bounds = [len(parts) * index // copies for index in range(copies + 1)]
            for first, last in itertools.pairwise(bounds):
                if not self._folder.is_recorded(f"copy-{key}-{first:08d}"):
                    # Only the sums of what is before and behind decide the places.
                    before, behind = _sum_parts(parts[:first]), _sum_parts(parts[last:])
                    yield copy_parts, (job_path, key, first, [before, *parts[first:last], behind])

    def _write_manifests(self, quarantine_sha256: str) -> None:
        quarantined = self._reasons.total()
        for key, parts in enumerate(self._parts):
            total = _layout(self._job, parts).total
            hashes = self._folder.recorded(f"hash-{key}", _HashRecord)
            manifest = ShardManifest(
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
            path = self._folder.staged / f"{key}.manifest.json"
            temporary = temporary_path(path)
            write_durably(temporary, encode_manifest(manifest))
            os.replace(temporary, path)
        fsync_path(self._folder.staged)
        self._folder.record("manifests", {})

    def _clear(self) -> None:
        """Remove older shards' indices first, so that no old index meets new tokens."""
        for prefix in self._prefixes:
            for name in (idx_path(prefix), manifest_path(prefix)):
                Path(name).unlink(missing_ok=True)
        fsync_path(Path(self._job.output).parent)
        self._folder.record("cleared", {})

    def _publish(self) -> None:
        """Give the files their names, each index last: without it there is no shard."""
        folder = Path(self._job.output).parent
        _rename(self._folder.staged / "bad", quarantine_path(self._job.output))
        for end, name in (("bin", bin_path), ("manifest.json", manifest_path), ("idx", idx_path)):
            if end == "idx":
                fsync_path(folder)
            for key, prefix in enumerate(self._prefixes):
                _rename(self._folder.staged / f"{key}.{end}", name(prefix))
        fsync_path(folder)


def _rename(staged: Path, final: str) -> None:
    # What is missing was renamed before a kill.
    if staged.exists():
        os.replace(staged, final)


def job_file(folder: JobFolder) -> Path:
    """Return the path of the file that describes the job to workers."""
    return folder.work / "job.json"


def copy_parts(job_path: str, key: int, first: int, parts: list[Part]) -> None:
    """Copy parts to their places in a shard's files, and flush them.

    Args:
        job_path: file written by ``Job.write``.
        key: index of the key.
        first: number of the first part to copy, for the record.
        parts: the sum of those before, those to copy, and the sum of those behind.

    Raises:
        DataError: a part is damaged, or the disk is full.
    """
    job, folder = _open(job_path)
    layout = _layout(job, parts)
    files = [os.open(folder.staged / f"{key}.{end}", os.O_WRONLY) for end in ("bin", "idx")]
    try:
        for number, part in enumerate(parts[1:-1], 1):
            with _part_path(folder, part, key).open("rb") as stream:
                found = hashlib.sha256()
                layout.copy_tokens(files[0], number, stream.fileno(), found.update)
            _check_part(folder, part.unit, stream.name, found, part.sha256[0])
            layout.write_index(files[1], number, *_read_index(job, folder, part, key))
        for descriptor in files:
            os.fsync(descriptor)
    except OSError as error:
        raise DataError(f"{job.output}: cannot write shard: {error}; is the disk full?") from error
    finally:
        for descriptor in files:
            os.close(descriptor)
    folder.record(f"copy-{key}-{first:08d}", {})


def hash_shard(job_path: str, key: int, parts: list[Part]) -> None:
    """Record the SHA-256 of a shard's files, from the parts that are copied into them.

    Raises:
        DataError: a part is damaged or cannot be read.
    """
    job, folder = _open(job_path)
    digest = hashlib.sha256()
    for part in parts:
        found = hashlib.sha256()
        for chunk in _read_tokens(job, folder, part, key):
            found.update(chunk)
            digest.update(chunk)
        _check_part(folder, part.unit, _part_path(folder, part, key), found, part.sha256[0])

    def indices() -> Iterator[PartIndex]:
        return (_read_index(job, folder, part, key) for part in parts)

    idx_sha256 = _layout(job, parts).idx_sha256(indices)
    folder.record(f"hash-{key}", {"bin_sha256": digest.hexdigest(), "idx_sha256": idx_sha256})


def _open(job_path: str) -> tuple[Job, JobFolder]:
    job = Job.read(Path(job_path))
    folder = JobFolder(job.output)
    folder.open(job.digest)
    return job, folder


def _layout(job: Job, parts: Sequence[Part]) -> ShardLayout:
    return ShardLayout(job.dtype, [PartSize(*part.size) for part in parts])


def _sum_parts(parts: Sequence[Part]) -> Part:
    sizes = [part.size for part in parts]
    return Part(
        "", (sum(s[0] for s in sizes), sum(s[1] for s in sizes), sum(s[2] for s in sizes)), ("", "")
    )


def _part_path(folder: JobFolder, part: Part, key: int) -> Path:
    return folder.parts / f"{part.unit}.{key}"


def _read_tokens(job: Job, folder: JobFolder, part: Part, key: int) -> Iterator[bytes]:
    left = part.size[0] * job.dtype.itemsize
    with _part_path(folder, part, key).open("rb") as stream:
        while left and (chunk := stream.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk


def _read_index(job: Job, folder: JobFolder, part: Part, key: int) -> PartIndex:
    """Return a part's index, stored after its tokens: lengths, and ends of documents."""
    path = _part_path(folder, part, key)
    with path.open("rb") as stream:
        stream.seek(part.size[0] * job.dtype.itemsize)
        content = stream.read()
    _check_part(folder, part.unit, path, hashlib.sha256(content), part.sha256[1])
    values = np.frombuffer(content, np.int32)
    counts = values[part.size[1] :]
    return values[: part.size[1]], np.cumsum(
        counts, dtype=np.int64
    ) if job.counts_sequences else None


def _check_part(folder: JobFolder, unit: str, path: object, found: Any, expected: str) -> None:
    """Raise DataError if a part is not what its record says; the unit will be done again."""
    if found.hexdigest() != expected:
        folder.discard(unit)
        raise DataError(
            f"{path}: damaged since it was written (SHA-256); run the same command again, which "
            "repeats this unit"
        )
