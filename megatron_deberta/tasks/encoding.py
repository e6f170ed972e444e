"""Encoding of examples as arrays of tokens and labels, with a cache."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.errors import DataError
from megatron_deberta.tasks.encoded import IGNORED, EncodedDataset
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.task import POOLED_HEADS, TaskConfig
from megatron_deberta.tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]


class RowBuilder:
    """Collects rows of tokens.

    Args:
        tokenizer: for the ids of [CLS] and [SEP].
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """See the class."""
        self._cls = np.array([tokenizer.cls_id], np.int32)
        self._sep = np.array([tokenizer.sep_id], np.int32)
        self._ids: list[Ids] = []
        self._types: list[npt.NDArray[np.uint8]] = []
        self._lengths: list[int] = []
        self._examples: list[int] = []

    def add(self, example: int, first: Ids, second: Ids | None = None) -> int:
        """Add a row.

        Args:
            example: index of its example.
            first: tokens of the first segment.
            second: tokens of the second segment; None: there is none.

        Returns:
            The row's number of tokens.
        """
        parts = [self._cls, first, self._sep]
        pair_tokens = 0
        if second is not None:
            parts += [second, self._sep]
            pair_tokens = len(second) + 1
        length = len(first) + 2 + pair_tokens
        types = np.zeros(length, np.uint8)
        types[length - pair_tokens :] = 1
        self._ids += parts
        self._types.append(types)
        self._lengths.append(length)
        self._examples.append(example)
        return length

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of ``EncodedDataset`` but labels, offsets and word indices."""
        return {
            "input_ids": np.concatenate(self._ids),
            "token_type_ids": np.concatenate(self._types),
            "row_offsets": np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)]),
            "example_index": np.array(self._examples, np.int64),
            "char_offsets": np.empty((0, 2), np.int32),
            "word_index": np.empty(0, np.int32),
        }


def first_and_second_lengths(first: int, second: int, limit: int, truncate: str) -> tuple[int, int]:
    """Return how many tokens of two segments are kept, ``limit`` at most in total.

    Args:
        first: tokens of the first segment.
        second: tokens of the second segment.
        limit: tokens for both.
        truncate: the segment that is cut: ``first``, ``second``, or token by token the ``longest``.
            If one alone does not suffice, the other one is cut as well.
    """
    if first + second <= limit:
        return first, second
    if truncate == "first":
        second = min(second, limit)
        return limit - second, second
    if truncate == "second":
        first = min(first, limit)
        return first, limit - first
    second = min(second, max(limit - first, limit // 2))
    return min(first, limit - second), second


def encode_each(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Ids]:
    """Encode texts; equal texts are encoded once."""
    distinct = list(dict.fromkeys(texts))
    ids, lengths = tokenizer.encode_texts(distinct)
    parts = dict(zip(distinct, np.split(ids, np.cumsum(lengths)[:-1]), strict=True))
    return [parts[text] for text in texts]


def encode_segments(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> EncodedDataset:
    """Encode examples of one or two segments with a class, labels or a score.

    Args:
        task: the task.
        examples: to encode.
        tokenizer: the model's tokenizer.
        length: maximum number of tokens per row.
    """
    first = encode_each(tokenizer, [example.text for example in examples])
    second = encode_each(tokenizer, [example.text_pair or "" for example in examples])
    rows = RowBuilder(tokenizer)
    for index, example in enumerate(examples):
        pair = second[index] if example.text_pair is not None else None
        _add_pair(rows, index, first[index], pair, length, task.truncate)
    return EncodedDataset(labels=_example_labels(task, examples), **rows.arrays())


def _example_labels(task: TaskConfig, examples: Sequence[Example]) -> npt.NDArray[Any]:
    if task.head == "multilabel":
        hidden = (IGNORED,) * len(task.labels)
        return np.array([example.tags or hidden for example in examples], np.int8)
    kind, missing = (np.float32, np.nan) if task.head == "regression" else (np.int64, IGNORED)
    return np.array([missing if e.label is None else e.label for e in examples], kind)


def encode_windows(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> EncodedDataset:
    """Encode examples of `encode_segments` without cutting them: long ones in several rows.

    The rows of a long example are windows of ``length`` tokens that overlap by ``task.stride``
    tokens, at most half a window; the last one ends with the text. Of a pair, the longer segment
    is split, and the other one stands in each row, cut to half of it.

    Args:
        task: the task.
        examples: to encode.
        tokenizer: the model's tokenizer.
        length: maximum number of tokens per row.
    """
    first = encode_each(tokenizer, [example.text for example in examples])
    second = encode_each(tokenizer, [example.text_pair or "" for example in examples])
    rows = RowBuilder(tokenizer)
    for index, example in enumerate(examples):
        a, b = first[index], second[index]
        if example.text_pair is None:
            for begin, end, _ in _windows(len(a), length - 2, task.stride):
                rows.add(index, a[begin:end])
            continue
        limit = length - 3
        kept = limit if len(a) + len(b) <= limit else limit // 2
        is_first = len(a) > len(b)
        whole, split = (b[:kept], a) if is_first else (a[:kept], b)
        for begin, end, _ in _windows(len(split), limit - len(whole), task.stride):
            part = split[begin:end]
            rows.add(index, *((part, whole) if is_first else (whole, part)))
    arrays = rows.arrays()
    labels = _example_labels(task, examples)[arrays["example_index"]]
    return EncodedDataset(labels=labels, **arrays)


def omitted_tokens(
    task: TaskConfig,
    examples: Sequence[Example],
    encoded: EncodedDataset,
    tokenizer: Tokenizer,
    length: int,
) -> npt.NDArray[np.int64]:
    """Return how many tokens of each example are in none of its rows, int64 ``[examples]``.

    Only the texts of full rows are encoded again. Spans and tokens have windows: 0.

    Args:
        task: the task.
        examples: that were encoded.
        encoded: the result of `encode`.
        tokenizer: the model's tokenizer.
        length: maximum number of tokens per row.
    """
    omitted = np.zeros(len(examples), np.int64)
    full = np.unique(encoded.example_index[encoded.lengths >= length]).tolist()
    if task.head in ("spans", "tokens") or not full:
        return omitted
    own = [(examples[i].text, examples[i].text_pair or "", *examples[i].choices) for i in full]
    lengths = map(len, encode_each(tokenizer, list(itertools.chain.from_iterable(own))))
    num_rows = np.diff(encoded.example_offsets)
    for index in full:
        example = examples[index]
        first, second = next(lengths), next(lengths)
        if task.head == "embed":
            sizes = [first, second, *(next(lengths) for _ in example.choices)]
            omitted[index] = sum(max(size - (length - 2), 0) for size in sizes)
        elif example.choices:
            limit = length - 3 if example.text else length - 2
            sizes = [first + next(lengths) for _ in example.choices]
            omitted[index] = sum(max(size - limit, 0) for size in sizes)
        elif num_rows[index] > 1:
            # In windows, only the shorter segment can lack tokens.
            omitted[index] = max(min(first, second) - (length - 3) // 2, 0)
        else:
            limit = length - 2 if example.text_pair is None else length - 3
            omitted[index] = max(first + second - limit, 0)
    return omitted


def encode_choices(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> EncodedDataset:
    """Encode one row per choice or passage: the example's text, if it has one, then the choice.

    Args:
        task: the task.
        examples: to encode.
        tokenizer: the model's tokenizer.
        length: maximum number of tokens per row.
    """
    first = encode_each(tokenizer, [example.text for example in examples])
    choices = iter(encode_each(tokenizer, [text for e in examples for text in e.choices]))
    rows = RowBuilder(tokenizer)
    for index, example in enumerate(examples):
        for _ in example.choices:
            # Without a passage the choice is the only segment.
            choice = next(choices)
            if example.text:
                _add_pair(rows, index, first[index], choice, length, task.truncate)
            else:
                _add_pair(rows, index, choice, None, length, task.truncate)
    if task.head == "rerank":
        relevance = [e.relevance or (np.nan,) * len(e.choices) for e in examples]
        return EncodedDataset(labels=np.concatenate(relevance, dtype=np.float32), **rows.arrays())
    labels = np.array([IGNORED if e.label is None else e.label for e in examples], np.int64)
    return EncodedDataset(labels=labels, **rows.arrays())


def encode_texts(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> EncodedDataset:
    """Encode one row per text of an example.

    Args:
        task: the task.
        examples: to encode; all have as many texts.
        tokenizer: the model's tokenizer.
        length: maximum number of tokens per row.
    """
    texts = [
        (e.text, *(() if e.text_pair is None else (e.text_pair,)), *e.choices) for e in examples
    ]
    encoded = iter(encode_each(tokenizer, [text for each in texts for text in each]))
    rows = RowBuilder(tokenizer)
    for index, each in enumerate(texts):
        for _ in each:
            rows.add(index, next(encoded)[: length - 2])
    low, high = task.label_range or (0.0, 1.0)
    scores = [high if e.label is None else e.label for e in examples]
    labels = (np.array(scores, np.float64) - low) / (high - low)
    labels[[e.text_pair is None for e in examples]] = np.nan
    return EncodedDataset(labels=labels.astype(np.float32), **rows.arrays())


def _add_pair(
    rows: RowBuilder, example: int, first: Ids, second: Ids | None, length: int, truncate: str
) -> None:
    if second is None:
        rows.add(example, first[: length - 2])
        return
    kept = first_and_second_lengths(len(first), len(second), length - 3, truncate)
    rows.add(example, first[: kept[0]], second[: kept[1]])


def encode_words(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> EncodedDataset:
    """Encode sentences; each word is labelled at its first piece, in exactly one window.

    Words without a piece (such as a lone variation selector) become [UNK]. A sentence that is too
    long is split into windows that overlap by ``task.stride`` tokens; a word is labelled in the
    window where the nearer edge of the window is farther away.

    Args:
        task: the task.
        examples: to encode.
        tokenizer: the model's tokenizer.
        length: maximum number of tokens per row.
    """
    pieces = _pieces_of_words(examples, tokenizer)
    rows = RowBuilder(tokenizer)
    word_index: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    labels = []
    for index, example in enumerate(examples):
        words = pieces[index]
        starts = np.concatenate([[0], np.cumsum([len(word) for word in words])])
        ids = np.concatenate([np.empty(0, np.int32), *words])
        tags = np.array(example.tags, np.int32)
        for begin, end, scored in _windows(len(ids), length - 2, task.stride):
            size = rows.add(index, ids[begin:end])
            at = np.full(size, -1, np.int32)
            first = (starts[:-1] >= scored[0]) & (starts[:-1] < scored[1])
            numbers = np.flatnonzero(first)
            at[1 + starts[numbers] - begin] = numbers
            tag = np.full(size, IGNORED, np.int32)
            if len(tags):
                tag[at >= 0] = tags[at[at >= 0]]
            word_index.append(at)
            labels.append(tag)
    arrays = {**rows.arrays(), "word_index": np.concatenate(word_index)}
    return EncodedDataset(labels=np.concatenate(labels), **arrays)


def _windows(size: int, width: int, stride: int) -> list[tuple[int, int, tuple[int, int]]]:
    """Return begin and end of each window, and the part of the tokens that is scored in it."""
    if size <= width:
        return [(0, size, (0, size))]
    overlap = min(stride, width // 2)
    begins = [*range(0, size - width, width - overlap), size - width]
    # The border of two windows is the middle of what they share.
    borders = [0, *((b + a + width) // 2 for a, b in zip(begins, begins[1:], strict=False)), size]
    return [(begin, begin + width, (borders[i], borders[i + 1])) for i, begin in enumerate(begins)]


def _pieces_of_words(examples: Sequence[Example], tokenizer: Tokenizer) -> list[list[Ids]]:
    """Encode each word as within a sentence."""
    space = "" if _starts_words(tokenizer) else " "
    texts = [
        (space if position else "") + word
        for example in examples
        for position, word in enumerate(example.words)
    ]
    unknown = np.array([tokenizer.unk_id], np.int32)
    encoded = iter(encode_each(tokenizer, texts))
    return [
        [found if len(found := next(encoded)) else unknown for _ in example.words]
        for example in examples
    ]


def _starts_words(tokenizer: Tokenizer) -> bool:
    """Tell whether a text's first piece begins a word without a space before it.

    SentencePiece and WordPiece do so; byte-level BPE needs the space.
    """
    return bool(tokenizer.word_starts()[tokenizer.encode("a")[0]])


_LEAST_PASSAGE = 16
"""Tokens of the passage that a row has at least; longer questions are cut."""


def encode_spans(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> EncodedDataset:
    """Encode ``[CLS] question [SEP] window [SEP]`` rows; windows share ``task.stride`` tokens.

    The label of a row is the first answer that lies wholly in its window.

    Args:
        task: the task.
        examples: to encode.
        tokenizer: the model's tokenizer.
        length: maximum number of tokens per row.

    Raises:
        DataError: ``length`` leaves no room for a passage.
    """
    if length < 2 * _LEAST_PASSAGE:
        raise DataError(f"max_length={length}: spans need at least {2 * _LEAST_PASSAGE} tokens")
    questions = _encode_questions(task, examples, tokenizer)
    contexts = list(dict.fromkeys(example.text_pair or "" for example in examples))
    passages = {
        context: (ids, whole_characters(context, offsets))
        for context, (ids, offsets) in zip(
            contexts, tokenizer.encode_with_offsets(contexts), strict=True
        )
    }
    rows = RowBuilder(tokenizer)
    chars: list[npt.NDArray[np.int32]] = []
    labels = []
    for index, example in enumerate(examples):
        question = questions[index][: length - 3 - _LEAST_PASSAGE]
        ids, offsets = passages[example.text_pair or ""]
        answers = [covered_span(offsets, a.start, a.end) for a in example.answers or ()]
        for begin, end in windows(len(ids), length - 3 - len(question), task.stride):
            size = rows.add(index, question, ids[begin:end])
            row = np.full((size, 2), -1, np.int32)
            row[len(question) + 2 : size - 1] = offsets[begin:end]
            chars.append(row)
            labels.append(_label(answers, row))
    arrays = {**rows.arrays(), "char_offsets": np.concatenate(chars)}
    return EncodedDataset(labels=np.array(labels, np.int64), **arrays)


def windows(size: int, width: int, stride: int) -> list[tuple[int, int]]:
    """Split tokens into windows that overlap.

    The stride is at most half a window, so that windows advance whatever the question's length.

    Args:
        size: number of tokens.
        width: tokens per window.
        stride: tokens that neighbouring windows share.

    Returns:
        First token and one past the last of each window.
    """
    step = width - min(stride, width // 2)
    begins = [0]
    while begins[-1] + width < size:
        begins.append(begins[-1] + step)
    return [(begin, min(begin + width, size)) for begin in begins]


def _label(
    answers: Sequence[tuple[int, int] | None], chars: npt.NDArray[np.int32]
) -> tuple[int, int]:
    for answer in answers:
        if answer is not None and (pieces := pieces_of(chars, *answer)):
            return pieces
    return 0, 0


def unplaced_answers(examples: Sequence[Example], encoded: EncodedDataset) -> list[str]:
    """Return the ids of answered questions whose answers are in no window, so without a label."""
    has_label = np.zeros(len(examples), np.bool_)
    np.logical_or.at(has_label, encoded.example_index, encoded.labels[:, 0] > 0)
    return [
        example.id
        for example, has in zip(examples, has_label.tolist(), strict=True)
        if example.answers and not has
    ]


def _encode_questions(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer
) -> list[Ids]:
    """Encode questions; ``task.mask_text`` in them becomes [MASK]."""
    if not task.mask_text:
        return encode_each(tokenizer, [example.text for example in examples])
    parts = [example.text.split(task.mask_text) for example in examples]
    encoded = iter(encode_each(tokenizer, [part.strip() for found in parts for part in found]))
    mask = np.array([tokenizer.mask_id], np.int32)
    return [
        np.concatenate([ids for _ in found for ids in (mask, next(encoded))][1:]) for found in parts
    ]


_FIRST_MARK = 0x300


_JOINER = "\u200d"


def covered_span(chars: npt.NDArray[np.int32], start: int, end: int) -> tuple[int, int] | None:
    """Return the part of a span from the first to the last character that pieces stand for.

    White space and characters that the tokenizer removes, such as a zero-width space, belong to no
    piece; at the ends of an answer they are left out.

    Args:
        chars: characters of each piece of the passage, -1 for other tokens.
        start: first character.
        end: character after the last one.

    Returns:
        First character, and the one after the last; None: no piece stands for any of them.
    """
    touched = chars[(chars[:, 0] < end) & (chars[:, 1] > start) & (chars[:, 0] < chars[:, 1])]
    if not len(touched):
        return None
    return max(start, int(touched[:, 0].min())), min(end, int(touched[:, 1].max()))


def whole_characters(text: str, spans: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Extend the spans of pieces to all code points of the characters that they touch.

    A character may be several code points: a letter with accents that are not composed, the
    letters of a Korean syllable, an emoji with its modifiers. Where encoding composes them, the
    tokenizer reports the first code point only.

    Args:
        text: the text.
        spans: int32 ``[pieces, 2]``, first code point and the one after the last.
    """
    continuing = {c for c in set(text) if ord(c) >= _FIRST_MARK and _continues_character(c)}
    if not continuing:
        return spans
    is_start = np.array([c not in continuing for c in text] + [True])
    for at in np.flatnonzero(~is_start).tolist():
        # A mark at the beginning or after white space is a character of its own.
        is_start[at] = at == 0 or text[at - 1].isspace()
    joined = [at + 1 for at, c in enumerate(text[:-1]) if c == _JOINER]
    for at in joined:
        is_start[at] &= unicodedata.category(text[at]) != "So"
    numbers = np.arange(len(text) + 1)
    begins = np.maximum.accumulate(np.where(is_start, numbers, 0))
    ends = np.minimum.accumulate(np.where(is_start, numbers, len(text))[::-1])[::-1]
    extended = np.stack([begins[spans[:, 0]], ends[spans[:, 1]]], axis=1).astype(np.int32)
    is_empty = spans[:, :1] == spans[:, 1:]
    # A blank piece inside a character must not lead back.
    result: npt.NDArray[np.int32] = np.maximum.accumulate(
        np.where(is_empty, spans, extended), axis=0
    )
    return result


def _continues_character(c: str) -> bool:
    """Tell whether a code point belongs to the character before it, as in Unicode's UAX 29."""
    return (
        unicodedata.category(c).startswith("M")
        or c in ("\u200c", _JOINER)
        # Vowels and final consonants of decomposed Korean, and skin tones of emoji.
        or "\u1160" <= c <= "\u11ff"
        or "\ud7b0" <= c <= "\ud7fb"
        or "\U0001f3fb" <= c <= "\U0001f3ff"
    )


def pieces_of(chars: npt.NDArray[np.int32], start: int, end: int) -> tuple[int, int] | None:
    """Return the first and last token of a row that cover the characters of a span.

    Args:
        chars: characters of each token, -1 outside the passage.
        start: first character.
        end: character after the last one.

    Returns:
        Indices of the tokens; None if the span is not wholly in this row.
    """
    inside = np.flatnonzero(chars[:, 0] >= 0)
    if not len(inside) or chars[inside, 0].min() > start or chars[inside, 1].max() < end:
        return None
    after = inside[chars[inside, 1] > start]
    before = inside[chars[inside, 0] < end]
    if not len(after) or not len(before) or before[-1] < after[0]:
        return None
    return int(after[0]), int(before[-1])


logger = logging.getLogger(__name__)


_VERSION = 3
"""Part of the cache's key; raised when encoding changes."""


_ENCODERS: Mapping[
    str, Callable[[TaskConfig, Sequence[Example], Tokenizer, int], EncodedDataset]
] = {
    "classification": encode_segments,
    "multilabel": encode_segments,
    "regression": encode_segments,
    "spans": encode_spans,
    "tokens": encode_words,
    "choices": encode_choices,
    "embed": encode_texts,
    "rerank": encode_choices,
}


_USED = ("head", "stride", "truncate", "mask_text", "merge_sentences")
"""Keys of a task that encoding depends on; that of pairs to embed also on ``label_range``."""


def encode(
    task: TaskConfig,
    examples: Sequence[Example],
    tokenizer: Tokenizer,
    max_length: int | None = None,
    cache: Path | None = None,
) -> EncodedDataset:
    """Encode examples; a pure function of its arguments but ``cache``.

    Args:
        task: the task; its ``long_text`` says whether texts that are longer than a row are cut.
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
    encoder = _ENCODERS[task.head]
    if task.long_text != "truncate" and task.head in POOLED_HEADS:
        encoder = encode_windows
    if cache is None:
        encoded = encoder(task, examples, tokenizer, length)
    else:
        kind = "-windows" if encoder is encode_windows else ""
        folder = cache / f"{task.name}{kind}-{_key(task, examples, tokenizer, length)}"
        if not folder.is_dir():
            encoder(task, examples, tokenizer, length).save(folder)
        encoded = EncodedDataset.load(folder)
        num_labels = len(task.labels) if task.head in ("classification", "tokens") else 0
        num_labels = 2 if task.head == "multilabel" else num_labels
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
    used = (*_USED, "label_range") if task.head == "embed" else _USED
    content = [_VERSION, {key: values[key] for key in used}, length, tokenizer.fingerprint]
    if task.head == "multilabel":
        content.append(len(task.labels))
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for example in examples:
        digest.update(repr(example).encode())
    return digest.hexdigest()[:16]
