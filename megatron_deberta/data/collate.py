"""Collation of packed rows into masked and autoregressive batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from megatron_deberta.data import Integers
from megatron_deberta.data.batch import Batch, DecoderRows, MicroBatch
from megatron_deberta.data.dataset.rows import RowBatch, RowSource
from megatron_deberta.data.masking import MaskedRows
from megatron_deberta.data.randomness import Purpose, mix64
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL

# Sample index of a padding row without labels.
FILLER = -1


_AnyBatch = TypeVar("_AnyBatch", bound=MicroBatch, covariant=True)


class Builder(Protocol[_AnyBatch]):
    """Builder of batches."""

    def build(self, samples: Sequence[int]) -> _AnyBatch:
        """Return the batch of the given samples, in that order."""


class Targets(Protocol):
    """Chooses the tokens to predict, such as ``Masker``."""

    @property
    def max_targets(self) -> int:
        """M, the maximum number of targets per row."""

    def __call__(
        self, tokens: Integers, sizes: Integers, mask_ids: npt.NDArray[np.integer]
    ) -> MaskedRows:
        """Return rows with their targets."""


@dataclass(frozen=True, slots=True)
class BatchBuilder:
    """Builds micro batches as a pure function of sample indices.

    Attributes:
        rows: source of unmasked rows.
        masker: masks them, or chooses other targets.
        vocabulary: special ids.
        sequence_length: N.
        attend_across_documents: False: add document and position ids.
        causal: build autoregressive batches.
        decoder_masker: masks the same rows for a decoder; None: there is none.
    """

    rows: RowSource
    masker: Targets
    vocabulary: Vocabulary
    sequence_length: int
    attend_across_documents: bool
    causal: bool = False
    decoder_masker: Targets | None = None

    def build(self, samples: Sequence[int]) -> Batch:
        """Return the batch of the given samples, in that order; ``FILLER`` gives a padding row.

        Raises:
            DataError: a shard holds an id outside the vocabulary.
        """
        indices = np.asarray(samples, np.int64)
        live = np.flatnonzero(indices != FILLER)
        shape = (indices.size, self.sequence_length)
        maskers = [one for one in (self.masker, self.decoder_masker) if one is not None]
        versions = [
            (
                np.full(shape, self.vocabulary.pad_id, np.int64),
                np.full((indices.size, masker.max_targets), -1, np.int64),
                np.full((indices.size, masker.max_targets), IGNORED_LABEL, np.int64),
            )
            for masker in maskers
        ]
        attention_mask = np.zeros(shape, np.bool_)
        parts = np.zeros(shape, np.int64)
        is_random_next = None
        if live.size:
            rows = self.rows.rows(indices[live])
            mask_ids = indices[live] if rows.mask_ids is None else rows.mask_ids
            attention_mask[live] = np.arange(self.sequence_length) < rows.sizes[:, None]
            for masker, (ids, positions, targets) in zip(maskers, versions, strict=True):
                masked = masker(rows.tokens, rows.sizes, mask_ids)
                ids[attention_mask] = masked.tokens
                _fill_targets(masked, rows.sizes, live, positions, targets)
            if not self.attend_across_documents or rows.is_random_next is not None:
                parts[attention_mask] = _part_numbers(rows)
            if rows.is_random_next is not None:
                is_random_next = np.full(indices.size, IGNORED_LABEL, np.int64)
                is_random_next[live] = rows.is_random_next
        if live.size < indices.size:
            filler = indices == FILLER
            for ids, _, _ in versions:
                ids[filler, :2] = self.vocabulary.cls_id, self.vocabulary.sep_id
            attention_mask[filler, :2] = True
        optional: dict[str, npt.NDArray[Any]] = {}
        if not attention_mask.all():
            optional["attention_mask"] = attention_mask
        if not self.attend_across_documents:
            # Padding belongs to the last document.
            document_ids = np.maximum.accumulate(parts, axis=1)
            optional["document_ids"] = document_ids
            optional["position_ids"] = _restarting(document_ids)
        if is_random_next is not None:
            optional["token_type_ids"] = parts
        (input_ids, masked_positions, labels), *others = (
            tuple(map(torch.from_numpy, version)) for version in versions
        )
        return Batch(
            ModelInputs(
                input_ids,
                causal=self.causal,
                **{name: torch.from_numpy(array) for name, array in optional.items()},
            ),
            masked_positions,
            labels,
            torch.from_numpy(indices),
            None if is_random_next is None else torch.from_numpy(is_random_next),
            DecoderRows(*others[0]) if others else None,
        )


def _fill_targets(
    masked: MaskedRows,
    sizes: Integers,
    live: Integers,
    masked_positions: Integers,
    labels: Integers,
) -> None:
    row = np.repeat(np.arange(live.size), masked.counts)
    slot = np.arange(row.size) - (masked.counts.cumsum() - masked.counts)[row]
    begins = sizes.cumsum() - sizes
    masked_positions[live[row], slot] = masked.positions - begins[row]
    labels[live[row], slot] = masked.labels


def _part_numbers(rows: RowBatch) -> Integers:
    """Return [T] the number of each token's document within its row."""
    before = rows.part_counts.cumsum() - rows.part_counts
    numbers = np.arange(rows.part_sizes.size) - before.repeat(rows.part_counts)
    return numbers.repeat(rows.part_sizes)


def _restarting(document_ids: Integers) -> Integers:
    """Return [B, N] positions that restart at each document."""
    steps = np.arange(document_ids.shape[1])
    begins = np.diff(document_ids, axis=1, prepend=0) > 0
    return steps - np.maximum.accumulate(begins * steps, axis=1)


@dataclass(frozen=True, slots=True)
class NextTokens:
    """Targets of autoregressive rows: the token after each one.

    Attributes:
        vocabulary: special ids.
        sequence_length: N.
        within_documents: the first token of a packed document is no target, because nothing before
            it is visible.
    """

    vocabulary: Vocabulary
    sequence_length: int
    within_documents: bool

    @property
    def max_targets(self) -> int:
        """M, the maximum number of targets per row."""
        return self.sequence_length - 1

    def __call__(
        self, tokens: Integers, sizes: Integers, mask_ids: npt.NDArray[np.integer]
    ) -> MaskedRows:
        """Return unchanged rows with a target at every token but the last.

        Args:
            tokens: [T] int64 ids, row after row.
            sizes: [B] tokens of each row.
            mask_ids: not used.
        """
        is_last = np.zeros(tokens.size, np.bool_)
        is_last[sizes.cumsum() - 1] = True
        if self.within_documents:
            is_last |= tokens == self.vocabulary.sep_id
        positions = np.flatnonzero(~is_last)
        counts = np.diff(positions.searchsorted(sizes.cumsum()), prepend=0)
        return MaskedRows(tokens, positions, tokens[positions + 1], counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepForms:
    """Form of each step's batch, spread evenly: a function of the seed and the step's samples.

    Of consecutive steps n of G samples, those are autoregressive at which n f + phase passes an
    integer, where f is ``fraction`` and the phase a hash of the seed. So no layout and no resumed
    run changes a step's form.

    Attributes:
        fraction: of the steps that are autoregressive.
        seed: of the run.
        first_sample: first sample of any step.
        global_batch_size: G.
    """

    fraction: float
    seed: int
    first_sample: int
    global_batch_size: int

    def is_causal(self, sample: int) -> bool:
        """Return whether the step that reads ``sample`` is autoregressive."""
        size = self.global_batch_size
        first = sample - (sample - self.first_sample) % size
        phase = mix64(self.seed, Purpose.STEP_FORM) / 2**64
        number = first / size
        before, after = (math.floor(n * self.fraction + phase) for n in (number, number + 1))
        return after > before


@dataclass(frozen=True, slots=True)
class TwoFormBuilder:
    """Builds masked or autoregressive batches, as the step's form is.

    Attributes:
        masked: builder of masked batches.
        causal: builder of autoregressive batches.
        forms: form of each step.
    """

    masked: Builder[Batch]
    causal: Builder[Batch]
    forms: StepForms

    def build(self, samples: Sequence[int]) -> Batch:
        """Return the batch of the given samples of one step, in that order."""
        return (self.causal if self.forms.is_causal(samples[0]) else self.masked).build(samples)
