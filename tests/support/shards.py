"""Sentences of a shard."""

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.shards.reader import IndexedDataset


def sentences(shard: IndexedDataset, index: int) -> list[npt.NDArray[Any]]:
    """Return the sentences of a document."""
    first, stop = shard.document_boundaries[index : index + 2]
    lengths = shard.sequence_lengths[first:stop]
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.split(shard.document(index), ends[:-1]) if lengths.size else []
