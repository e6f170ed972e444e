"""Text to shards by any number of processes on any number of nodes, which share a folder.

Owns a run from beginning to end: what decides its result, its processes, and when it is done.
Refuses to go on with a changed input, tokenizer or option; and to wait for a process that died.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megatron_deberta.data.shards.format import bin_path, dtype_for_vocab, idx_path, manifest_path
from megatron_deberta.data.shards.manifest import ShardManifest, read_manifest
from megatron_deberta.data.shards.writer import PartSize, ShardLayout
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.processes import die_with_parent
from megatron_deberta.text.preprocess import units
from megatron_deberta.text.preprocess.encoding import (
    BatchEncoder,
    EncodingOptions,
    choose_encoder,
    sentencepiece_encoder,
)
from megatron_deberta.text.preprocess.merging import Merger, quarantine_path, shard_prefixes
from megatron_deberta.text.preprocess.progress import ProgressCounters, ProgressDisplay
from megatron_deberta.text.preprocess.worker import Job, encode_units
from megatron_deberta.text.preprocess.workfolder import WorkFolder
from megatron_deberta.text.readers.reading import READING_VERSION
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import Source
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOptions:
    """How a run is done; nothing of it changes the result.

    Attributes:
        workers: processes on this node; 0 works in this one.
        rank: of this launch among ``size`` that share the work.
        size: launches that share the work (MPI ranks, tasks of a job array).
        allow_bad: share of records that may be bad; None: 0.1 %, and no file may be damaged.
        force: replace shards that exist.
    """

    workers: int = 0
    rank: int = 0
    size: int = 1
    allow_bad: float | None = None
    force: bool = False


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
    """Tokenize text into one shard a key: ``{output}_{key}_document.{bin,idx,manifest.json}``.

    Shards hold no special tokens but ``encoding.append_eod``; packing adds them. They depend on
    nothing in ``run``. What is done is kept in ``{output}.unfinished`` until all is: the same call
    goes on with it.

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
        What was recorded beside each shard.

    Raises:
        ConfigError: a shard exists, a key cannot be part of a file name, the tokenizer lacks what
            ``encoding`` needs, an unfinished run was begun in another way, or its folder is
            somebody's own.
        DataError: an input, the tokenizer or the disk fails, a worker dies, too many records are
            bad, or there is no text.
    """
    read, run = read or ReadOptions(), run or RunOptions()
    encoding = encoding or EncodingOptions()
    # Processes are what works side by side here; the library's threads would outlive no fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    unit_bytes = unit_bytes or units.usual_unit_bytes(sources)
    _check_names(sources, output, read.keys)
    tokenizer = load_tokenizer(tokenizer_path)
    eod = encoding.eod(tokenizer)
    exact = sentencepiece_encoder(tokenizer) if encoding.use_sentencepiece else None
    plan = _plan(sources, tokenizer, read, language, unit_bytes) | encoding.plan()
    digest = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()
    prefixes = shard_prefixes(output, read.keys, language)
    folder = WorkFolder(output)
    folder.refuse_foreign()
    folder.remove_leftovers()
    # A complete result of the same plan is this run's own, or as good.
    again = run.force and run.size == 1 and not folder.exists()
    if not again and (found := _complete(prefixes, digest)) is not None:
        folder.remove()
        return found
    _refuse_existing(output, prefixes, run, folder)
    with _disk_errors(output):
        folder.begin(plan)
        if not again and (found := _complete(prefixes, digest)) is not None:
            # Others finished between the first look and the beginning.
            folder.remove()
            return found
        job = Job(
            sources=tuple(sources),
            segments=tuple(units.plan_segments(sources, unit_bytes)),
            unit_bytes=unit_bytes,
            options=read,
            vocab_size=tokenizer.vocab_size,
            language=language,
            output=output,
            digest=digest,
            tokenizer_fingerprint=tokenizer.fingerprint,
            tokenizer_path=os.path.abspath(tokenizer_path),
            allow_bad=run.allow_bad,
            eod=eod,
            keep_empty=encoding.keep_empty,
        )
        _work(job, exact or _choose_encoder(job, tokenizer, folder), folder, run)
    found = _complete(prefixes, digest)
    if found is None:
        raise DataError(f"{output}: published files are missing; run the same command again")
    folder.remove()
    return found


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


def _choose_encoder(job: Job, tokenizer: Tokenizer, folder: WorkFolder) -> BatchEncoder | None:
    """Choose one, or None where nothing is left to encode."""
    with _finished_elsewhere(folder):
        if not units.UnitQueue(folder, job.segments, 0).is_finished():
            return choose_encoder(tokenizer, job.sources, job.options)
    return None


def _work(job: Job, encode: BatchEncoder | None, folder: WorkFolder, run: RunOptions) -> None:
    total_bytes = sum(segment.file_bytes for segment in job.segments)
    counters = [ProgressCounters() for _ in range(max(run.workers, 1))]
    places = run.size * len(counters)
    first = [
        len(job.segments) * (run.rank * len(counters) + i) // places for i in range(len(counters))
    ]
    # A forked copy of a process that runs threads can deadlock, and the display runs one.
    workers = _start(job, encode, first, counters) if run.workers else {}
    with ProgressDisplay(
        total_bytes,
        counters,
        lambda: units.recorded_bytes(folder, job.segments, job.sources, job.unit_bytes),
    ):
        if workers:
            _watch(workers)
        else:
            _do_share(job, encode, first[0], counters[0])


def _do_share(
    job: Job, encode: BatchEncoder | None, first_segment: int, board: ProgressCounters
) -> None:
    """Do units until there are none, then merge; in any process."""
    folder = WorkFolder(job.output)
    with folder.kept_alive(), _finished_elsewhere(folder):
        queue = units.UnitQueue(folder, job.segments, first_segment)
        if encode is not None:
            encode_units(job, folder, queue, encode, board)
        Merger(job, queue.units(), folder, board).run()


def _start(
    job: Job,
    encode: BatchEncoder | None,
    first: Sequence[int],
    counters: Sequence[ProgressCounters],
) -> dict[Connection, Any]:
    """Start worker processes; each says on its connection how it ended."""
    # What is loaded is shared: a process of its own would take most of a second to come as far.
    context = multiprocessing.get_context("fork")
    # The collector would write to all of it, and so copy it for each process.
    gc.freeze()
    workers = {}
    for first_segment, counter in zip(first, counters, strict=True):
        here, there = context.Pipe(duplex=False)
        process = context.Process(
            target=_run_worker,
            args=(job, encode, first_segment, counter, there, os.getpid()),
            daemon=True,
        )
        process.start()
        there.close()
        workers[here] = process
    return workers


def _run_worker(
    job: Job,
    encode: BatchEncoder | None,
    first_segment: int,
    counter: ProgressCounters,
    messages: Connection,
    parent: int,
) -> None:
    # Nobody waits for a worker whose parent was killed.
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with _disk_errors(job.output):
            _do_share(job, encode, first_segment, counter)
    except (ConfigError, DataError) as error:
        messages.send_bytes(type(error).__name__.encode() + b" " + str(error).encode())
    else:
        messages.send_bytes(b"done")


def _watch(workers: dict[Connection, Any]) -> None:
    """Wait for all workers, or for the first that fails.

    Raises:
        ConfigError, DataError: as a worker did, or one died.
    """
    left = set(workers)
    try:
        while left:
            ready = wait(left)
            for connection in [each for each in left if each in ready]:
                try:
                    message = connection.recv_bytes().decode()
                except EOFError:
                    raise DataError(
                        "a worker process died (killed, or out of memory?); run the same command "
                        f"again to go on, with less than --workers {len(workers)} for less memory"
                    ) from None
                if message != "done":
                    kind, _, text = message.partition(" ")
                    raise (ConfigError if kind == "ConfigError" else DataError)(text)
                left.remove(connection)
    finally:
        for connection in left:
            workers[connection].kill()
        for process in workers.values():
            process.join()


def _plan(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    read: ReadOptions,
    language: str,
    unit_bytes: int,
) -> dict[str, Any]:
    """Everything that decides the result, by the name that a message would give it."""
    libraries = ["tokenizers", "gigatoken", *(["sentencex"] if language else [])]
    return {
        "--input": [
            [each.name, each.size_bytes, each.modified_ns, each.text_format, each.compression]
            for each in sources
        ],
        "--tokenizer (its fingerprint)": tokenizer.fingerprint,
        "vocabulary size": tokenizer.vocab_size,
        "--keys": list(read.keys),
        "--normalize": read.normalization,
        "--max-document-mb (in bytes)": read.longest_bytes,
        "--sentences": language,
        "--unit-mb (in bytes)": unit_bytes,
        "version of reading": READING_VERSION,
        "libraries": [f"{name} {version(name)}" for name in libraries],
    }


def _complete(prefixes: Sequence[str], digest: str) -> list[ShardManifest] | None:
    """Return the manifests of shards that this very plan has published, and nobody has cut."""
    manifests = []
    for prefix in prefixes:
        try:
            manifest = read_manifest(prefix)
        except DataError:
            return None
        if not (manifest and manifest.plan_sha256 == digest and _is_whole(manifest, prefix)):
            return None
        manifests.append(manifest)
    return manifests


def _is_whole(manifest: ShardManifest, prefix: str) -> bool:
    """Tell by the files' sizes: an index of many documents takes a while to open."""
    total = PartSize(manifest.num_tokens, manifest.num_sequences, manifest.num_documents)
    layout = ShardLayout(dtype_for_vocab(manifest.vocab_size), [total])
    paths = bin_path(prefix), idx_path(prefix)
    if not all(os.path.exists(path) for path in paths):
        return False
    return [os.path.getsize(path) for path in paths] == [layout.bin_bytes, layout.idx_bytes]


def _refuse_existing(
    output: str, prefixes: Sequence[str], run: RunOptions, folder: WorkFolder
) -> None:
    """Refuse to replace a shard; while publishing, some names are this run's own."""
    if run.force or folder.recorded("manifests") is not None:
        return
    for prefix in prefixes:
        for path in (bin_path(prefix), idx_path(prefix), manifest_path(prefix)):
            if os.path.exists(path):
                raise ConfigError(f"{path}: exists; choose another --output or add --force")
    if os.path.exists(quarantine_path(output)):
        raise ConfigError(
            f"{quarantine_path(output)}: exists, of other shards; choose another --output, or add "
            "--force to lose it"
        )


@contextlib.contextmanager
def _finished_elsewhere(folder: WorkFolder) -> Iterator[None]:
    """End the block without error where the folder vanishes: others have published."""
    try:
        yield
    except FileNotFoundError:
        if folder.exists():
            raise


@contextlib.contextmanager
def _disk_errors(output: str) -> Iterator[None]:
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise DataError(f"{output}: cannot write shard: {error}; is the disk full?") from error
