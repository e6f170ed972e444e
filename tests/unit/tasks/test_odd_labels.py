"""Odd label files: each gives the right labels, or one line that names what is wrong."""

from __future__ import annotations

import gzip
import json
import os
import time
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from seqeval import metrics as seqeval_metrics
from seqeval.scheme import BILOU, IOB2, IOBES

from megatron_deberta.config import config_from_dict, load_config, save_config
from megatron_deberta.errors import EXIT_USAGE, ConfigError, DataError, MegatronDebertaError
from megatron_deberta.evaluate.language_models import read_words
from megatron_deberta.tasks import Answer, Example, load_task, read_examples
from megatron_deberta.tasks.metrics import finish_tag_metric, tag_counts
from megatron_deberta.tasks.records import read_bytes
from megatron_deberta.tasks.task import TaskConfig, entities, entity_labels, task_from_dict
from tests.support.task_files import make_task

CLASSES = "base: configs/tasks/custom_classification.yaml\nname: own\nlabels: {labels}\n{more}\n"
TAGS = (
    "base: configs/tasks/custom_tokens.yaml\nname: own\nreader: conll\nlabels: {labels}\n{more}\n"
    "splits: {{train: train.csv}}\ncolumns: {{words: words, tags: tags}}\n"
)
SCORES = "base: configs/tasks/custom_regression.yaml\nname: own\nlabels: {labels}\n{more}\n"
BIO = "[O, B-X, I-X]"
NFD = unicodedata.normalize("NFD", "café")


def case(
    name: str, labels: str, file: str, content: str, expected: Any, *,
    base: str = CLASSES, more: str = "", split: str = "train",
) -> Any:  # fmt: skip
    """Return a task, a file and its labels, or the pattern of an error."""
    return pytest.param(base, labels, more, split, file, content, expected, id=name)


CASES = [
    case("no and yes", "[no, yes]", "csv", "text,label\na,yes\nb,no\n", [1, 0]),
    case("on and off", "[on, off]", "csv", "text,label\na,off\nb,on\n", [1, 0]),
    case("leading zeros", "[01, 02, 010]", "csv", "text,label\na,010\nb,01\n", [2, 0]),
    case("zeros are not numbers", "[01, 02]", "csv", "text,label\na,1\n", "'1' is not one of 01"),
    case("dates", "[2024-01-01, 2024-01-02]", "csv", "text,label\na,2024-01-02\n", [1]),
    case("times", "[12:30, 1:00]", "csv", "text,label\na,1:00\n", [1]),
    case("underscores", "[555_1, 5551]", "csv", "text,label\na,5551\nb,555_1\n", [1, 0]),
    case("floats", "[1.0, 1.50]", "csv", "text,label\na,1.50\nb,1.0\n", [1, 0]),
    case("float of JSON", "[1.0, 2.5]", "jsonl", '{"text": "a", "label": 1.0}\n', [0]),
    case("integer as float", "[0, 1]", "jsonl", '{"text": "a", "label": 1.0}\n', [1]),
    case("octal and hex", "[0o7, 0x1F]", "csv", "text,label\na,0x1F\n", [1]),
    case("null and tilde", "[null, ~]", "csv", "text,label\na,~\nb,null\n", [1, 0]),
    case("NaN and inf", "[.nan, .inf, nan]", "csv", "text,label\na,nan\nb,.nan\n", [2, 0]),
    case("booleans of JSON", "[False, True]", "jsonl", '{"text": "a", "label": true}\n', [1]),
    case("booleans of pandas", "[False, True]", "csv", "text,label\na,True\nb,False\n", [1, 0]),
    case("JSON's null", "[None, x]", "jsonl", '{"text": "a", "label": null}\n', "label 'None' is"),
    case("other order", "[b, a]", "csv", "text,label\nx,a\ny,b\n", [1, 0]),
    case("spaces inside", "[not good, good]", "csv", "text,label\na,not good\n", [0]),
    case("spaces around", "[bad, good]", "csv", "text,label\na, good\n", "' good' is not one of"),
    case("another case", "[bad, good]", "csv", "text,label\na,Good\n", "'Good' is not one of"),
    case("byte-order mark", "[bad, good]", "csv", "\ufefftext,label\na,good\n", [1]),
    case("CRLF", "[bad, good]", "csv", "text,label\r\na,good\r\nb,bad\r\n", [1, 0]),
    case("CRLF, no quoting", "[bad, good]", "tsv", "text\tlabel\r\na\tgood\r\n", [1],
         more="quoting: false"),
    case("quoted labels", "[bad, good]", "csv", 'text,label\na,"good"\n', [1]),
    case("quotes are text", "[bad, good]", "tsv", 'text\tlabel\na\t"good"\n',
         "'\"good\"' is not one of", more="quoting: false"),
    case("decomposed labels", "[thé, café]", "csv", f"text,label\na,{NFD}\n", [1]),
    case("no label", "[bad, good]", "csv", "text,label\na,\n", "label '' is not one of"),
    case("hidden label", "[bad, good]", "csv", "text,label\na,\nb,-1\n", [None, None],
         split="test"),
    case("-1 is a label", "[-1, 0, 1]", "csv", "text,label\na,-1\nb,1\n", [0, 2], split="test"),
    case("unknown in dev", "[bad, good]", "csv", "text,label\na,fine\n", "dev.csv:2: label 'fine'",
         split="dev"),
    case("no header", "[bad, good]", "csv", "a,good\nb,bad\n", "no column 'text'"),
    case("header as data", "[bad, good]", "csv", "text,label\na,good\n", "no column 'text'",
         more="header: false"),
    case("same column twice", "[bad, good]", "csv", "text,label,label\na,good,bad\n",
         "2 columns are named 'label'"),
    case("semicolons", "[bad, good]", "csv", "text;label\na;good\n", "there are 'text;label'"),
    case("column no", "[bad, good]", "csv", "text,no\na,good\n", [1],
         more="columns: {text: text, label: no}"),
    case("rows that merge", "[bad, good]", "tsv",
         'text\tlabel\n"a\tbad\nb\tgood\nc\tgood\nd\tbad\nd"\tgood\n',
         "train.tsv:2: a quoted field reaches from line 2 to line 6; set quoting: false"),
    case("rows that merge at the last column", "[bad, good]", "tsv",
         'text\tlabel\na\t"good\nb"\tgood\n', "train.tsv:2: .*line 2"),
    case("quotes in one line", "[bad, good]", "tsv", 'text\tlabel\n"a ""b"""\tgood\n', [1]),
    case("long field", "[bad, good]", "csv", f"text,label\n{'x ' * 75_000},good\n", [1]),
    case("faults of other keys", "[bad, good]", "jsonl",
         '{"text": "a", "label": "good", "ppl": NaN}\n'
         '{"text": "b", "label": "bad", "raw": "\\ud800", "n": -Infinity}\n', [1, 0]),
    case("faults of the text", "[bad, good]", "jsonl", '{"text": "\\ud800", "label": "bad"}\n',
         ":1: 'text' has an unpaired surrogate"),
    case("faults of the label", "[bad, good]", "jsonl", '{"text": "a", "label": NaN}\n',
         "label 'nan' is not one of"),
    case("skipped label", "[bad, good]", "csv", "text,label\na,no\nb,good\n", [1],
         more="skip_labels: [no]"),
    case("skipped in JSON", "[bad, good]", "jsonl",
         '{"text": "a", "m": {"l": false}}\n{"text": "b", "m": {"l": "bad"}}\n', [0],
         more="skip_labels: [false]\ncolumns: {text: text, label: m.l}"),
    case("blank line of a single column", "[bad, good]", "csv", "text\na\n\nb\n",
         "test.csv:3: the line is blank", split="test"),
    case("blank lines at the end", "[bad, good]", "csv", "text\na\n\n\n", [None], split="test"),
    case("blank lines between rows", "[bad, good]", "csv", "text,label\n\na,good\n\nb,bad\n",
         [1, 0]),
    case("one document", "[bad, good]", "jsonl", '[\n{"text": "a"}\n]\n',
         "write one object per line, not one document"),
    case("scores", "[]", "csv", "text,score\na,-1.5e1\nb, 2 \n", [-15.0, 2.0], base=SCORES),
    case("NaN score", "[]", "csv", "text,score\na,nan\n", "score 'nan' is not a number",
         base=SCORES),
    case("infinite score", "[]", "csv", "text,score\na,inf\n", "score 'inf' is not a number",
         base=SCORES),
    case("score with underscore", "[]", "csv", "text,score\na,1_000\n", "'1_000' is not a number",
         base=SCORES),
    case("score with comma", "[]", "csv", 'text,score\na,"1,5"\n', "'1,5' is not a number",
         base=SCORES),
    case("true is no score", "[]", "jsonl", '{"text": "a", "score": true}\n', "not a number",
         base=SCORES),
    case("empty sentences", BIO, "csv", "\n\na\tB-X\n\n\n\nb\tO\n\n", [(1,), (0,)], base=TAGS),
    case("spaces in CoNLL", BIO, "csv", "a  X B-X \nb Y  I-X\n", [(1, 2)], base=TAGS),
    case("tabs in CoNLL", BIO, "csv", "New York\tB-X \nb\tO\n", [(1, 0)], base=TAGS),
    case("no-break space in a word", BIO, "csv", "10\u00a0km B-X\nb O\n", [(1, 0)], base=TAGS),
    case("document marks", BIO, "csv", "-DOCSTART- -X- O\n\na X B-X\n\n-DOCSTART- -X- O\n\nb X O\n",
         [(1,), (0,)], base=TAGS),
    case("a word like a mark", BIO, "csv", "-DOCSTART-ed B-X\n", [(1,)], base=TAGS),
    case("comments", BIO, "csv", "# id = 1\na O\n", "2 columns instead of 4", base=TAGS),
    case("comments as wide as lines", BIO, "csv", "# one\na O\n", ":1: label 'one' is not one of",
         base=TAGS),
    case("word without label", BIO, "csv", "a\tO\nb\t\n", ":2: 1 columns instead of 2", base=TAGS),
    case("all labels are listed", BIO, "csv", "a\tO\n\nb\tB-NP\nc\tI-NP\n",
         r":3: label 'B-NP' is not one of O, B-X, I-X; the data has labels: \[B-NP, I-NP, O\]",
         base=TAGS),
    case("listed labels are quoted", "[bad, good]", "jsonl",
         '{"text": "a", "label": "so, so"}\n{"text": "b", "label": 1.0}\n{"text": 1}\n',
         r"; the data has labels: \[1, \"so, so\"\]$"),
    case("50 labels are listed", "[bad, good]", "csv",
         "text,label\n" + "".join(f"a,k{n:02}\n" for n in range(62)), "k48, k49, and 12 more]$"),
    case("format of a file of words", BIO, "csv", "a b c d O\ne O\n",
         ":2: 2 columns instead of 5, as in the first line; expected one word per line, spaces or "
         "a tab, and its label", base=TAGS),
    case("format of a table", "[bad, good]", "csv", "text,label\na,bad,c\n",
         r":2: 3 columns instead of 2; expected the columns of the header \(text, label\), "
         "separated by commas"),
    case("lower case tags", BIO, "csv", "a\tb-x\n", "label 'b-x' is not one of", base=TAGS),
]  # fmt: skip


@pytest.mark.parametrize(("base", "labels", "more", "split", "file", "content", "expected"), CASES)
def test_labels_of_odd_files(
    base: str, labels: str, more: str, split: str, file: str, content: str, expected: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    task = tmp_path / "task.yaml"
    task.write_text(base.format(labels=labels, more=more))
    (tmp_path / f"{split}.{file}").write_bytes(content.encode())
    if not isinstance(expected, str):
        examples = read_examples(load_task(task), tmp_path, split)
        found = [e.tags if base is TAGS else e.label for e in examples]
        assert found == expected
        return
    with pytest.raises(DataError, match=expected) as error:
        read_examples(load_task(task), tmp_path, split)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (f"labels: [café, {NFD}]", "labels: '.*' occurs twice"),
        ("labels: [1, '1']", "labels: '1' occurs twice"),
        ("labels: [a, '']", "labels: '' is empty"),
        ('labels: [a, "b\\t"]', "labels: .* is empty or has control characters"),
        ("labels: a", "labels='a' is not a list"),
        ("labels: {a: b}", "labels=.* is not a list"),
        ("labels: [[a], b]", r"labels: \['a'\] is not text; quote it"),
        ("name: ../x", "name: '../x' cannot be the name of a file"),
        ("name: /x", "name: '/x' cannot be the name of a file"),
        ("name: .hidden", "name: '.hidden' cannot be the name of a file"),
        ('name: "a\\nb"', "cannot be the name of a file|control characters"),
        ("splits: {../x: a.csv}", "splits: '../x' cannot be the name of a file"),
        ("splits: {dev: /dev/zero}", "splits.dev.files: '/dev/zero' is not below the data folder"),
        ("splits: {dev: [a, b/../../x]}", "splits.dev.files: 'b/../../x' is not below"),
        ("splits: {dev: {files: a, leaderboard_file: ../x}}", "leaderboard_file: '../x' is not"),
        ("splits: {dev: {files: a, leaderboard_file: /x}}", "leaderboard_file: '/x' is not"),
        ("metrics: [accuracy, no]", "metrics: no is none of head classification's: accuracy, f1"),
        ("max_length: 0100", "max_length: '0100' is not a decimal number"),
        ("settings: {default: {train.steps: 1:30}}", "train.steps: '1:30' is not a decimal"),
        ("settings: {default: {train.run_dir: /x}}", "default.train.run_dir='/x': settings"),
        ("settings: {default: {finetune.cache: ../x}}", "settings cannot name files"),
    ],
)  # fmt: skip
def test_mistakes_of_task_files(change: str, message: str, tmp_path: Path) -> None:
    task = tmp_path / "task.yaml"
    base = "base: configs/tasks/custom_classification.yaml\n"
    task.write_text(base + ("" if change.startswith("name:") else "name: own\n") + change + "\n")
    with pytest.raises(ConfigError, match=message) as error:
        load_task(task)
    assert "\n" not in str(error.value)


def test_text_stays_text_in_every_key_and_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(
        "base: configs/tasks/custom_classification.yaml\nname: 2024_01\nlabels: [off, on]\n"
        "positive_label: on\nlabel_names: [01, 1]\nvalues: {label: {yes: on, 0: off}}\n"
        "splits: {no: 2024_02, dev: {files: 0123, header: no, part: [0, 0.5]}}\n"
        "settings: {default: {log.wandb: 0123, optimizer.freeze: [no, 1_0], data.sample_log: no,\n"
        "  train.steps: 1_000}}\n"
    )
    task = load_task(path)
    assert (task.name, task.labels, task.positive_label) == ("2024_01", ("off", "on"), "on")
    assert task.label_names == ("01", "1")
    assert task.values == {"label": {"yes": "on", "0": "off"}}
    assert task.splits["no"].files == ("2024_02",)
    dev = task.splits["dev"]
    assert (dev.files, dev.header, dev.part) == (("0123",), False, (0.0, 0.5))
    settings = {key: task.settings["default"][key] for key in ("log.wandb", "optimizer.freeze")}
    assert settings == {"log.wandb": "0123", "optimizer.freeze": ["no", "1_0"]}
    assert task.settings["default"]["data.sample_log"] is False
    assert task.settings["default"]["train.steps"] == 1000
    overrides = ["labels=[no, 0123]", "positive_label=no", "max_length=64", "splits.dev.files=1_0"]
    task = load_task(path, overrides)
    assert (task.labels, task.positive_label, task.max_length) == (("no", "0123"), "no", 64)
    assert task.splits["dev"].files == ("1_0",)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("columns", ["answer_text: answer", "answers: answers"])
def test_answers_in_another_unicode_form_than_the_passage(
    form: Any, columns: str, tmp_path: Path
) -> None:
    context, answer = (unicodedata.normalize(form, t) for t in ("Elle aime le café.", "café"))
    start = context.index(answer)
    other = unicodedata.normalize({"NFC": "NFD", "NFD": "NFC"}[form], answer)
    row = {"answer": other, "answers": [{"text": other, "answer_start": start}]}
    row |= {"question": "Quoi ?", "context": context}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    task = load_task(
        "custom_spans", [f"columns={{question: question, context: context, {columns}}}"]
    )
    (example,) = read_examples(task, tmp_path, "train")
    assert example.answers == (Answer(answer, start),)


def test_text_inside_elements_is_kept(tmp_path: Path) -> None:
    (tmp_path / "balanced_copa.xml").write_text(
        '<copa-corpus><item id="1" asks-for="cause" most-plausible-alternative="2">'
        "<p>It <b>rained</b> hard.</p><a1>The <i>sun</i>.</a1><a2>Clouds.</a2></item></copa-corpus>"
    )
    task = load_task("balanced_copa", ["splits.train=balanced_copa.xml"])
    (example,) = read_examples(task, tmp_path, "train")
    assert example.text == "It rained hard."
    assert example.choices[0].endswith("the sun.") or example.choices[0].endswith("The sun.")


def test_missing_values_of_tables_of_numbers(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", "b"], "label": [1.0, float("nan")]})
    task = load_task("custom_classification", ["labels=[0, 1]"])
    for split in ("test", "dev"):
        pyarrow.parquet.write_table(table, tmp_path / f"{split}.parquet")
    assert [e.label for e in read_examples(task, tmp_path, "test")] == [1, None]
    with pytest.raises(DataError, match="dev.parquet:2: label 'nan' is not one of"):
        read_examples(task, tmp_path, "dev")
    table = pyarrow.table({"text": [1.5, float("nan")], "label": [1, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "dev.parquet")
    with pytest.raises(DataError, match="dev.parquet:2: 'text' is a number, not a string"):
        read_examples(task, tmp_path, "dev")


def test_odd_labels_of_a_run_survive_its_config(tmp_path: Path) -> None:
    labels = ("no", "yes", "01", "2024-01-01", "12:30", "1_0", "1e5", "~", "null", "a: b", "#", "é")
    model = {"head": "classification", "labels": list(labels)}
    run = {"model": model, "objective": {"name": "classification"}, "finetune": {"task": "own"}}
    config = config_from_dict(run, "test")
    save_config(config, tmp_path / "run.yaml")
    assert load_config(tmp_path / "run.yaml").model.labels == labels


def tag_metric(
    task: TaskConfig, name: str, truth: list[list[str]], found: list[list[str]]
) -> float:
    counts = np.array([tag_counts(task, name, truth, found)], np.float64)
    return float(finish_tag_metric(name, counts)[0])


def tags_task(labels: list[str], *metrics: str) -> TaskConfig:
    return make_task("tokens", *(metrics or ("f1", "precision", "recall")), labels=labels)


@pytest.mark.parametrize(
    ("labels", "truth", "found", "name", "value"),
    [
        # Labels without a scheme: words, not chunks of their first letters.
        ("O PER SEC", "PER O SEC", "SEC O PER", "token_f1", 0),
        ("OTHER PER LOC", "OTHER OTHER PER", "OTHER PER PER", "token_f1", 2 / 3),
        ("O PER LOC", "O PER LOC O", "O PER O LOC", "token_f1", 1 / 2),
        ("NOUN VERB ADJ", "NOUN VERB", "NOUN NOUN", "token_f1", 1 / 2),
        ("E S B-", "E S", "S E", "token_f1", 0),
        # The position may stand behind the type.
        ("O PER-B PER-I LOC-B LOC-I", "PER-B PER-I", "LOC-B LOC-I", "f1", 0),
        ("O PER-B PER-I LOC-B LOC-I", "PER-B PER-B", "PER-B PER-I", "f1", 0),
        ("O PER_B PER_I", "PER_B PER_I O", "PER_B PER_I O", "f1", 1),
        # One of two entities found, none wrong.
        ("O B-PER I-PER L-PER U-PER", "U-PER U-PER", "U-PER O", "f1", 2 / 3),
        ("O B-P I-P E-P S-P", "B-P E-P S-P", "B-P E-P O", "f1", 2 / 3),
        ("O B-P M-P E-P S-P", "B-P M-P E-P S-P", "B-P M-P E-P O", "f1", 2 / 3),
        ("B M E S", "B E S B E", "B E S S S", "f1", 2 * 2 / (3 + 4)),
        ("O B I", "B I B O", "B I I O", "f1", 0),
        ("O I-PER I-LOC B-LOC", "I-PER I-PER I-LOC B-LOC", "I-PER I-PER I-LOC I-LOC", "f1", 0.4),
        ("o-X B-X I-X O", None, None, "refused", "'B-X' has a position .* but 'o-X' has none"),
        ("OTHER B-X I-X", None, None, "refused", "'B-X' has a position .* but 'OTHER' has none"),
        ("O B-X I-X X", None, None, "refused", "'B-X' has a position .* but 'X' has none"),
        ("O X-B X-I X", None, None, "refused", "'X-B' has a position .* but 'X' has none"),
        ("O B-X L-X E-X", None, None, "refused", "the positions B, E, L are of no scheme"),
    ],
)
def test_schemes_worked_out_by_hand(
    labels: str, truth: str | None, found: str, name: str, value: Any
) -> None:
    if truth is None:
        with pytest.raises(ConfigError, match=value) as error:
            tags_task(labels.split())
        assert "\n" not in str(error.value)
        # Metrics of words need no scheme.
        assert tags_task(labels.split(), "token_f1", "accuracy").metrics[0] == "token_f1"
        return
    task = tags_task(labels.split())
    assert task.metrics[0] == name
    assert tag_metric(task, name, [truth.split()], [found.split()]) == pytest.approx(value)


@pytest.mark.parametrize(
    ("labels", "scheme"), [("BI", IOB2), ("BIES", IOBES), ("BILU", BILOU)], ids=str
)
def test_f1_of_well_formed_labels_is_seqevals_in_strict_mode(labels: str, scheme: type) -> None:
    rng = np.random.default_rng(0)
    begin, inside, *single = labels
    end, alone = single or (inside, begin)

    def sentence() -> list[str]:
        tags: list[str] = []
        while len(tags) < 12:
            size, kind = rng.integers(0, 4), rng.choice(["PER", "LOC"])
            if size == 0:
                tags.append("O")
            elif size == 1:
                tags.append(f"{alone}-{kind}")
            else:
                tags += [f"{begin}-{kind}", *[f"{inside}-{kind}"] * (size - 2), f"{end}-{kind}"]
        return tags[:12] if "I" in tags[11] or "O" == tags[11] else [*tags[:11], "O"]

    task = tags_task(["O", *(f"{p}-{kind}" for p in labels for kind in ("PER", "LOC"))])
    truth, found = ([sentence() for _ in range(60)] for _ in range(2))
    # Both sides must be well formed: cut entities at the end are not.
    for side in (truth, found):
        for tags in side:
            while tags[-1] != "O":
                tags[-1] = "O"
            for at in range(10, -1, -1):
                if labels != "BI" and tags[at][0] in (begin, inside) and tags[at + 1] == "O":
                    tags[at] = "O"
    for name in ("f1", "precision", "recall"):
        expected = getattr(seqeval_metrics, f"{name}_score")(
            truth, found, mode="strict", scheme=scheme
        )
        value = tag_metric(task, name, truth, found)
        assert value == pytest.approx(expected)
        assert 0 < value < 1


def test_packaged_labels_have_a_scheme() -> None:
    for name in ("conll2003", "wnut17", "chunking", "custom_tokens"):
        task = load_task(name)
        assert task.metrics[0] == "f1"
        assert entity_labels(task.labels) == {label: label for label in task.labels}
    labels = load_task("wnut17").labels
    tags = ["B-creative-work", "I-creative-work", "B-person"]
    assert entities(labels, [tags]) == {("creative-work", 0, 1), ("person", 2, 2)}


@pytest.mark.parametrize("name", ["train.csv", "train.csv.gz", "train.parquet", "train"])
def test_only_regular_files_are_read(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    task = load_task("custom_classification")
    with pytest.raises(MegatronDebertaError, match="not a regular file|is none of"):
        read_examples(task, tmp_path, "train")
    with pytest.raises(MegatronDebertaError, match="not a regular file"):
        load_task(_fifo(tmp_path / "task.yaml"))
    with pytest.raises(MegatronDebertaError, match="not a regular file"):
        read_words(str(tmp_path / name))
    with pytest.raises(MegatronDebertaError, match="not a regular file"):
        read_words("/dev/zero")


def _fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def test_links_do_not_lead_out_of_the_data_folder(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (tmp_path / "secret.csv").write_text("text,label\na,positive\n")
    (data / "train.csv").symlink_to(tmp_path / "secret.csv")
    task = load_task("custom_classification")
    with pytest.raises(ConfigError, match="train.csv: leads outside the data folder"):
        read_examples(task, data, "train")
    # The folder itself may be a link, and links may stay inside.
    (data / "train.csv").unlink()
    (data / "real.csv").write_text("text,label\na,positive\n")
    (data / "train.csv").symlink_to("real.csv")
    (tmp_path / "link").symlink_to(data)
    assert read_examples(task, tmp_path / "link", "train")[0].label == 1


def test_small_files_that_expand_without_bound(tmp_path: Path) -> None:
    path = tmp_path / "train.csv.gz"
    with gzip.open(path, "wb", compresslevel=9) as stream:
        for _ in range(80):
            stream.write(bytes(1 << 20))
    with pytest.raises(DataError, match="bytes expand to more than") as error:
        read_bytes(path)
    assert error.value.exit_code == EXIT_USAGE
    with gzip.open(path, "wt") as stream:
        stream.write("text,label\n" + "a,positive\n" * 1_000_000)
    assert len(read_bytes(path)) == 11_000_011


def test_many_columns_and_labels_take_linear_time(tmp_path: Path) -> None:
    columns = [f"c{i}" for i in range(50_000)]
    (tmp_path / "train.csv").write_text(
        f"text,label,{','.join(columns)}\na,l99999,{',' * 49_999}\n"
    )
    labels = [f"l{i}" for i in range(100_000)]
    values = {"name": "own", "head": "classification", "reader": "table", "metrics": ["accuracy"]}
    start = time.process_time()
    task = task_from_dict(
        {
            **values,
            "splits": {"train": "train"},
            "columns": {"text": "text", "label": "label"},
            "labels": labels,
            "max_length": 32,
        },
        "test",
    )
    assert read_examples(task, tmp_path, "train") == [Example(id="0", text="a", label=99_999)]
    # It was quadratic: 15 s for the columns alone.
    assert time.process_time() - start < 4
    (tmp_path / "train.csv").write_text("text,label\na,odd\n")
    with pytest.raises(DataError, match="l49 and 99,950 more") as error:
        read_examples(task, tmp_path, "train")
    assert len(str(error.value)) < 1_000


@pytest.mark.slow
def test_a_kept_task_is_the_same_task(tmp_path: Path) -> None:
    from megatron_deberta.tasks.task import TASK_FILE, run_task_name, save_task, task_names

    for name in task_names():
        task = load_task(name)
        save_task(task, tmp_path)
        assert load_task(tmp_path / TASK_FILE) == task
    odd = load_task("custom_classification", ["labels=[no, 01, 2024-01-01, ~, café, 'a: b', '#']"])
    save_task(odd, tmp_path)
    assert run_task_name("gone.yaml", tmp_path) == str(tmp_path / TASK_FILE)
    assert load_task(run_task_name("gone.yaml", tmp_path)) == odd
    assert run_task_name("sst2", tmp_path / "other") == "sst2"
    packaged = "configs/tasks/sst2.yaml"
    assert run_task_name(packaged, tmp_path / "other") == packaged
    for gone in ("gone.yaml", str(tmp_path / "gone.yaml")):
        with pytest.raises(ConfigError, match="gone.yaml does not exist; copy the file to"):
            run_task_name(gone, tmp_path / "other")


def test_csv_rows_that_look_merged_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """CSV may have line breaks in quoted fields, but two stray marks look the same."""
    task = load_task("custom_classification")
    merged = '"hello,positive\nb,negative\nc",positive\n'
    (tmp_path / "train.csv").write_text("text,label\n" + 2 * merged + '"two\nlines",negative\n')
    assert len(read_examples(task, tmp_path, "train")) == 3
    assert [r.getMessage().partition("train.csv")[2] for r in caplog.records] == [
        ":2: a quoted field reaches from line 2 to line 4, but each of these lines looks like a "
        "row of its own; check the quotation marks",
        ": 2 rows are like this one",
    ]
