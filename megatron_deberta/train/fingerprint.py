"""Fingerprint of a run's training data: content, order and weights of shards, validation split.

Paths and validation shards do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_deberta.config.schema import DataConfig
from megatron_deberta.data.build import parse_prefixes
from megatron_deberta.data.shards.format import bin_path, idx_path
from megatron_deberta.data.shards.manifest import read_manifest


def data_fingerprint(data: DataConfig) -> str:
    """Compute the SHA-256 (hex) over the training shards' hashes.

    A shard without a manifest, as Megatron writes it, is identified by its index and size.

    Raises:
        ConfigError: prefixes or weights are malformed.
        DataError: a manifest is damaged.
        OSError: a shard cannot be read.
    """
    components, weights = parse_prefixes(data.train, "data.train")
    shards = [[_shard_identity(prefix) for prefix in component] for component in components]
    is_split = not data.validation and data.validation_fraction > 0
    content = [shards, weights, is_split]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def run_fingerprint(parts: Sequence[DataConfig]) -> str:
    """Compute the fingerprint of a run whose phases have these data, in order."""
    hashes = list(dict.fromkeys(data_fingerprint(part) for part in parts))
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def _shard_identity(prefix: str) -> list[str]:
    manifest = read_manifest(prefix)
    if manifest is not None:
        return [manifest.idx_sha256, manifest.bin_sha256]
    index = hashlib.sha256(Path(idx_path(prefix)).read_bytes()).hexdigest()
    return [index, str(Path(bin_path(prefix)).stat().st_size)]
