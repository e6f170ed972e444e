"""Predictions of texts: long ones in windows, from options, standard input and files."""

from __future__ import annotations

import gzip
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megatron_deberta.cli.main import main
from megatron_deberta.errors import EXIT_DONE, EXIT_USAGE
from megatron_deberta.evaluate import predict as module
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer
from tests.support.stock_weights import randomize
from tests.support.tiny_task import MODEL, WORDS

LENGTH = 24
STRIDE = (LENGTH - 2) // 2
"""The task's stride of 128, at most half a window."""
FIELDS: dict[str, Any] = {
    "vocab_size": 304, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": LENGTH, "type_vocab_size": 0,
    "relative_attention": True, "position_buckets": 8, "pos_att_type": ["c2p", "p2c"],
    "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
}  # fmt: skip
NAMES = ["bad", "good", "odd"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "classes": ("SequenceClassification", {}),
    "several": ("SequenceClassification", {"problem_type": "multi_label_classification"}),
    "score": ("SequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    "tagger": ("TokenClassification", {}),
}
LONG = " ".join(WORDS * 4)
SHORT = "the cat sat on a mat"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of transformers with random weights, and a text file of both kinds of lines."""
    found = tmp_path_factory.mktemp("models")
    for kind, (head, fields) in KINDS.items():
        labels = ["O", "B-PER", "I-PER"] if kind == "tagger" else NAMES
        names = {} if kind == "score" else {"id2label": dict(enumerate(labels))}
        config = transformers.DebertaV2Config(**FIELDS, **names, **fields)
        model = getattr(transformers, f"DebertaV2For{head}")(config)
        randomize(model)
        # Predictions of windows shall differ.
        with torch.no_grad():
            model.classifier.weight.mul_(20)
        model.save_pretrained(found / kind)
        for name in ("spm.model", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL / name, found / kind / name)
    lines = [SHORT, "", LONG, *(" ".join(WORDS[n : n + 9] * (n + 1)) for n in range(5))]
    (found / "texts.txt").write_text("\r\n".join(lines) + "\r\n")
    return found


def run(folder: Path, kind: str, *arguments: str) -> int:
    return main(["predict", "--model", str(folder / kind), "train.device=cpu", *arguments])


def lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def windows_of(tokenizer: Tokenizer, text: str, pair: str = "") -> list[list[int]]:
    """Return the rows of a text, written down independently of the package."""
    ids, room = tokenizer.encode(text), LENGTH - 2
    cls, sep = [tokenizer.cls_id], [tokenizer.sep_id]
    before = []
    if pair:
        before = [*ids, *sep]
        ids, room = tokenizer.encode(pair), room - len(before)
    stride = min(128, room // 2)
    begins = list(range(0, max(len(ids) - room, 0), room - stride)) + [max(len(ids) - room, 0)]
    return [[*cls, *before, *ids[begin : begin + room], *sep] for begin in begins]


@torch.no_grad()
def stock_values(folder: Path, kind: str, rows: list[list[int]]) -> np.ndarray[Any, Any]:
    """Return probabilities, or scores, of transformers' model for each row by itself."""
    path = folder / kind
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    logits = torch.cat([model(torch.tensor([row])).logits for row in rows]).double()
    if kind == "score":
        return logits[:, 0].numpy()
    return (logits.sigmoid() if kind == "several" else logits.softmax(-1)).numpy()


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("kind", ["classes", "several", "score"])
def test_a_long_text_is_pooled_over_its_windows(
    folder: Path, kind: str, pooling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [LONG, SHORT]
    given = [argument for text in texts for argument in ("--text", text)]
    assert run(folder, kind, *given, "--long-text", pooling) == EXIT_DONE
    captured = capsys.readouterr()
    found = lines(captured.out)
    tokenizer = load_tokenizer(str(folder / kind))
    counts = []
    for text, ours in zip(texts, found, strict=True):
        values = stock_values(folder, kind, windows_of(tokenizer, text))
        counts.append(len(values))
        expected = values.mean(axis=0) if pooling == "mean" else values.max(axis=0)
        if kind == "score":
            assert ours["label"] == pytest.approx(expected, abs=1e-5)
        else:
            assert list(ours["scores"].values()) == pytest.approx(expected.tolist(), abs=1e-5)
            chosen = [name for name, p in zip(NAMES, expected, strict=True) if p >= 0.5]
            assert ours["label"] == (chosen if kind == "several" else NAMES[expected.argmax()])
        assert "truncated" not in ours
    assert [each["windows"] for each in found] == counts
    assert counts[0] > 3
    assert counts[1] == 1
    what = "score" if kind == "score" else "probability"
    how = "mean" if pooling == "mean" else "largest"
    assert (
        f"1 of 2 texts are longer than {LENGTH} tokens: {how} {what} of their windows, at most "
        f"{counts[0]}" in captured.err
    )


def test_the_mean_is_the_default_and_cutting_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "classes", "--text", LONG) == EXIT_DONE
    default = capsys.readouterr().out
    assert run(folder, "classes", "--text", LONG, "--long-text", "mean") == EXIT_DONE
    assert capsys.readouterr().out == default
    assert run(folder, "classes", "--text", LONG, "--long-text", "truncate") == EXIT_DONE
    captured = capsys.readouterr()
    (cut,) = lines(captured.out)
    first = windows_of(load_tokenizer(str(folder / "classes")), LONG)[:1]
    (expected,) = stock_values(folder, "classes", first)
    assert list(cut["scores"].values()) == pytest.approx(expected.tolist(), abs=1e-5)
    assert (cut["windows"], cut["truncated"]) == (1, True)
    assert "1 of 1 text is longer than 24 tokens: cut; --long-text mean" in captured.err


def test_of_a_pair_the_longer_segment_is_split(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "score", "--text", SHORT, "--text-pair", LONG) == EXIT_DONE
    (found,) = lines(capsys.readouterr().out)
    rows = windows_of(load_tokenizer(str(folder / "score")), SHORT, LONG)
    expected = stock_values(folder, "score", rows)
    assert found["label"] == pytest.approx(expected.mean(), abs=1e-5)
    assert found["windows"] == len(rows)
    assert run(folder, "score", "--text", LONG, "--text-pair", LONG) == EXIT_DONE
    assert lines(capsys.readouterr().out)[0]["truncated"] is True


def test_results_do_not_depend_on_batches_and_blocks(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Lines of a file come in their order, whatever the lengths that are batched together."""
    source, results = str(folder / "texts.txt"), []
    for size, block in ((8, 1024), (1, 2), (3, 3)):
        monkeypatch.setattr(module, "_BLOCK_TEXTS", block)
        output = tmp_path / f"{size}.jsonl"
        arguments = ["--input", source, "--output", str(output), f"train.micro_batch_size={size}"]
        assert run(folder, "classes", *arguments) == EXIT_DONE
        results.append(lines(output.read_text()))
        captured = capsys.readouterr()
        assert f"{output}: 7 predictions of text" in captured.out
        assert "of 7 texts are longer than 24 tokens: mean probability" in captured.err
        assert "predict: texts 100%" in captured.err
    texts = [line for line in (folder / "texts.txt").read_text().split("\n") if line.strip()]
    for found in results:
        assert [each["text"] for each in found] == texts
        assert [each["id"] for each in found] == list(map(str, range(7)))
        for ours, first in zip(found, results[0], strict=True):
            assert ours["scores"] == pytest.approx(first["scores"], abs=1e-6)
            assert (ours["label"], ours["windows"]) == (first["label"], first["windows"])


def test_json_lines_keep_their_ids(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "texts.jsonl.gz"
    rows = [{"body": SHORT, "id": "first"}, {"body": LONG, "text": "another", "n": 1}]
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    assert run(folder, "classes", "--input", str(path), "--keys", "body") == EXIT_DONE
    found = lines(capsys.readouterr().out)
    assert [(each["id"], each["text"]) for each in found] == [("first", SHORT), ("1", LONG)]


def test_taggers_and_standard_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = json.dumps({"text": LONG}) + "\n" + json.dumps({"words": ["a", "mat"]}) + "\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    assert run(folder, "tagger") == EXIT_DONE
    captured = capsys.readouterr()
    first, second = lines(captured.out)
    assert first["words"] == WORDS * 4
    assert len(first["label"]) == len(first["scores"]) == len(WORDS * 4)
    assert first["windows"] > 1
    assert isinstance(first["entities"], list)
    assert (second["words"], second["windows"]) == (["a", "mat"], 1)
    assert "1 of 2 texts are longer than 24 tokens: predicted in windows" in captured.err


def test_a_failed_run_leaves_no_output(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second block cannot be read; what was written before is not the result."""
    monkeypatch.setattr(module, "_BLOCK_TEXTS", 1)
    source, output = tmp_path / "texts.jsonl", tmp_path / "out" / "found.jsonl"
    source.write_text('{"text": "one"}\n{"text": "two"}\n{"text": 3}\n')
    output.parent.mkdir()
    output.write_text("before")
    assert run(folder, "classes", "--input", str(source), "--output", str(output)) == EXIT_USAGE
    assert [path.name for path in output.parent.iterdir()] == ["found.jsonl"]
    assert output.read_text() == "before"


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("classes", ["--input", "FOLDER/none.txt"], "none.txt: cannot be read: No such file"),
        ("classes", ["--input", "FOLDER/texts.csv"], "a table; write a task file"),
        ("classes", ["--input", "FOLDER/texts.txt", "--text", "a"], "give one of them"),
        ("classes", ["--input", "FOLDER/texts.txt", "--format", "jsonl"], "texts.txt:1: not valid"),
        ("classes", ["--input", "-", "FOLDER/texts.txt"], "cannot be read beside files"),
        ("classes", ["--text", "a", "--keys", "b"], "--keys is for --input"),
        ("tagger", ["--text", "a", "--long-text", "max"], "is for classes and scores"),
    ],
)
def test_wrong_input_is_refused(
    folder: Path,
    kind: str,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [argument.replace("FOLDER", str(folder)) for argument in arguments]
    assert run(folder, kind, *given) == EXIT_USAGE
    assert message in capsys.readouterr().err
