"""Reader of megatron-core, imported when a test calls it, because the import takes seconds."""

from typing import Any


def megatron_dataset(prefix: str) -> Any:
    """Return megatron-core's reader of a shard."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(prefix)
