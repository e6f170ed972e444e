"""Encoding of examples as arrays of tokens and labels, with a cache."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.config.schema import GROUPED_HEADS
from megatron_deberta.errors import DataError
from megatron_deberta.files import folder_writer
from megatron_deberta.tasks.encoded import IGNORED, EncodedDataset
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.task import POOLED_HEADS, TaskConfig
from megatron_deberta.tokenizer import Tokenizer

Ids = npt.NDArray[np.int32]


EncodedRow = tuple[int, Ids, Ids | None]
"""Index of the row's example, and the tokens of its first and second segment; None: no second."""


def row_arrays(tokenizer: Tokenizer, rows: Sequence[EncodedRow]) -> dict[str, Any]:
    """Return the arrays of ``EncodedDataset`` but labels, offsets and word indices.

    Args:
        tokenizer: for the ids of [CLS] and [SEP].
        rows: of all examples.
    """
    cls, sep = (np.array([token], np.int32) for token in (tokenizer.cls_id, tokenizer.sep_id))
    ids: list[Ids] = []
    types: list[npt.NDArray[np.uint8]] = []
    for _, first, second in rows:
        ids += [cls, first, sep] if second is None else [cls, first, sep, second, sep]
        pair_tokens = 0 if second is None else len(second) + 1
        types.append(np.repeat(np.array([0, 1], np.uint8), [len(first) + 2, pair_tokens]))
    lengths = [len(each) for each in types]
    return {
        "input_ids": np.concatenate(ids),
        "token_type_ids": np.concatenate(types),
        "row_offsets": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        "example_index": np.array([index for index, *_ in rows], np.int64),
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


def encode_each(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, Ids]:
    """Return the tokens of each text; equal texts are encoded once."""
    distinct = list(dict.fromkeys(texts))
    ids, lengths = tokenizer.encode_texts(distinct)
    return dict(zip(distinct, np.split(ids, np.cumsum(lengths)[:-1]), strict=True))


def _segments(task: TaskConfig, example: Example) -> list[tuple[str, str | None]]:
    """Return the first and the second segment of each row of an example; None: no second."""
    pair = example.text_pair
    if task.head == "embed":
        texts = (example.text, *(() if pair is None else (pair,)), *example.choices)
        return [(text, None) for text in texts]
    if task.head not in GROUPED_HEADS:
        return [(example.text, pair)]
    if not example.text:
        # Without a passage the choice is the only segment.
        return [(choice, None) for choice in example.choices]
    return [(example.text, choice) for choice in example.choices]


def _encode_each_segment(
    tokenizer: Tokenizer, segments: Iterable[Sequence[tuple[str, str | None]]]
) -> dict[str | None, Ids | None]:
    """Return the tokens of each segment of `_segments`; None of None."""
    texts = (text for rows in segments for row in rows for text in row if text is not None)
    tokens: dict[str | None, Ids | None] = {None: None}
    tokens.update(encode_each(tokenizer, texts).items())
    return tokens


def encode_segments(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer, length: int
) -> EncodedDataset:
    """Encode rows of one or two segments: those of an example, of a choice or passage, or a text.

    Segments that are too long are cut, unless ``task.long_text`` asks for windows.

    Args:
        task: the task.
        examples: to encode; in embeddings, all have as many texts.
        tokenizer: the model's tokenizer.
        length: maximum number of tokens per row.
    """
    segments = [_segments(task, example) for example in examples]
    tokens = _encode_each_segment(tokenizer, segments)
    rows: list[EncodedRow] = []
    for index, each in enumerate(segments):
        for text, pair in each:
            first, second = tokens[text], tokens[pair]
            assert first is not None
            if has_windows(task):
                rows += [(index, *part) for part in _split(first, second, length, task.stride)]
            elif second is None:
                rows.append((index, first[: length - 2], None))
            else:
                kept = first_and_second_lengths(len(first), len(second), length - 3, task.truncate)
                rows.append((index, first[: kept[0]], second[: kept[1]]))
    arrays, labels = row_arrays(tokenizer, rows), _labels(task, examples)
    if task.head in POOLED_HEADS:
        labels = labels[arrays["example_index"]]
    return EncodedDataset(labels=labels, **arrays)


def _labels(task: TaskConfig, examples: Sequence[Example]) -> npt.NDArray[Any]:
    """Return the labels of examples of `encode_segments`; of rerank, of each passage."""
    if task.head == "multilabel":
        hidden = (IGNORED,) * len(task.labels)
        return np.array([example.tags or hidden for example in examples], np.int8)
    if task.head == "rerank":
        relevance = [e.relevance or (np.nan,) * len(e.choices) for e in examples]
        return np.concatenate(relevance, dtype=np.float32)
    if task.head == "embed":
        low, high = task.label_range or (0.0, 1.0)
        scores = [high if e.label is None else e.label for e in examples]
        labels = (np.array(scores, np.float64) - low) / (high - low)
        labels[[e.text_pair is None for e in examples]] = np.nan
        return labels.astype(np.float32)
    kind, missing = (np.float32, np.nan) if task.head == "regression" else (np.int64, IGNORED)
    return np.array([missing if e.label is None else e.label for e in examples], kind)


def has_windows(task: TaskConfig) -> bool:
    """Return whether long texts of a task are divided into several rows, and not cut."""
    return task.long_text != "truncate" and task.head in POOLED_HEADS


def _split(
    first: Ids, second: Ids | None, length: int, stride: int
) -> Iterator[tuple[Ids, Ids | None]]:
    """Yield windows of ``length`` tokens that overlap by ``stride``, at most half a window.

    The last one ends with the text. Of a pair, the longer segment is split, and the other one
    stands in each row, cut to half of it.
    """
    if second is None:
        for begin, end, _ in _windows(len(first), length - 2, stride):
            yield first[begin:end], None
        return
    limit = length - 3
    kept = limit if len(first) + len(second) <= limit else limit // 2
    is_first = len(first) > len(second)
    whole, split = (second[:kept], first) if is_first else (first[:kept], second)
    for begin, end, _ in _windows(len(split), limit - len(whole), stride):
        yield (split[begin:end], whole) if is_first else (whole, split[begin:end])


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
    segments = {index: _segments(task, examples[index]) for index in full}
    tokens = _encode_each_segment(tokenizer, segments.values())
    num_rows = np.diff(encoded.example_offsets)
    for index, rows in segments.items():
        for row in rows:
            sizes = [len(ids) for text in row if (ids := tokens[text]) is not None]
            room = length - 1 - len(sizes)
            if num_rows[index] == len(rows):
                omitted[index] += max(sum(sizes) - room, 0)
            elif len(sizes) == 2:
                # In windows, only the shorter segment can lack tokens.
                omitted[index] += max(min(sizes) - room // 2, 0)
    return omitted


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
    rows: list[EncodedRow] = []
    word_index: list[npt.NDArray[np.int32]] = []
    labels = []
    for index, example in enumerate(examples):
        words = pieces[index]
        starts = np.concatenate([[0], np.cumsum([len(word) for word in words])])
        ids = np.concatenate([np.empty(0, np.int32), *words])
        tags = np.array(example.tags, np.int32)
        for begin, end, scored in _windows(len(ids), length - 2, task.stride):
            rows.append((index, ids[begin:end], None))
            at = np.full(end - begin + 2, -1, np.int32)
            first = (starts[:-1] >= scored[0]) & (starts[:-1] < scored[1])
            numbers = np.flatnonzero(first)
            at[1 + starts[numbers] - begin] = numbers
            tag = np.full(len(at), IGNORED, np.int32)
            if len(tags):
                tag[at >= 0] = tags[at[at >= 0]]
            word_index.append(at)
            labels.append(tag)
    arrays = {**row_arrays(tokenizer, rows), "word_index": np.concatenate(word_index)}
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
        [(space if position else "") + word for position, word in enumerate(example.words)]
        for example in examples
    ]
    unknown = np.array([tokenizer.unk_id], np.int32)
    ids = encode_each(tokenizer, itertools.chain.from_iterable(texts))
    return [[ids[text] if len(ids[text]) else unknown for text in words] for words in texts]


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
    rows: list[EncodedRow] = []
    chars: list[npt.NDArray[np.int32]] = []
    labels = []
    for index, example in enumerate(examples):
        question = questions[index][: length - 3 - _LEAST_PASSAGE]
        ids, offsets = passages[example.text_pair or ""]
        answers = [covered_span(offsets, a.start, a.end) for a in example.answers or ()]
        for begin, end in windows(len(ids), length - 3 - len(question), task.stride):
            rows.append((index, question, ids[begin:end]))
            row = np.full((len(question) + end - begin + 3, 2), -1, np.int32)
            row[len(question) + 2 : -1] = offsets[begin:end]
            chars.append(row)
            labels.append(_label(answers, row))
    arrays = {**row_arrays(tokenizer, rows), "char_offsets": np.concatenate(chars)}
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


def _encode_questions(
    task: TaskConfig, examples: Sequence[Example], tokenizer: Tokenizer
) -> list[Ids]:
    """Encode questions; ``task.mask_text`` in them becomes [MASK]."""
    if not task.mask_text:
        ids = encode_each(tokenizer, (example.text for example in examples))
        return [ids[example.text] for example in examples]
    parts = [[part.strip() for part in e.text.split(task.mask_text)] for e in examples]
    ids = encode_each(tokenizer, itertools.chain.from_iterable(parts))
    mask = np.array([tokenizer.mask_id], np.int32)
    return [
        np.concatenate([each for part in found for each in (mask, ids[part])][1:])
        for found in parts
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
    encoder = {"spans": encode_spans, "tokens": encode_words}.get(task.head, encode_segments)
    if cache is None:
        encoded = encoder(task, examples, tokenizer, length)
    else:
        kind = "-windows" if has_windows(task) else ""
        folder = cache / f"{task.name}{kind}-{_key(task, examples, tokenizer, length)}"
        if folder.is_dir():
            # Removes what a process left that was killed just after it published this folder.
            folder_writer(folder)
        else:
            encoder(task, examples, tokenizer, length).save(folder)
        encoded = EncodedDataset.load(folder)
        num_words = [len(example.words) for example in examples]
        problem = encoded.find_problem(task.head, num_words, tokenizer.vocab_size, len(task.labels))
        if problem:
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
    has_label = np.zeros(len(examples), np.bool_)
    np.logical_or.at(has_label, encoded.example_index, encoded.labels[:, 0] > 0)
    labelled = zip(examples, has_label.tolist(), strict=True)
    unplaced = [example.id for example, has in labelled if example.answers and not has]
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
