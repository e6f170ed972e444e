"""Merging of shards into one, byte for byte as if all documents had been written into it.

Each shard is copied to its place by a call of its own, which any executor may run, and every byte
read is checked against its shard's manifest. Memory does not grow with the shards. Nothing appears
under the final names before all is flushed.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from megatron_deberta.data.shards.format import bin_path, idx_path, manifest_path
from megatron_deberta.data.shards.manifest import (
    CONTENT_COUNTS,
    INPUT_COUNTS,
    ShardManifest,
    check_counts,
    compare_hash,
    read_manifest,
    verify_hash,
)
from megatron_deberta.data.shards.prefixes import refuse_duplicates
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.data.shards.writer import (
    PartIndex,
    PartSize,
    ShardLayout,
    staged_shard,
)
from megatron_deberta.errors import ConfigError, DataError

_CHUNK_BYTES = 1 << 23
Call = tuple[Callable[..., Any], tuple[Any, ...]]
Runner = Callable[[Iterable[Call], Callable[[Any], None]], None]
"""Runs calls in any order, process and node, and passes each result to a function."""


def run_in_turn(calls: Iterable[Call], on_result: Callable[[Any], None]) -> None:
    """Run calls one after the other in this thread."""
    for function, arguments in calls:
        on_result(function(*arguments))


def merge_shards(
    prefixes: Sequence[str],
    output: str,
    *,
    run: Runner = run_in_turn,
    force: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> ShardManifest:
    """Merge shards in the order given, and write the manifest of the result.

    Args:
        prefixes: shards with manifests, of one token type and tokenizer, either all of sentences
            or all of whole documents; each once.
        output: prefix of the result, none of ``prefixes``.
        run: runs the copies, one per shard, and the hash; may use other nodes that share the disk.
        force: replace an existing shard.
        advance: called with the number of ``.bin`` bytes of each shard that was copied.

    Returns:
        The manifest of the result.

    Raises:
        ConfigError: ``output`` exists or is one of the inputs, or a shard is listed twice.
        DataError: a shard is damaged, has no manifest or differs from the first; the disk is full;
            or another process writes ``output``. Nothing is published then.
    """
    refuse_duplicates(prefixes, "", "name each shard once, as part-*.idx")
    _check_output(prefixes, output, force)
    shards, manifests = _open_compatible(prefixes)
    sizes = [PartSize(each.num_tokens, each.num_sequences, each.num_documents) for each in shards]
    layout = ShardLayout(shards[0].dtype, sizes)
    paths = [os.path.abspath(prefix) for prefix in prefixes]
    with staged_shard(os.path.abspath(output), layout) as staged:
        files = staged.bin_path, staged.idx_path
        calls: list[Call] = [
            (_hash_tokens, (paths, [manifest.bin_sha256 for manifest in manifests])),
            *(
                (_copy_shard, (files, layout, part, paths[part], manifest))
                for part, manifest in enumerate(manifests)
            ),
        ]
        bin_sha256 = ""

        def on_result(result: str | int) -> None:
            nonlocal bin_sha256
            if isinstance(result, str):
                bin_sha256 = result
            else:
                advance(result)

        run(calls, on_result)
        idx_sha256 = layout.idx_sha256(lambda: map(_index, shards))
        merged = replace(_sum_manifests(manifests), bin_sha256=bin_sha256, idx_sha256=idx_sha256)
        staged.publish(merged)
    return merged


def _sum_manifests(manifests: Sequence[ShardManifest]) -> ShardManifest:
    """Add up counts and join the sources; quarantine lists and plans are not merged."""
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
    )


def _copy_shard(
    files: tuple[str, str], layout: ShardLayout, part: int, prefix: str, manifest: ShardManifest
) -> int:
    """Write one shard's tokens and index, flush them and check the hashes of what was read.

    Returns:
        Bytes of the tokens.
    """
    found = hashlib.sha256()
    descriptors = [os.open(path, os.O_WRONLY) for path in files]
    try:
        with open(bin_path(prefix), "rb") as stream:
            layout.copy_tokens(descriptors[0], part, stream.fileno(), found.update)
        compare_hash(bin_path(prefix), found.hexdigest(), manifest.bin_sha256)
        verify_hash(idx_path(prefix), manifest.idx_sha256)
        layout.write_index(descriptors[1], part, *_index(IndexedDataset(prefix)))
        for descriptor in descriptors:
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    begin, end = layout.token_range(part)
    return end - begin


def _index(shard: IndexedDataset) -> PartIndex:
    return shard.sequence_lengths, shard.document_boundaries[1:]


def _hash_tokens(prefixes: Sequence[str], hashes: Sequence[str]) -> str:
    """Return the SHA-256 of all shards' tokens in order, and check the hash of each shard."""
    digest = hashlib.sha256()
    for prefix, expected in zip(prefixes, hashes, strict=True):
        found = hashlib.sha256()
        with open(bin_path(prefix), "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                found.update(chunk)
                digest.update(chunk)
        compare_hash(bin_path(prefix), found.hexdigest(), expected)
    return digest.hexdigest()


def _check_output(prefixes: Sequence[str], output: str, force: bool) -> None:
    if os.path.realpath(idx_path(output)) in [os.path.realpath(idx_path(p)) for p in prefixes]:
        raise ConfigError(f"--output {output}: is one of the inputs; choose another name")
    for path in (idx_path(output), bin_path(output), manifest_path(output)):
        if os.path.exists(path) and not force:
            raise ConfigError(f"{path}: exists; choose another --output or add --force")


def _open_compatible(
    prefixes: Sequence[str],
) -> tuple[list[IndexedDataset], list[ShardManifest]]:
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
    return shards, manifests


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
