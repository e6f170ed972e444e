"""What a run will take: time, disk and memory by formula, before it is started.

Owns the formula and its constants, which ``benchmarks/deduplicate.py`` measured on one core
(``benchmarks/results/cpu/deduplicate.json``). Refuses to read more of the input than a sample.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron_deberta.deduplicate.candidates import PART_DOCUMENTS
from megatron_deberta.deduplicate.settings import PERMUTATIONS, Settings
from megatron_deberta.preprocess.reading import DocumentReader, ReadOptions
from megatron_deberta.preprocess.sources import Source

_SAMPLE_BYTES = 8_000_000
_SAMPLE_FILES = 8
_SIGN_BYTES_PER_SECOND = 30e6
_READ_BYTES_PER_SECOND = 110e6
_SECONDS_PER_CANDIDATE = 60e-6
_PROCESS_BYTES = 220e6
_KEY_BYTES = 120
_NEEDED_SHARE = 0.3
_BYTES_PER_WORD = 5.7


def estimate(
    sources: Sequence[Source], options: ReadOptions, settings: Settings, workers: int
) -> str:
    """Describe what a run over the files will take.

    Raises:
        DataError: a file of the sample cannot be read.
    """
    text_bytes, documents = sample(sources, options)
    return describe(text_bytes, documents, settings, workers)


def sample(sources: Sequence[Source], options: ReadOptions) -> tuple[float, float]:
    """Estimate the text's uncompressed bytes and documents from the beginnings of some files."""
    file_bytes = text_bytes = documents = 0
    step = max(1, len(sources) // _SAMPLE_FILES)
    for source in sources[::step]:
        reader = DocumentReader(source, options)
        read = 0
        for batch in reader.read():
            read += batch.text_bytes
            documents += len(batch.documents)
            if read >= _SAMPLE_BYTES:
                break
        records = reader.records
        file_bytes += source.size_bytes if records is None else records.file_bytes
        text_bytes += read
        reader.close()
    scale = sum(source.size_bytes for source in sources) / max(file_bytes, 1)
    return text_bytes * scale, documents * scale


def describe(text_bytes: float, documents: float, settings: Settings, workers: int) -> str:
    """Put the formula's results for so much text on a few lines."""
    parts = max(workers, 1)
    signed = documents * bytes_a_document(settings)
    collected = (
        0.0
        if settings.exact_only
        else (_NEEDED_SHARE * text_bytes / _BYTES_PER_WORD * 8 + documents * 40)
    )
    seconds = text_bytes * (1 / _SIGN_BYTES_PER_SECOND + 1 / _READ_BYTES_PER_SECOND)
    if not settings.exact_only:
        seconds += _NEEDED_SHARE * text_bytes / _SIGN_BYTES_PER_SECOND
        seconds += documents * settings.bands * 1e-6 + documents * _SECONDS_PER_CANDIDATE
    memory = (parts + 1) * _PROCESS_BYTES + parts * _KEY_BYTES * min(documents, PART_DOCUMENTS)
    memory += documents * 33
    cores = len(os.sched_getaffinity(0))
    return "\n".join(
        [
            f"text        {text_bytes / 1e9:.2f} GB, {documents:,.0f} documents (from a sample)",
            f"time        {seconds / min(parts, cores) / 60:.1f} minutes with {parts} workers "
            f"on {cores} cores",
            f"disk        {(signed + collected) / 1e9:.2f} GB while it works, "
            f"and up to {text_bytes / 1e9:.2f} GB for the result, uncompressed",
            f"memory      {memory / 1e9:.2f} GB for all processes",
            f"sketch      {settings.bands} bands of {settings.rows}",
        ]
    )


def bytes_a_document(settings: Settings) -> int:
    """Return the bytes that are kept of each document besides its runs of words."""
    digest, place, exact, fate = 16, 16, 8 + 8 + 4, 1 + 8 + 8 + 8
    if settings.exact_only:
        return digest + place + exact + fate
    return digest + place + exact + fate + 4 * PERMUTATIONS + 12 * settings.bands + 2
