"""Small files in the exact formats in which labelled data is published, with made-up content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_deberta.config.schema import CLASS_HEADS
from megatron_deberta.tasks.task import METRICS, TaskConfig, task_from_dict


def make_task(head: str, *metrics: str, **changes: Any) -> TaskConfig:
    """Return a task without files, by default with the head's first metric."""
    columns: dict[str, dict[str, str]] = {
        "tokens": {"words": "w"}, "choices": {"choices": "c"},
        "spans": {"question": "q", "context": "c"},
    }  # fmt: skip
    values = {
        "name": head, "head": head, "reader": "jsonl", "splits": {"dev": "dev.jsonl"},
        "columns": columns.get(head, {"text": "t"}), "max_length": 32,
        "labels": ["O", "B-X", "I-X"] if head in CLASS_HEADS else [],
        "metrics": list(metrics or METRICS[head][:1]),
    }  # fmt: skip
    return task_from_dict({**values, **changes}, "test")


def table(*rows: Sequence[str]) -> str:
    return "".join("\t".join(row) + "\n" for row in rows)


def json_lines(*objects: Any) -> str:
    return "".join(json.dumps(item) + "\n" for item in objects)


_MNLI = (
    "index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse",
    "sentence1_parse", "sentence2_parse", "sentence1", "sentence2",
)  # fmt: skip


def _mnli(index: int, first: str, second: str, *labels: str) -> tuple[str, ...]:
    parses = ("( a )", "( b )", "(ROOT a)", "(ROOT b)")
    return (str(index), "1", f"{index}e", "fiction", *parses, first, second, *labels)


GLUE = {
    "mnli/train.tsv": table(
        (*_MNLI, "label1", "gold_label"),
        _mnli(0, "The fox runs.", "An animal moves.", "entailment", "entailment"),
        _mnli(1, 'He said "so.', "He was silent.", "contradiction", "contradiction"),
        _mnli(2, "A dog sleeps.", "The dog is old.", "neutral", "neutral"),
    ),
    "mnli/dev_matched.tsv": table(
        (*_MNLI, "label1", "label2", "label3", "label4", "label5", "gold_label"),
        _mnli(0, "The fox runs.", "A fox is still.", *["contradiction"] * 5, "contradiction"),
        _mnli(1, "It rains.", "It is wet.", "neutral", *["entailment"] * 4, "-"),
    ),
    "mnli/test_matched.tsv": table(_MNLI, _mnli(0, "The sun set.", "It is dark.")),
    "ax/diagnostic.tsv": table(
        ("index", "sentence1", "sentence2"), ("0", "The cat sat.", "The cat did not sit.")
    ),
    "ax/diagnostic-full.tsv": table(
        (
            "Lexical Semantics", "Predicate-Argument Structure", "Logic", "Knowledge", "Domain",
            "Premise", "Hypothesis", "Label",
        ),
        ("", "", "Negation", "", "Artificial", "The cat sat.", "The cat did not sit.",
         "contradiction"),
    ),
    "qqp/train.tsv": table(
        ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
        ("133273", "213221", "213222", "How do I cook?", "How can I cook?", "1"),
        ("402555", "536040", "536041", "Why does it rain?"),
        ("360472", "364011", "490273", 'What is "it?', "Who is she?", "0"),
    ),
    "qqp/test.tsv": table(("id", "question1", "question2"), ("0", "Who?", "Where?")),
    "rte/dev.tsv": table(
        ("index", "sentence1", "sentence2", "label"),
        ("0", "Dana Reeve died at 44.", "Dana Reeve lived to 44.", "entailment"),
        ("1", "A river is long.", "A river is short.", "not_entailment"),
    ),
    "cola/test.tsv": table(("index", "sentence"), ("0", "The fox ran."), ("1", "Fox the ran.")),
    "stsb/test.tsv": table(
        ("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1",
         "sentence2"),
        ("0", "main-captions", "MSRvid", "2012test", "0024", "none", "none", "A girl is styling.",
         "A girl is brushing."),
    ),
}  # fmt: skip

_PASSAGE = "The quick fox ran. It met a dog near the river."
SUPERGLUE = {
    "boolq/val.jsonl": json_lines(
        {"question": "did the fox meet a dog", "passage": _PASSAGE, "idx": 0, "label": True},
        {"question": "did it rain", "passage": _PASSAGE, "idx": 1, "label": False},
    ),
    "boolq/test.jsonl": json_lines({"question": "was it day", "passage": _PASSAGE, "idx": 0}),
    "cb/val.jsonl": json_lines(
        {"premise": "It may rain.", "hypothesis": "it rains", "label": "neutral", "idx": 0}
    ),
    "copa/val.jsonl": json_lines(
        {"premise": "The man fell.", "choice1": "He slipped.", "choice2": "He slept.",
         "question": "cause", "label": 0, "idx": 0},
        {"premise": "It rained.", "choice1": "It was dry.", "choice2": "It was wet.",
         "question": "effect", "label": 1, "idx": 1},
    ),
    "multirc/val.jsonl": json_lines(
        {"idx": 0, "version": 1.1, "passage": {"text": _PASSAGE, "questions": [
            {"question": "Who ran?", "idx": 0, "answers": [
                {"text": "The fox", "idx": 0, "label": 1},
                {"text": "The river", "idx": 1, "label": 0}]},
            {"question": "Who was met?", "idx": 1, "answers": [
                {"text": "A dog", "idx": 2, "label": 1},
                {"text": "The moon", "idx": 3, "label": 0},
                {"text": "A fish", "idx": 4, "label": 0}]}]}}
    ),
    "record/val.jsonl": json_lines(
        {"source": "Daily mail", "idx": 0,
         "passage": {"text": "Anna met Bob in Rome.\n@highlight\nBob lives there.",
                     "entities": [{"start": 0, "end": 3}, {"start": 9, "end": 11},
                                  {"start": 16, "end": 19}, {"start": 33, "end": 35}]},
         "qas": [{"query": "In her mail @placeholder wrote of Rome.", "idx": 0,
                  "answers": [{"start": 0, "end": 3, "text": "Anna"}]},
                 {"query": "The home of @placeholder is Rome.", "idx": 1,
                  "answers": [{"start": 9, "end": 11, "text": "Bob"},
                              {"start": 33, "end": 35, "text": "Bob"}]}]}
    ),
    "superglue_rte/val.jsonl": json_lines(
        {"premise": "Dana died at 44.", "hypothesis": "Dana lived.", "label": "entailment",
         "idx": 0}
    ),
    "wic/val.jsonl": json_lines(
        {"word": "bank", "sentence1": "The bank was steep.", "sentence2": "A bank lends.",
         "idx": 0, "label": False, "start1": 4, "start2": 2, "end1": 8, "end2": 6, "version": 1.1}
    ),
    "wsc/val.jsonl": json_lines(
        {"text": "Mark told Pete lies, which Pete printed. He should have been careful.", "idx": 0,
         "target": {"span1_index": 2, "span1_text": "Pete", "span2_index": 7, "span2_text": "He"},
         "label": True},
        {"text": "Jim saw Kevin because his hat was red.", "idx": 1, "label": False,
         "target": {"span1_index": 0, "span1_text": "Jim", "span2_index": 4,
                    "span2_text": "his"}},
    ),
    "axb/AX-b.jsonl": json_lines(
        {"sentence1": "The cat sat.", "sentence2": "The cat did not sit.", "idx": 0,
         "label": "not_entailment", "logic": "Negation"}
    ),
    "axg/AX-g.jsonl": json_lines(
        {"premise": "The guest met the cook and he ate.", "hypothesis": "The guest ate.",
         "pair_id": 1, "label": "entailment", "idx": 0},
        {"premise": "The guest met the cook and she ate.", "hypothesis": "The guest ate.",
         "pair_id": 1, "label": "entailment", "idx": 1},
    ),
}  # fmt: skip

_QUESTION = {"question": "Whom did it meet?", "id": "q1",
             "answers": [{"text": "a dog", "answer_start": 26}]}  # fmt: skip
_NO_ANSWER = {"question": "Who slept?", "id": "q2", "answers": [], "is_impossible": True,
              "plausible_answers": [{"text": "a dog", "answer_start": 26}]}  # fmt: skip


def squad(version: str, questions: Sequence[Any], indent: int | None = None) -> str:
    paragraphs = [{"context": _PASSAGE, "qas": list(questions)}]
    data = [{"title": "Fox", "paragraphs": paragraphs}]
    return json.dumps({"version": version, "data": data}, indent=indent)


def _race(level: str, *, text: str = _PASSAGE) -> str:
    return json.dumps(
        {"answers": ["B", "A"], "article": text, "id": f"{level}1.txt",
         "options": [["a cat", "a dog", "a cow", "a hen"], ["The fox", "The dog", "A", "B"]],
         "questions": ["The fox met _ .", "Who ran?"]}
    )  # fmt: skip


OTHERS = {
    "squad1/dev-v1.1.json": squad("1.1", [_QUESTION]),
    "squad2/dev-v2.0.json": squad("v2.0", [{**_QUESTION, "is_impossible": False}, _NO_ANSWER]),
    "race/dev/high/1.txt": _race("high"),
    "race/dev/middle/7.txt": _race("middle"),
    "swag/val.csv": (
        ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,"
        "label\n"
        '0,lsmdc3057,18,"Students lower. He","Students, in a row, lower their eyes.",He,gold,'
        'pats her shoulder.,"wheels around, and runs.",walks off.,"sits ""down"".",1\n'
    ),
    "swag/test.csv": (
        ",video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3\n"
        "0,a,1,It rains. She,It rains.,She,gen,runs.,eats.,sleeps.,sings.\n"
    ),
    "conll2003/valid.txt": (
        "-DOCSTART- -X- -X- O\n\n"
        "EU NNP I-NP I-ORG\nrejects VBZ I-VP O\nGerman JJ I-NP I-MISC\ncall NN I-NP O\n\n"
        "Peter NNP I-NP I-PER\nBlackburn NNP I-NP I-PER\n\n"
        "-DOCSTART- -X- -X- O\n\n"
        "BRUSSELS NNP I-NP I-LOC\n\n"
    ),
}
PUBLISHED = {**GLUE, **SUPERGLUE, **OTHERS}
"""Content by task, file and folder."""


def write_published(folder: Path) -> Path:
    """Write all files; ``folder / TASK`` is the data folder of a task."""
    for name, content in PUBLISHED.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder
