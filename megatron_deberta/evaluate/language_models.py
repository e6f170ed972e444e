"""Evaluation of pretrained models on disk: perplexity of a text file, and minimal pairs.

Source of perplexity by word: Merity et al. 2016, arXiv:1609.07843: words are separated by white
space, and the end of each line counts as a word. The validation part of WikiText-103 has 217,646
words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_deberta.config.rules import causal_fraction, trained_forms
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.errors import CheckpointError, ConfigError, DataError, MalformedInputError
from megatron_deberta.evaluate.likelihood import Metric, WindowRows, score_rows
from megatron_deberta.evaluate.minimal_pairs import (
    MinimalPairScores,
    build_minimal_pairs,
    read_minimal_pairs,
)
from megatron_deberta.evaluate.models import language_model_config, open_ranks, open_source_model
from megatron_deberta.hf.loading import NONFINITE
from megatron_deberta.tasks.records import read_bytes


@dataclass(frozen=True, slots=True)
class WordText:
    """A text and its length.

    Attributes:
        lines: lines with their ends.
        num_words: words, the end of each line included.
        num_bytes: bytes in UTF-8.
    """

    lines: tuple[str, ...]
    num_words: int
    num_bytes: int

    @staticmethod
    def of(text: str) -> WordText:
        """Count the words of a text."""
        # Unlike str.splitlines, at newlines only.
        parts = text.split("\n")
        lines = tuple(part + "\n" for part in parts[:-1]) + tuple(filter(None, parts[-1:]))
        words = sum(len(line.split()) + 1 for line in lines)
        return WordText(lines, words, len(text.encode("utf-8")))


def read_words(path: str) -> WordText:
    """Read a text file, which may be compressed by gzip.

    Raises:
        DataError: it is missing, damaged, empty, or not in UTF-8.
    """
    try:
        text = read_bytes(Path(path)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedInputError(f"--data {path} is not in UTF-8: {error}; convert it") from error
    if not text.strip():
        raise MalformedInputError(f"--data {path} has no words; give a text file")
    return WordText.of(text)


Form = Literal["autoregressive", "masked"]


MASK_EVERY = 7
"""Of a masked model, one in so many tokens is masked at once: 14 %, as in pretraining."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Result of an evaluation.

    Attributes:
        form: ``autoregressive``: each token is predicted from those before it; ``masked``: from
            those on both sides (pseudo-perplexity).
        loss: sum over pieces of -log p, in nats.
        num_pieces: pieces of the text.
        num_unknown: pieces that are [UNK], which hide what they stand for.
        num_words: words, the end of each line included.
        num_bytes: bytes of the text.
        sequence_length: tokens per row, [CLS] and [SEP] included.
        stride: scored pieces per row.
        mask_every: one in so many pieces is masked at once; 0: autoregressive.
    """

    form: Form
    loss: float
    num_pieces: int
    num_unknown: int
    num_words: int
    num_bytes: int
    sequence_length: int
    stride: int
    mask_every: int

    @property
    def per_word(self) -> float:
        """exp(loss / words)."""
        return _exp(self.loss / self.num_words)

    @property
    def per_piece(self) -> float:
        """exp(loss / pieces)."""
        return _exp(self.loss / self.num_pieces)

    @property
    def bits_per_byte(self) -> float:
        """The loss in bits, per byte."""
        return self.loss / math.log(2) / self.num_bytes


def evaluate_perplexity(
    model: Path,
    data: str,
    *,
    form: Form | None = None,
    stride: int = 0,
    mask_every: int = 0,
    tokenizer: str = "",
    overrides: Sequence[str] = (),
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Perplexity, bool]:
    """Compute the perplexity of a pretrained model. Collective over the ranks of the launcher.

    Args:
        model: run, checkpoint, export or release with a language-model head.
        data: text file.
        form: None: autoregressive if the model was trained so.
        stride: scored pieces per row; 0: a quarter of ``data.sequence_length``.
        mask_every: masked form: one in so many pieces is masked at once; 0: `MASK_EVERY`.
        tokenizer: the model's tokenizer; empty: its own.
        overrides: ``section.key=value``, such as ``train.micro_batch_size=64``.
        advance: called on every rank with the batches done and their number.

    Returns:
        The result, and whether this is rank 0.

    Raises:
        CheckpointError: the folder holds no model, or one without a trained head, or whose outputs
            are infinite or not a number.
        ConfigError: the model was not trained in this form, or is fine-tuned.
        DataError: the text or the tokenizer is missing or malformed.
    """
    source = open_source_model(model, tokenizer, "generator")
    config = language_model_config(source, overrides)
    form = _form(config, form, str(model))
    if mask_every and form == "autoregressive":
        raise ConfigError(f"--mask-every {mask_every} is for the masked form; remove it")
    masked = (mask_every or MASK_EVERY) if form == "masked" else 0
    length = config.data.sequence_length
    stride = stride or max(length // 4, 1)
    if stride > length - 2:
        raise ConfigError(
            f"--stride {stride} exceeds the {length - 2} tokens of a row beside [CLS] and [SEP]; "
            "lower it, or raise data.sequence_length"
        )
    text = read_words(data)
    loaded = source.load_tokenizer(config.tokenizer.path or "")
    ids, _ = loaded.encode_texts(text.lines)
    if not ids.size:
        raise DataError("--data has no pieces of the model's tokenizer; give a text file")
    tokens, vocabulary = ids.astype(np.int64), Vocabulary.of(loaded)
    rows = WindowRows.of_text(tokens, vocabulary, length, stride, masked)
    tokens_per_batch = config.train.micro_batch_size * length
    parallel = config.parallel
    multiple = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    with open_ranks(config, source) as (module, groups):
        scores = score_rows(
            module, rows, groups, tokens_per_batch, multiple=multiple, advance=advance
        )
        assert scores is not None
        if not np.isfinite(scores).all():
            raise CheckpointError(f"{model}: {NONFINITE}")
        result = Perplexity(
            form=form,
            loss=-float(scores.sum()),
            num_pieces=len(rows.tokens),
            num_unknown=int((ids == loaded.unk_id).sum()),
            num_words=text.num_words,
            num_bytes=text.num_bytes,
            sequence_length=length,
            stride=stride,
            mask_every=masked,
        )
        return result, groups.rank == 0


def _form(config: RunConfig, form: Form | None, model: str) -> Form:
    trained = causal_fraction(config.objective)
    if form is None:
        return "autoregressive" if trained else "masked"
    if form == "autoregressive" and not trained:
        raise ConfigError(
            f"--form autoregressive: {model} was trained with objective.name="
            f"{config.objective.name}; use --form masked, or the run of an autoregressive model"
        )
    if form == "masked" and trained == 1:
        raise ConfigError(
            f"--form masked: {model} was trained with objective.name=autoregressive; remove it"
        )
    return form


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def evaluate_minimal_pairs(
    model: Path,
    data: str,
    *,
    limit: int = 0,
    metric: Metric = "original",
    tokenizer: str = "",
    overrides: Sequence[str] = (),
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[MinimalPairScores, bool]:
    """Compute the accuracies of a pretrained model. Collective over the ranks of the launcher.

    Args:
        model: run, checkpoint, export or release with a masked-language-model head; of replaced-
            token detection, the generator is evaluated.
        data: folder of BLiMP's JSON Lines.
        limit: first pairs of each paradigm; 0: all.
        metric: what is masked with a scored token.
        tokenizer: the model's tokenizer; empty: its own.
        overrides: ``section.key=value``, such as ``train.micro_batch_size=64``.
        advance: called on every rank with the batches done and their number.

    Returns:
        The accuracies, and whether this is rank 0.

    Raises:
        CheckpointError: the folder holds no model, or one without a trained head.
        ConfigError: the model is fine-tuned.
        DataError: the data or the tokenizer is missing or malformed.
    """
    source = open_source_model(model, tokenizer, "generator")
    config = language_model_config(source, overrides)
    if "masked" not in trained_forms(config.objective) and metric != "original":
        raise ConfigError(f"--metric {metric} is for masked language models; remove it")
    pairs = read_minimal_pairs(data, limit)
    loaded = source.load_tokenizer(config.tokenizer.path or "")
    task = build_minimal_pairs(config, loaded, pairs, metric)
    with open_ranks(config, source) as (module, groups):
        scores = task.score(module, groups, advance=advance)
        assert scores is not None
        return scores, groups.rank == 0
