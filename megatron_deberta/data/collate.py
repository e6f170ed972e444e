"""Rows and masks to a ``Batch``.

Owns padding and document fields. Refuses to choose samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron_deberta.data.batch import IGNORED_LABEL, Batch
from megatron_deberta.data.masking import Masker
from megatron_deberta.data.packing import RowSource
from megatron_deberta.data.vocabulary import Vocabulary

FILLER = -1
"""Sample index of a row without labels that fills a batch."""


class BatchBuilder:
    """Builds micro batches from sample indices; a pure function of them.

    Args:
        rows: where samples come from.
        masker: how they are masked.
        vocabulary: special ids.
        sequence_length: N.
        attend_across_documents: False adds document and position ids.
    """

    def __init__(
        self,
        rows: RowSource,
        masker: Masker,
        vocabulary: Vocabulary,
        sequence_length: int,
        attend_across_documents: bool,
    ) -> None:
        """See the class."""
        self._rows = rows
        self._masker = masker
        self._vocabulary = vocabulary
        self._sequence_length = sequence_length
        self._with_documents = not attend_across_documents

    def build(self, samples: Sequence[int]) -> Batch:
        """Return the batch of the given samples, in that order; ``FILLER`` gives an empty row.

        Raises:
            DataError: a shard holds an id outside the vocabulary.
        """
        batch_size, length = len(samples), self._sequence_length
        input_ids = np.full((batch_size, length), self._vocabulary.pad_id, np.int64)
        attention_mask = np.zeros((batch_size, length), np.bool_)
        masked_positions = np.full((batch_size, self._masker.max_targets), -1, np.int64)
        labels = np.full((batch_size, self._masker.max_targets), IGNORED_LABEL, np.int64)
        marks = np.zeros((batch_size, length), np.int64) if self._with_documents else None
        for number, sample in enumerate(samples):
            if sample == FILLER:
                input_ids[number, :2] = self._vocabulary.cls_id, self._vocabulary.sep_id
                attention_mask[number, :2] = True
                continue
            row = self._rows.row(sample)
            masked = self._masker(row.tokens, sample)
            input_ids[number, : masked.tokens.size] = masked.tokens
            attention_mask[number, : masked.tokens.size] = True
            masked_positions[number, : masked.positions.size] = masked.positions
            labels[number, : masked.labels.size] = masked.labels
            if marks is not None:
                marks[number, row.document_starts[1:]] = 1
        document_ids = position_ids = None
        if marks is not None:
            document_ids = np.cumsum(marks, axis=1)
            steps = np.arange(length)
            position_ids = steps - np.maximum.accumulate(marks * steps, axis=1)
        return Batch(
            input_ids=torch.from_numpy(input_ids),
            attention_mask=torch.from_numpy(attention_mask),
            masked_positions=torch.from_numpy(masked_positions),
            labels=torch.from_numpy(labels),
            sample_index=torch.tensor(samples, dtype=torch.int64),
            document_ids=None if document_ids is None else torch.from_numpy(document_ids),
            position_ids=None if position_ids is None else torch.from_numpy(position_ids),
        )
