"""Puts shards one behind the other into a single one.

Owns the offsets (an exclusive scan over the shards), the parallel writes at them and the check of
every byte that is copied. Refuses shards of different token types or tokenizers, sentences beside
documents, and a shard twice. Memory does not grow with the shards. A merge that is killed leaves
``PREFIX.*.merging`` files, which the next one to the same prefix takes over; nothing appears under
the final names before all is flushed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.shards.format import (
    CODES_OF_DTYPES,
    HEADER,
    MAGIC,
    VERSION,
    bin_path,
    idx_path,
    manifest_path,
)
from megatron_deberta.data.shards.manifest import (
    ShardManifest,
    check_counts,
    encode_manifest,
    read_manifest,
)
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import fsync_path

_CHUNK_BYTES = 1 << 23
_CHUNK_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a shard's parts go in the merged one: the sums over the shards before it.

    Attributes:
        tokens: tokens before it.
        sequences: sequences before it.
        documents: documents before it.
    """

    tokens: int
    sequences: int
    documents: int


def merge_shards(
    prefixes: Sequence[str],
    output: str,
    *,
    jobs: int = 1,
    force: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> ShardManifest:
    """Merge shards in the order given, and write the manifest of the result.

    Args:
        prefixes: shards with manifests, of one token type and one tokenizer, all of sentences or
            none; each once.
        output: prefix of the result, none of ``prefixes``.
        jobs: threads that copy, one shard each at a time.
        force: replace a shard that exists.
        advance: told the bytes of ``.bin`` copied, from any thread.

    Returns:
        The manifest of the result.

    Raises:
        ConfigError: ``output`` exists or is one of the inputs, or a shard is there twice.
        DataError: a shard is damaged, has no manifest or differs in type, tokenizer or in holding
            sentences; the disk is full; or another merge writes there. Nothing is published then.
    """
    _refuse_twice(prefixes)
    _refuse_output(prefixes, output, force)
    shards, manifests = _open_alike(prefixes)
    try:
        return _merge(shards, manifests, output, jobs, advance)
    except OSError as error:
        raise DataError(f"{output}: cannot write: {error}; is the disk full?") from error


def exclusive_scan(shards: Sequence[IndexedDataset]) -> list[Place]:
    """Return where each shard's parts go, and at the end what all hold together."""
    places = [Place(0, 0, 0)]
    for shard in shards:
        last = places[-1]
        places.append(
            Place(
                last.tokens + shard.num_tokens,
                last.sequences + shard.num_sequences,
                last.documents + shard.num_documents,
            )
        )
    return places


def _merge(
    shards: Sequence[IndexedDataset],
    manifests: Sequence[ShardManifest],
    output: str,
    jobs: int,
    advance: Callable[[int], None],
) -> ShardManifest:
    places = exclusive_scan(shards)
    total = places[-1]
    dtype = shards[0].dtype
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    index_bytes = HEADER.size + 12 * total.sequences + 8 * (total.documents + 1)
    with (
        _unfinished(f"{output}.bin.merging", total.tokens * dtype.itemsize) as tokens,
        _unfinished(f"{output}.idx.merging", index_bytes) as index,
        ThreadPoolExecutor(jobs) as pool,
    ):
        header = HEADER.pack(
            MAGIC, VERSION, CODES_OF_DTYPES[dtype], total.sequences, total.documents + 1
        )
        os.pwrite(index, header, 0)
        copies = [
            pool.submit(_copy_shard, shard, manifest, tokens, index, place, total, advance)
            for shard, manifest, place in zip(shards, manifests, places, strict=False)
        ]
        bin_sha256 = _hash_behind(tokens, copies, shards)
        os.fsync(tokens)
        os.fsync(index)
        merged = replace(
            manifests[0],
            num_documents=total.documents,
            num_sequences=total.sequences,
            num_tokens=total.tokens,
            bin_sha256=bin_sha256,
            idx_sha256=_digest(index, 0, index_bytes),
            **_sums(manifests),
        )
        _publish(output, merged)
    return merged


def _sums(manifests: Sequence[ShardManifest]) -> dict[str, Any]:
    """Return the fields that tell where the documents are from.

    The lists of quarantined records stay with the shards that were merged, as do the plans.
    """
    quarantine: Counter[str] = Counter()
    for each in manifests:
        quarantine.update(each.quarantine)
    return {
        "sources": tuple(dict.fromkeys(name for each in manifests for name in each.sources)),
        "documents_in": sum(each.documents_in for each in manifests),
        "documents_empty": sum(each.documents_empty for each in manifests),
        "documents_quarantined": sum(each.documents_quarantined for each in manifests),
        "quarantine": dict(sorted(quarantine.items())),
        "quarantine_sha256": "",
        "plan_sha256": "",
    }


def _copy_shard(
    shard: IndexedDataset,
    manifest: ShardManifest,
    tokens: int,
    index: int,
    place: Place,
    total: Place,
    advance: Callable[[int], None],
) -> None:
    """Write one shard's tokens, lengths, offsets and boundaries, and check what was read."""
    item = shard.dtype.itemsize
    found = hashlib.sha256()
    with open(bin_path(shard.prefix), "rb") as stream:
        offset = place.tokens * item
        while content := stream.read(_CHUNK_BYTES):
            found.update(content)
            _write_at(tokens, content, offset)
            offset += len(content)
            advance(len(content))
    _compare(bin_path(shard.prefix), found.hexdigest(), manifest.bin_sha256)
    with open(idx_path(shard.prefix), "rb") as stream:
        _compare(idx_path(shard.prefix), _digest_stream(stream), manifest.idx_sha256)
    lengths_at = HEADER.size + 4 * place.sequences
    offsets_at = HEADER.size + 4 * total.sequences + 8 * place.sequences
    boundaries_at = HEADER.size + 12 * total.sequences + 8 * place.documents
    _write_rows(index, shard.sequence_lengths, lengths_at, 0)
    _write_rows(index, shard.sequence_offsets, offsets_at, place.tokens * item)
    # Each shard's first boundary is the last one of the shard before it.
    _write_rows(index, shard.document_boundaries, boundaries_at, place.sequences)


def _write_rows(file: int, rows: npt.NDArray[np.integer], offset: int, base: int) -> None:
    for begin in range(0, len(rows), _CHUNK_ROWS):
        content = (rows[begin : begin + _CHUNK_ROWS] + rows.dtype.type(base)).tobytes()
        _write_at(file, content, offset + begin * rows.itemsize)


def _write_at(file: int, content: bytes, offset: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(file, view, offset)
        view = view[written:]
        offset += written


def _hash_behind(
    tokens: int, copies: Sequence[Future[None]], shards: Sequence[IndexedDataset]
) -> str:
    """Hash the merged tokens shard by shard, as soon as each has been written.

    The sum is of the bytes as they are in the new file. The first failure ends the rest.
    """
    digest = hashlib.sha256()
    begin = 0
    try:
        for copy, shard in zip(copies, shards, strict=True):
            copy.result()
            end = begin + shard.num_tokens * shard.dtype.itemsize
            for content in _pieces(tokens, begin, end):
                digest.update(content)
            begin = end
    except BaseException:
        for copy in copies:
            copy.cancel()
        raise
    return digest.hexdigest()


def _digest(file: int, begin: int, end: int) -> str:
    digest = hashlib.sha256()
    for content in _pieces(file, begin, end):
        digest.update(content)
    return digest.hexdigest()


def _digest_stream(stream: BinaryIO) -> str:
    return _digest(stream.fileno(), 0, os.fstat(stream.fileno()).st_size)


def _pieces(file: int, begin: int, end: int) -> Iterator[bytes]:
    for offset in range(begin, end, _CHUNK_BYTES):
        yield os.pread(file, min(_CHUNK_BYTES, end - offset), offset)


def _compare(path: str, found: str, expected: str) -> None:
    if found != expected:
        raise DataError(
            f"{path}: SHA-256 {found} is not the manifest's {expected}; preprocess again"
        )


@contextlib.contextmanager
def _unfinished(path: str, size_bytes: int) -> Iterator[int]:
    """Open a file of that size to write into, taking over what a killed merge left.

    Its blocks are allocated at once, so that a full disk is found before anything is copied. It is
    removed at the end, unless it has got another name by then.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{path}: another merge is writing it; wait for that one") from error
        try:
            os.ftruncate(file, 0)
            os.posix_fallocate(file, 0, size_bytes)
            yield file
        finally:
            Path(path).unlink(missing_ok=True)
    finally:
        os.close(file)


def _publish(output: str, manifest: ShardManifest) -> None:
    """Give the files their names, the index last: without one there is no shard to any reader."""
    folder = Path(output).parent
    staged = Path(f"{output}.manifest.json.merging")
    try:
        staged.write_bytes(encode_manifest(manifest))
        fsync_path(staged)
        for path in (idx_path(output), manifest_path(output)):
            Path(path).unlink(missing_ok=True)
        fsync_path(folder)
        os.replace(f"{output}.bin.merging", bin_path(output))
        os.replace(staged, manifest_path(output))
        fsync_path(folder)
        os.replace(f"{output}.idx.merging", idx_path(output))
        fsync_path(folder)
    finally:
        staged.unlink(missing_ok=True)


def _refuse_output(prefixes: Sequence[str], output: str, force: bool) -> None:
    if os.path.realpath(idx_path(output)) in [os.path.realpath(idx_path(p)) for p in prefixes]:
        raise ConfigError(f"--output {output}: is one of the inputs; choose another name")
    for path in (idx_path(output), bin_path(output), manifest_path(output)):
        if os.path.exists(path) and not force:
            raise ConfigError(f"{path}: exists; choose another --output or add --force")


def _refuse_twice(prefixes: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for prefix in prefixes:
        path = os.path.realpath(idx_path(prefix))
        if path in seen:
            raise ConfigError(
                f"{prefix}: is there twice (as {seen[path]}); name each shard once, as part-*.idx"
            )
        seen[path] = prefix


def _open_alike(
    prefixes: Sequence[str],
) -> tuple[list[IndexedDataset], list[ShardManifest]]:
    shards: list[IndexedDataset] = []
    manifests: list[ShardManifest] = []
    for prefix in prefixes:
        shard, manifest = IndexedDataset(prefix), read_manifest(prefix)
        if manifest is None:
            raise DataError(
                f"{manifest_path(prefix)}: missing, so nothing says which tokenizer made the "
                "shard; preprocess again"
            )
        check_counts(shard, manifest)
        first = manifests[0] if manifests else manifest
        for what, mine, others in (
            ("token type", manifest.dtype, first.dtype),
            ("tokenizer", manifest.tokenizer_fingerprint, first.tokenizer_fingerprint),
            ("vocabulary size", manifest.vocab_size, first.vocab_size),
        ):
            if mine != others:
                raise DataError(
                    f"{prefix}: {what} {mine} is not that of {prefixes[0]}, {others}; merge only "
                    "shards of one tokenizer"
                )
        shards.append(shard)
        manifests.append(manifest)
    _refuse_mixture(shards)
    return shards, manifests


def _refuse_mixture(shards: Sequence[IndexedDataset]) -> None:
    """Sentences beside whole documents would make pairs of what are no sentences."""
    kinds = [_holds_sentences(shard) for shard in shards]
    if any(kinds) and not all(kinds):
        sentences, documents = shards[kinds.index(True)], shards[kinds.index(False)]
        raise DataError(
            f"{documents.prefix}: holds whole documents, {sentences.prefix} sentences; merge only "
            "shards made with --sentences or only such made without (of documents of one sentence "
            "the name must end in _sentence)"
        )


def _holds_sentences(shard: IndexedDataset) -> bool:
    """Say whether a shard is of sentences; the name decides if documents have one sequence each."""
    return shard.num_sequences > shard.num_documents or shard.prefix.endswith("_sentence")
