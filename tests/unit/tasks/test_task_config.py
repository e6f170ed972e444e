"""Task configs: packaged ones load, and mistakes are named."""

from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.errors import ConfigError
from megatron_deberta.tasks import load_task
from megatron_deberta.tasks.task import task_from_dict, task_names

PLAIN: dict[str, Any] = {
    "name": "mine",
    "head": "classification",
    "reader": "csv",
    "splits": {"train": "train.csv"},
    "columns": {"text": "sentence", "label": "label"},
    "labels": [0, 1],
    "metrics": ["accuracy"],
    "max_length": 64,
}


@pytest.mark.parametrize("name", task_names())
def test_packaged_tasks_load_under_their_file_name(name: str) -> None:
    task = load_task(name)
    assert task.name == name
    assert task.description
    assert "dev" in task.splits
    assert not task.transfer_from or load_task(task.transfer_from)


def test_labels_are_written_as_in_the_files() -> None:
    task = task_from_dict({**PLAIN, "labels": [False, True], "label_names": ["no", "yes"]}, "x")
    assert task.labels == ("false", "true")
    assert task.id2label == {0: "no", 1: "yes"}


def test_overrides_and_a_base_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: configs/tasks/sst2.yaml\nname: mine\nsplits: {dev: my.tsv}\n")
    task = load_task(path, ["max_length=32", "splits.dev.part=[0.5, 1]"])
    assert (task.name, task.max_length, task.columns["text"]) == ("mine", 32, "sentence")
    assert list(task.splits) == ["dev"]
    assert task.splits["dev"].files == ("my.tsv",)
    assert task.splits["dev"].part == (0.5, 1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metric": []}, "x: no key 'metric'; did you mean metrics?"),
        ({"head": "span"}, "x: head: Invalid value 'span'"),
        ({"columns": {"label": "label"}}, "x: columns: text missing for head classification"),
        ({"columns": {"text": "a", "words": "b"}}, "x: columns.words: head classification has"),
        ({"metrics": ["exact"]}, "x: metrics: exact is none of head classification's"),
        ({"labels": [0, 0]}, "x: labels: '0' occurs twice"),
        ({"labels": []}, "x: labels: head classification needs at least two"),
        ({"positive_label": "2"}, "x: positive_label='2': not in labels"),
        ({"splits": {"train": {"files": "a", "part": [1, 0]}}}, r"x: splits.train.part=\[1.0, 0"),
        ({"splits": {"train": {"file": "a"}}}, "x: .*file"),
        ({"default_settings": "best"}, "x: default_settings='best': not in settings"),
        ({"max_length": "long"}, "x: max_length: "),
        (
            {"head": "rerank", "columns": {"query": "q", "labels": "l"}, "metrics": ["map"]},
            "x: columns: passages .with labels. or positives missing for head rerank",
        ),
        ({"max_passages": -1}, "x: max_passages=-1: is negative"),
        ({"long_text": "min"}, "x: long_text: Invalid value 'min'"),
        (
            {"head": "tokens", "columns": {"words": "w"}, "long_text": "mean"},
            "x: long_text=mean: is for the heads classification, multilabel, regression, not for "
            "tokens; remove it",
        ),
        ({"hypothesis": "It is {}."}, "x: hypothesis='It is {}.': is for head choices"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        task_from_dict({**PLAIN, **change}, "x")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["mnli", "rte", "qnli", "qnli_dev", "cb", "wnli", "superglue_rte", "ax", "axb", "axg"]
)
def test_classes_of_inference_name_entailment(name: str) -> None:
    """Every packaged inference task has exactly one class named entailment."""
    names = load_task(name).id2label.values()
    assert [label for label in names if label.startswith("entail")] == ["entailment"]


def test_an_unknown_task_suggests_a_name() -> None:
    with pytest.raises(ConfigError, match="no task 'sst3'; did you mean 'sst2'"):
        load_task("sst3")


def test_the_page_lists_every_task() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()
    assert [name for name in task_names() if f"`{name}`" not in page] == []


def test_the_example_of_the_page_loads(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()
    path = tmp_path / "tickets.yaml"
    path.write_text(page.split("```yaml\n")[1].split("```")[0])
    task = load_task(path, ["max_length=128"])
    assert (task.reader, task.max_length, task.metrics[0]) == ("table", 128, "macro_f1")
    assert task.columns["text"] == "{subject}: {body}"
