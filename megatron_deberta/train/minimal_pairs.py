"""Evaluation of minimal pairs, during pretraining and of a trained model."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from megatron_deberta.config.rules import trained_forms
from megatron_deberta.config.schema import ModelConfig, RunConfig
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import DataError
from megatron_deberta.tasks.minimal_pairs import (
    MinimalPair,
    MinimalPairScores,
    read_minimal_pairs,
    score_minimal_pairs,
)
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer
from megatron_deberta.train.evaluate import Evaluation, never
from megatron_deberta.train.pseudo_likelihood import MaskedRows, Metric, score_sentences
from megatron_deberta.train.windows import WindowRows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MinimalPairTask:
    """Encoded minimal pairs of a run.

    Attributes:
        pairs: the pairs.
        rows: the distinct sentences: masked, or of an autoregressive model.
        sides: int64 ``[pairs, 2]``, the acceptable and the unacceptable sentence of each pair.
        tokens_per_batch: maximum tokens of a forward pass.
        multiple: row lengths are padded to a multiple of this.
    """

    pairs: Sequence[MinimalPair]
    rows: MaskedRows | WindowRows
    sides: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    tokens_per_batch: int
    multiple: int

    def score(
        self,
        module: nn.Module,
        groups: ProcessGroups,
        must_stop: Callable[[], bool] = never,
        advance: Callable[[int, int], None] = lambda done, total: None,
    ) -> MinimalPairScores | None:
        """Compute the accuracies of all pairs. Collective over all ranks.

        A pair is correct if its acceptable sentence has the higher pseudo-log-likelihood, or
        log-likelihood if the model is autoregressive; two sentences of the same tokens are equal,
        which counts as wrong.

        Args:
            module: ``objectives.MaskedLanguageModel``.
            groups: the rank grid.
            must_stop: called before each batch, with the same result on every rank.
            advance: called after each batch with the number of batches done and of all batches of
                this rank.

        Returns:
            The accuracies; None: told to stop.

        Raises:
            DataError: a score is infinite or not a number.
        """
        scores = score_sentences(
            module,
            self.rows,
            groups,
            self.tokens_per_batch,
            multiple=self.multiple,
            must_stop=must_stop,
            advance=advance,
        )
        if scores is None:
            return None
        if wrong := int((~np.isfinite(scores)).sum()):
            # Compared with such a score, every other one would count as the lower one.
            raise DataError(
                f"the model's scores of {wrong:,} of {len(scores):,} sentences are infinite or not "
                "a number; give an earlier checkpoint, or one trained with a lower "
                "optimizer.learning_rate"
            )
        good, bad = scores[self.sides].T
        return score_minimal_pairs(self.pairs, good > bad)

    def evaluate(
        self, module: nn.Module, groups: ProcessGroups, must_stop: Callable[[], bool]
    ) -> Evaluation | None:
        """Compute the metrics for ``metrics.jsonl``. Collective over all ranks.

        Args:
            module: ``objectives.MaskedLanguageModel``.
            groups: the rank grid.
            must_stop: called before each batch, with the same result on every rank.

        Returns:
            The metrics, with an accuracy of NaN if a score is not finite; None: told to stop.
        """
        try:
            scores = self.score(module, groups, must_stop)
        except DataError as error:
            # A run goes on: the guard may roll it back.
            logger.warning("%s; the accuracy is not a number", error)
            nothing = {"accuracy": math.nan, "num_pairs": float(len(self.pairs))}
            return Evaluation(nothing, "all nan")
        if scores is None:
            return None
        values = {"all": scores.accuracy, **scores.fields}
        text = " | ".join(f"{name.replace('_', ' ')} {value:.1%}" for name, value in values.items())
        metrics = {"accuracy": scores.accuracy, "num_pairs": float(scores.num_pairs)}
        metrics |= {f"accuracy_{name}": value for name, value in scores.fields.items()}
        return Evaluation(metrics, text)


def build_minimal_pairs(
    config: RunConfig,
    tokenizer: Tokenizer,
    pairs: Sequence[MinimalPair],
    metric: Metric = "original",
) -> MinimalPairTask:
    """Encode minimal pairs for a run.

    Args:
        config: the run; an autoregressive model scores sentences from left to right.
        tokenizer: of the model.
        pairs: the pairs.
        metric: what is masked with a scored token.

    Raises:
        DataError: a sentence is longer than the model's positions.
    """
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    ids, sizes = tokenizer.encode_texts(texts)
    parts = np.split(ids.astype(np.int64), np.cumsum(sizes)[:-1])
    _check_lengths(config.model, texts, parts)
    # Equal sentences are scored once, so that their scores are equal.
    numbers: dict[bytes, int] = {}
    sides = [numbers.setdefault(part.tobytes(), len(numbers)) for part in parts]
    sentences = [np.frombuffer(key, np.int64) for key in numbers]
    parallel, vocabulary = config.parallel, Vocabulary.of(tokenizer)
    rows: MaskedRows | WindowRows
    if "masked" in trained_forms(config.objective):
        rows = MaskedRows.of(sentences, vocabulary, metric)
    else:
        rows = WindowRows.of_sentences(sentences, vocabulary)
    return MinimalPairTask(
        pairs,
        rows,
        np.array(sides, np.int64).reshape(-1, 2),
        config.train.micro_batch_size * config.data.sequence_length,
        parallel.tensor_parallel_size if parallel.sequence_parallel else 1,
    )


def open_minimal_pairs(config: RunConfig, tokenizer_path: str) -> MinimalPairTask | None:
    """Open the minimal pairs of a pretraining run, if it has any.

    Raises:
        DataError: ``train.blimp_data`` is missing or malformed.
    """
    train = config.train
    if train.blimp_every is None or train.blimp_data is None:
        return None
    pairs = read_minimal_pairs(train.blimp_data, train.blimp_pairs or 0)
    return build_minimal_pairs(config, load_tokenizer(tokenizer_path), pairs)


def _check_lengths(model: ModelConfig, texts: Sequence[str], parts: Sequence[np.ndarray]) -> None:
    if model.absolute_positions == "none":
        return
    for text, part in zip(texts, parts, strict=True):
        if len(part) + 2 > model.max_position_embeddings:
            raise DataError(
                f"sentence {text[:60]!r} has {len(part) + 2} tokens, but the model has "
                f"{model.max_position_embeddings} positions; remove the pair"
            )
