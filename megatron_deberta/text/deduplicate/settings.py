"""Settings of deduplication; defaults as in Megatron-LM: Jaccard 0.7, runs of five words."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_deberta.errors import ConfigError

PERMUTATIONS = 128
_LEAST_RECALL = 0.98
_MARGIN_SIGMAS = 4.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How documents are compared.

    Attributes:
        threshold: least Jaccard similarity of two documents' sets of runs for a near duplicate.
        ngram: words in a run.
        seed: of the sketch.
        exact_only: remove only documents that are the same but for case and whitespace.

    Raises:
        ConfigError: a value cannot be.
    """

    threshold: float = 0.7
    ngram: int = 5
    seed: int = 1
    exact_only: bool = False

    def __post_init__(self) -> None:
        if not 0.3 <= self.threshold <= 1:
            raise ConfigError(
                f"--threshold {self.threshold}: must be in [0.3, 1]; below it, candidates are "
                "most pairs of documents"
            )
        if self.ngram < 1:
            raise ConfigError(f"--ngram {self.ngram}: must be at least 1")

    @property
    def rows(self) -> int:
        """Sketch values in a band.

        The most for which a pair at the threshold itself shares a band with a probability of
        98 %: 1 - (1 - t^rows)^bands. Candidates at lower similarities are then fewest.
        """
        rows = 1
        while (
            rows < PERMUTATIONS // 4
            and recall(self.threshold, rows + 1, PERMUTATIONS // (rows + 1)) >= _LEAST_RECALL
        ):
            rows += 1
        return rows

    @property
    def bands(self) -> int:
        """Bands of ``rows`` values each; values beyond the last are used for the estimate only."""
        return PERMUTATIONS // self.rows

    @property
    def least_estimate(self) -> float:
        """Share of equal sketch values below which a pair is not compared exactly.

        Four standard deviations of the share below the threshold: one pair in 30,000 at the
        threshold itself is lost by it.
        """
        deviation = math.sqrt(self.threshold * (1 - self.threshold) / PERMUTATIONS)
        return self.threshold - _MARGIN_SIGMAS * deviation


def recall(similarity: float, rows: int, bands: int) -> float:
    """Return the probability that two documents of a similarity share a band.

    Args:
        similarity: Jaccard similarity of the documents.
        rows: values per band.
        bands: number of bands.
    """
    missed: float = (1 - similarity**rows) ** bands
    return 1 - missed
