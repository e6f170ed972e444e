"""Encoding of examples as arrays of tokens and labels, with a cache."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_deberta.errors import DataError
from megatron_deberta.tasks.encoded import IGNORED, EncodedDataset
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.segments import encode_choices, encode_segments
from megatron_deberta.tasks.span_windows import encode_spans, unplaced_answers
from megatron_deberta.tasks.task import TaskConfig
from megatron_deberta.tasks.word_windows import encode_words
from megatron_deberta.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

__all__ = ["IGNORED", "EncodedDataset", "encode"]

_VERSION = 3
"""Part of the cache's key; raised when encoding changes."""
_ENCODERS: Mapping[
    str, Callable[[TaskConfig, Sequence[Example], Tokenizer, int], EncodedDataset]
] = {
    "classification": encode_segments,
    "regression": encode_segments,
    "spans": encode_spans,
    "tokens": encode_words,
    "choices": encode_choices,
}
_USED = ("head", "stride", "truncate", "mask_text", "merge_sentences")
"""Keys of a task that encoding depends on."""


def encode(
    task: TaskConfig,
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    max_length: int | None = None,
    cache: Path | None = None,
) -> EncodedDataset:
    """Encode examples; a pure function of its arguments but ``cache``.

    Args:
        task: the task.
        examples: examples of one split.
        tokenizer: the model's tokenizer.
        max_length: tokens per row; None: the task's.
        cache: folder where the result is kept under a hash of the other arguments; None: nowhere.

    Raises:
        DataError: there are no examples, a question leaves no room for the passage, most answers
            are in no window, or the cached result is damaged.
    """
    if not examples:
        raise DataError(f"task {task.name}: no examples to encode")
    length = task.max_length if max_length is None else max_length
    if cache is None:
        encoded = _ENCODERS[task.head](task, examples, tokenizer, length)
    else:
        folder = cache / f"{task.name}-{_key(task, examples, tokenizer, length)}"
        if not folder.is_dir():
            _ENCODERS[task.head](task, examples, tokenizer, length).save(folder)
        encoded = EncodedDataset.load(folder)
        has_classes = task.head in ("classification", "tokens")
        num_labels = len(task.labels) if has_classes else 0
        if problem := encoded.find_problem(tokenizer.vocab_size, num_labels):
            raise DataError(f"{folder}: damaged ({problem}); remove this folder")
    if task.head == "spans":
        _report_unplaced(task, examples, encoded)
    return encoded


def _report_unplaced(
    task: TaskConfig, examples: Sequence[Example], encoded: EncodedDataset
) -> None:
    """Count the answers that are in no window; their questions are labelled as without answer.

    Raises:
        DataError: they are more than half.
    """
    unplaced = unplaced_answers(examples, encoded)
    if not unplaced:
        return
    answered = sum(bool(example.answers) for example in examples)
    problem = (
        f"task {task.name}: the answers of {len(unplaced):,} of {answered:,} answered questions "
        f"are in no window and count as no answer (first: {unplaced[0]}); raise max_length or "
        "stride, or check the tokenizer"
    )
    if len(unplaced) > answered / 2:
        raise DataError(problem)
    logger.warning("%s", problem)


def _key(task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer, length: int) -> str:
    """Return a hash of everything that the encoding depends on."""
    values = asdict(task)
    content = [_VERSION, {key: values[key] for key in _USED}, length, tokenizer.fingerprint]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for example in examples:
        digest.update(repr(example).encode())
    return digest.hexdigest()[:16]
