"""Text to shards: plan, units on an engine, merge of their parts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from megatron_deberta.data.shards.format import bin_path, idx_path, refuse_existing
from megatron_deberta.data.shards.manifest import ShardManifest, read_manifest
from megatron_deberta.data.shards.merge import (
    DamagedPartError,
    ShardHashes,
    ShardPart,
    check_part,
    shard_layout,
    shard_part,
)
from megatron_deberta.data.shards.writer import PartIndex, PartSize
from megatron_deberta.errors import ConfigError, DataError, MalformedInputError
from megatron_deberta.files import HashedFile, fsync_path, write_atomically
from megatron_deberta.parsing import dump_json, parse_json
from megatron_deberta.text.jobs.executors import Call, Engine, RunOptions, run_calls, run_job
from megatron_deberta.text.jobs.folder import RESTART, JobFolder, plan_digest
from megatron_deberta.text.jobs.units import Unit, plan_units, usual_unit_bytes
from megatron_deberta.text.merge import StagedShards
from megatron_deberta.text.preprocess.encoding import EncodingOptions
from megatron_deberta.text.preprocess.worker import (
    Chunk,
    ChunkRecord,
    Job,
    encode_unit,
    find_recorded,
    load_once,
    names_chunk,
    open_worker,
    read_record,
    slice_units,
)
from megatron_deberta.text.readers.checks import refuse_bad
from megatron_deberta.text.readers.reading import plan_input
from megatron_deberta.text.readers.records import Defect, ReadOptions
from megatron_deberta.text.readers.sources import Source
from megatron_deberta.tokenizer import Tokenizer

_QUARANTINE = "bad"
JOB = "job.json"
_SECONDS_BETWEEN_LOOKS = 5.0


def preprocess(
    sources: Sequence[Source],
    tokenizer_path: str,
    output: str,
    *,
    read: ReadOptions | None = None,
    run: RunOptions | None = None,
    language: str = "",
    unit_bytes: int | None = None,
    encoding: EncodingOptions | None = None,
) -> list[ShardManifest]:
    """Tokenize text into one shard per key: ``{output}_{key}_document.{bin,idx,manifest.json}``.

    Shards hold no special tokens but ``encoding.append_eod``; packing adds them. They do not
    depend on ``run``. Completed units are kept in ``{output}.unfinished`` until the shards are
    published; the same call resumes from them.

    Args:
        sources: input files.
        tokenizer_path: see ``load_tokenizer``.
        output: beginning of the shards' names.
        read: what is read of the files.
        run: how it is done.
        language: keep sentences apart, as this language (ISO 639-1) ends them.
        unit_bytes: text that is done again after a crash, for each process; None: 8 to 64 MiB,
            by the size of the input.
        encoding: how texts become ids.

    Returns:
        What was recorded beside each shard; nothing if other array tasks still work.

    Raises:
        ConfigError: a shard exists, a key cannot be part of a file name, the tokenizer lacks what
            ``encoding`` needs, an unfinished run was started with other options, or a folder of
            its name exists that no run has made.
        DataError: an input, the tokenizer or the disk fails, a worker dies, too many records are
            bad, there is no text, or another process works on this output.
    """
    read, run = read or ReadOptions(), run or RunOptions()
    encoding = encoding or EncodingOptions()
    # Processes are what works side by side here; the library's threads would outlive no fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    unit_bytes = unit_bytes or usual_unit_bytes(sources)
    _check_names(sources, output, read.keys)
    try:
        tokenizer = load_once(os.path.abspath(tokenizer_path))
        plan = _plan(sources, tokenizer, read, language, unit_bytes) | encoding.plan()
        job = Job(
            sources=tuple(sources),
            unit_bytes=unit_bytes,
            options=read,
            vocab_size=tokenizer.vocab_size,
            language=language,
            output=os.path.abspath(output),
            digest=plan_digest(plan),
            tokenizer_fingerprint=tokenizer.fingerprint,
            tokenizer_path=os.path.abspath(tokenizer_path),
            eod=encoding.eod(tokenizer),
            keep_empty=encoding.keep_empty,
            use_sentencepiece=encoding.use_sentencepiece,
        )
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        return _Run(job, plan, run).run()
    except OSError as error:
        raise DataError(f"{output}: cannot write shard: {error}; is the disk full?") from error
    finally:
        # The files may be others at the next call.
        load_once.cache_clear()
        open_worker.cache_clear()


class _Run:
    """One call of ``preprocess``."""

    def __init__(self, job: Job, plan: dict[str, Any], options: RunOptions) -> None:
        self._job = job
        self._plan = plan
        self._options = options
        self._prefixes = shard_prefixes(job.output, job.options.keys, job.language)
        self._folder = JobFolder(job.output)
        self._units = plan_units(job.sources, job.unit_bytes)
        # A complete result of the same plan is this run's own, or as good.
        self._again = options.force and options.share.tasks == 1 and not self._folder.exists()

    def run(self) -> list[ShardManifest]:
        """Run the units that are left; return the manifests, or none if other array tasks work."""
        found = run_job(
            self._folder,
            self._options,
            find_result=lambda: None if self._again else self._complete(),
            work=self._encode,
            publish=self._merge,
        )
        return found or []

    def _begin(self, *, is_shared: bool) -> None:
        folder = self._folder
        folder.open(self._job.digest)
        self._refuse_existing()
        folder.begin(self._plan)
        if not is_shared:
            folder.remove_attempts()
        # Array tasks do so at the same time.
        write_atomically(folder.work / JOB, dump_json(self._job))

    def _encode(self) -> None:
        """Encode what is not done yet, also of other array tasks, of which one may have died."""
        folder, options = self._folder, self._options
        self._begin(is_shared=options.share.tasks > 1)
        job_path = str(folder.work / JOB)
        left = find_recorded(folder, self._units)
        if options.engine is None and None in left:
            # Forked workers share what is loaded here.
            open_worker(job_path, threading.get_ident())
        with options.open_engine() as engine:
            progress = _Progress(folder, self._units, options)
            calls: Iterator[Call] = (
                (encode_unit, (job_path, self._units[chunks.unit], chunks))
                for chunks in slice_units(self._units, options.share, engine.workers)
                if left[chunks.unit] is None
            )
            run_calls(engine, calls, on_wait=progress.look)
            progress.look(last=True)

    def _merge(self) -> list[ShardManifest] | None:
        """Merge the units and publish; None: other array tasks still encode some."""
        folder, options = self._folder, self._options
        if options.share.tasks > 1:
            self._begin(is_shared=False)
        found = find_recorded(folder, self._units)
        if None in found:
            if options.share.tasks > 1:
                return None
            raise DataError(f"{folder.path}: records of units are gone; run the command again")
        merger = _Merger(self._job, [chunk for each in found for chunk in each or []], folder)
        with options.open_engine() as engine:
            merger.run(engine, options)
        manifests = self._complete()
        if manifests is None:
            raise DataError(
                f"{self._job.output}: published files are missing; run the same command again"
            )
        return manifests

    def _complete(self) -> list[ShardManifest] | None:
        """Return the manifests of this plan's published shards; None: one is missing or cut off."""
        manifests = []
        for prefix in self._prefixes:
            try:
                manifest = read_manifest(prefix)
            except DataError:
                return None
            if manifest is None or manifest.plan_sha256 != self._job.digest:
                return None
            if not _is_whole(manifest, prefix):
                return None
            manifests.append(manifest)
        return manifests

    def _refuse_existing(self) -> None:
        """Raise if a shard exists, except those that this run is publishing."""
        output = self._job.output
        if self._options.force or self._folder.is_recorded("manifests"):
            return
        refuse_existing(self._prefixes)
        if os.path.exists(quarantine_path(output)):
            raise ConfigError(
                f"{quarantine_path(output)}: exists, of other shards; choose another --output, or "
                "add --force to lose it"
            )


class _QuarantineRecord(TypedDict):
    """Record of the list of quarantined records."""

    sha256: str


class _Merger:
    """Merges the parts of all ``chunks`` of a run, in order; ``folder`` holds them, locked."""

    def __init__(self, job: Job, chunks: Sequence[Chunk], folder: JobFolder) -> None:
        self._job = job
        self._folder = folder
        self._records = {chunk.name: read_record(folder, chunk) for chunk in chunks}
        self._reasons: Counter[str] = Counter()
        for record in self._records.values():
            self._reasons.update(record["reasons"])
        self._documents = sum(record["documents"] for record in self._records.values())
        self._shards = StagedShards(
            folder=folder,
            prefixes=shard_prefixes(job.output, job.options.keys, job.language),
            dtype=job.dtype,
            parts=[self._parts(key) for key in range(len(job.options.keys))],
            read_index=partial(_read_index, job.dtype.name, job.counts_sequences),
            others={_QUARANTINE: quarantine_path(job.output)},
        )

    def _parts(self, key: int) -> list[ShardPart]:
        return [
            ShardPart(
                name,
                PartSize(*record["sizes"][key][:3]),
                str(self._folder.parts / f"{name}.{key}"),
                (record["sha256"][2 * key], record["sha256"][2 * key + 1]),
            )
            for name, record in self._records.items()
        ]

    def run(self, engine: Engine, options: RunOptions) -> None:
        """Merge and publish, with copies and hashes on the engine."""
        try:
            found = self._folder.recorded("quarantine", _QuarantineRecord)
            listed = found or self._list_quarantined()
            self._refuse_bad(options.allow_bad)
            self._shards.merge(engine, options.advance, partial(self._describe, listed["sha256"]))
        except DamagedPartError as error:
            self._folder.discard(error.part)
            raise DataError(f"{error}; run the same command again to repeat this unit") from error

    def _list_quarantined(self) -> _QuarantineRecord:
        with contextlib.closing(HashedFile(self._folder.staged / _QUARANTINE)) as quarantine:
            lines: Counter[int] = Counter()
            for name, record in self._records.items():
                bases = []
                for source, begin, range_lines in record["pieces"]:
                    if begin == 0:
                        lines[source] = 0
                    bases.append(lines[source])
                    lines[source] += range_lines
                if record["sha256"][-1]:
                    for line in self._quarantined(name, record["sha256"][-1], bases):
                        quarantine.write(line)
            listed = _QuarantineRecord(sha256=quarantine.take_digest())
            quarantine.commit()
        fsync_path(self._folder.staged)
        self._folder.record("quarantine", {**listed})
        return listed

    def _quarantined(self, chunk: str, sha256: str, bases: list[int]) -> Iterator[bytes]:
        path = self._folder.parts / f"{chunk}.bad"
        check_part(chunk, path, hashlib.sha256(path.read_bytes()).hexdigest(), sha256)
        with path.open("rb") as stream:
            for entry in stream:
                source, place, line, offset, reason, detail = parse_json(
                    entry, tuple[int, int, int, int, str, str], chunk, "a bad record",
                    remedy=RESTART,
                )  # fmt: skip
                defect = Defect(line, offset, reason, detail)
                yield defect.describe(self._job.sources[source].name, bases[place])

    def _refuse_bad(self, allow_bad: float | None) -> None:
        records = self._documents + self._reasons.total()
        refuse_bad(self._reasons, records, allow_bad, self._folder.staged / _QUARANTINE)
        for key, parts in zip(self._job.options.keys, self._shards.parts, strict=True):
            if not any(part.size.tokens for part in parts):
                empty = [each.name for each in self._job.sources if not each.size_bytes]
                if len(empty) == len(self._job.sources):
                    raise MalformedInputError(f"{empty[0]}: the file is empty")
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
            documents_empty=sum(record["sizes"][key][3] for record in self._records.values()),
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


class _Progress:
    """Shows what the units' records count, whichever process has written them."""

    def __init__(self, folder: JobFolder, units: Sequence[Unit], options: RunOptions) -> None:
        self._folder = folder
        self._size = sum(unit.file_bytes for unit in units)
        self._advance = options.advance
        self._seen: set[str] = set()
        self._total: Counter[str] = Counter()
        self._before: Counter[str] | None = None
        self._last_look = 0.0
        self.look(last=True)

    def look(self, *, last: bool = False) -> None:
        """Read the new records, at most every few seconds but for the ``last`` time."""
        if not last and time.monotonic() - self._last_look < _SECONDS_BETWEEN_LOOKS:
            return
        self._last_look = time.monotonic()
        for name in filter(names_chunk, self._folder.records() - self._seen):
            record = self._folder.recorded(name, ChunkRecord)
            # The last array task to finish removes the records.
            if record is not None:
                self._total.update(
                    file_bytes=record["file_bytes"],
                    text_bytes=record["text_bytes"],
                    tokens=sum(size[0] for size in record["sizes"]),
                    documents=record["documents"],
                    quarantined=sum(record["reasons"].values()),
                )
            self._seen.add(name)
        if self._before is None:
            self._before = self._total.copy()
        done = min(self._total["file_bytes"], self._size)
        self._advance("encode", self._size, done, self._total - self._before)


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


def _check_names(sources: Sequence[Source], output: str, keys: Sequence[str]) -> None:
    for key in keys:
        if not key or os.sep in key:
            raise ConfigError(f"--keys {key!r}: cannot be part of a file name")
    if not os.path.basename(output):
        raise ConfigError(f"--output {output}: ends without a name; add one, as {output}books")
    if os.path.realpath(quarantine_path(output)) in (os.path.realpath(s.path) for s in sources):
        raise ConfigError(
            f"--output {output}: {quarantine_path(output)} is an input and would be replaced; "
            "choose another name"
        )


def _plan(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    read: ReadOptions,
    language: str,
    unit_bytes: int,
) -> dict[str, Any]:
    """Return everything that determines the result, by the name that error messages use."""
    libraries = ["tokenizers", "gigatoken", *(["sentencex"] if language else [])]
    return {
        **plan_input(sources, read),
        "--tokenizer (its fingerprint)": tokenizer.fingerprint,
        "vocabulary size": tokenizer.vocab_size,
        "--sentences": language,
        "--unit-mb (in bytes)": unit_bytes,
        "libraries": [f"{name} {version(name)}" for name in libraries],
    }


def _is_whole(manifest: ShardManifest, prefix: str) -> bool:
    """Return whether the files have the expected sizes; opening a large index takes a while."""
    layout = shard_layout(manifest.dtype, [shard_part(prefix, manifest)])
    sizes = ((bin_path(prefix), layout.bin_bytes), (idx_path(prefix), layout.idx_bytes))
    return all(os.path.exists(path) and os.path.getsize(path) == size for path, size in sizes)
