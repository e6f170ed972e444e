"""Minimal pairs of sentences: reading, and accuracies during pretraining and of a trained model.

Source: BLiMP, Warstadt et al. 2020, arXiv:1912.00582.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from megatron_deberta.config.rules import trained_forms
from megatron_deberta.config.schema import ModelConfig, RunConfig
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import DataError, MissingInputError
from megatron_deberta.evaluate.likelihood import Metric, WindowRows, score_rows
from megatron_deberta.evaluate.validation import Evaluation, never
from megatron_deberta.tasks.records import read_jsonl, string_of
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer

_SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True, slots=True)
class MinimalPair:
    """An acceptable sentence and an unacceptable one that differs in one phenomenon.

    Attributes:
        good: the acceptable sentence.
        bad: the unacceptable sentence.
        paradigm: name of the phenomenon (BLiMP's ``UID``).
        field: linguistic field of the paradigm.
    """

    good: str
    bad: str
    paradigm: str
    field: str


@dataclass(frozen=True, slots=True)
class ParadigmScore:
    """Share of a paradigm's pairs whose acceptable sentence has the higher score."""

    paradigm: str
    field: str
    num_pairs: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class MinimalPairScores:
    """Accuracies of all pairs; chance is 0.5.

    Attributes:
        paradigms: by field and name.
    """

    paradigms: tuple[ParadigmScore, ...]

    @property
    def fields(self) -> dict[str, float]:
        """Mean accuracy of the paradigms of each linguistic field."""
        names = dict.fromkeys(score.field for score in self.paradigms)
        return {name: _mean(s for s in self.paradigms if s.field == name) for name in names}

    @property
    def accuracy(self) -> float:
        """Mean accuracy of all paradigms."""
        return _mean(self.paradigms)

    @property
    def num_pairs(self) -> int:
        """Number of pairs."""
        return sum(score.num_pairs for score in self.paradigms)


def read_minimal_pairs(data: str | os.PathLike[str], limit: int = 0) -> list[MinimalPair]:
    """Read minimal pairs in BLiMP's format.

    Args:
        data: folder of JSON Lines files (``.jsonl``, ``.jsonl.gz``), such as BLiMP's ``data``
            with one file per paradigm, or one such file. Each line has ``sentence_good``,
            ``sentence_bad``, ``UID`` and ``field``.
        limit: first pairs of each paradigm to read; 0: all.

    Raises:
        DataError: there is no such file, or a line is malformed; names file and line.
    """
    path = Path(data)
    if not path.exists():
        raise MissingInputError(f"{path}: no such folder; give the folder of BLiMP's .jsonl files")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in files if file.name.endswith(_SUFFIXES)]
    if not files:
        raise MissingInputError(f"{path}: no {' or '.join(_SUFFIXES)} file; give BLiMP's folder")
    pairs: list[MinimalPair] = []
    counts: dict[str, int] = {}
    for place, values in (record for file in files for record in read_jsonl(file)):
        names = ("sentence_good", "sentence_bad", "UID", "field")
        good, bad, paradigm, field = (string_of(place, values, name) for name in names)
        counts[paradigm] = counts.get(paradigm, 0) + 1
        if not limit or counts[paradigm] <= limit:
            # BLiMP spells one field in two ways.
            pairs.append(MinimalPair(good, bad, paradigm, field.replace("/", "_")))
    return pairs


def _mean(scores: Iterable[ParadigmScore]) -> float:
    accuracies = [score.accuracy for score in scores]
    return sum(accuracies) / len(accuracies)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MinimalPairTask:
    """Encoded minimal pairs of a run.

    Attributes:
        pairs: the pairs.
        rows: windows of the distinct sentences: masked, or from left to right.
        sides: int64 ``[pairs, 2]``, the acceptable and the unacceptable sentence of each pair.
        tokens_per_batch: maximum tokens of a forward pass.
        multiple: row lengths are padded to a multiple of this.
    """

    pairs: Sequence[MinimalPair]
    rows: WindowRows
    sides: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    tokens_per_batch: int
    multiple: int

    def score(
        self,
        module: nn.Module,
        groups: ProcessGroups,
        should_abort: Callable[[], bool] = never,
        advance: Callable[[int, int], None] = lambda done, total: None,
    ) -> MinimalPairScores | None:
        """Compute the accuracies of all pairs. Collective over all ranks.

        A pair is correct if its acceptable sentence has the higher pseudo-log-likelihood, or
        log-likelihood if the model is autoregressive; two sentences of the same tokens are equal,
        which counts as wrong.

        Args:
            module: ``objectives.MaskedLanguageModel``.
            groups: the rank grid.
            should_abort: called before each batch, with the same result on every rank.
            advance: called after each batch with the number of batches done and of all batches of
                this rank.

        Returns:
            The accuracies; None: told to stop.

        Raises:
            DataError: a score is infinite or not a number.
        """
        scores = score_rows(
            module,
            self.rows,
            groups,
            self.tokens_per_batch,
            multiple=self.multiple,
            should_abort=should_abort,
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
        found: dict[tuple[str, str], list[bool]] = {}
        for pair, correct in zip(self.pairs, (good > bad).tolist(), strict=True):
            found.setdefault((pair.field, pair.paradigm), []).append(correct)
        return MinimalPairScores(
            tuple(
                ParadigmScore(paradigm, field, len(hits), sum(hits) / len(hits))
                for (field, paradigm), hits in sorted(found.items())
            )
        )

    def evaluate(
        self, module: nn.Module, groups: ProcessGroups, should_abort: Callable[[], bool]
    ) -> Evaluation | None:
        """Compute the metrics for ``metrics.jsonl``. Collective over all ranks.

        Args:
            module: ``objectives.MaskedLanguageModel``.
            groups: the rank grid.
            should_abort: called before each batch, with the same result on every rank.

        Returns:
            The metrics, with an accuracy of NaN if a score is not finite; None: told to stop.
        """
        try:
            scores = self.score(module, groups, should_abort)
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
    parallel, is_masked = config.parallel, "masked" in trained_forms(config.objective)
    masks = metric if is_masked else None
    return MinimalPairTask(
        pairs,
        WindowRows.of_sentences(sentences, Vocabulary.of(tokenizer), masks),
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
