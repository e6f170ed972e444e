"""Metrics and predictions, compared with values worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.stats import pearsonr
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    precision_recall_curve,
    precision_recall_fscore_support,
    precision_score,
    recall_score,
)

from megatron_deberta.errors import DataError, MalformedInputError
from megatron_deberta.tasks import (
    EncodedDataset,
    Example,
    encode,
    json_lines,
    load_task,
    predict,
    score,
)
from megatron_deberta.tasks.class_scores import class_scores
from megatron_deberta.tasks.scoring import best_label_threshold, sigmoid, with_best_thresholds
from megatron_deberta.tasks.task import METRICS, POOLED_HEADS
from megatron_deberta.tokenizer import Tokenizer
from tests.support.task_files import make_task


def logits_of(classes: list[int], width: int) -> Any:
    return np.eye(width, dtype=np.float32)[classes] * 3


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_outputs_that_are_no_numbers_are_no_class(tokenizer: Tokenizer, value: float) -> None:
    """``argmax`` of NaN or infinite scores returns a class, in most cases the first."""
    task = make_task("classification", "accuracy", labels=["a", "b"])
    examples = [Example(id=str(i), text="the fox", label=i % 2) for i in range(4)]
    encoded = encode(task, examples, tokenizer)
    outputs = logits_of([0, 1, 0, 1], 2)
    assert score(task, examples, encoded, outputs) == {"accuracy": 1.0}
    outputs[2, 1] = value
    for function in (score, predict):
        with pytest.raises(DataError, match="not a number in 1 of 4 rows"):
            function(task, examples, encoded, outputs)


def test_outputs_of_words_that_are_no_numbers_are_counted_by_row(tokenizer: Tokenizer) -> None:
    task = make_task("tokens", "accuracy", labels=["a", "b"])
    examples = [Example(id=str(i), words=("the", "fox"), tags=(0, 1)) for i in range(3)]
    encoded = encode(task, examples, tokenizer)
    outputs = np.zeros((len(encoded.input_ids), 2), np.float32)
    outputs[-3:] = np.nan
    with pytest.raises(DataError, match="not a number in 1 of 3 rows"):
        predict(task, examples, encoded, outputs)


def test_group_metrics_of_multirc(tokenizer: Tokenizer) -> None:
    task = make_task("classification", "f1a", "group_exact", labels=[0, 1])
    # Questions x (right), y (one of three wrong) and z (right): F1 of answers is 2*2/(2*2+1).
    truth, found, groups = [1, 0, 1, 0, 0, 0], [1, 0, 1, 1, 0, 0], "xxyyyz"
    examples = [
        Example(id=str(i), text="the fox", label=label, group=groups[i])
        for i, label in enumerate(truth)
    ]
    values = score(task, examples, encode(task, examples, tokenizer), logits_of(found, 2))
    assert list(values) == ["f1a", "group_exact"]
    assert values["group_exact"] == pytest.approx(2 / 3)
    assert values["f1a"] == pytest.approx(4 / 5)


def labelled_twice(tokenizer: Tokenizer, **changes: Any) -> Any:
    """Return a task of several labels per example, random examples, encoding and outputs.

    No example has the last label, and scores repeat.
    """
    random = np.random.default_rng(5)
    metrics = METRICS["multilabel"]
    task = make_task("multilabel", *metrics, labels=["a", "b", "c", "d"], **changes)
    flags = random.random((60, 4)) < [0.1, 0.5, 0.8, 0.0]
    examples = [
        Example(id=str(i), text="the fox", tags=tuple(map(int, row))) for i, row in enumerate(flags)
    ]
    noise = random.normal(0, 1, flags.shape)
    outputs = np.round(2 * flags - 1.5 + 1.5 * noise, 1).astype(np.float32)
    return task, flags, examples, encode(task, examples, tokenizer), outputs


def test_metrics_of_labels_are_those_of_scikit_learn(tokenizer: Tokenizer) -> None:
    task, flags, examples, encoded, outputs = labelled_twice(tokenizer)
    for thresholds in ((), (0.3,), (0.2, 0.4, 0.6, 0.8)):
        chosen = replace(task, thresholds=thresholds)
        found = 1 / (1 + np.exp(-outputs.astype(np.float64))) >= (thresholds or 0.5)
        expected = {"accuracy": accuracy_score(flags, found)}
        for average in ("micro", "macro"):
            for name, function in (
                ("f1", f1_score), ("precision", precision_score), ("recall", recall_score),
            ):  # fmt: skip
                value = function(flags, found, average=average, zero_division=0)
                expected[f"{average}_{name}"] = value
        values = score(chosen, examples, encoded, outputs)
        assert values == {name: pytest.approx(expected[name]) for name in task.metrics}
        predictions = predict(chosen, examples, encoded, outputs)
        names = [tuple(np.array(task.labels)[row]) for row in found]
        assert [prediction.value for prediction in predictions] == names
        scores = class_scores(chosen, examples, predictions)
        assert scores is not None
        by_label = precision_recall_fscore_support(flags, found, zero_division=0)
        for each, threshold, *wanted in zip(
            scores.classes, np.broadcast_to(thresholds or 0.5, 4), *by_label, strict=True
        ):
            assert [each.precision, each.recall, each.f1, each.labelled] == pytest.approx(wanted)
            assert each.threshold == threshold


def test_thresholds_have_the_best_f1_of_scikit_learns_curve(tokenizer: Tokenizer) -> None:
    task, flags, examples, encoded, outputs = labelled_twice(tokenizer)
    tuned = with_best_thresholds(task, examples, encoded, outputs)
    probabilities = sigmoid(outputs)
    for number, threshold in enumerate(tuned.thresholds[:3]):
        precision, recall, _ = precision_recall_curve(flags[:, number], probabilities[:, number])
        best = np.max(2 * precision * recall / np.maximum(precision + recall, 1e-12))
        found = probabilities[:, number] >= threshold
        assert f1_score(flags[:, number], found) == pytest.approx(best)
        # Away from all scores: rounding errors change no prediction.
        assert np.abs(probabilities[:, number] - threshold).min() > 1e-3
    assert tuned.thresholds[3] == 0.5
    assert (
        score(tuned, examples, encoded, outputs)["macro_f1"]
        > (score(task, examples, encoded, outputs)["macro_f1"])
    )
    given = replace(task, thresholds=(0.7,))
    assert with_best_thresholds(given, examples, encoded, outputs) is given


def test_thresholds_separate_scores_that_are_nearly_equal() -> None:
    high = np.nextafter(0.25, 1)
    truth = np.array([True, False])
    assert best_label_threshold(truth, np.array([0.3, 0.2])) == 0.25
    # Nothing lies between them: both are predicted, as one alone cannot be.
    assert best_label_threshold(truth, np.array([high, 0.25])) == 0.125
    assert best_label_threshold(~truth, np.array([0.9, 0.8])) == pytest.approx(0.4)
    assert 0 < best_label_threshold(truth, np.array([1.0, 1.0])) < 1


@pytest.mark.parametrize("long_text", ["mean", "max"])
@pytest.mark.parametrize("head", POOLED_HEADS)
def test_windows_of_a_document_count_as_one_example(
    tokenizer: Tokenizer, head: str, long_text: str
) -> None:
    random = np.random.default_rng(3)
    metrics = {"classification": ["accuracy", "macro_f1"], "multilabel": ["micro_f1", "macro_f1"]}
    names = {} if head == "regression" else {"labels": ["a", "b", "c"]}
    chosen = metrics.get(head, ["pearson"])
    task = make_task(head, *chosen, long_text=long_text, stride=4, **names)
    classes, flags, scores = (
        random.integers(0, 3, 20), random.random((20, 3)) < 0.5, random.normal(0, 1, 20),
    )  # fmt: skip
    examples = [
        Example(
            id=str(n),
            text="the cat sat on a mat and " * (1 + n % 5),
            label={"classification": int(classes[n]), "regression": scores[n]}.get(head),
            tags=tuple(map(int, flags[n])) if head == "multilabel" else (),
        )
        for n in range(20)
    ]
    encoded = encode(task, examples, tokenizer, 16)
    index = encoded.example_index
    assert encoded.num_rows > 40
    shape = (encoded.num_rows, 3)
    outputs = random.normal(0, 2, shape[: 1 if head == "regression" else 2]).astype(np.float32)
    values = outputs.astype(np.float64)
    if head == "classification":
        values = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
    elif head == "multilabel":
        values = 1 / (1 + np.exp(-values))
    pooled = np.array([getattr(values[index == n], long_text)(axis=0) for n in range(20)])
    tuned = with_best_thresholds(task, examples, encoded, outputs)
    predictions = predict(tuned, examples, encoded, outputs)
    assert [each.windows for each in predictions] == np.bincount(index).tolist()
    if head == "regression":
        expected = {"pearson": pearsonr(scores, pooled)[0]}
        assert [each.value for each in predictions] == pytest.approx(pooled)
    elif head == "classification":
        found = pooled.argmax(axis=1)
        expected = {"accuracy": accuracy_score(classes, found)}
        expected["macro_f1"] = f1_score(classes, found, average="macro")
        assert [each.index for each in predictions] == found.tolist()
    else:
        columns = zip(flags.T, pooled.T, strict=True)
        assert list(tuned.thresholds) == pytest.approx([best_label_threshold(*c) for c in columns])
        found = pooled >= tuned.thresholds
        expected = {name: f1_score(flags, found, average=name[:-3]) for name in task.metrics}
    assert score(tuned, examples, encoded, outputs) == {
        name: pytest.approx(value) for name, value in expected.items()
    }
    if head == "regression":
        return
    classwise = class_scores(tuned, examples, predictions)
    assert classwise is not None
    truth = np.eye(3, dtype=np.bool_)[classes] if head == "classification" else flags
    assert [each.labelled for each in classwise.classes] == truth.sum(axis=0).tolist()


def test_correlations(tokenizer: Tokenizer) -> None:
    task = make_task("regression", "pearson_spearman", "pearson", "spearman", label_range=[0, 5])
    examples = [Example(id=str(i), text="the fox", label=float(i)) for i in (0, 1, 2, 3)]
    encoded = encode(task, examples, tokenizer)
    outputs = np.array([-1, 1, 0, 6], np.float32)
    values = score(task, examples, encoded, outputs)
    # Deviations -1.5, -.5, .5, 1.5 and -2.5, -.5, -1.5, 4.5: 10 / sqrt(5 * 29).
    assert values["pearson"] == pytest.approx(10 / np.sqrt(145))
    # Ranks 1 2 3 4 and 1 3 2 4: 1 - 6 * 2 / (4 * 15).
    assert values["spearman"] == pytest.approx(0.8)
    assert values["pearson_spearman"] == pytest.approx((10 / np.sqrt(145) + 0.8) / 2)
    # Correlations are of the raw scores; predictions are clipped to the range.
    assert [p.value for p in predict(task, examples, encoded, outputs)] == [0, 1, 0, 5]
    assert score(task, examples, encoded, np.ones(4, np.float32))["pearson"] == 0


def test_choices_vary_in_number(tokenizer: Tokenizer) -> None:
    task = make_task("choices", "accuracy")
    examples = [
        Example(id="a", choices=("fox", "dog", "river"), label=2, group="high"),
        Example(id="b", choices=("fox", "dog"), label=0, group="high"),
        Example(id="c", choices=("fox", "dog"), label=1, group="middle"),
    ]
    encoded = encode(task, examples, tokenizer)
    outputs = np.array([0, 1, 2, 5, 6, 0, 1], np.float32)
    values = score(task, examples, encoded, outputs)
    assert values == {
        "accuracy": pytest.approx(2 / 3),
        "accuracy_high": 0.5,
        "accuracy_middle": 1,
    }
    first = predict(task, examples, encoded, outputs)[0]
    assert (first.index, first.value) == (2, "2")
    assert sum(first.probabilities) == pytest.approx(1)
    assert len(first.probabilities) == 3


def test_passages_are_ranked_by_their_scores(tokenizer: Tokenizer) -> None:
    task = load_task("custom_rerank")
    examples = [
        Example(id="a", text="fox", choices=("dog", "river", "fox"), relevance=(0.0, 1.0, 2.0)),
        Example(id="b", text="dog", choices=("fox", "dog"), relevance=(0.0, 0.0)),
    ]
    encoded = encode(task, examples, tokenizer)
    assert encoded.labels.tolist() == [0, 1, 2, 0, 0]
    outputs = np.array([2, 3, 1, 5, 6], np.float32)
    dcg, ideal = 1 + 2 / 2, 2 + 1 / np.log2(3)
    # The second query has no relevant passage.
    assert score(task, examples, encoded, outputs) == {
        "ndcg_at_10": pytest.approx(dcg / ideal),
        "mrr_at_10": 1,
        "map": pytest.approx((1 + 2 / 3) / 2),
    }
    first, second = predict(task, examples, encoded, outputs)
    assert (first.index, first.value, first.probabilities) == (1, "1", (2, 3, 1))
    (first, _) = predict(task, examples, encoded, outputs, uses_sigmoid=True)
    assert first.probabilities == pytest.approx(1 / (1 + np.exp([-2.0, -3.0, -1.0])))
    with pytest.raises(MalformedInputError, match="1 of 2 examples have no label"):
        score(task, [examples[0], replace(examples[1], relevance=())], encoded, outputs)


LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def token_outputs(encoded: EncodedDataset, tags: list[list[int]]) -> Any:
    """Return logits of the tags at first pieces, and of the wrong class everywhere else."""
    outputs = logits_of([4] * len(encoded.input_ids), len(LABELS))
    at = np.flatnonzero(encoded.word_index >= 0)
    outputs[at] = logits_of([tag for sentence in tags for tag in sentence], len(LABELS))
    return outputs


def test_tags(tokenizer: Tokenizer) -> None:
    task = make_task("tokens", "f1", "precision", "recall", "accuracy", labels=LABELS)
    words = ("Anna", "Lee", "met", "Bob", "in", "Rome")
    examples = [
        Example(id="0", words=words, tags=(1, 2, 0, 1, 0, 3)),
        Example(id="1", words=("fox",), tags=(0,)),
    ]
    encoded = encode(task, examples, tokenizer)
    # Found: "Anna Lee" and "Rome"; "Bob" as a place; and one that is none.
    outputs = token_outputs(encoded, [[1, 2, 0, 3, 0, 3], [3]])
    values = score(task, examples, encoded, outputs)
    assert values["precision"] == pytest.approx(2 / 4)
    assert values["recall"] == pytest.approx(2 / 3)
    assert values["f1"] == pytest.approx(4 / 7)
    assert values["accuracy"] == pytest.approx(5 / 7)
    found = predict(task, examples, encoded, outputs)
    assert found[0].value == ("B-PER", "I-PER", "O", "B-LOC", "O", "B-LOC")


def test_tags_of_a_sentence_in_several_windows(tokenizer: Tokenizer) -> None:
    task = make_task("tokens", "accuracy", labels=LABELS, stride=8)
    tags = [i % 5 for i in range(50)]
    examples = [
        Example(id=str(n), words=tuple(f"w{i}" for i in range(50)), tags=tuple(tags))
        for n in range(2)
    ]
    encoded = encode(task, examples, tokenizer)
    assert encoded.num_rows > 4
    values = score(task, examples, encoded, token_outputs(encoded, [tags, tags]))
    assert values == {"accuracy": 1.0}


def test_unlabelled_examples_have_no_score(tokenizer: Tokenizer) -> None:
    task = make_task("classification", "accuracy", labels=[0, 1])
    examples = [Example(id="7", text="the fox")]
    encoded = encode(task, examples, tokenizer)
    outputs = np.zeros((1, 2), np.float32)
    assert predict(task, examples, encoded, outputs)[0].probabilities == (0.5, 0.5)
    with pytest.raises(DataError, match="1 of 1 examples have no label .*7"):
        score(task, examples, encoded, outputs)


def test_outputs_of_another_shape(tokenizer: Tokenizer) -> None:
    task = make_task("classification", "accuracy", labels=[0, 1])
    examples = [Example(id="0", text="the fox", label=1)]
    encoded = encode(task, examples, tokenizer)
    with pytest.raises(ValueError, match=r"outputs are \[1, 3\], not \[1, 2\]"):
        score(task, examples, encoded, np.zeros((1, 3), np.float32))


def test_embeddings_are_scored_by_their_cosines(tokenizer: Tokenizer) -> None:
    task = make_task("embed", "spearman", "pearson", label_range=[0, 5])
    texts = ["the fox", "the dog", "a river"]
    pairs = [
        Example(id=str(i), text=text, text_pair="it", choices=("no",), label=label)
        for i, (text, label) in enumerate(zip(texts, [5.0, 2.5, 0.0], strict=True))
    ]
    encoded = encode(task, pairs, tokenizer)
    assert encoded.labels.tolist() == [1.0, 0.5, 0.0]
    assert encoded.example_index.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    outputs = np.zeros((9, 2), np.float32)
    outputs[[0, 1]] = [[3, 4], [6, 8]]
    outputs[[3, 4]] = [[1, 0], [3, 4]]
    outputs[[6, 7]] = [[0, 2], [7, 0]]
    assert [p.value for p in predict(task, pairs, encoded, outputs)] == pytest.approx([1, 0.6, 0])
    values = score(task, pairs, encoded, outputs)
    assert values["spearman"] == pytest.approx(1)
    assert values["pearson"] == pytest.approx(np.corrcoef([1, 0.6, 0], [5, 2.5, 0])[0, 1])
    alone = [Example(id=str(i), text=text) for i, text in enumerate(texts)]
    encoded = encode(task, alone, tokenizer)
    assert np.isnan(encoded.labels).all()
    found = predict(task, alone, encoded, outputs[:3])
    assert [p.embedding for p in found] == [(3, 4), (6, 8), (0, 0)]
    assert b'"embedding":[3.0,4.0]' in json_lines(task, alone, found).replace(b" ", b"")
