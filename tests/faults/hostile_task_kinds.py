"""Kinds of files of labelled tasks that ``tests.faults.hostile_files`` changes.

These are task files, their data in every format, encoded examples, and texts to predict. Reading
goes on to encoded examples, metrics and predictions, as in fine-tuning, ``evaluate`` and
``predict``, because a value that a reader lets through must not fail there.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import yaml

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import MegatronDebertaError
from megatron_deberta.evaluate.minimal_pairs import build_minimal_pairs, read_minimal_pairs
from megatron_deberta.evaluate.models import SourceModel, open_source_model
from megatron_deberta.evaluate.splits import TaskRows, output_shape
from megatron_deberta.files import NPY_ERRORS
from megatron_deberta.finetune.settings import finetune_config
from megatron_deberta.tasks import json_lines, predict, read_examples, score, write_predictions
from megatron_deberta.tasks.class_scores import class_scores
from megatron_deberta.tasks.encoded import FINGERPRINT_FILE, EncodedDataset
from megatron_deberta.tasks.encoding import encode
from megatron_deberta.tasks.examples import Example, Prediction
from megatron_deberta.tasks.scoring import Outputs, with_best_thresholds
from megatron_deberta.tasks.task import TASK_FILE, TaskConfig, is_labelled, load_task, save_task
from megatron_deberta.tasks.texts import TEXT_KEYS, check_text_files, read_text_files, text_examples
from megatron_deberta.text.jobs.units import plan_units
from megatron_deberta.text.readers.reading import read_documents
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import find_sources
from tests.faults.hostile_kinds import Kind, Syntax
from tests.support.task_files import PUBLISHED
from tests.support.tiny_models import tiny_tokenizer
from tests.support.tiny_task import MODEL

Records = Sequence[Mapping[str, Any]]

TASK = "user.yaml"
"""The task file in the folder of a kind; its data is beside it."""
DATA = "data.jsonl"
_PASSAGE = "The quick fox ran. It met a dog near the river."
_WIDTH = 4
"""Numbers of an embedding."""

TASKS: dict[str, tuple[dict[str, Any], Records]] = {
    "classification": (
        {
            "base": "configs/tasks/custom_classification.yaml", "labels": ["bad", "good"],
            "columns": {"text": "{title}: {text}", "text_pair": "more.pair", "label": "label",
                        "id": "id", "group": "title"},
            "values": {"title": {"A": "First"}}, "skip_labels": ["-"], "long_text": "mean",
            "max_length": 24, "stride": 4, "settings": {"own": {"finetune.epochs": [1, 2]}},
        },
        [
            {"id": n, "title": "AB"[n % 2], "text": _PASSAGE * (1 + 2 * n),
             "more": {"pair": "It rains."}, "label": label}
            for n, label in enumerate(("good", "bad", "-", "good"))
        ],
    ),
    "multilabel": (
        {"columns": {"text": "text", "label": "labels"}, "labels": ["a", "b", "c"],
         "label_separator": ";", "thresholds": [0.5, 0.25, 0.75],
         "metrics": ["micro_f1", "macro_f1", "accuracy"]},
        [{"text": "It rains.", "labels": ["a", "c"]}, {"text": "It is dry.", "labels": "b; c"},
         {"text": "It snows.", "labels": []}],
    ),
    "regression": (
        {"columns": {"text": "text", "text_pair": "pair", "label": "score"},
         "label_range": [0, 5], "metrics": ["pearson", "spearman"], "truncate": "first"},
        [{"text": "A cat sat.", "pair": "A dog sat.", "score": 2.5},
         {"text": "A cat sat.", "pair": "The cat sat.", "score": "4.75"},
         {"text": "A cat sat.", "pair": "It rains.", "score": 0}],
    ),
    "spans": (
        {"columns": {"question": "question", "context": "context", "answers": "answers",
                     "id": "id"},
         "unanswerable": True, "stride": 8, "max_length": 40, "mask_text": "@blank",
         "max_answer_length": 5, "metrics": ["f1", "best_exact"]},
        [{"id": "a", "question": "Whom did it meet?", "context": _PASSAGE,
          "answers": [{"text": "a dog", "answer_start": 26}]},
         {"id": "b", "question": "The @blank ran.", "context": _PASSAGE * 3,
          "answers": {"text": ["fox"], "answer_start": [10]}},
         {"id": "c", "question": "Who slept?", "context": _PASSAGE, "answers": []}],
    ),
    "tokens": (
        {"columns": {"words": "words", "tags": "tags"}, "labels": ["O", "B-PER", "I-PER"],
         "metrics": ["f1", "accuracy"], "stride": 4, "max_length": 16},
        [{"words": ["Dana", "Reeve", "slept", "."], "tags": ["B-PER", "I-PER", "O", "O"]},
         {"words": "It rained " * 9, "tags": "O O " * 9}],
    ),
    "choices": (
        {"columns": {"text": "premise", "question": "question", "choices": ["one", "two"],
                     "label": "label", "group": "question"},
         "values": {"question": {"cause": "because"}}, "metrics": ["accuracy"]},
        [{"premise": "It rained.", "question": "cause", "one": "Clouds.", "two": "Sun.",
          "label": 0},
         {"premise": "It was wet.", "question": "effect", "one": "She slept.", "two": "She fell.",
          "label": 1}],
    ),
    "embed": (
        {"columns": {"text": "text", "text_pair": "pair", "negative": "other", "label": "score"},
         "label_range": [0, 5], "metrics": ["spearman"]},
        [{"text": "A cat sat.", "pair": "The cat sat.", "other": "It rains.", "score": 4},
         {"text": "A dog ran.", "pair": "It snows.", "other": "It rains.", "score": 1.5}],
    ),
    "rerank": (
        {"columns": {"query": "query", "passages": "passages", "labels": "labels",
                     "positives": "positive", "negatives": "negative", "id": "id"},
         "max_passages": 3, "passage_seed": 1, "metrics": ["ndcg_at_10", "mrr_at_10", "map"]},
        [{"id": 1, "query": "Who ran?", "passages": ["The fox ran.", "It rained."],
          "labels": [1, 0.5]},
         {"id": 2, "query": "Who fell?", "positive": ["She fell."], "negative": "He slept."}],
    ),
}  # fmt: skip
"""Task file and records of each head."""


def write_task(folder: Path, head: str) -> None:
    """Write the task file of a head, and its data."""
    keys, records = TASKS[head]
    split = {"files": [DATA], "leaderboard_file": "test.jsonl"}
    task = {
        "name": "user", "description": "for the campaign", "head": head, "reader": "table",
        "splits": {"train": DATA, "dev": [DATA], "test": split}, "max_length": 32, **keys,
    }  # fmt: skip
    (folder / TASK).write_text(yaml.safe_dump(task, sort_keys=False))
    (folder / DATA).write_text("".join(json.dumps(record) + "\n" for record in records))


def run_each(steps: Iterable[Callable[[], object]]) -> None:
    """Call functions of which each must be seen to end; a refusal of one is raised afterwards."""
    refusal: Exception | None = None
    for step in steps:
        try:
            step()
        except (MegatronDebertaError, OSError) as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal


def zero_outputs(task: TaskConfig, encoded: EncodedDataset) -> Outputs:
    """Return outputs of the shape that a model with the task's head has."""
    width = _WIDTH if task.head == "embed" else task.num_labels
    return np.zeros(output_shape(task.head, encoded, width), np.float32)


def predictions_of(
    task: TaskConfig, examples: Sequence[Example], encoded: EncodedDataset
) -> list[Prediction]:
    """Return predictions of examples, and write them as ``predict`` does."""
    found = predict(task, examples, encoded, zero_outputs(task, encoded))
    json_lines(task, examples, found)
    return found


def use_split(task: TaskConfig, folder: Path, name: str) -> None:
    """Read, encode, predict and score the examples of a split."""
    examples = read_examples(task, folder, name)
    encoded = encode(task, examples, tiny_tokenizer())
    if is_labelled(name):
        score_examples(task, examples, encoded)
    else:
        found = predictions_of(task, examples, encoded)
        write_predictions(task, name, examples, found, folder / "predicted")


def score_examples(task: TaskConfig, examples: Sequence[Example], encoded: EncodedDataset) -> None:
    """Compute all scores of labelled examples, as a validation does."""
    outputs = zero_outputs(task, encoded)
    best = with_best_thresholds(task, examples, encoded, outputs)
    score(best, examples, encoded, outputs)
    class_scores(best, examples, predictions_of(best, examples, encoded))


@cache
def source_model() -> SourceModel:
    """Return the model that tasks are fine-tuned from."""
    return open_source_model(MODEL)


def _read_task(folder: Path) -> None:
    task = load_task(folder / TASK)
    # What fine-tuning keeps of a task must be the same task.
    save_task(task, folder)
    assert repr(load_task(folder / TASK_FILE)) == repr(task)
    splits = [partial(use_split, task, folder, name) for name in task.splits]
    configure = partial(finetune_config, str(folder / TASK), source_model(), str(folder), [])
    run_each([*splits, configure])


def _task_kinds(head: str) -> Iterable[Kind]:
    def make(name: str, folder: Path) -> Path:
        write_task(folder, head)
        return folder / name

    def read_data(folder: Path) -> None:
        task = _own_task(head)
        run_each(partial(use_split, task, folder, name) for name in ("dev", "test"))

    yield Kind(f"task_{head}", "yaml", partial(make, TASK), _read_task)
    yield Kind(f"examples_{head}", "lines", partial(make, DATA), read_data)


@cache
def _own_task(head: str, *overrides: str) -> TaskConfig:
    """Return a task of `TASKS`, which is always the same."""
    with TemporaryDirectory() as folder:
        write_task(Path(folder), head)
        return load_task(Path(folder) / TASK, overrides)


def _splits(file: str) -> str:
    """Return the override of a task whose dev and test split are the same file."""
    return f"splits={json.dumps({'dev': file, 'test': file})}"


@cache
def _packaged_task(name: str, file: str) -> TaskConfig:
    return load_task(name, [_splits(file)])


_COPA = (
    '<copa-corpus version="1.0">\n<item id="1" asks-for="cause" most-plausible-alternative="1">'
    "<p>It <b>rained</b>.</p>\n<a1>Clouds.</a1><a2>Sun.</a2></item>\n"
    '<item id="1001" asks-for="effect" most-plausible-alternative="2"><p>It rained.</p>'
    "<a1>It was dry.</a1><a2>It was wet.</a2></item></copa-corpus>\n"
)
_QUAIL = (
    '<data>\n<text id="f1"><text_body>It rained &amp; snowed.</text_body><questions>\n'
    '<q id="0" type="Causality">What?<a id="0" correct="True">rain</a>'
    '<a id="1" correct="False">sun</a></q>\n</questions></text></data>\n'
)
_ANSWERS = (
    'question,context,answer,answer_start\nWho ran?,"The fox ran, fast.",fox,4\n'
    'Who ran?,"The ""dog""\nran.",dog,5\n'
)
_FILES: dict[str, tuple[str, Syntax, str, str]] = {
    # name of the kind: task, syntax, file below the data folder, content
    "tsv": ("mnli", "binary", "train.tsv", PUBLISHED["mnli/train.tsv"]),
    "tsv_short_rows": ("qqp", "binary", "train.tsv", PUBLISHED["qqp/train.tsv"]),
    "tsv_words": (
        "custom_tokens", "binary", "dev.tsv", "tokens\ttags\nDana slept\tB-PER O\nIt rains\tO O\n",
    ),
    "csv": ("swag", "binary", "val.csv", PUBLISHED["swag/val.csv"]),
    "csv_answers": ("custom_spans", "binary", "dev.csv", _ANSWERS),
    "conll": ("conll2003", "binary", "valid.txt", PUBLISHED["conll2003/valid.txt"]),
    "conll_types": ("wnut17_types", "binary", "dev.conll", "Dana\tB-person\nslept\tO\n\nIt\tO\n"),
    "squad": ("squad2", "json", "dev-v2.0.json", PUBLISHED["squad2/dev-v2.0.json"]),
    "squad_passages": (
        "policyqa_rerank", "json", "policyqa.dev.json", PUBLISHED["squad2/dev-v2.0.json"],
    ),
    "record": ("record", "lines", "val.jsonl", PUBLISHED["record/val.jsonl"]),
    "multirc": ("multirc", "lines", "val.jsonl", PUBLISHED["multirc/val.jsonl"]),
    "wic": ("wic", "lines", "val.jsonl", PUBLISHED["wic/val.jsonl"]),
    "wsc": ("wsc", "lines", "val.jsonl", PUBLISHED["wsc/val.jsonl"]),
    "race": ("race", "json", "dev/high/1.txt", PUBLISHED["race/dev/high/1.txt"]),
    "race_lines": ("race", "lines", "dev.jsonl", PUBLISHED["race/dev/high/1.txt"] + "\n"),
    "quail": ("quail", "binary", "quail_dev.xml", _QUAIL),
    "copa_xml": ("balanced_copa", "binary", "balanced_copa.xml", _COPA),
}  # fmt: skip


def _file_kind(name: str) -> Kind:
    task_name, syntax, file, content = _FILES[name]
    split = "dev" if name == "race" else file

    def make(folder: Path) -> Path:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        return path

    def read(folder: Path) -> None:
        task = _packaged_task(task_name, split)
        run_each(partial(use_split, task, folder, each) for each in task.splits)

    return Kind(f"data_{name}", syntax, make, read)


def _arrow_table(metadata: Mapping[bytes, bytes]) -> Any:
    """Return examples with the metadata of ``datasets``, where classes are numbers."""
    rows = [{"text": "It rains.", "label": 0}, {"text": "It is dry.", "label": 1}]
    return pyarrow.Table.from_pylist(rows * 9).replace_schema_metadata(metadata)


_FEATURES = {"label": {"_type": "ClassLabel", "names": ["bad", "good"]}}
_METADATA = {b"huggingface": json.dumps({"info": {"features": _FEATURES}}).encode()}


def _write_table(table: Any, path: Path) -> Path:
    """Write a table as Parquet or, as ``datasets`` does, as Arrow."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return path
    with pyarrow.OSFile(str(path), "wb") as sink:
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return path


def _make_saved(name: str, folder: Path) -> Path:
    """Write a split as ``datasets.Dataset.save_to_disk`` does."""
    saved = folder / "data"
    saved.mkdir()
    _write_table(_arrow_table(_METADATA), saved / "data-00000-of-00001.arrow")
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train"}
    (saved / "state.json").write_text(json.dumps(state))
    return saved / name


def _make_gzip(folder: Path) -> Path:
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerows([("text", "label"), ("It rains.", "bad"), ("It is dry.", "good")])
    path = folder / "data.csv.gz"
    path.write_bytes(gzip.compress(stream.getvalue().encode(), mtime=0))
    return path


def _read_table(folder: Path) -> None:
    """Read the table ``data`` of any format."""
    overrides = ("columns={text: text, label: label}", _splits("data"))
    task = _own_task("classification", *overrides)
    run_each(partial(use_split, task, folder, name) for name in ("dev", "test"))


def _document_kind(name: str) -> Kind:
    """Return the kind of a table whose rows are documents for pretraining."""

    def make(folder: Path) -> Path:
        texts = pyarrow.array(["It rains.", "It is dry.", "It rains."] * 9)
        columns = {"text": texts, "title": texts.dictionary_encode()}
        return _write_table(pyarrow.table(columns), folder / name)

    def read(folder: Path) -> None:
        sources = find_sources([str(folder / name)])
        plan_units(sources, 1000)
        for _ in read_documents(sources, ReadOptions(keys=("text", "title"))):
            pass

    return Kind(f"text_{Path(name).suffix[1:]}", "binary", make, read)


def _encoded_kind(head: str, array: str) -> Kind:
    def make(folder: Path) -> Path:
        task = _own_task(head)
        write_task(folder, head)
        encode(task, read_examples(task, folder, "dev"), tiny_tokenizer(), cache=folder / "cache")
        name = array if array == FINGERPRINT_FILE else f"{array}.npy"
        return next((folder / "cache").glob(f"*/{name}"))

    def read(folder: Path) -> None:
        task, tokenizer = _own_task(head), tiny_tokenizer()
        examples = read_examples(task, folder, "dev")
        if array != FINGERPRINT_FILE:
            _renew_fingerprint(next((folder / "cache").iterdir()))
        encoded = encode(task, examples, tokenizer, cache=folder / "cache")
        score_examples(task, examples, encoded)
        filler = (tokenizer.cls_id, tokenizer.sep_id)
        for _ in TaskRows(task.head, encoded, filler, tokenizer.pad_id).batches(2, 0, 1):
            pass

    return Kind(f"encoded_{head}_{array}", "binary", make, read)


def _renew_fingerprint(folder: Path) -> None:
    """Write the fingerprint of arrays: whoever changes them can also change it."""
    try:
        arrays: dict[str, Any] = {
            path.stem: np.load(path, allow_pickle=False) for path in folder.glob("*.npy")
        }
        fingerprint = EncodedDataset(**arrays).fingerprint
    except NPY_ERRORS:
        return
    (folder / FINGERPRINT_FILE).write_text(fingerprint + "\n")


_ENCODED = {
    "classification": (
        FINGERPRINT_FILE, "input_ids", "token_type_ids", "row_offsets", "example_index", "labels",
    ),
    "multilabel": ("labels",),
    "spans": ("char_offsets", "labels"),
    "tokens": ("word_index", "labels"),
    "rerank": ("example_index", "labels"),
}  # fmt: skip

_TEXTS: dict[str, Records] = {
    "classification": [{"id": 3, "text": "It rains.", "text_pair": "It is wet."}],
    "tokens": [{"words": ["Dana", "slept"]}, {"text": "It rains"}],
    "choices": [{"text": "It rains.", "choices": ["It is wet.", "It is dry."]}],
    "rerank": [
        {"query": "Who ran?", "passages": ["The fox ran.", "It rained."]},
        {"text": "Who fell?", "text_pair": "She fell."},
    ],
}  # fmt: skip
"""Objects to predict by head."""


def _text_kind(head: str) -> Kind:
    name = "texts.jsonl"

    def make(folder: Path) -> Path:
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in _TEXTS[head]))
        return folder / name

    def read(folder: Path) -> None:
        _predict_texts(_own_task(head), folder / name)

    return Kind(f"texts_{head}", "lines", make, read)


def _predict_texts(task: TaskConfig, path: Path) -> None:
    check_text_files([str(path)])
    records = read_text_files([str(path)], "auto", TEXT_KEYS, lambda position: None)
    examples = list(text_examples(task, records))
    encoded = encode(task, examples, tiny_tokenizer())
    predictions_of(task, examples, encoded)


def _make_plain_texts(folder: Path) -> Path:
    (folder / "texts.gz").write_bytes(gzip.compress(b"It rains.\nIt is dry.\n\n", mtime=0))
    return folder / "texts.gz"


def _make_pairs(folder: Path) -> Path:
    pair = {
        "sentence_good": "The cat sits.", "sentence_bad": "The cat sit.", "UID": "agreement",
        "field": "morphology/syntax",
    }  # fmt: skip
    (folder / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 2)
    return folder / "pairs.jsonl"


def _read_pairs(folder: Path) -> None:
    build_minimal_pairs(RunConfig(), tiny_tokenizer(), read_minimal_pairs(folder))


TASK_KINDS = (
    *(kind for head in TASKS for kind in _task_kinds(head)),
    *map(_file_kind, _FILES),
    Kind(
        "data_parquet", "binary",
        lambda folder: _write_table(_arrow_table(_METADATA), folder / "data.parquet"), _read_table,
    ),
    Kind("data_arrow", "binary", partial(_make_saved, "data-00000-of-00001.arrow"), _read_table),
    Kind("data_arrow_state", "json", partial(_make_saved, "state.json"), _read_table),
    Kind("data_gzip", "binary", _make_gzip, _read_table),
    *map(_document_kind, ("documents.parquet", "documents.arrow")),
    *(_encoded_kind(head, array) for head, arrays in _ENCODED.items() for array in arrays),
    *map(_text_kind, _TEXTS),
    Kind(
        "texts_gzip", "binary", _make_plain_texts,
        lambda folder: _predict_texts(_own_task("multilabel"), folder / "texts.gz"),
    ),
    Kind("minimal_pairs", "lines", _make_pairs, _read_pairs),
)  # fmt: skip
