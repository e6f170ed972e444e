"""What a run will take: time, disk and memory by formula, before it is started.

Owns the formula and its constants, which ``benchmarks/text/deduplicate.py`` measured on one core
(``benchmarks/results/cpu/deduplicate.json``). Refuses to read more of the input than a sample.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from megatron_deberta.text.deduplicate.candidates import PART_DOCUMENTS
from megatron_deberta.text.deduplicate.settings import PERMUTATIONS, Settings
from megatron_deberta.text.readers.reading import DocumentReader
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import Source

_SAMPLE_BYTES = 8_000_000
_SAMPLE_FILES = 8
_SIGN_BYTES_PER_SECOND = 33e6
_READ_BYTES_PER_SECOND = 130e6
_COLLECT_BYTES_PER_SECOND = 90e6
_SECONDS_PER_DOCUMENT = 30e-6
_FIRST_PROCESS_BYTES = 55e6
_WORKER_BYTES = 140e6
_KEY_BYTES = 120
_MAP_BYTES = 33
# Bytes that a long document takes in its worker, over its own: text, record, hashes, their set.
_LONGEST_TIMES = 8
_NEAR_SHARE = 0.25
_BYTES_PER_WORD = 5.7


class Needs(NamedTuple):
    """What a run takes.

    Attributes:
        processor_seconds: of all processes, on a core of the machine that was measured.
        work_bytes: on disk while it works, besides the result.
        memory_bytes: of all processes, with documents of ordinary length.
    """

    processor_seconds: float
    work_bytes: float
    memory_bytes: float


def estimate(
    sources: Sequence[Source], options: ReadOptions, settings: Settings, workers: int
) -> str:
    """Describe what a run over the files will take.

    Raises:
        DataError: a file of the sample cannot be read.
    """
    text_bytes, documents = sample(sources, options)
    found = needs(text_bytes, documents, settings, workers)
    cores = min(max(workers, 1), len(os.sched_getaffinity(0)))
    return (
        f"text    {text_bytes / 1e9:.2f} GB, {documents:,.0f} documents\n"
        f"time    {found.processor_seconds / 60:.1f} minutes of a core, "
        f"{found.processor_seconds / cores / 60:.1f} minutes on {cores}\n"
        f"disk    {found.work_bytes / 1e9:.2f} GB while it works and at most "
        f"{text_bytes / 1e9:.2f} GB for the result, uncompressed\n"
        f"memory  {found.memory_bytes / 1e9:.2f} GB for all {max(workers, 1)} workers, and "
        f"{_LONGEST_TIMES} times a long document (at most "
        f"{_LONGEST_TIMES * options.longest_bytes / 1e9:.2f} GB) in the worker that meets it\n"
        f"sketch  {settings.bands} bands of {settings.rows}"
    )


def sample(sources: Sequence[Source], options: ReadOptions) -> tuple[float, float]:
    """Estimate the text's uncompressed bytes and documents from the beginnings of some files."""
    file_bytes = text_bytes = documents = 0
    step = max(1, len(sources) // _SAMPLE_FILES)
    for source in sources[::step]:
        read = 0
        with contextlib.closing(DocumentReader(source, options)) as reader:
            for batch in reader.read():
                read += batch.text_bytes
                documents += len(batch.documents)
                if read >= _SAMPLE_BYTES:
                    break
            file_bytes += reader.records.file_bytes if reader.records else source.size_bytes
        text_bytes += read
    scale = sum(source.size_bytes for source in sources) / max(file_bytes, 1)
    return text_bytes * scale, documents * scale


def needs(text_bytes: float, documents: float, settings: Settings, workers: int) -> Needs:
    """Compute what so much text takes, if a quarter of the documents are in near pairs."""
    processes = max(workers, 1)
    seconds = text_bytes * (1 / _SIGN_BYTES_PER_SECOND + 1 / _READ_BYTES_PER_SECOND)
    digest, place, exact, fate = 16, 16, 8 + 8 + 4, 1 + 8 + 8 + 8
    document_bytes = digest + place + exact + fate
    run_bytes = 0.0
    if not settings.exact_only:
        seconds += text_bytes / _READ_BYTES_PER_SECOND + documents * _SECONDS_PER_DOCUMENT
        seconds += _NEAR_SHARE * text_bytes / _COLLECT_BYTES_PER_SECOND
        document_bytes += 4 * PERMUTATIONS + 12 * settings.bands + 2
        run_bytes = _NEAR_SHARE * text_bytes / _BYTES_PER_WORD * 8
    work_bytes = documents * document_bytes + run_bytes
    keys = _KEY_BYTES * min(documents, PART_DOCUMENTS)
    memory = _FIRST_PROCESS_BYTES + processes * (_WORKER_BYTES + keys) + documents * _MAP_BYTES
    return Needs(seconds, work_bytes, memory)
