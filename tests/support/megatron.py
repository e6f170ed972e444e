"""megatron-core, which takes seconds to import: every worker collects tests, and one runs them."""

from typing import Any


def megatron_dataset(prefix: str) -> Any:
    """Return megatron-core's reader of a shard."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(prefix)
