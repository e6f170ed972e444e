"""Spans: offsets of pieces, windows, the best span, and SQuAD's and ReCoRD's metrics."""

from __future__ import annotations

import itertools
import json
import unicodedata
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_deberta.errors import DataError
from megatron_deberta.tasks import (
    Answer,
    EncodedDataset,
    Example,
    TaskConfig,
    encode,
    load_task,
    predict,
    read_examples,
    score,
)
from megatron_deberta.tasks.encoding import pieces_of, windows
from megatron_deberta.tasks.metrics import best_threshold, exact_match, normalize_answer, token_f1
from megatron_deberta.tokenizer import Tokenizer
from megatron_deberta.tokenizer.loading import load_tokenizer
from tests.support import task_files
from tests.support.corpus import corpus_path
from tests.support.machine_text import HOSTILE_PIECES

PASSAGE = "The quick fox ran. It met a dog near the river."


def make_task(**changes: Any) -> TaskConfig:
    metrics = changes.pop("metrics", ["f1", "exact"])
    return task_files.make_task("spans", *metrics, **{"max_length": 48, "stride": 12, **changes})


def question(text: str, *answers: Answer, context: str = PASSAGE) -> Example:
    return Example(id=text, text=text, text_pair=context, answers=answers)


def oracle(encoded: EncodedDataset, null: float = 0.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return logits that point at the labels."""
    logits = np.zeros((len(encoded.input_ids), 2), np.float32)
    logits[encoded.row_offsets[:-1]] = null
    for row, (start, end) in enumerate(encoded.labels):
        logits[encoded.row_offsets[row] + start, 0] += 5
        logits[encoded.row_offsets[row] + end, 1] += 5
    return logits


@pytest.fixture(scope="session")
def bpe(bpe_dir: str) -> Tokenizer:
    return load_tokenizer(bpe_dir)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Beatles", "beatles"),
        ("  a   dog\tand an  apple. ", "dog and apple"),
        ("U.S.A.", "usa"),
        ("Theatre of the absurd", "theatre of absurd"),
        ("“quotes” stay", "“quotes” stay"),
        ("1,000.50", "100050"),
        ("the", ""),
        ("Å Straße", "å straße"),
    ],
)
def test_normalisation_worked_out_by_hand(text: str, normalized: str) -> None:
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("found", "truth", "exact", "f1"),
    [
        ("The fox.", "fox", 1, 1),
        ("a red fox", "the fox", 0, 2 / 3),
        # Two of three words found, two of four right: precision 2/3, recall 1/2.
        ("red fox ran", "fox ran to river", 0, 2 * (2 / 3) * (1 / 2) / (2 / 3 + 1 / 2)),
        # A word counts as often as it occurs on both sides.
        ("fox fox", "fox", 0, 2 / 3),
        ("dog", "cat", 0, 0),
        ("", "cat", 0, 0),
        ("the", "a", 1, 1),
    ],
)
def test_exact_match_and_f1_worked_out_by_hand(
    found: str, truth: str, exact: float, f1: float
) -> None:
    assert exact_match(found, truth) == exact
    assert token_f1(found, truth) == pytest.approx(f1)


@pytest.mark.parametrize("kind", ["unigram", "bpe", "byte_level"])
def test_every_piece_has_a_valid_offset(
    kind: str, tokenizer: Tokenizer, bpe: Tokenizer, byte_level: Tokenizer
) -> None:
    used = {"unigram": tokenizer, "bpe": bpe, "byte_level": byte_level}[kind]
    hostile = [piece for piece in HOSTILE_PIECES if piece not in ("x" * 300, "ab" * 200)]
    texts = [PASSAGE, " 黑豹队 的 308分", "  two  spaces\tand … \u00a0ﬁ", " ".join(hostile), ""]
    texts += hostile
    for text, (ids, spans) in zip(texts, used.encode_with_offsets(texts), strict=True):
        assert ids.tolist() == used.encode(text)
        assert spans.shape == (len(ids), 2)
        assert (spans[:, 0] <= spans[:, 1]).all()
        assert (spans >= 0).all()
        assert (spans <= len(text)).all()
        # Ends never go back, so a span of pieces is a span of text.
        assert (np.diff(spans[:, 1]) >= 0).all()
        for start, end in spans:
            assert text[start:end] == text[start:end].strip()


def test_a_space_before_the_text_is_not_its_first_character(tokenizer: Tokenizer) -> None:
    ids, spans = tokenizer.encode_with_offsets(["Tea"])[0]
    assert tokenizer.piece(int(ids[0])) == "▁"
    assert spans[:2].tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize(
    ("size", "width", "stride"), [(5, 9, 3), (9, 9, 3), (10, 9, 3), (40, 9, 8)]
)
def test_windows_cover_everything(size: int, width: int, stride: int) -> None:
    found = windows(size, width, stride)
    assert found[0][0] == 0
    assert found[-1][1] == size
    assert all(end - begin <= width for begin, end in found)
    shared = min(stride, width // 2)
    assert all(b[0] == a[1] - shared for a, b in itertools.pairwise(found))
    assert windows(0, width, stride) == [(0, 0)]


def test_labels_are_where_the_answer_is(tokenizer: Tokenizer) -> None:
    context = PASSAGE * 4
    at = context.rindex("a dog")
    example = question("Who?", Answer("a dog", at), context=context)
    encoded = encode(make_task(), [example], tokenizer)
    assert encoded.num_rows > 3
    for row in range(encoded.num_rows):
        chars = encoded.char_offsets[encoded.row(row)]
        first, last = encoded.labels[row]
        if first:
            assert context[chars[first, 0] : chars[last, 1]] == "a dog"
        else:
            assert pieces_of(chars, at, at + 5) is None
        # The question and special tokens have no characters.
        outside = encoded.token_type_ids[encoded.row(row)] == 0
        assert (chars[outside] == -1).all()
        assert (chars[-1] == -1).all()
    assert 1 <= (encoded.labels[:, 0] > 0).sum() <= 2
    # The first token of a row is the label of a window without the answer.
    assert (encoded.labels[encoded.labels[:, 0] == 0] == 0).all()


def test_a_long_question_is_cut(tokenizer: Tokenizer) -> None:
    encoded = encode(make_task(), [question("fox " * 60, Answer("fox", 10))], tokenizer)
    assert encoded.lengths.max() == 48
    assert (encoded.labels[:, 0] > 0).any()


def test_the_best_span_is_that_of_an_exhaustive_search(tokenizer: Tokenizer) -> None:
    task = make_task(max_answer_length=4)
    examples = [question(f"{i}", Answer("fox", 10), context=PASSAGE * (i + 1)) for i in range(3)]
    encoded = encode(task, examples, tokenizer)
    rng = np.random.default_rng(0)
    outputs = rng.normal(size=(len(encoded.input_ids), 2)).astype(np.float32)
    for index, found in enumerate(predict(task, examples, encoded, outputs)):
        best: tuple[float, str] = (-np.inf, "")
        nulls = []
        for row in np.flatnonzero(encoded.example_index == index):
            logits = outputs[encoded.row(row)].astype(float)
            chars = encoded.char_offsets[encoded.row(row)]
            nulls.append(logits[0].sum())
            for start in np.flatnonzero(chars[:, 0] >= 0):
                for end in range(start, min(start + 4, len(chars) - 1)):
                    text = (examples[index].text_pair or "")[chars[start, 0] : chars[end, 1]]
                    best = max(best, (logits[start, 0] + logits[end, 1], text))
        assert found.value == best[1]
        assert found.null_score == pytest.approx(min(nulls) - best[0])


def test_scores_of_several_right_answers(tokenizer: Tokenizer) -> None:
    examples = [
        question("a", Answer("The quick fox", 0), Answer("fox", 10)),
        question("b", Answer("river", PASSAGE.index("river"))),
    ]
    task = make_task()
    encoded = encode(task, examples, tokenizer)
    assert score(task, examples, encoded, oracle(encoded)) == {"f1": 1.0, "exact": 1.0}
    # "ran" is none of the answers; the second question is right.
    wrong = oracle(encoded)
    row = encoded.row(0)
    first, last = pieces_of(encoded.char_offsets[row], 14, 17) or (0, 0)
    wrong[row.start + first, 0] = wrong[row.start + last, 1] = 9
    assert score(task, examples, encoded, wrong) == {"f1": 0.5, "exact": 0.5}


def test_no_answer_by_threshold(tokenizer: Tokenizer) -> None:
    task = make_task(unanswerable=True, metrics=["best_f1", "f1", "exact"])
    examples = [question("a", Answer("fox", 10)), question("b"), question("c")]
    encoded = encode(task, examples, tokenizer)
    outputs = oracle(encoded)
    for row, null in enumerate((4.0, 6.0, 8.0)):
        outputs[encoded.row_offsets[row]] = null
    # Without answers, the best span of b and c scores 0; their null scores are 12 and 16. That of
    # a is 8 - 10 = -2.
    found = [p.null_score for p in predict(task, examples, encoded, outputs)]
    assert found == [-2, 12, 16]
    values = score(task, examples, encoded, outputs)
    assert values == {"best_f1": 1, "f1": 1, "exact": 1, "null_threshold": -2}
    assert [p.value for p in predict(task, examples, encoded, outputs)] == ["fox", "", ""]
    # Where the model is too sure of an answer, dev moves the threshold.
    outputs[encoded.row_offsets[:3]] = np.array([-4, -2, -1], np.float32)[:, None]
    values = score(task, examples, encoded, outputs)
    assert values["f1"] == pytest.approx(1 / 3)
    assert values["best_f1"] == 1
    answers = predict(task, examples, encoded, outputs, null_threshold=values["null_threshold"])
    assert [p.value for p in answers] == ["fox", "", ""]


def test_the_threshold_is_that_of_an_exhaustive_search() -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        nulls = rng.integers(-3, 4, 12).astype(float)
        scores = rng.random(12)
        empty = rng.integers(0, 2, 12).astype(float)
        scores[empty == 1] = 0
        every = [np.where(nulls > at, empty, scores).mean() for at in [*np.unique(nulls), -4.0]]
        best, threshold = best_threshold(nulls, scores, empty)
        assert best == pytest.approx(max(every))
        assert np.where(nulls > threshold, empty, scores).mean() == pytest.approx(best)


def test_right_answers_without_words_do_not_count_in_squad2(tokenizer: Tokenizer) -> None:
    task = make_task(unanswerable=True, metrics=["exact"])

    def exact(example: Example, null: float) -> float:
        encoded = encode(task, [example], tokenizer)
        return score(task, [example], encoded, oracle(encoded, null))["exact"]

    # "The" is predicted, but only "fox" counts.
    assert exact(question("a", Answer("The", 0), Answer("fox", 10)), -4) == 0
    # No right answer is left, so that no answer is right.
    assert exact(question("b", Answer("The", 0)), 9) == 1


def test_only_candidates_are_predicted(tokenizer: Tokenizer) -> None:
    context = "Anna met Bob in Rome."
    entities = (Answer("Anna", 0), Answer("Bob", 9), Answer("Rome", 16))
    example = replace(question("who", Answer("Bob", 9), context=context), candidates=entities)
    task = make_task()
    encoded = encode(task, [example], tokenizer)
    outputs = np.zeros((len(encoded.input_ids), 2), np.float32)
    first, last = pieces_of(encoded.char_offsets, 5, 8) or (0, 0)
    # The best span is "met"; the best entity is Rome.
    outputs[first, 0] = outputs[last, 1] = 9
    first, last = pieces_of(encoded.char_offsets, 16, 20) or (0, 0)
    outputs[first, 0] = outputs[last, 1] = 3
    (found,) = predict(task, [example], encoded, outputs)
    assert found.value == "Rome"
    assert score(task, [example], encoded, outputs) == {"f1": 0, "exact": 0}


@pytest.mark.parametrize(
    ("task", "file"),
    [
        pytest.param("policyqa", "tasks/qa/policyqa.test.json", marks=pytest.mark.slow),
        pytest.param("xquad", "tasks/qa/xquad.en.first.json", marks=pytest.mark.nightly),
        ("xquad", "tasks/qa/xquad.zh.json"),
    ],
)
def test_labels_of_real_files_give_the_answers_back(task: str, file: str, bpe: Tokenizer) -> None:
    path = corpus_path(file)
    config = load_task(task, [f"splits.dev.files=[{path.name}]", "max_answer_length=400"])
    examples = read_examples(config, path.parent, "dev")
    encoded = encode(config, examples, bpe)
    values = score(config, examples, encoded, oracle(encoded, null=-1))
    whole = np.zeros(len(examples), bool)
    np.logical_or.at(whole, encoded.example_index, encoded.labels[:, 0] > 0)
    # Answers that are longer than what two windows share may be in none of them.
    assert whole.mean() > 0.97
    predictions = predict(config, examples, encoded, oracle(encoded, null=-1))
    for example, prediction, is_whole in zip(examples, predictions, whole, strict=True):
        if is_whole:
            assert isinstance(prediction.value, str)
            assert any(answer.text.strip() in prediction.value for answer in example.answers or ())
    assert values["f1"] > 0.95


COMPOSED = {
    "accent": ("Elle aime le café noir", "café"),
    "last": ("Elle aime le café", "café"),
    "two accents": ("Nói Tiếng Việt hay", "Tiếng Việt"),
    "Korean": ("나는 한국 사람", "한국"),
    "no composed form": ("say q\u0304 twice", "q\u0304"),
    "below a word": ("a dog\u0301 ran", "dog\u0301"),
}


def composing(used: Tokenizer) -> Tokenizer:
    """Return a tokenizer that composes text before everything else."""
    spec = json.loads(json.dumps(used.spec))
    steps = [step for step in [{"type": "NFC"}, spec["normalizer"]] if step]
    return Tokenizer(
        {**spec, "normalizer": {"type": "Sequence", "normalizers": steps}}, used.special
    )


@pytest.mark.parametrize("composes", [False, True])
@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("kind", ["unigram", "byte_level"])
@pytest.mark.parametrize("name", COMPOSED)
def test_answers_in_any_unicode_form(
    name: str, kind: str, form: Any, composes: bool, tokenizer: Tokenizer, byte_level: Tokenizer
) -> None:
    used = {"unigram": tokenizer, "byte_level": byte_level}[kind]
    used = composing(used) if composes else used
    context, answer = (unicodedata.normalize(form, text) for text in COMPOSED[name])
    example = question("Was?", Answer(answer, context.index(answer)), context=context)
    candidates = (Answer(answer, context.index(answer)),)
    task = make_task()
    encoded = encode(task, [example], used)
    assert encoded.labels[0].all()
    (found,) = predict(task, [example], encoded, oracle(encoded))
    assert found.value == answer
    example = replace(example, candidates=candidates)
    (found,) = predict(task, [example], encoded, oracle(encoded))
    assert found.value == answer


@pytest.mark.parametrize("answer", ["fox\u200b", "\u200bfox", "fox \u200b", " fox", "fox\u00ad"])
def test_invisible_characters_around_an_answer(answer: str, tokenizer: Tokenizer) -> None:
    # As the whole passage, so that no other piece lies around the answer.
    for context in (answer, f"The quick {answer} ran"):
        example = question("Who?", Answer(answer, context.index(answer)), context=context)
        task = make_task()
        encoded = encode(task, [example], tokenizer)
        assert encoded.labels[0].all()
        assert score(task, [example], encoded, oracle(encoded))["exact"] == 1


def test_answers_without_a_place_are_counted(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    lost = question("lost", Answer("\u200b", 8), context="The fox \u200b ran")
    kept = question("kept", Answer("fox", 10))
    task = make_task()
    encoded = encode(task, [kept, lost, question("none")], tokenizer)
    assert encoded.labels[:, 0].astype(bool).tolist() == [True, False, False]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "the answers of 1 of 2 answered questions are in no window" in message
    assert "(first: lost)" in message
    with pytest.raises(DataError, match="the answers of 1 of 1 answered questions"):
        encode(task, [lost], tokenizer)


def test_candidates_without_a_place_are_counted(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    context = "The fox \u200b ran"
    entities = (Answer("fox", 4), Answer("\u200b", 8))
    example = replace(question("who", entities[0], context=context), candidates=entities)
    task = make_task()
    encoded = encode(task, [example], tokenizer)
    (found,) = predict(task, [example], encoded, oracle(encoded))
    assert found.value == "fox"
    assert "1 of 2 candidates are in no window" in caplog.text
