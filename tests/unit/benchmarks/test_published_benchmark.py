"""The benchmark of published models: all forms compute one model, and the tables of its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.step import published
from benchmarks.step.published import V3, Budget, Variants, decisions
from megatron_deberta.errors import ConfigError
from tests.support.tiny_models import TEXT

TINY: dict[str, Any] = V3 | {
    "vocab_size": 71, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24,
    "pooler_hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 32,
    "position_buckets": 8,
}  # fmt: skip
BUDGET = Budget(rounds=1, seconds=0.0, epochs=1)


def test_forms_are_compared_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="extra [onnx] is not installed")

    def refuse(*_: object) -> None:  # torch's own exporter takes most of a minute
        raise ConfigError("torch cannot export the model")

    monkeypatch.setattr(published, "export_stock", refuse)
    variants = Variants(TINY, TEXT * 5, tmp_path, compiled=False, pieces=70)
    row = variants.measure(2, 12, BUDGET)
    forms = {"stock", "fast", "onnx_fp32", "onnx_fp16", "onnx_int8"}
    assert set(row["difference"]) == forms
    assert set(row["cpu_seconds"]) == {*forms, "products"}
    assert row["skipped"] == {"torch_onnx": "torch cannot export the model"}
    assert all(value > 0 for value in row["seconds"].values())
    assert 0 < row["difference"]["onnx_fp32"] < row["difference"]["onnx_int8"]

    variants.fast.classifier.bias.data += 1e-2
    with pytest.raises(SystemExit, match="2 x 12: logits differ from stock's: {'fast': 0.0"):
        variants.measure(2, 12, BUDGET)


def test_decisions_of_a_trained_model(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="extra [onnx] is not installed")
    lines = [f"{line}\t{number % 2}" for number, line in enumerate(TEXT * 5)]
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("\n".join(["sentence\tlabel", *lines[:64]]) + "\n")
    found = decisions(tmp_path, TINY, BUDGET)
    assert found["same_as_fp32"]["onnx_fp32"] == found["sentences"] == len(lines[:64])
    assert found["accuracy"]["stock"] == found["accuracy"]["onnx_fp32"]
