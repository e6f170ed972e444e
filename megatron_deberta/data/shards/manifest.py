"""Sidecar manifest of a shard, ``{prefix}.manifest.json``: tokenizer, counts, hashes, sources.

Shards written by Megatron have none.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megatron_deberta.data.shards.format import bin_path, idx_path, manifest_path
from megatron_deberta.data.shards.reader import IndexedDataset
from megatron_deberta.errors import DataError
from megatron_deberta.files import sha256_file
from megatron_deberta.parsing import Count, read_json

FORMAT_VERSION = 1
CONTENT_COUNTS = ("num_documents", "num_sequences", "num_tokens")
INPUT_COUNTS = ("documents_in", "documents_empty", "documents_quarantined")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardManifest:
    """Content of a manifest.

    Attributes:
        tokenizer_fingerprint: hash of the tokenizer's content.
        tokenizer_path: path of the tokenizer.
        vocab_size: rows of the embedding table meant for the tokenizer.
        dtype: numpy name of the token type.
        num_documents: documents.
        num_sequences: sentences; equal to documents where those are not split.
        num_tokens: tokens.
        bin_sha256: hex digest of the ``.bin`` file.
        idx_sha256: hex digest of the ``.idx`` file.
        sources: input files, in order.
        documents_in: input records: tokenized, empty and quarantined.
        documents_empty: records without tokens.
        documents_quarantined: records that were quarantined.
        quarantine: their number by reason.
        quarantine_sha256: hex digest of the quarantine list; empty: no list.
        plan_sha256: hex digest of everything that determines the result; empty: unknown.
        format_version: version of this file's format.
    """

    tokenizer_fingerprint: str
    tokenizer_path: str
    vocab_size: Count
    dtype: str
    num_documents: Count
    num_sequences: Count
    num_tokens: Count
    bin_sha256: str
    idx_sha256: str
    sources: tuple[str, ...]
    documents_in: Count = 0
    documents_empty: Count = 0
    documents_quarantined: Count = 0
    quarantine: dict[str, Count] = field(default_factory=dict)
    quarantine_sha256: str = ""
    plan_sha256: str = ""
    format_version: int = FORMAT_VERSION


def encode_manifest(manifest: ShardManifest) -> bytes:
    """Return the content of the manifest file."""
    return (json.dumps(asdict(manifest), indent=2) + "\n").encode()


def read_manifest(prefix: str) -> ShardManifest | None:
    """Read the manifest of a shard; None where there is none.

    Raises:
        DataError: the file is unreadable, not JSON, of another version, or a field is missing,
            unknown or of the wrong type.
    """
    path = manifest_path(prefix)
    if not os.path.exists(path):
        return None
    try:
        manifest = read_json(
            Path(path), ShardManifest, "a shard manifest", remedy="preprocess again"
        )
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; preprocess again") from error
    if manifest.format_version != FORMAT_VERSION:
        raise DataError(f"{path}: format_version {manifest.format_version} is not {FORMAT_VERSION}")
    return manifest


def check_counts(shard: IndexedDataset, manifest: ShardManifest) -> None:
    """Compare a shard's dtype and counts with its manifest.

    Raises:
        DataError: they differ.
    """
    found = (shard.dtype.name, *(getattr(shard, name) for name in CONTENT_COUNTS))
    recorded = (manifest.dtype, *(getattr(manifest, name) for name in CONTENT_COUNTS))
    if found != recorded:
        raise DataError(
            f"{shard.prefix}: dtype, documents, sequences and tokens {found} are not the "
            f"manifest's {recorded}; preprocess again"
        )


def verify_hashes(prefix: str, manifest: ShardManifest) -> None:
    """Compare the SHA-256 of both files with the manifest.

    Raises:
        DataError: a file cannot be read or differs.
    """
    verify_hash(idx_path(prefix), manifest.idx_sha256)
    verify_hash(bin_path(prefix), manifest.bin_sha256)


def verify_hash(path: str, expected: str) -> None:
    """Compare the SHA-256 of a file with its manifest's.

    Raises:
        DataError: the file cannot be read or differs.
    """
    try:
        found = sha256_file(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; preprocess again") from error
    if found != expected:
        raise DataError(
            f"{path}: SHA-256 {found} is not the manifest's {expected}; preprocess again"
        )
