"""Extractive question answering: best spans, answer normalisation, exact match and F1.

Source: the evaluation scripts of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016 and 2018) and of ReCoRD
(Zhang et al. 2018), which normalise answers alike.
"""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_deberta.tasks.encoding import EncodedDataset, covered_span, pieces_of
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.task import TaskConfig

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)


_INVISIBLE = "\u200b\u2060\ufeff"
"""Characters without width that no word contains: tokenizers remove them or read them as spaces."""


_REMOVED = str.maketrans("", "", string.punctuation + _INVISIBLE)


logger = logging.getLogger(__name__)


class BestSpan(NamedTuple):
    """The best answer of a question.

    Attributes:
        text: its text.
        score: sum of its start and end logits; -inf if no span is possible.
        null_score: score of no answer minus ``score``.
    """

    text: str
    score: float
    null_score: float


def normalize_answer(text: str) -> str:
    """Lower-case, and remove punctuation, articles and superfluous white space.

    Unlike SQuAD's script, also remove characters without width: pieces do not contain them, so no
    prediction has them at its ends.
    """
    lowered = text.lower().translate(_REMOVED)
    return " ".join(_ARTICLES.sub(" ", lowered).split())


def exact_match(found: str, truth: str) -> float:
    """Return 1 if two answers are equal after normalisation, else 0."""
    return float(normalize_answer(found) == normalize_answer(truth))


def token_f1(found: str, truth: str) -> float:
    """Return the F1 of the words that two answers share after normalisation."""
    found_words, truth_words = normalize_answer(found).split(), normalize_answer(truth).split()
    if not found_words or not truth_words:
        # Without words on one side, the answers agree only if both have none.
        return float(found_words == truth_words)
    shared = sum((Counter(found_words) & Counter(truth_words)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(found_words), shared / len(truth_words)
    return 2 * precision * recall / (precision + recall)


def best_spans(
    task: TaskConfig,
    examples: Sequence[Example],
    encoded: EncodedDataset,
    outputs: npt.NDArray[np.float32],
) -> list[BestSpan]:
    """Return the best span of each question over all its windows.

    Candidates that are in no window are counted in a warning.

    Args:
        task: the task.
        examples: the questions.
        encoded: their rows.
        outputs: fp32 ``[tokens, 2]``, logits of the first and of the last token of an answer.
    """
    offsets = encoded.example_offsets
    found = []
    unplaced = total = 0
    for index, example in enumerate(examples):
        context = example.text_pair or ""
        null, best, place = np.inf, -np.inf, (0, 0)
        rows = range(int(offsets[index]), int(offsets[index + 1]))
        candidates = _Candidates(example, encoded, rows) if example.candidates else None
        for row in rows:
            tokens = encoded.row(row)
            logits, chars = outputs[tokens].astype(np.float64), encoded.char_offsets[tokens]
            # The first token stands for "no answer in this window"; so does the example's score
            # for the window where that is least likely.
            null = min(null, float(logits[0].sum()))
            if candidates is not None:
                value, span = candidates.best(logits, chars)
            else:
                value, span = _best_pieces(logits, chars, task.max_answer_length)
            if value > best:
                best, place = value, span
        found.append(BestSpan(context[place[0] : place[1]], float(best), float(null - best)))
        if candidates is not None:
            total += len(example.candidates)
            unplaced += candidates.num_unplaced
    if unplaced:
        logger.warning(
            "task %s: %s of %s candidates are in no window and cannot be predicted; raise "
            "max_length or stride",
            task.name, f"{unplaced:,}", f"{total:,}",
        )  # fmt: skip
    return found


def _best_pieces(
    logits: npt.NDArray[np.float64], chars: npt.NDArray[np.int32], longest: int
) -> tuple[float, tuple[int, int]]:
    """Return score and characters of the best span of at most ``longest`` tokens."""
    inside = np.flatnonzero(chars[:, 0] >= 0)
    if not len(inside):
        return -np.inf, (0, 0)
    # The passage's tokens are contiguous in a row.
    first, last = inside[0], inside[-1] + 1
    starts, ends = logits[first:last, 0], logits[first:last, 1]
    padded = np.concatenate([ends, np.full(longest - 1, -np.inf)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, longest)
    lengths = windows.argmax(axis=1)
    scores = starts + windows[np.arange(len(starts)), lengths]
    start = int(scores.argmax())
    end = start + int(lengths[start])
    span = int(chars[first + start, 0]), int(chars[first + end, 1])
    return float(scores[start]), span


class _Candidates:
    """The candidates of one example.

    Args:
        example: the example.
        encoded: encoded examples.
        rows: rows of the example.
    """

    def __init__(self, example: Example, encoded: EncodedDataset, rows: range) -> None:
        """See the class."""
        self._candidates = example.candidates
        chars = encoded.char_offsets[encoded.row_offsets[rows.start] :][
            : encoded.row_offsets[rows.stop] - encoded.row_offsets[rows.start]
        ]
        self._covered = [covered_span(chars, c.start, c.end) for c in example.candidates]
        self._is_placed = [False] * len(self._covered)

    @property
    def num_unplaced(self) -> int:
        """Candidates that were in none of the windows seen."""
        return self._is_placed.count(False)

    def best(
        self, logits: npt.NDArray[np.float64], chars: npt.NDArray[np.int32]
    ) -> tuple[float, tuple[int, int]]:
        """Return score and characters of the best candidate that lies in a window."""
        best, place = -np.inf, (0, 0)
        for index, (candidate, span) in enumerate(
            zip(self._candidates, self._covered, strict=True)
        ):
            pieces = None if span is None else pieces_of(chars, *span)
            if pieces is None:
                continue
            self._is_placed[index] = True
            value = float(logits[pieces[0], 0] + logits[pieces[1], 1])
            if value > best:
                best, place = value, (candidate.start, candidate.end)
        return best, place


def span_metrics(
    task: TaskConfig, examples: Sequence[Example], found: Sequence[BestSpan]
) -> dict[str, float]:
    """Compute exact match and F1; if there are unanswerable questions, also at the best threshold.

    Each answer is compared with all right ones, and the best counts.

    Args:
        task: the task.
        examples: the questions.
        found: their best spans.
    """
    truth = [right_answers(task, example) for example in examples]
    exact = _scores(truth, found, exact_match)
    f1 = _scores(truth, found, token_f1)
    if not task.unanswerable:
        means = {"exact": float(exact.mean()), "f1": float(f1.mean())}
        values = {**means, "best_exact": means["exact"], "best_f1": means["f1"]}
        return {name: values[name] for name in task.metrics}
    nulls = np.array([span.null_score for span in found])
    empty = np.array([not answers for answers in truth], np.float64)
    values = {
        "exact": float(np.where(nulls > 0, empty, exact).mean()),
        "f1": float(np.where(nulls > 0, empty, f1).mean()),
        "best_exact": best_threshold(nulls, exact, empty)[0],
    }
    values["best_f1"], values["null_threshold"] = best_threshold(nulls, f1, empty)
    return {name: values[name] for name in [*task.metrics, "null_threshold"]}


def right_answers(task: TaskConfig, example: Example) -> list[str]:
    """Return the texts of right answers; SQuAD 2.0's script ignores those without words."""
    texts = [answer.text for answer in example.answers or ()]
    return [text for text in texts if not task.unanswerable or normalize_answer(text)]


def best_threshold(
    null_scores: npt.NDArray[np.float64],
    scores: npt.NDArray[np.float64],
    empty_scores: npt.NDArray[np.float64],
) -> tuple[float, float]:
    """Return the best mean score over all thresholds of no answer, and that threshold.

    Args:
        null_scores: score of no answer minus that of the best answer, per question.
        scores: score of the best answer.
        empty_scores: score of no answer.

    Returns:
        The best mean, and the threshold: no answer is given where ``null_scores`` is above it.
    """
    order = np.argsort(null_scores, kind="stable")
    ordered = null_scores[order]
    gains = np.concatenate([[0.0], np.cumsum(scores[order] - empty_scores[order])])
    # Questions of equal scores are answered together or not at all.
    is_border = np.concatenate([[True], ordered[1:] > ordered[:-1], [True]])
    gains[~is_border] = -np.inf
    answered = int(gains.argmax())
    mean = (empty_scores.sum() + gains[answered]) / len(scores)
    if answered == 0:
        return float(mean), float(ordered[0] - 1.0)
    return float(mean), float(ordered[answered - 1])


def _scores(
    truth: Sequence[Sequence[str]],
    found: Sequence[BestSpan],
    compare: Callable[[str, str], float],
) -> npt.NDArray[np.float64]:
    """Return each answer's best score over the right ones; 0 for unanswerable questions."""
    return np.array(
        [
            max((compare(span.text, answer) for answer in answers), default=0.0)
            for answers, span in zip(truth, found, strict=True)
        ]
    )
