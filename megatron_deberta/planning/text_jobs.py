"""Time, disk and memory of jobs over text, from a sample of the input or the sizes of shards.

The constants were measured on one core, on English text: those of ``deduplicate`` and
``preprocess`` by the benchmarks of their names, the others by
``benchmarks.text.commands`` (``benchmarks/results/cpu``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_deberta.data.shards.format import bin_path, dtype_for_vocab, idx_path
from megatron_deberta.data.shards.merge import open_compatible
from megatron_deberta.text.deduplicate.pairs import PART_DOCUMENTS
from megatron_deberta.text.deduplicate.sign import PERMUTATIONS, Settings
from megatron_deberta.text.preprocess.encoding import CACHE_BYTES, choose_encoder
from megatron_deberta.text.readers.reading import DocumentReader
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import Source
from megatron_deberta.text.sample import INPUT_PER_SAMPLE
from megatron_deberta.tokenizer import load_tokenizer

_SAMPLE_BYTES = 8_000_000
_SAMPLE_FILES = 8
_ENCODED_BYTES = 2_000_000
_SIGN_BYTES_PER_SECOND = 42e6
_READ_BYTES_PER_SECOND = 130e6
_COLLECT_BYTES_PER_SECOND = 90e6
_SPLIT_BYTES_PER_SECOND = 78e6
_DRAW_BYTES_PER_SECOND = 70e6
# By the clock; SentencePiece's threads share some of the work.
_TRAIN_BYTES_PER_SECOND = 3.9e6
_MERGE_BYTES_PER_SECOND = 400e6
_HASH_BYTES_PER_SECOND = 1.2e9
_SECONDS_PER_DOCUMENT = 30e-6
_SERIAL_SECONDS_PER_DOCUMENT = 1.5e-6
_FIRST_PROCESS_BYTES = 55e6
_WORKER_BYTES = 140e6
# Of a worker that only reads and copies.
_COPYING_BYTES = 70e6
_KEY_BYTES = 120
_MAP_BYTES = 33
_TOKENIZER_BYTES = 330e6
_TOKENIZER_FILES_BYTES = 3e6
# Of the process in which SentencePiece trains, and for each byte that it trains on.
_TRAINER_BYTES = 150e6
_TRAINED_TIMES = 14
# Bytes that a long document takes in its worker: text, record, hashes and their set.
_LONGEST_TIMES = 8
_NEAR_SHARE = 0.25
_BYTES_PER_WORD = 5.7
# Lengths, offsets and document boundaries of a shard's index, and the lengths of its parts.
_INDEX_BYTES = 24


class Sample(NamedTuple):
    """Estimated content of the input.

    Attributes:
        text_bytes: uncompressed bytes.
        documents: number of documents.
        texts: some of the documents' texts.
        texts_bytes: bytes of the records of ``texts``, in the uncompressed files.
    """

    text_bytes: float
    documents: float
    texts: list[str]
    texts_bytes: int


class Needs(NamedTuple):
    """Requirements of a job.

    Attributes:
        processor_seconds: of all processes, on a core of the machine of the measurements.
        result_bytes: disk space of the uncompressed result.
        memory_bytes: of all processes of a node, with documents of usual length.
        serial_seconds: the part of them that a single process does while the others wait.
        work_bytes: disk space during the work, besides the result.
    """

    processor_seconds: float
    result_bytes: float
    memory_bytes: float
    serial_seconds: float = 0.0
    work_bytes: float = 0.0


def estimate_deduplicate(
    sources: Sequence[Source], options: ReadOptions, settings: Settings, nodes: int, workers: int
) -> str:
    """Describe the time, disk space and memory that ``deduplicate`` requires.

    Args:
        sources: files of the input.
        options: how documents are read.
        settings: of the deduplication.
        nodes: number of nodes.
        workers: worker processes per node.

    Raises:
        DataError: a file of the sample cannot be read.
    """
    found = sample(sources, options)
    needed = needs(found.text_bytes, found.documents, settings, workers)
    return (
        f"{describe_needs(found, needed, nodes, workers)}, and {_LONGEST_TIMES} times a long "
        f"document (at most {_LONGEST_TIMES * options.longest_bytes / 1e9:.2f} GB) in its worker\n"
        f"sketch  {settings.bands} bands of {settings.rows}"
    )


def estimate_preprocess(
    sources: Sequence[Source], tokenizer_path: str, options: ReadOptions, nodes: int, workers: int
) -> str:
    """Describe the time, disk space and memory that ``preprocess`` requires.

    Args:
        sources: files of the input.
        tokenizer_path: the tokenizer, which is timed on a sample of the documents.
        options: how documents are read.
        nodes: number of nodes.
        workers: worker processes per node.

    Raises:
        DataError: a file of the sample or the tokenizer cannot be read.
    """
    found = sample(sources, options)
    tokenizer = load_tokenizer(tokenizer_path)
    encode = choose_encoder(tokenizer, sources, options)
    begin = time.process_time()
    ids, _ = encode(found.texts)
    seconds = time.process_time() - begin
    scale = found.text_bytes / max(found.texts_bytes, 1)
    tokens = ids.size * scale
    token_bytes = tokens * dtype_for_vocab(tokenizer.vocab_size).itemsize
    result_bytes = token_bytes + _INDEX_BYTES * found.documents * len(options.keys)
    serial = token_bytes / _HASH_BYTES_PER_SECOND
    needed = Needs(
        processor_seconds=seconds * scale + found.text_bytes / _READ_BYTES_PER_SECOND + serial,
        serial_seconds=serial,
        work_bytes=result_bytes,
        result_bytes=result_bytes,
        memory_bytes=_TOKENIZER_BYTES + workers * (_WORKER_BYTES + CACHE_BYTES),
    )
    return f"{describe_needs(found, needed, nodes, workers)}\ntokens  {tokens:,.0f}"


def estimate_split(
    sources: Sequence[Source], options: ReadOptions, nodes: int, workers: int
) -> str:
    """Describe the time, disk space and memory that ``split`` requires.

    Args:
        sources: files of the input.
        options: how documents are read.
        nodes: number of nodes.
        workers: worker processes per node.

    Raises:
        DataError: a file of the sample cannot be read.
    """
    found = sample(sources, options)
    # The files of the work become those of the result.
    needed = Needs(
        processor_seconds=found.text_bytes / _SPLIT_BYTES_PER_SECOND,
        result_bytes=found.text_bytes,
        memory_bytes=_FIRST_PROCESS_BYTES + workers * _COPYING_BYTES,
    )
    return describe_needs(found, needed, nodes, workers)


def estimate_train_tokenizer(
    sources: Sequence[Source], options: ReadOptions, sample_bytes: int, nodes: int, workers: int
) -> str:
    """Return a description of the time, disk space and memory that ``train-tokenizer`` requires.

    Workers draw the sample; then a single process trains.

    Args:
        sources: input files.
        options: what is read of them.
        sample_bytes: of the text that it trains on; 0: all.
        nodes: of the job.
        workers: processes per node.

    Raises:
        DataError: a file of the sample cannot be read.
    """
    found = sample(sources, options)
    trained = min(sample_bytes or found.text_bytes, found.text_bytes)
    serial = trained / _TRAIN_BYTES_PER_SECOND
    needed = Needs(
        processor_seconds=found.text_bytes / _DRAW_BYTES_PER_SECOND + serial,
        serial_seconds=serial,
        work_bytes=min(INPUT_PER_SAMPLE * trained, found.text_bytes),
        result_bytes=_TOKENIZER_FILES_BYTES,
        memory_bytes=_TRAINER_BYTES + _TRAINED_TIMES * trained + workers * _COPYING_BYTES,
    )
    return (
        f"{describe_needs(found, needed, nodes, workers)}\n"
        f"sample  {trained / 1e6:,.1f} MB; SentencePiece trains on it in a single process"
    )


def estimate_merge(prefixes: Sequence[str], nodes: int, workers: int) -> str:
    """Describe the time, disk space and memory that ``merge`` requires.

    Args:
        prefixes: paths of the shards without suffix.
        nodes: number of nodes.
        workers: worker processes per node.

    Raises:
        DataError: a shard has no manifest, or differs from the first.
    """
    manifests = open_compatible(prefixes)
    files = [Path(name(prefix)) for prefix in prefixes for name in (bin_path, idx_path)]
    size = sum(path.stat().st_size for path in files)
    tokens = sum(manifest.num_tokens for manifest in manifests)
    documents = sum(manifest.num_documents for manifest in manifests)
    serial = size / _HASH_BYTES_PER_SECOND
    # The copies become the result.
    needed = Needs(
        processor_seconds=size / _MERGE_BYTES_PER_SECOND + serial,
        serial_seconds=serial,
        result_bytes=size,
        memory_bytes=_FIRST_PROCESS_BYTES + workers * _COPYING_BYTES,
    )
    return (
        f"shards  {len(prefixes):,} of {documents:,} documents, {tokens:,} tokens\n"
        f"{_describe(needed, nodes, workers)}"
    )


def sample(sources: Sequence[Source], options: ReadOptions) -> Sample:
    """Read the beginnings of some files."""
    file_bytes = text_bytes = documents = texts_bytes = 0
    texts: list[str] = []
    step = max(1, len(sources) // _SAMPLE_FILES)
    for source in sources[::step]:
        read = 0
        with contextlib.closing(DocumentReader(source, options)) as reader:
            for batch in reader.read():
                read += batch.text_bytes
                documents += len(batch.documents)
                if texts_bytes < _ENCODED_BYTES:
                    texts += [text for document in batch.documents for text in document.texts]
                    texts_bytes += batch.text_bytes
                if read >= _SAMPLE_BYTES:
                    break
            file_bytes += reader.records.file_bytes if reader.records else source.size_bytes
        text_bytes += read
    scale = sum(source.size_bytes for source in sources) / max(file_bytes, 1)
    return Sample(text_bytes * scale, documents * scale, texts, texts_bytes)


def needs(text_bytes: float, documents: float, settings: Settings, workers: int) -> Needs:
    """Estimate what ``deduplicate`` requires.

    A quarter of the documents is assumed to be in near pairs.

    Args:
        text_bytes: bytes of the documents.
        documents: number of documents.
        settings: of the deduplication.
        workers: worker processes per node.
    """
    seconds = text_bytes * (1 / _SIGN_BYTES_PER_SECOND + 1 / _READ_BYTES_PER_SECOND)
    digest, place, exact, decision = 16, 16, 8 + 8 + 4, 1 + 8 + 8 + 8
    document_bytes = digest + place + exact + decision
    run_bytes = 0.0
    if not settings.exact_only:
        seconds += text_bytes / _READ_BYTES_PER_SECOND + documents * _SECONDS_PER_DOCUMENT
        seconds += _NEAR_SHARE * text_bytes / _COLLECT_BYTES_PER_SECOND
        document_bytes += 4 * PERMUTATIONS + 12 * settings.bands + 2
        run_bytes = _NEAR_SHARE * text_bytes / _BYTES_PER_WORD * 8
    keys = _KEY_BYTES * min(documents, PART_DOCUMENTS)
    workers_bytes = max(workers, 1) * (_WORKER_BYTES + keys)
    return Needs(
        processor_seconds=seconds,
        serial_seconds=documents * _SERIAL_SECONDS_PER_DOCUMENT,
        work_bytes=documents * document_bytes + run_bytes,
        result_bytes=text_bytes,
        memory_bytes=_FIRST_PROCESS_BYTES + workers_bytes + documents * _MAP_BYTES,
    )


def describe_needs(found: Sample, needed: Needs, nodes: int, workers: int) -> str:
    """Describe the input of a job and its requirements.

    Args:
        found: sample of the input.
        needed: requirements of the job.
        nodes: number of nodes.
        workers: worker processes per node.
    """
    return (
        f"text    {found.text_bytes / 1e9:.2f} GB, {found.documents:,.0f} documents\n"
        f"{_describe(needed, nodes, workers)}"
    )


def _describe(needed: Needs, nodes: int, workers: int) -> str:
    parallel = (needed.processor_seconds - needed.serial_seconds) / (nodes * workers)
    minutes = (parallel + needed.serial_seconds) / 60
    return (
        f"time    {needed.processor_seconds / 3600:.2f} hours of a core; {minutes:,.1f} minutes "
        f"with {nodes} x {workers} workers, a core each, of which "
        f"{needed.serial_seconds / 60:,.1f} in a single process\n"
        f"disk    {needed.work_bytes / 1e9:.2f} GB during the work and at most "
        f"{needed.result_bytes / 1e9:.2f} GB for the uncompressed result\n"
        f"memory  {needed.memory_bytes / 1e9:.2f} GB on each node for {workers} workers"
    )
