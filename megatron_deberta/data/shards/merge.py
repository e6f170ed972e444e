"""Merge parts into a shard, with the same bytes as writing all its documents in order.

Parts are those of ``preprocess``, or whole shards. Copies and the hash are calls that any executor
may run, and every byte read is compared with its recorded hash. Memory does not grow with the
parts.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy.typing as npt
from typing_extensions import TypedDict

from megatron_deberta.data.shards.format import bin_path, idx_path, manifest_path
from megatron_deberta.data.shards.manifest import (
    CONTENT_COUNTS,
    INPUT_COUNTS,
    ShardManifest,
    check_counts,
    read_manifest,
)
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.data.shards.writer import (
    PartIndex,
    PartSize,
    ShardLayout,
    open_flushed,
    write_at,
)
from megatron_deberta.errors import DataError
from megatron_deberta.files import sha256_file

_CHUNK_BYTES = 1 << 23
_COPY_BYTES = 1 << 28
_MOST_COPIES = 1024
Call = tuple[Callable[..., Any], tuple[Any, ...]]


class ShardPart(NamedTuple):
    """Tokens and index of a part of a shard, in files of their own.

    Attributes:
        name: of the part, for errors.
        size: of the part.
        path: absolute path of the file that begins with its tokens.
        sha256: hexadecimal digests of the tokens and of the index.
    """

    name: str
    size: PartSize
    path: str
    sha256: tuple[str, str]


ReadIndex = Callable[[ShardPart], PartIndex]
"""Reads the index of a part and compares its hash; must be picklable."""


class ShardHashes(TypedDict):
    """SHA-256 of a shard's files."""

    bin_sha256: str
    idx_sha256: str


class DamagedPartError(DataError):
    """The hash of a part differs from the one recorded when it was written.

    Attributes:
        part: its name.
    """

    part: str


def check_part(part: str, path: object, found: str, expected: str) -> None:
    """Compare a digest of a file of a part with the recorded one.

    Args:
        part: name of the part.
        path: the file.
        found: digest of its content.
        expected: recorded digest.

    Raises:
        DamagedPartError: they differ.
    """
    if found != expected:
        error = DamagedPartError(f"{path}: damaged since it was written (SHA-256)")
        error.part = part
        raise error


def merge_calls(
    name: str,
    files: tuple[str, str],
    dtype: npt.DTypeLike,
    parts: Sequence[ShardPart],
    read_index: ReadIndex,
) -> dict[str, Call]:
    """Return calls that fill a shard's allocated files and compute their hashes, by unique names.

    Args:
        name: end of the names.
        files: ``.bin`` and ``.idx`` file, see ``ShardLayout.create``.
        dtype: token type.
        parts: of the shard, in order.
        read_index: of a part.
    """
    layout = shard_layout(dtype, parts)
    calls: dict[str, Call] = {f"hash-{name}": (hash_parts, (layout, parts, read_index))}
    size = layout.bin_bytes + layout.idx_bytes
    # A copy is worth a flush.
    copies = max(1, min(len(parts), size // _COPY_BYTES, _MOST_COPIES))
    bounds = [len(parts) * index // copies for index in range(copies + 1)]
    for first, last in itertools.pairwise(bounds):
        arguments = files, layout.zoom(first, last), parts[first:last], read_index
        calls[f"copy-{name}-{first:08d}-{last:08d}"] = copy_parts, arguments
    return calls


def shard_layout(dtype: npt.DTypeLike, parts: Sequence[ShardPart]) -> ShardLayout:
    """Return the layout of a shard that is made of parts."""
    return ShardLayout(dtype, [part.size for part in parts])


def copy_parts(
    files: tuple[str, str],
    layout: ShardLayout,
    parts: Sequence[ShardPart],
    read_index: ReadIndex,
) -> dict[str, int]:
    """Copy parts to their places in a shard's files, and flush them.

    Args:
        files: ``.bin`` and ``.idx`` file.
        layout: the parts are numbers 1, 2, ... of it, see ``ShardLayout.zoom``.
        parts: to copy.
        read_index: of a part.

    Returns:
        ``text_bytes``: bytes of the tokens.

    Raises:
        DamagedPartError: a part is damaged.
        OSError: the disk is full, or a file cannot be read.
    """
    with open_flushed(*files) as (bin_file, idx_file):
        for number, part in enumerate(parts, 1):
            offset = layout.token_offset(number)
            for chunk in _read_tokens(part, layout):
                write_at(bin_file, chunk, offset)
                offset += len(chunk)
            layout.write_index(idx_file, number, *read_index(part))
    return {"text_bytes": sum(part.size.tokens for part in parts) * layout.dtype.itemsize}


def _read_tokens(part: ShardPart, layout: ShardLayout) -> Iterator[bytes]:
    """Yield the bytes of a part's tokens in chunks.

    Raises:
        DamagedPartError: the part is damaged, which shows at its end.
        OSError: its file cannot be read.
    """
    found = hashlib.sha256()
    left = part.size.tokens * layout.dtype.itemsize
    with open(part.path, "rb") as stream:
        while left and (chunk := stream.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            found.update(chunk)
            yield chunk
    check_part(part.name, part.path, found.hexdigest(), part.sha256[0])


def hash_parts(
    layout: ShardLayout, parts: Sequence[ShardPart], read_index: ReadIndex
) -> ShardHashes:
    """Return the SHA-256 of a shard's files, from the parts that are copied into them.

    Args:
        layout: of the shard.
        parts: of the shard, in order.
        read_index: returns the index of a part.

    Raises:
        DamagedPartError: a part is damaged.
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for part in parts:
        for chunk in _read_tokens(part, layout):
            digest.update(chunk)
    idx_sha256 = layout.idx_sha256(lambda: map(read_index, parts))
    return {"bin_sha256": digest.hexdigest(), "idx_sha256": idx_sha256}


def shard_part(prefix: str, manifest: ShardManifest) -> ShardPart:
    """Return the part that stands for a whole shard; its index is read by ``read_shard_index``."""
    size = PartSize(manifest.num_tokens, manifest.num_sequences, manifest.num_documents)
    path = os.path.abspath(prefix)
    return ShardPart(path, size, bin_path(path), (manifest.bin_sha256, manifest.idx_sha256))


def read_shard_index(part: ShardPart) -> PartIndex:
    """Return the index of a whole shard.

    Raises:
        DamagedPartError: its hash is not the manifest's.
        DataError: it contradicts itself.
        OSError: it cannot be read.
    """
    path = idx_path(part.name)
    check_part(part.name, path, sha256_file(path), part.sha256[1])
    shard = IndexedDataset(part.name)
    return shard.sequence_lengths, shard.document_boundaries[1:]


def sum_manifests(manifests: Sequence[ShardManifest], hashes: ShardHashes) -> ShardManifest:
    """Return the manifest of merged shards; quarantine lists and plans are not merged."""
    quarantine: Counter[str] = Counter()
    for each in manifests:
        quarantine.update(each.quarantine)
    counts: dict[str, Any] = {
        name: sum(getattr(each, name) for each in manifests)
        for name in (*CONTENT_COUNTS, *INPUT_COUNTS)
    }
    return replace(
        manifests[0],
        sources=tuple(dict.fromkeys(name for each in manifests for name in each.sources)),
        quarantine=dict(sorted(quarantine.items())),
        quarantine_sha256="",
        plan_sha256="",
        **counts,
        **hashes,
    )


def open_compatible(prefixes: Sequence[str]) -> list[ShardManifest]:
    """Open shards that are to be merged, and return their manifests.

    Raises:
        DataError: a shard is damaged, has no manifest, or differs from the first one in token
            type, tokenizer or vocabulary size; or some hold sentences and others whole documents.
    """
    shards: list[IndexedDataset] = []
    manifests: list[ShardManifest] = []
    for prefix in prefixes:
        shard, manifest = IndexedDataset(prefix), read_manifest(prefix)
        if manifest is None:
            raise DataError(
                f"{manifest_path(prefix)}: missing, so the shard's tokenizer is unknown; "
                "preprocess again"
            )
        check_counts(shard, manifest)
        first = manifests[0] if manifests else manifest
        for what, found, expected in (
            ("token type", manifest.dtype, first.dtype),
            ("tokenizer", manifest.tokenizer_fingerprint, first.tokenizer_fingerprint),
            ("vocabulary size", manifest.vocab_size, first.vocab_size),
        ):
            if found != expected:
                raise DataError(
                    f"{prefix}: {what} {found} is not that of {prefixes[0]}, {expected}; merge "
                    "only shards of one tokenizer"
                )
        shards.append(shard)
        manifests.append(manifest)
    _check_kinds(shards)
    return manifests


def _check_kinds(shards: Sequence[IndexedDataset]) -> None:
    """Raise if some shards hold sentences and others whole documents."""
    kinds = [_holds_sentences(shard) for shard in shards]
    if any(kinds) and not all(kinds):
        sentences, documents = shards[kinds.index(True)], shards[kinds.index(False)]
        raise DataError(
            f"{documents.prefix}: holds whole documents, {sentences.prefix} sentences; merge only "
            "shards that were all made with or all without --sentences (the name of a shard whose "
            "documents have one sentence each must end in _sentence)"
        )


def _holds_sentences(shard: IndexedDataset) -> bool:
    """Tell whether a shard holds sentences; by name where each document has one sequence."""
    return shard.num_sequences > shard.num_documents or shard.prefix.endswith("_sentence")
