"""Says whether shards are what their manifests and their vocabulary promise, and where not.

Owns the walk over every byte: structure, counts, SHA-256 and the range of ids, on several threads
(hashing and numpy's reductions release the interpreter's lock). Refuses to mend anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from megatron_deberta.data.indexed_dataset import IndexedDataset
from megatron_deberta.data.indexed_format import bin_path, idx_path
from megatron_deberta.data.manifest import Manifest, check_counts, read_manifest, verify_hash
from megatron_deberta.errors import DataError

_CHUNK_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class ShardReport:
    """What was found out about one shard.

    Attributes:
        prefix: path without suffix.
        problems: one line each, naming file and place; empty for a good shard.
        summary: what a good shard holds.
    """

    prefix: str
    problems: tuple[str, ...]
    summary: str = ""


@dataclass(frozen=True, slots=True)
class _Work:
    """A shard whose structure is sound, and what is still being read of it."""

    shard: IndexedDataset
    manifest: Manifest | None
    problems: list[str]
    hashes: list[Future[str | None]]
    ranges: list[Future[tuple[int, int]]]


def verify_shards(
    prefixes: Sequence[str],
    *,
    fingerprint: str | None = None,
    vocab_size: int | None = None,
    jobs: int = 1,
    report: Callable[[ShardReport], None],
) -> int:
    """Read shards through and tell what is wrong with each.

    Args:
        prefixes: paths without suffix.
        fingerprint: of the tokenizer they must be of; None does not compare.
        vocab_size: ids must be below it; None takes each manifest's.
        jobs: threads that read.
        report: called with each shard's result, in order.

    Returns:
        The number of damaged shards.
    """
    bad = 0
    with ThreadPoolExecutor(jobs) as pool:
        # One shard is opened ahead, so that threads do not wait at the end of each.
        waiting: list[ShardReport | _Work] = []
        for prefix in [*prefixes, None]:
            if prefix is not None:
                waiting.append(_begin(prefix, fingerprint, pool))
            while len(waiting) > (prefix is not None):
                work = waiting.pop(0)
                result = work if isinstance(work, ShardReport) else _finish(work, vocab_size)
                bad += bool(result.problems)
                report(result)
    return bad


def _begin(prefix: str, fingerprint: str | None, pool: ThreadPoolExecutor) -> ShardReport | _Work:
    try:
        shard = IndexedDataset(prefix)
        manifest = read_manifest(prefix)
    except DataError as error:
        return ShardReport(prefix, (str(error),))
    problems = []
    hashes = []
    if manifest is not None:
        try:
            check_counts(shard, manifest)
        except DataError as error:
            problems.append(str(error))
        if fingerprint not in (None, manifest.tokenizer_fingerprint):
            problems.append(
                f"{prefix}: made with tokenizer {manifest.tokenizer_fingerprint} "
                f"({manifest.tokenizer_path}), not {fingerprint}"
            )
        files = [
            (idx_path(prefix), manifest.idx_sha256),
            (bin_path(prefix), manifest.bin_sha256),
        ]
        quarantine = _quarantine_path(prefix)
        if manifest.quarantine_sha256 and quarantine:
            files.append((quarantine, manifest.quarantine_sha256))
        hashes = [pool.submit(_hash_problem, path, expected) for path, expected in files]
    ranges = [
        pool.submit(_id_range, shard, begin) for begin in range(0, shard.num_tokens, _CHUNK_TOKENS)
    ]
    return _Work(shard, manifest, problems, hashes, ranges)


def _finish(work: _Work, vocab_size: int | None) -> ShardReport:
    shard, manifest = work.shard, work.manifest
    problems = work.problems + [found for each in work.hashes if (found := each.result())]
    extremes = [each.result() for each in work.ranges]
    smallest = min(low for low, _ in extremes)
    largest = max(high for _, high in extremes)
    if vocab_size is None and manifest is not None:
        vocab_size = manifest.vocab_size
    beyond = np.iinfo(shard.dtype).max + 1 if vocab_size is None else vocab_size
    if smallest < 0 or largest >= beyond:
        chunk = next(
            number for number, (low, high) in enumerate(extremes) if low < 0 or high >= beyond
        )
        problems.append(_describe_bad_id(shard, chunk * _CHUNK_TOKENS, beyond))
    summary = (
        f"good: {shard.num_documents:,} documents, {shard.num_tokens:,} tokens, {shard.dtype}, "
        f"ids {smallest}..{largest}"
    )
    summary += ", no manifest: hashes not checked" if manifest is None else ", hashes as recorded"
    if vocab_size is None:
        summary += "; ids not compared with a vocabulary, give --tokenizer"
    return ShardReport(shard.prefix, tuple(problems), summary)


def _quarantine_path(prefix: str) -> str:
    """Return the list of records that were set aside, if it is beside the shard.

    A shard is ``{output}_{key}_document``, its list ``{output}.quarantine.jsonl``; either part may
    hold underscores.
    """
    folder, name = os.path.split(prefix)
    while "_" in name:
        name = name.rpartition("_")[0]
        path = os.path.join(folder, f"{name}.quarantine.jsonl")
        if os.path.exists(path):
            return path
    return ""


def _hash_problem(path: str, expected: str) -> str | None:
    try:
        verify_hash(path, expected)
    except DataError as error:
        return str(error)
    return None


def _id_range(shard: IndexedDataset, begin: int) -> tuple[int, int]:
    tokens = shard.tokens(begin, min(begin + _CHUNK_TOKENS, shard.num_tokens))
    return int(tokens.min()), int(tokens.max())


def _describe_bad_id(shard: IndexedDataset, begin: int, vocab_size: int) -> str:
    tokens = shard.tokens(begin, min(begin + _CHUNK_TOKENS, shard.num_tokens))
    place = begin + int(np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[0])
    document = int(np.searchsorted(shard.document_offsets, place, side="right")) - 1
    return (
        f"{bin_path(shard.prefix)}: byte {place * shard.dtype.itemsize}: id "
        f"{shard.tokens(place, place + 1)[0]} (token {place - shard.document_offsets[document]} of "
        f"document {document}) is outside the vocabulary of {vocab_size}; preprocess again"
    )
