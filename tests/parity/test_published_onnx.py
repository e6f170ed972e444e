"""Published models as ONNX graphs: transformers' outputs, labels, tokenizer and decisions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from megatron_deberta.cli.main import main
from megatron_deberta.hf.onnx import published
from megatron_deberta.hf.onnx.graph import write_graph
from tests.support.selection import every
from tests.support.stock_weights import randomize
from tests.support.tiny_models import TEXT, tiny_tokenizer

onnxruntime = pytest.importorskip("onnxruntime", reason="extra [onnx] is not installed")

SIZES: dict[str, Any] = {
    "vocab_size": 208, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "pooler_hidden_size": 32,
    "relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"],
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Deberta": {"type_vocab_size": 2},
    "DebertaV2": {
        "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm",
        "max_relative_positions": 32, "type_vocab_size": 0,
    },
}  # fmt: skip
THREE = {"id2label": {0: "entailment", 1: "neutral", 2: "contradiction"}}
THREE |= {"label2id": {name: n for n, name in THREE["id2label"].items()}}  # type: ignore[dict-item]
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "single label": ("ForSequenceClassification", THREE),
    "two default labels, tanh": ("ForSequenceClassification", {"pooler_hidden_act": "tanh"}),
    "multi label": (
        "ForSequenceClassification", {**THREE, "problem_type": "multi_label_classification"},
    ),
    "regression": ("ForSequenceClassification", {"num_labels": 1, "problem_type": "regression"}),
    "tokens": ("ForTokenClassification", THREE),
    "spans": ("ForQuestionAnswering", {}),
    "masked language model": ("ForMaskedLM", {"legacy": True}),
    "choices": ("ForMultipleChoice", {}),
    "encoder": ("Model", {}),
}  # fmt: skip
SENTENCES = [line for line in TEXT if line.strip()][:6]


def write_published(folder: Path, family: str, head: str, *, pickle: bool = False) -> Any:
    """Write a transformers model with random weights and a tokenizer; return the model."""
    kind, fields = HEADS[head]
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family], **fields)
    model = getattr(transformers, family + kind)(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    tiny_tokenizer().save(str(folder))
    if pickle:
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return model


def run_graph(path: Path, rows: Any) -> list[Tensor]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = {each.name for each in session.get_inputs()}
    given = {name: np.asarray(value, dtype=np.int64) for name, value in rows.items()}
    return [torch.from_numpy(o) for o in session.run(None, {n: given[n] for n in names})]


def stock_outputs(model: Any, rows: Any) -> list[Tensor]:
    with torch.no_grad():
        found = model(**{name: torch.as_tensor(value) for name, value in rows.items()})
    names = ("start_logits", "end_logits") if "start_logits" in found else ("logits",)
    return [found[name] if name in found else found.last_hidden_state for name in names]


def convert(folder: Path, output: Path, *options: str) -> None:
    arguments = ["convert", "--from", "hf", str(folder), "--to", "onnx", "--output", str(output)]
    assert main([*arguments, "--no-timing", *options]) == 0


FIRST_VERSION = ("single label", "masked language model")
"""Heads of the first version that are not nightly. transformers has no multiple choice for it."""
CASES = [
    *every(2, [("DebertaV2", head) for head in HEADS]),
    *every(2, [("Deberta", head) for head in FIRST_VERSION]),
    *(
        pytest.param("Deberta", head, marks=pytest.mark.nightly)
        for head in HEADS
        if head not in (*FIRST_VERSION, "choices")
    ),
]


@pytest.mark.parametrize(("family", "head"), CASES)
def test_graphs_of_every_head(family: str, head: str, tmp_path: Path) -> None:
    folder, output, texts = tmp_path / "published", tmp_path / "onnx", tmp_path / "texts.txt"
    stock = write_published(folder, family, head)
    texts.write_text("\n".join(SENTENCES) + "\n")
    convert(folder, output, "--dtype", "all", "--texts", str(texts))

    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    assert (output / "tokenizer.json").is_file()
    rows = tokenizer(SENTENCES, padding=True, truncation=True, max_length=64, return_tensors="pt")
    mask = rows["attention_mask"].bool()
    if head == "choices":
        rows = {name: value[None] for name, value in rows.items()}
    for expected, found in zip(
        stock_outputs(stock, rows), run_graph(output / "onnx/model.onnx", rows), strict=True
    ):
        if expected.shape[:2] == mask.shape:
            expected, found = expected[mask], found[mask]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    config = transformers.AutoConfig.from_pretrained(output)
    assert config.to_dict() == stock.config.to_dict() | {
        "_name_or_path": config.to_dict().get("_name_or_path")
    }
    for name, dtype in (("fp16", "fp16"), ("quantized", "int8")):
        assert (output / f"onnx/model_{name}.onnx").is_file()
        report = json.loads((output / f"onnx/report_{name}.json").read_text())
        assert report["dtype"] == dtype
        if head not in ("encoder", "regression", "choices"):
            agreement = report["agreement"]
            assert agreement["texts"] == len(SENTENCES)
            share = agreement["same"] / agreement["decisions"]
            assert dtype != "int8" or share >= published.MIN_AGREEMENT


def test_layers_that_change_decisions_stay_in_fp32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, output, texts = tmp_path / "published", tmp_path / "onnx", tmp_path / "texts.txt"
    write_published(folder, "DebertaV2", "tokens")
    texts.write_text("\n".join(SENTENCES) + "\n")

    def coarse(path: Path, config: Any, read: Any, kind: Any, dtype: Any, **layers: Any) -> None:
        """Write a graph whose second layer, as int8, is of no use."""
        chosen = layers["int8_layers"]
        spoiled = dtype == "int8" and (chosen is None or 1 in chosen)

        def read_spoiled(name: str) -> Tensor:
            tensor: Tensor = read(name)
            return -tensor if spoiled and name == "encoder.layers.1.ffn.down.weight" else tensor

        write_graph(path, config, read_spoiled, kind, dtype, **layers)

    monkeypatch.setattr(published, "write_graph", coarse)
    convert(folder, output, "--dtype", "int8", "--texts", str(texts))
    agreement = json.loads((output / "onnx/report_quantized.json").read_text())["agreement"]
    assert 1 in agreement["fp32_layers"]
    assert len(agreement["fp32_layers"]) < SIZES["num_hidden_layers"]
    card = (output / "README.md").read_text()
    assert "stay in fp32" in card


def test_a_head_that_the_file_lacks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "published"
    write_published(folder, "DebertaV2", "encoder")
    fields = json.loads((folder / "config.json").read_text())
    fields["architectures"] = ["DebertaV2ForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(fields))
    arguments = ["convert", "--checkpoint", str(folder), "--to", "onnx"]
    assert main([*arguments, "--output", str(tmp_path / "onnx")]) == 2
    message = capsys.readouterr().err
    assert "pooler.dense.weight" in message
    assert "--encoder" in message
    convert(folder, tmp_path / "onnx", "--encoder")
