"""Order of examples in fine-tuning: a pure function of seed and sample index."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from megatron_deberta.data import Integers
from megatron_deberta.data.randomness import Purpose, hash_values, mix64

# Batches whose examples are sorted by length together. Larger pools have less padding; smaller ones
# mix examples more.
_POOL_BATCHES = 50


class EpochOrder:
    """Permutes the examples of each epoch, in batches of similar length.

    An epoch has as many samples as its batches; the last batch of random examples is filled with
    -1, so that every example occurs once.

    Args:
        lengths: tokens of each example.
        batch_size: samples per optimizer step.
        seed: of the run.
        by_length: group examples of similar length; batches are in random order.
    """

    def __init__(self, lengths: Integers, batch_size: int, seed: int, *, by_length: bool) -> None:
        """See the class."""
        self._lengths = lengths
        self._batch_size = batch_size
        self._seed = seed
        self._by_length = by_length
        # Two epochs, because workers may build batches of the next one already.
        self._order = lru_cache(2)(self._permute)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return -(-len(self._lengths) // self._batch_size)

    def examples(self, samples: Sequence[int]) -> Integers:
        """Return the example of each global sample index, -1 for none."""
        size = self.steps_per_epoch * self._batch_size
        return np.array([self._order(s // size)[s % size] if s >= 0 else -1 for s in samples])

    def _permute(self, epoch: int) -> Integers:
        """Return the examples of an epoch in order."""
        number, steps = len(self._lengths), self.steps_per_epoch
        key = mix64(self._seed, Purpose.EXAMPLE_ORDER, epoch)
        order = np.full(steps * self._batch_size, -1, np.int64)
        order[:number] = np.argsort(hash_values(key, np.arange(number)), kind="stable")
        if not self._by_length:
            return order
        pool = np.arange(order.size) // (_POOL_BATCHES * self._batch_size)
        # Missing examples come last, with the longest.
        lengths = np.where(order < 0, np.iinfo(np.int64).max, self._lengths[order])
        order = order[np.lexsort((lengths, pool))]
        key = mix64(self._seed, Purpose.BATCH_ORDER, epoch)
        batches = np.argsort(hash_values(key, np.arange(steps)), kind="stable")
        return order.reshape(steps, self._batch_size)[batches].reshape(-1)
