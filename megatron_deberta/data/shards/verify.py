"""Verification of shards against manifest and vocabulary: structure, counts, SHA-256, id range.

Files are read by several threads (hashing and numpy's reductions release the interpreter's lock).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from megatron_deberta.data.shards.format import bin_path, dtype_for_vocab, idx_path, manifest_path
from megatron_deberta.data.shards.manifest import (
    ShardManifest,
    check_counts,
    read_manifest,
    verify_hash,
)
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.errors import DataError

_CHUNK_TOKENS = 1 << 24
_LIST_MISSING = "quarantine list missing"


@dataclass(frozen=True, slots=True)
class ShardReport:
    """Result for one shard.

    Attributes:
        prefix: path without suffix.
        problems: one line each, naming file and place; empty for a good shard.
        summary: content of a good shard.
    """

    prefix: str
    problems: tuple[str, ...]
    summary: str = ""


@dataclass(frozen=True, slots=True)
class _Work:
    """A shard with a valid structure, and the pending results of reading it."""

    shard: IndexedDataset
    manifest: ShardManifest | None
    problems: list[str]
    hashes: list[Future[str | None]]
    quarantine: Future[str | None] | None
    ranges: list[Future[tuple[int, int]]]


def verify_shards(
    prefixes: Sequence[str],
    *,
    fingerprint: str | None = None,
    vocab_size: int | None = None,
    jobs: int = 1,
    report: Callable[[ShardReport], None],
) -> int:
    """Read shards completely and report the problems of each.

    Args:
        prefixes: paths without suffix.
        fingerprint: of the expected tokenizer; None: do not compare.
        vocab_size: of that tokenizer, above all ids and equal to the manifests'; None: use each
            manifest's.
        jobs: number of reading threads.
        report: called with each shard's result, in order.

    Returns:
        The number of damaged shards.
    """
    bad = 0
    with ThreadPoolExecutor(jobs) as pool:
        begun = (_begin(prefix, fingerprint, vocab_size, pool) for prefix in prefixes)
        # In pairs: the next shard is opened before, so that threads are not idle in between.
        for work, _ in pairwise(chain(begun, [ShardReport("", ())])):
            result = work if isinstance(work, ShardReport) else _finish(work, vocab_size)
            bad += bool(result.problems)
            report(result)
    return bad


def _begin(
    prefix: str, fingerprint: str | None, vocab_size: int | None, pool: ThreadPoolExecutor
) -> ShardReport | _Work:
    try:
        shard = IndexedDataset(prefix)
        manifest = read_manifest(prefix)
    except DataError as error:
        return ShardReport(prefix, (str(error),))
    problems = []
    hashes = []
    quarantine = None
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
        elif vocab_size not in (None, manifest.vocab_size):
            problems.append(
                f"{manifest_path(prefix)}: vocab_size {manifest.vocab_size} is not the "
                f"tokenizer's {vocab_size}; give {manifest.tokenizer_path}, or preprocess again"
            )
        problems += _contradictions(shard, manifest)
        files = [
            (idx_path(prefix), manifest.idx_sha256),
            (bin_path(prefix), manifest.bin_sha256),
        ]
        hashes = [pool.submit(_hash_problem, path, expected) for path, expected in files]
        if manifest.quarantine_sha256:
            quarantine = pool.submit(_quarantine_problem, prefix, manifest)
    ranges = [
        pool.submit(_id_range, shard, begin) for begin in range(0, shard.num_tokens, _CHUNK_TOKENS)
    ]
    return _Work(shard, manifest, problems, hashes, quarantine, ranges)


def _finish(work: _Work, vocab_size: int | None) -> ShardReport:
    shard, manifest = work.shard, work.manifest
    problems = work.problems + [found for each in work.hashes if (found := each.result())]
    quarantine = work.quarantine.result() if work.quarantine else None
    if quarantine not in (None, _LIST_MISSING):
        problems.append(quarantine)
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
    if quarantine == _LIST_MISSING:
        summary += f"; {_LIST_MISSING}"
    if vocab_size is None:
        summary += "; ids not compared with a vocabulary, give --tokenizer"
    return ShardReport(shard.prefix, tuple(problems), summary)


def _contradictions(shard: IndexedDataset, manifest: ShardManifest) -> list[str]:
    """Compare a manifest's fields with each other and with the token type.

    Only shards written by ``preprocess`` have ``plan_sha256``. Other shards need not count all of
    their input and may have a larger type than necessary.
    """
    path = manifest_path(shard.prefix)
    original = bool(manifest.plan_sha256)
    problems = []
    named = manifest.num_documents + manifest.documents_empty + manifest.documents_quarantined
    if manifest.documents_in > named or (original and manifest.documents_in != named):
        problems.append(
            f"{path}: documents_in {manifest.documents_in} is not num_documents "
            f"{manifest.num_documents} + documents_empty {manifest.documents_empty} + "
            f"documents_quarantined {manifest.documents_quarantined}; preprocess again"
        )
    usual = dtype_for_vocab(manifest.vocab_size)
    if manifest.vocab_size > np.iinfo(shard.dtype).max + 1 or (original and shard.dtype != usual):
        problems.append(
            f"{path}: vocab_size {manifest.vocab_size} does not fit dtype {shard.dtype}; "
            "preprocess again"
        )
    return problems


def _quarantine_problem(prefix: str, manifest: ShardManifest) -> str | None:
    """Compare the quarantine list with the manifest; return ``_LIST_MISSING`` without a list.

    A shard's name does not determine its list (``_list_outputs``), so any list with the recorded
    SHA-256 matches. Otherwise a list that belongs to no other shard was changed.
    """
    outputs = [name for name in _list_outputs(prefix) if os.path.exists(_list_path(name))]
    found = {name: _hash_problem(_list_path(name), manifest.quarantine_sha256) for name in outputs}
    if None in found.values():
        return None
    own = (problem for name, problem in found.items() if not _is_of_another(name, manifest))
    return next(own, _LIST_MISSING)


def _list_outputs(prefix: str) -> list[str]:
    """Return the possible values of ``preprocess --output`` for a shard, longest first.

    The name is ``{output}_{key}_document`` or ``_sentence``; both parts may contain underscores.
    """
    folder, name = os.path.split(prefix)
    *words, kind = name.split("_")
    if kind not in ("document", "sentence"):
        return []
    ends = range(len(words) - 1, 0, -1)
    return [os.path.join(folder, "_".join(words[:end])) for end in ends]


def _list_path(output: str) -> str:
    return f"{output}.quarantine.jsonl"


def _is_of_another(output: str, manifest: ShardManifest) -> bool:
    """Tell whether a list belongs to a neighbouring shard of another run.

    It does if that shard has no other possible list, or records the SHA-256 of this one.
    """
    folder = os.path.dirname(output)
    for path in Path(folder).glob("*.manifest.json"):
        prefix = os.path.join(folder, path.name.removesuffix(".manifest.json"))
        outputs = _list_outputs(prefix)
        if output not in outputs:
            continue
        try:
            other = read_manifest(prefix)
        except DataError:
            continue
        if other is None or other.plan_sha256 == manifest.plan_sha256:
            continue
        if len(outputs) == 1 or not _hash_problem(_list_path(output), other.quarantine_sha256):
            return True
    return False


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
