"""Text to shards: plan, units on an engine, merge."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_deberta.data.shards.format import bin_path, idx_path, refuse_existing
from megatron_deberta.data.shards.manifest import ShardManifest, read_manifest
from megatron_deberta.data.shards.merge import shard_layout, shard_part
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.text.jobs.executors import (
    Call,
    Engine,
    RunOptions,
    local_engine,
    run_calls,
)
from megatron_deberta.text.jobs.folder import BusyError, JobFolder, plan_digest
from megatron_deberta.text.preprocess import units
from megatron_deberta.text.preprocess.encoding import EncodingOptions
from megatron_deberta.text.preprocess.merging import Merger, quarantine_path, shard_prefixes
from megatron_deberta.text.preprocess.worker import Job, encode_segment, load_once, open_worker
from megatron_deberta.text.readers.reading import plan_input
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import Source
from megatron_deberta.tokenizer import Tokenizer

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
    unit_bytes = unit_bytes or units.usual_unit_bytes(sources)
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
        with _disk_errors(output):
            return _Run(job, plan, run).run()
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
        self._segments = units.plan_segments(job.sources, job.unit_bytes)

    def run(self) -> list[ShardManifest]:
        """Run the units that are left; return the manifests, or none if other array tasks work."""
        folder, options = self._folder, self._options
        folder.remove_leftovers()
        # A complete result of the same plan is this run's own, or as good.
        again = options.force and options.share.tasks == 1 and not folder.exists()
        if not again and not folder.exists() and (found := self._complete()) is not None:
            return found
        if options.share.tasks == 1:
            with folder.locked():
                return self._work(again, is_shared=False)
        with folder.locked(shared=True):
            if found := self._work(again, is_shared=True):
                return found
        try:
            with folder.locked(seconds=0):
                # Only a task that finds all units done merges; a killed one's share is missing.
                return self._work(again, is_shared=False, encode=False)
        except BusyError:
            return []

    def _work(self, again: bool, *, is_shared: bool, encode: bool = True) -> list[ShardManifest]:
        """Encode and, unless others share the folder, merge; the lock is held."""
        folder = self._folder
        folder.open(self._job.digest)
        if not again and (found := self._complete()) is not None:
            if not is_shared:
                folder.remove()
            return found
        self._refuse_existing()
        folder.begin(self._plan)
        if not is_shared:
            folder.remove_attempts()
        self._job.write(folder.work / JOB)
        left = units.find_recorded(folder, self._segments)
        if not encode and None in left:
            return []
        self._encode_and_merge(left, is_shared)
        if is_shared:
            return []
        found = self._complete()
        if found is None:
            raise DataError(
                f"{self._job.output}: published files are missing; run the same command again"
            )
        folder.remove()
        return found

    def _encode_and_merge(self, left: list[list[units.WorkUnit] | None], is_shared: bool) -> None:
        options, folder, segments = self._options, self._folder, self._segments
        job, job_path = self._job, str(folder.work / JOB)
        if options.engine is None and None in left:
            # Forked workers share what is loaded here.
            open_worker(job_path, threading.get_ident())
        with contextlib.ExitStack() as stack:
            engine = options.engine or stack.enter_context(local_engine(options.workers))
            progress = _Progress(folder, segments, options)
            run_calls(engine, self._calls(job_path, left, engine), on_wait=progress.look)
            progress.look(last=True)
            if is_shared:
                return
            found = units.find_recorded(folder, segments)
            done = [unit for each in found for unit in each or []]
            if None in found:
                raise DataError(f"{folder.path}: records of units are gone; run the command again")
            Merger(job, done, folder).run(engine, options)

    def _calls(
        self, job_path: str, left: list[list[units.WorkUnit] | None], engine: Engine
    ) -> Iterator[Call]:
        """Yield the calls of this array task for what is not done."""
        for lane in units.plan_lanes(self._segments, self._options.share, engine.workers):
            if left[lane.segment] is None:
                yield encode_segment, (job_path, self._segments[lane.segment], lane)

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


class _Progress:
    """Shows what the units' records count, whichever process has written them."""

    def __init__(
        self, folder: JobFolder, segments: Sequence[units.Segment], options: RunOptions
    ) -> None:
        self._folder = folder
        self._size = sum(segment.file_bytes for segment in segments)
        self._advance = options.advance
        self._seen: set[str] = set()
        self._total: Counter[str] = Counter()
        self._read()
        self._before = self._total.copy()
        self._show()

    def look(self, *, last: bool = False) -> None:
        """Read the new records, at most every few seconds but for the ``last`` time."""
        if not last and time.monotonic() - self._last_look < _SECONDS_BETWEEN_LOOKS:
            return
        self._read()
        self._show()

    def _read(self) -> None:
        self._last_look = time.monotonic()
        for name in filter(units.names_unit, self._folder.records() - self._seen):
            record = self._folder.recorded(name, units.UnitRecord)
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

    def _show(self) -> None:
        done = min(self._total["file_bytes"], self._size)
        self._advance("encode", self._size, done, self._total - self._before)


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


@contextlib.contextmanager
def _disk_errors(output: str) -> Iterator[None]:
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DataError(f"{output}: cannot write shard: {error}; is the disk full?") from error
