"""Autoregressive rows, and the steps whose batch is autoregressive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.arrays import Integers
from megatron_deberta.data.batch import Batch
from megatron_deberta.data.collate import Builder
from megatron_deberta.data.masking import MaskedRows
from megatron_deberta.data.randomness import Purpose, mix64
from megatron_deberta.data.vocabulary import Vocabulary


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
