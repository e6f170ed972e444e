"""Merging of shards into one, byte for byte as if all documents had been written into it.

Shards are copied in parallel to their places, and every byte read is checked against its shard's
manifest. Memory does not grow with the shards. Nothing appears under the final names before all
is flushed.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
    StagedShard,
    staged_shard,
)
from megatron_deberta.errors import ConfigError, DataError

_CHUNK_BYTES = 1 << 23


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
        prefixes: shards with manifests, of one token type and tokenizer, either all of sentences
            or all of whole documents; each once.
        output: prefix of the result, none of ``prefixes``.
        jobs: threads that copy, one shard each at a time.
        force: replace an existing shard.
        advance: called with the number of ``.bin`` bytes copied, from any thread.

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
    with staged_shard(output, layout) as staged, ThreadPoolExecutor(jobs) as pool:
        copies = [
            pool.submit(_copy_shard, staged, part, shard, manifest, advance)
            for part, (shard, manifest) in enumerate(zip(shards, manifests, strict=True))
        ]
        bin_sha256 = _hash_copies(shards, copies)
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
    staged: StagedShard,
    part: int,
    shard: IndexedDataset,
    manifest: ShardManifest,
    advance: Callable[[int], None],
) -> None:
    """Write one shard's tokens and index, and check the hashes of what was read."""
    found = hashlib.sha256()

    def on_chunk(chunk: bytes) -> None:
        found.update(chunk)
        advance(len(chunk))

    with open(bin_path(shard.prefix), "rb") as stream:
        staged.layout.copy_tokens(staged.bin_file, part, stream.fileno(), on_chunk)
    compare_hash(bin_path(shard.prefix), found.hexdigest(), manifest.bin_sha256)
    verify_hash(idx_path(shard.prefix), manifest.idx_sha256)
    staged.layout.write_index(staged.idx_file, part, *_index(shard))


def _index(shard: IndexedDataset) -> PartIndex:
    return shard.sequence_lengths, shard.document_boundaries[1:]


def _hash_copies(shards: Sequence[IndexedDataset], copies: Sequence[Future[None]]) -> str:
    """Hash the tokens that are merged, not the new file read back, each part once it is checked.

    The first failure cancels the copies that have not started.
    """
    digest = hashlib.sha256()
    try:
        for shard, copy in zip(shards, copies, strict=True):
            copy.result()
            with open(bin_path(shard.prefix), "rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
    except BaseException:
        for copy in copies:
            copy.cancel()
        raise
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
