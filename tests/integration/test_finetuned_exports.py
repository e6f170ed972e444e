"""From labelled files to exports: the printed line opens a pipeline that predicts as we do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE
from megatron_deberta.hf.heads import HEADS
from megatron_deberta.hf.loading import temporary_module_cache
from tests.support.selection import every
from tests.support.tiny_runs import export_run
from tests.support.tiny_task import MODEL, WORDS

pytest.importorskip("sklearn")
SENTENCES = [WORDS[first : first + 2 + first % 4] for first in range(12)]
TASKS: dict[str, dict[str, Any]] = {
    "classification": {"labels": ["bad", "so-so", "good"]},
    "multilabel": {"labels": ["bad", "so-so", "good"]},
    "regression": {},
    "tokens": {"labels": ["O", "B-PER", "I-PER"]},
}


def row(head: str, words: list[str], number: int) -> dict[str, Any]:
    """Return a labelled example as a record of a packaged custom task."""
    if head == "tokens":
        return {"tokens": words, "tags": ["O" if len(word) < 3 else "B-PER" for word in words]}
    if head == "multilabel":
        return {"text": " ".join(words), "labels": [["so-so"], [], ["good", "bad"]][number % 3]}
    label = {"classification": ["bad", "so-so", "good"][number % 3], "regression": number / 4}
    return {"text": " ".join(words), {"regression": "score"}.get(head, "label"): label[head]}


def predicted(head: str, output: Any) -> list[Any]:
    """Return what a pipeline says about one text, as ``predict`` writes it: value, certainty."""
    (best,) = output if isinstance(output, list) else (output,)
    return [best["score"]] if head == "regression" else [best["label"], best["score"]]


def assert_whole_words(spans: Any, words: list[str], tags: list[str], tokenizer: Any) -> None:
    """Check the entities of words, except those that begin with a piece of only a space."""
    start = 0
    for word, tag in zip(words, tags, strict=True):
        end = start + len(word)
        if tokenizer.tokenize(word)[0] != "▁":
            found = [span for span in spans if span["start"] < end and start < span["end"]]
            assert [span["entity_group"] for span in found] == [tag[2:]] * (tag != "O")
            for span in found:
                assert span["start"] <= start
                assert end <= span["end"]
        start = end + 1
    text = " ".join(words)
    assert not any(text[span["start"]].isspace() for span in spans)


def assert_labels(scope: dict[str, Any], printed: str, words: list[str], ours: Any) -> None:
    """Check the scores of all labels, and those that the printed line chooses by thresholds."""
    assert len(scope["run"].model.config.label_thresholds) == 3
    (output,) = scope["run"]([" ".join(words)])
    found = {each["label"]: each["score"] for each in output}
    assert found == pytest.approx(ours["scores"], abs=1e-5)
    line = printed.partition("In Python, labels: ")[2].partition("\n")[0]
    exec(line.replace("A text.", " ".join(words)), scope)
    assert sorted(scope["labels"]) == sorted(ours["label"])


@pytest.mark.parametrize(
    "head", every(2, ["multilabel", "classification", "tokens", "regression"], ["nightly"])
)
def test_the_printed_pipeline_predicts_as_we_do(
    head: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run_dir, exported = (tmp_path / name for name in ("data", "run", "exported"))
    data.mkdir()
    rows = [row(head, words, number) for number, words in enumerate(SENTENCES)]
    for split in ("train", "dev"):
        text = "".join(json.dumps(values) + "\n" for values in rows)
        (data / f"{split}.jsonl").write_text(text)
    task = tmp_path / "task.yaml"
    base = f"configs/tasks/custom_{head}.yaml"
    task.write_text(json.dumps({"base": base, "name": "own", "max_length": 32, **TASKS[head]}))
    common = [str(task), "--data", str(data)]
    settings = (
        "train.steps=4", "optimizer.learning_rate=1e-2", "model.head_dropout=0",
        "train.global_batch_size=4", "parallel.engine=plain", "train.device=cpu",
        "log.tensorboard=false", f"train.run_dir={run_dir}",
    )  # fmt: skip
    assert main(["finetune", *common, "--model", str(MODEL), *settings]) == EXIT_DONE
    written = tmp_path / "dev.jsonl"
    predict = ["predict", *common, "--model", str(run_dir), "--split", "dev"]
    assert main([*predict, "--output", str(written)]) == EXIT_DONE
    capsys.readouterr()
    export_run(run_dir, exported)
    printed = capsys.readouterr().out

    (line,) = (line for line in printed.splitlines() if " pipeline(" in line)
    scope: dict[str, Any] = {}
    with temporary_module_cache():
        exec(line[line.index("from transformers") :], scope)
    expected = [json.loads(line) for line in written.read_text().splitlines()]
    assert len(expected) == len(SENTENCES)
    assert printed.count("In Python, labels: ") == (head == "multilabel")
    for words, ours in zip(SENTENCES, expected, strict=True):
        output = scope["run"](" ".join(words))
        if head == "multilabel":
            assert_labels(scope, printed, words, ours)
        elif head == "tokens":
            assert_whole_words(output, words, ours["label"], scope["run"].tokenizer)
        else:
            found = predicted(head, output)
            values = [ours["label"], *([max(ours["scores"].values())] if len(found) > 1 else [])]
            assert found == [pytest.approx(v, abs=1e-5) for v in values]
    if head == "tokens":
        card = (exported / "README.md").read_text()
        lines = card.split("```python\n")[2].split("```")[0].replace('"exported"', f'"{exported}"')
        lone = 0
        for words, ours in zip(SENTENCES, expected, strict=True):
            written_text = lines.replace(
                "A sentence, its words separated by single spaces", " ".join(words)
            )
            with temporary_module_cache():
                exec(written_text, scope)
            assert scope["labels"] == dict(enumerate(ours["label"]))
            lone += sum(scope["run"].tokenizer.tokenize(word)[0] == "▁" for word in words)
        assert lone
        assert len({tag for ours in expected for tag in ours["label"]}) > 1


def test_only_existing_pipelines_are_printed() -> None:
    pipelines = pytest.importorskip("transformers.pipelines")
    known = pipelines.PIPELINE_REGISTRY.get_supported_tasks()
    for head, export in HEADS.items():
        assert export.has_pipeline == (export.task in known), head
