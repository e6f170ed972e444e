"""Micro batches of a labelled task, and the collection of a model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_deberta.config.schema import Head
from megatron_deberta.data import Integers
from megatron_deberta.data.batch import IGNORED_LABEL, TaskBatch
from megatron_deberta.data.dataset.best_fit import best_fit
from megatron_deberta.model.inputs import ModelInputs, RowPacking
from megatron_deberta.tasks.encoded import EncodedDataset

# Dropout keys per sample: more than any example's choices
_KEYS_PER_SAMPLE = 1 << 20


@dataclass(frozen=True, slots=True)
class TaskRows:
    """Encoded examples of one split, as samples: rows, or whole examples in multiple choice.

    Attributes:
        head: of the model.
        encoded: the examples.
        filler: tokens of a padding row.
        pad_id: token id of padding.
        multiple: N of a micro batch is a multiple of this.
        pack: the rows of a micro batch also stand side by side, see ``RowPacking``.
    """

    head: Head
    encoded: EncodedDataset
    filler: tuple[int, ...]
    pad_id: int
    multiple: int = 1
    pack: bool = False

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return self.encoded.num_examples if self.head == "choices" else self.encoded.num_rows

    @property
    def lengths(self) -> Integers:
        """Tokens of each sample; of the longest choice in multiple choice."""
        lengths = self.encoded.lengths
        if self.head != "choices":
            return lengths
        longest: Integers = np.maximum.reduceat(lengths, self.encoded.example_offsets[:-1])
        return longest

    def batch(self, samples: Integers, indices: Integers) -> TaskBatch:
        """Build a micro batch without padding beyond its longest row.

        Args:
            samples: number of each sample in the split, -1 = padding sample.
            indices: global sample index of each, which selects dropout bits.
        """
        if self.head != "choices":
            rows = samples
            return self._collate(rows, indices, self._labels(rows))
        offsets = self.encoded.example_offsets
        counts = np.where(samples < 0, 1, np.diff(offsets)[samples])
        columns = np.arange(counts.max())
        present = columns < counts[:, None]
        rows = np.where(samples[:, None] < 0, -1, offsets[samples][:, None] + columns)[present]
        choice_rows = np.full(present.shape, -1, np.int64)
        choice_rows[present] = np.arange(rows.size)
        keys = (indices[:, None] * _KEYS_PER_SAMPLE + columns)[present]
        labels = np.where(samples < 0, IGNORED_LABEL, self.encoded.labels[samples])
        return self._collate(rows, indices, labels.astype(np.int64), choice_rows, keys)

    def _collate(
        self,
        rows: Integers,
        indices: Integers,
        labels: npt.NDArray[Any] | None,
        choice_rows: Integers | None = None,
        keys: Integers | None = None,
    ) -> TaskBatch:
        encoded = self.encoded
        live = rows >= 0
        sizes = np.where(live, encoded.lengths[rows], len(self.filler))
        length = -(-int(sizes.max()) // self.multiple) * self.multiple
        mask = np.arange(length) < sizes[:, None]
        source = mask & live[:, None]
        # Index of each token of the batch in the arrays of all tokens
        tokens = (encoded.row_offsets[rows][:, None] + np.arange(length))[source]
        ids = np.full(mask.shape, self.pad_id, np.int64)
        types = np.zeros(mask.shape, np.int64)
        ids[source], types[source] = encoded.input_ids[tokens], encoded.token_type_ids[tokens]
        ids[~live, : len(self.filler)] = self.filler
        if labels is None:
            labels = np.full(mask.shape, IGNORED_LABEL, np.int64)
            labels[source] = encoded.labels[tokens]
        return TaskBatch(
            ModelInputs(
                torch.from_numpy(ids),
                torch.from_numpy(mask),
                token_type_ids=torch.from_numpy(types),
            ),
            torch.from_numpy(labels),
            sample_index=torch.from_numpy(indices),
            row_index=torch.from_numpy(rows),
            choice_rows=None if choice_rows is None else torch.from_numpy(choice_rows),
            row_keys=None if keys is None else torch.from_numpy(keys),
            packing=pack_rows(sizes, length) if self.pack else None,
        )

    def _labels(self, rows: Integers) -> npt.NDArray[Any] | None:
        """Return the labels of rows; None: they belong to tokens."""
        if self.head == "tokens":
            return None
        labels = np.asarray(self.encoded.labels[rows])
        if self.head == "regression":
            return np.where(rows < 0, np.nan, labels).astype(np.float32)
        labels = labels.astype(np.int64)
        labels[rows < 0] = IGNORED_LABEL
        return labels


def pack_rows(sizes: Integers, length: int) -> RowPacking:
    """Put the rows of a batch side by side, best fit decreasing.

    Args:
        sizes: [B] tokens of each row.
        length: N of the batch, and of the packed rows.
    """
    order = np.argsort(-sizes, kind="stable")
    bins = np.empty(sizes.size, np.int64)
    bins[order], num_bins = best_fit(sizes[order], length)
    # Rows by packed row, in ascending order
    order = np.argsort(bins, kind="stable")
    of = bins[order]
    counts = np.bincount(bins, minlength=num_bins)
    number = np.arange(sizes.size) - (counts.cumsum() - counts)[of]
    ends = sizes[order].cumsum()
    starts = ends - sizes[order]
    begins = starts - starts[counts.cumsum() - counts][of]
    index = np.full((num_bins, length), -1, np.int64)
    firsts = np.full((num_bins, int(counts.max())), -1, np.int64)
    firsts[of, number] = begins
    rows = order.repeat(sizes[order])
    place = np.arange(rows.size) - starts.repeat(sizes[order])
    index[bins[rows], begins.repeat(sizes[order]) + place] = rows * length + place
    places = np.empty(sizes.size, np.int64)
    places[order] = of * firsts.shape[1] + number
    return RowPacking(*(torch.from_numpy(array) for array in (index, firsts, places)))


@dataclass(frozen=True, slots=True)
class TaskBatchBuilder:
    """Builds micro batches as a pure function of global sample indices.

    Attributes:
        rows: the training examples.
        examples: returns the sample number of each global sample index, -1 for none.
    """

    rows: TaskRows
    examples: Callable[[Sequence[int]], Integers]

    def build(self, samples: Sequence[int]) -> TaskBatch:
        """Return the batch of the given samples, in that order."""
        numbers = self.examples(samples)
        return self.rows.batch(numbers, np.where(numbers < 0, -1, np.asarray(samples, np.int64)))


@dataclass(frozen=True, slots=True)
class TaskBatches:
    """Iterable over a rank's batches of all examples, sorted by length.

    All ranks yield the same number of batches, as collectives require.

    Attributes:
        rows: the examples.
        micro_batch_size: samples per forward pass.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
    """

    rows: TaskRows
    micro_batch_size: int
    dp_rank: int
    dp_size: int

    def __iter__(self) -> Iterator[TaskBatch]:
        """Yield this rank's micro batches."""
        order = np.argsort(self.rows.lengths, kind="stable")
        unit = self.micro_batch_size * self.dp_size
        order = np.concatenate([order, np.full(-len(order) % unit, -1, np.int64)])
        for batch in order.reshape(-1, self.dp_size, self.micro_batch_size)[:, self.dp_rank]:
            yield self.rows.batch(batch, batch)


def output_shape(head: Head, encoded: EncodedDataset, num_outputs: int) -> tuple[int, ...]:
    """Return the shape of a model's outputs for all rows of a split.

    Args:
        head: of the model.
        encoded: the examples.
        num_outputs: values per row or token.
    """
    places = len(encoded.input_ids) if head in ("spans", "tokens") else encoded.num_rows
    return (places,) if head in ("regression", "choices") else (places, num_outputs)


class OutputCollector:
    """Outputs of a model's head for all rows of a split.

    Args:
        head: of the model.
        encoded: the examples.
        num_outputs: values per row or token.
        device: of the outputs.
    """

    def __init__(
        self, head: Head, encoded: EncodedDataset, num_outputs: int, device: torch.device
    ) -> None:
        """See the class."""
        self._per_token = head in ("spans", "tokens")
        self._offsets = encoded.row_offsets
        self.outputs = torch.zeros(output_shape(head, encoded, num_outputs), device=device)

    def add(self, batch: Any, outputs: Tensor) -> None:
        """Store the outputs of a micro batch.

        Args:
            batch: ``TaskBatch`` of the split.
            outputs: of the head, fp32; ``[B, N, K]`` for a head on tokens, ``[B, K]`` for one on
                rows, ``[B]`` for a score or a choice.
        """
        live = batch.row_index >= 0
        if not self._per_token:
            self.outputs[batch.row_index[live]] = outputs[live]
            return
        places = torch.from_numpy(self._offsets[batch.row_index.cpu().numpy()]).to(outputs.device)
        places = places[:, None] + torch.arange(outputs.size(1), device=outputs.device)
        real = batch.inputs.is_token & live[:, None]
        self.outputs[places[real]] = outputs[real]
