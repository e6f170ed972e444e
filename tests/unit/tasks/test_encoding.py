"""Encoding of segments, choices and words, and the cache."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_deberta.errors import DataError
from megatron_deberta.tasks import EncodedDataset, Example, encode
from megatron_deberta.tasks.encoding import first_and_second_lengths, omitted_tokens
from megatron_deberta.tokenizer import Tokenizer
from tests.support.task_files import make_task


def rows_of(encoded: EncodedDataset) -> list[list[int]]:
    return [encoded.input_ids[encoded.row(i)].tolist() for i in range(encoded.num_rows)]


def test_pairs_have_two_token_types(tokenizer: Tokenizer) -> None:
    examples = [
        Example(id="0", text="the fox", text_pair="a dog", label=1),
        Example(id="1", text="the fox"),
    ]
    encoded = encode(make_task("classification"), examples, tokenizer)
    first, second = tokenizer.encode("the fox"), tokenizer.encode("a dog")
    cls, sep = tokenizer.cls_id, tokenizer.sep_id
    assert rows_of(encoded) == [[cls, *first, sep, *second, sep], [cls, *first, sep]]
    types = [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert encoded.token_type_ids[encoded.row(0)].tolist() == types
    assert not encoded.token_type_ids[encoded.row(1)].any()
    assert encoded.labels.tolist() == [1, -100]
    kinds = [array.dtype for array in encoded.arrays().values()]
    assert kinds == [np.int32, np.uint8, np.int64, np.int64, np.int64, np.int32, np.int32]


def test_a_score_that_is_missing_is_not_a_number(tokenizer: Tokenizer) -> None:
    examples = [Example(id="0", text="the fox", label=2.5), Example(id="1", text="a dog")]
    encoded = encode(make_task("regression"), examples, tokenizer)
    assert encoded.labels.dtype == np.float32
    assert encoded.labels[0] == 2.5
    assert np.isnan(encoded.labels[1])


@pytest.mark.parametrize("truncate", ["longest", "first", "second"])
def test_the_named_segment_is_cut(truncate: str) -> None:
    for first in range(12):
        for second in range(12):
            kept = first_and_second_lengths(first, second, 9, truncate)
            assert sum(kept) == min(first + second, 9)
            assert kept[0] <= first
            assert kept[1] <= second
            if truncate == "longest" and first + second > 9:
                # Only what is longer than the other segment was cut.
                assert kept[0] == first or kept[1] == second or abs(kept[0] - kept[1]) <= 1
                assert (kept[0] == first) or kept[0] >= kept[1]
                assert (kept[1] == second) or kept[1] + 1 >= kept[0]
    cut = {"first": (3, 6), "second": (5, 4), "longest": (5, 4)}
    assert first_and_second_lengths(5, 6, 9, truncate) == cut[truncate]


def test_long_pairs_keep_their_separators(tokenizer: Tokenizer) -> None:
    example = Example(id="0", text="quick brown fox " * 9, text_pair="lazy dog " * 9)
    encoded = encode(make_task("classification"), [example], tokenizer, 16)
    (row,) = rows_of(encoded)
    assert len(row) == 16
    assert row.count(tokenizer.sep_id) == 2
    assert row[-1] == tokenizer.sep_id


def test_windows_cover_a_long_text(tokenizer: Tokenizer) -> None:
    """All tokens of the longer segment, with those of the other one; labels are the example's."""
    task, length = make_task("classification", stride=4), 16
    texts = ["the cat sat on a mat and " * 8, "a cat", "the dog " * 3]
    examples = [
        Example(id="0", text=texts[0], label=1),
        Example(id="1", text=texts[1], label=0),
        Example(id="2", text=texts[1], text_pair=texts[0]),
        Example(id="3", text=texts[0], text_pair=texts[0]),
        Example(id="4", text=texts[1], text_pair=texts[1]),
    ]
    found = encode(replace(task, long_text="mean"), examples, tokenizer, length)
    cut = encode(task, examples, tokenizer, length)
    rows = rows_of(found)
    long = tokenizer.encode(texts[0])
    short = tokenizer.encode(texts[1])
    of_first = [row for row, i in zip(rows, found.example_index, strict=True) if i == 0]
    width = length - 2
    begins = [*range(0, len(long) - width, width - 4), len(long) - width]
    assert [row[1:-1] for row in of_first] == [long[begin : begin + width] for begin in begins]
    assert found.labels[found.example_index == 0].tolist() == [1] * len(begins)
    for row, index in zip(rows, found.example_index, strict=True):
        assert len(row) <= length
        if index == 2:
            assert row[1 : len(short) + 2] == [*short, tokenizer.sep_id]
    assert rows_of(cut)[1] == rows[len(begins)]
    assert rows_of(cut)[-1] == rows[-1]
    # Half of the 13 places is for the shorter segment.
    omitted = omitted_tokens(task, examples, found, tokenizer, length).tolist()
    assert omitted == [0, 0, 0, len(long) - 6, 0]
    total = len(short) + len(long)
    omitted = omitted_tokens(task, examples, cut, tokenizer, length).tolist()
    assert omitted == [len(long) - 14, 0, total - 13, 2 * len(long) - 13, 0]


def test_a_text_that_just_fits_lacks_nothing(tokenizer: Tokenizer) -> None:
    task, text = make_task("classification"), "the cat sat on a mat"
    examples = [Example(id="0", text=text)]
    length = len(tokenizer.encode(text)) + 2
    for size, lacking in ((length, 0), (length - 1, 1)):
        encoded = encode(task, examples, tokenizer, size)
        assert omitted_tokens(task, examples, encoded, tokenizer, size).tolist() == [lacking]


def test_choices_vary_in_number(tokenizer: Tokenizer) -> None:
    examples = [
        Example(id="0", text="the fox", choices=("runs", "jumps", "reads"), label=2),
        Example(id="1", choices=("a dog", "a river")),
    ]
    encoded = encode(make_task("choices"), examples, tokenizer)
    assert encoded.example_index.tolist() == [0, 0, 0, 1, 1]
    assert encoded.example_offsets.tolist() == [0, 3, 5]
    assert encoded.labels.tolist() == [2, -100]
    # Without a passage the choice is the first segment.
    assert not encoded.token_type_ids[encoded.row(3)].any()


def test_words_are_labelled_on_their_first_piece(tokenizer: Tokenizer) -> None:
    words = ("lazy", "\x07", "children")
    encoded = encode(make_task("tokens"), [Example(id="0", words=words, tags=(1, 0, 2))], tokenizer)
    sizes = [len(tokenizer.encode(words[0])), 1, len(tokenizer.encode(words[2]))]
    assert sizes[2] > 1
    expected = [-100, 1, *[-100] * (sizes[0] - 1), 0, 2, *[-100] * (sizes[2] - 1), -100]
    assert encoded.labels.tolist() == expected
    # A word without a piece is [UNK], so that every word has a label.
    assert encoded.input_ids[1 + sizes[0]] == tokenizer.unk_id
    assert encoded.word_index[encoded.word_index >= 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["unigram", "byte_level"])
def test_words_of_marks_and_invisible_characters_keep_their_labels(
    kind: str, tokenizer: Tokenizer, byte_level: Tokenizer
) -> None:
    used = tokenizer if kind == "unigram" else byte_level
    words = (
        "cafe\u0301",
        "\u0301",
        "\u200b",
        "fox\u200b",
        "\u200bfox",
        "\u1112\u1161\u11ab",
        "\ufe0f",
    )
    tags = (1, 2, 0, 1, 2, 0, 1)
    encoded = encode(make_task("tokens"), [Example(id="0", words=words, tags=tags)], used)
    at = encoded.word_index >= 0
    assert encoded.word_index[at].tolist() == list(range(len(words)))
    assert encoded.labels[at].tolist() == list(tags)


def test_each_word_of_a_long_sentence_is_labelled_once(tokenizer: Tokenizer) -> None:
    words = tuple(f"fox{i}" for i in range(60))
    tags = tuple(i % 3 for i in range(60))
    task = make_task("tokens", stride=12)
    encoded = encode(task, [Example(id="0", words=words, tags=tags)], tokenizer)
    assert encoded.num_rows > 3
    assert encoded.lengths.max() == 32
    at = encoded.word_index >= 0
    assert encoded.word_index[at].tolist() == list(range(60))
    assert encoded.labels[at].tolist() == list(tags)
    # Away from the ends of the sentence, a labelled word has tokens on both sides.
    for row in range(1, encoded.num_rows - 1):
        inner = np.flatnonzero(encoded.word_index[encoded.row(row)] >= 0)
        assert inner[0] >= 5
        assert inner[-1] <= 32 - 5


def test_words_of_byte_level_bpe_begin_with_a_space(byte_level: Tokenizer) -> None:
    words = ("lazy", "dog")
    encoded = encode(make_task("tokens"), [Example(id="0", words=words)], byte_level)
    assert encoded.input_ids[1:-1].tolist() == byte_level.encode("lazy dog")


def test_the_cache_depends_on_everything(tokenizer: Tokenizer, tmp_path: Path) -> None:
    task = make_task("classification")
    examples = [Example(id="0", text="the fox", text_pair="a dog", label=1)]
    direct = encode(task, examples, tokenizer)
    for _ in range(2):
        cached = encode(task, examples, tokenizer, cache=tmp_path)
        assert cached.fingerprint == direct.fingerprint
    assert len(list(tmp_path.iterdir())) == 1
    encode(task, examples, tokenizer, 16, cache=tmp_path)
    encode(make_task("classification", truncate="first"), examples, tokenizer, cache=tmp_path)
    encode(task, [Example(id="0", text="the fox", label=1)], tokenizer, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


CLASSES = make_task("classification")


def cached(tokenizer: Tokenizer, cache: Path) -> Path:
    """Return the folder of cached examples."""
    examples = [Example(id=str(n), text="a man and a dog", label=n % 3) for n in range(5)]
    encode(CLASSES, examples, tokenizer, 16, cache)
    (folder,) = cache.iterdir()
    return folder


def test_what_a_process_leaves_that_is_killed_after_publishing_is_removed(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (pid := os.fork()):
        monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: os._exit(9))
        try:
            cached(tokenizer, tmp_path)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert len(list(tmp_path.iterdir())) == 2
    assert cached(tokenizer, tmp_path).is_dir()


OVERFLOW = (1 << 62, -(1 << 62) - 8)
"""The difference of these 64-bit numbers is one above 0."""


@pytest.mark.parametrize("name", ["input_ids", "token_type_ids", "labels", "example_index"])
def test_a_flipped_bit_of_the_cache_is_found(
    tokenizer: Tokenizer, tmp_path: Path, name: str
) -> None:
    path = cached(tokenizer, tmp_path) / f"{name}.npy"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"damaged .*SHA-256 differs.* remove this folder"):
        cached(tokenizer, tmp_path)


def test_a_damaged_header_of_the_cache_is_an_error_of_one_line(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = cached(tokenizer, tmp_path) / "input_ids.npy"
    content = path.read_bytes()
    expected = np.load(path, allow_pickle=False)
    generator, messages = np.random.default_rng(0), list[str]()
    for _ in range(300):
        damaged = bytearray(content)
        for place in generator.integers(128, size=2).tolist():
            damaged[place] = int(generator.choice([*b"('9, ", generator.integers(256)]))
        path.write_bytes(damaged)
        try:
            folder = cached(tokenizer, tmp_path)
        except DataError as error:
            messages.append(str(error))
        else:
            # Spaces of the header, which mean nothing.
            assert np.array_equal(EncodedDataset.load(folder).input_ids, expected)
    assert len(messages) > 200
    assert all(text.endswith("; remove this folder") and "\n" not in text for text in messages)
    for make in (os.mkfifo, os.mkdir):
        path.unlink()
        make(path)
        with pytest.raises(DataError, match="input_ids.npy is missing or not a regular file"):
            cached(tokenizer, tmp_path)


@pytest.mark.parametrize(
    ("name", "index", "value", "problem"),
    [
        ("input_ids", 3, 1 << 30, "input_ids 1 to 1073741824 with a vocabulary of"),
        ("input_ids", 3, -1, "input_ids -1 to"),
        ("token_type_ids", 2, 7, "token_type_ids other than 0 and 1"),
        ("labels", 1, 3, "labels 0 to 3 of 3 classes"),
        ("labels", 1, -1, "labels -1 to 2 of 3 classes"),
        ("row_offsets", 0, 1, "row_offsets do not divide the tokens into rows"),
        ("row_offsets", 1, 1 << 40, "row_offsets do not divide the tokens into rows"),
        ("row_offsets", slice(1, 3), OVERFLOW, "row_offsets do not divide the tokens into rows"),
        ("example_index", -1, 9, "example_index does not number the examples"),
        ("token_type_ids", -1, None, r"token_type_ids uint8 \[\d+\] instead of"),
        ("labels", -1, None, r"labels int64 \[4\] instead of int64 \[5\]"),
    ],
)
def test_indices_of_the_cache_lie_in_what_they_refer_to(
    tokenizer: Tokenizer, tmp_path: Path, name: str, index: Any, value: Any, problem: str
) -> None:
    """Also if the fingerprint was written for the wrong arrays."""
    folder = cached(tokenizer, tmp_path)
    arrays = {key: array.copy() for key, array in EncodedDataset.load(folder).arrays().items()}
    if value is None:
        arrays[name] = np.delete(arrays[name], index)
    else:
        arrays[name][index] = value
    shutil.rmtree(folder)
    EncodedDataset(**arrays).save(folder)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=f"damaged .{problem}"):
        cached(tokenizer, tmp_path)


def test_no_examples(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="no examples to encode"):
        encode(make_task("classification"), [], tokenizer)
