"""ONNX graphs in onnxruntime: equal to our models for all heads, formats and architectures."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_deberta.cli.main import main
from megatron_deberta.config.schema import CLASS_HEADS, Head, ModelConfig, with_task_head
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.hf.export_model import export_model
from megatron_deberta.hf.loading import build_model, build_task_model
from megatron_deberta.hf.onnx.check import check_graph, graph_logits, graph_runner
from megatron_deberta.hf.onnx.export import add_onnx
from megatron_deberta.hf.onnx.graph import OnnxDtype, graph_kind, write_graph
from megatron_deberta.hf.onnx.libraries import require_libraries
from megatron_deberta.model.inputs import ModelInputs
from tests.support.selection import every
from tests.support.tiny_models import V1, V2, random_weights, reader, tiny_tokenizer

pytest.importorskip("onnx", reason="extra [onnx] is not installed")
pytest.importorskip("onnxruntime", reason="extra [onnx] is not installed")

ARCHITECTURES = {
    "v2": V2,
    "v1": V1,
    "conv-types": replace(V2, conv_kernel_size=3, type_vocab_size=2),
    "conv-one-layer": replace(V2, conv_kernel_size=3, conv_activation="tanh", num_layers=1),
    "c2p": replace(V1, position_terms="c2p", pooler_activation="tanh"),
    "p2c-paper": replace(V2, position_terms="p2c", p2c_index="paper"),
    "roberta": replace(
        V2, position_terms="none", absolute_positions="input", mask_decoder_passes=0
    ),
}
HEADS: tuple[Head, ...] = (
    "mlm", "classification", "multilabel", "regression", "tokens", "spans", "choices",
)  # fmt: skip


def with_head(config: ModelConfig, head: Head) -> ModelConfig:
    if head == "mlm":
        return config
    return with_task_head(config, head, ("a", "b", "c") if head in CLASS_HEADS else ())


def build(config: ModelConfig, read: Callable[[str], Tensor]) -> Any:
    return build_model(config, read) if config.head == "mlm" else build_task_model(config, read)


def write(
    config: ModelConfig, path: Path, dtype: OnnxDtype = "fp32", *, encoder: bool = False
) -> Any:
    """Write a graph and return our model, the graph's kind, and its parity."""
    read = reader(random_weights(config))
    kind = graph_kind(config, encoder=encoder)
    write_graph(path, config, read, kind, dtype)
    ours = build(config, read)
    return ours, kind, check_graph(path, ours, kind, tiny_tokenizer(), dtype)


@pytest.mark.parametrize("architecture", every(3, ARCHITECTURES))
def test_every_head_of_every_architecture(architecture: str, tmp_path: Path) -> None:
    for head in HEADS:
        config = with_head(ARCHITECTURES[architecture], head)
        _, _, parity = write(config, tmp_path / f"{head}.onnx")
        assert parity.max_error < 1e-5
        assert parity.cases[0] == (1, 1)
        assert (8, config.max_position_embeddings) in parity.cases
        assert (parity.masks > 0) == (head == "mlm")
        assert parity.same_answers == parity.masks
    _, kind, parity = write(ARCHITECTURES[architecture], tmp_path / "e.onnx", encoder=True)
    assert kind == "encoder"
    assert parity.max_error < 1e-5


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(("rows", "masks"), [(2, 0), (0, 3), (0, 0)])
def test_no_masks_give_an_empty_result(
    dtype: OnnxDtype, rows: int, masks: int, tmp_path: Path
) -> None:
    write_graph(tmp_path / "m.onnx", V2, reader(random_weights(V2)), graph_kind(V2), dtype)
    session = importlib.import_module("onnxruntime").InferenceSession(str(tmp_path / "m.onnx"))
    ids = np.ones((rows, 6), np.int64)
    at = np.zeros((rows, masks), np.int64)
    inputs = {"input_ids": ids, "attention_mask": ids, "masked_positions": at}
    (logits,) = session.run(["logits"], inputs)
    assert logits.shape == (rows, masks, V2.vocab_size)


@pytest.mark.parametrize(("dtype", "limit"), [("fp16", 5e-3), ("int8", 5e-2)])
@pytest.mark.parametrize("head", every(2, [*HEADS, "encoder"], ["slow"]))
def test_low_precision(
    head: Head | Literal["encoder"], dtype: OnnxDtype, limit: float, tmp_path: Path
) -> None:
    encoder = head == "encoder"
    config = V2 if head == "encoder" else with_head(V2, head)
    _, _, parity = write(config, tmp_path / "model.onnx", dtype, encoder=encoder)
    assert 1e-6 < parity.relative_error < limit
    assert (parity.same_answers > 0.5 * parity.masks) == (head == "mlm")


def test_formats_of_the_constants(tmp_path: Path) -> None:
    import onnx

    kinds: dict[str, dict[str, int]] = {}
    for dtype in ("fp32", "fp16", "int8"):
        path = tmp_path / f"{dtype}.onnx"
        write_graph(path, V2, reader(random_weights(V2)), "fill-mask", dtype)  # type: ignore[arg-type]
        graph = onnx.load(str(path)).graph
        kinds[dtype] = {entry.name: entry.data_type for entry in graph.initializer}
        assert onnx.load(str(path)).opset_import[0].version == 20
    float32, float16, int8 = (
        onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.INT8
    )  # fmt: skip
    layer = "encoder.layers.0"
    kept = ("embeddings.token.weight", f"{layer}.attention.key_positions", "head.transform.weight")
    assert [kinds["int8"][name] for name in kept] == [float32] * 3
    assert kinds["int8"][f"{layer}.ffn.up.weight"] == int8
    assert float32 not in kinds["fp16"].values()
    assert kinds["fp16"][f"{layer}.ffn.up.weight"] == float16


def test_constants_beyond_the_limit_go_to_a_second_file(tmp_path: Path) -> None:
    read, path = reader(random_weights(V2)), tmp_path / "model.onnx"
    write_graph(path, V2, read, "fill-mask", max_file_bytes=10_000)
    assert (tmp_path / "model.onnx_data").stat().st_size > 4 * 208 * 32
    assert path.stat().st_size < 120_000
    ours = build_model(V2, read)
    assert check_graph(path, ours, "fill-mask", tiny_tokenizer(), "fp32").max_error < 1e-5


def test_rows_without_a_token_are_finite(tmp_path: Path) -> None:
    for dtype in ("fp32", "fp16"):
        path = tmp_path / f"{dtype}.onnx"
        write_graph(path, V2, reader(random_weights(V2)), "encoder", dtype)  # type: ignore[arg-type]
        ids = torch.full((2, 5), 7)
        mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
        states = graph_runner(path, "encoder")({"input_ids": ids, "attention_mask": mask})
        assert torch.isfinite(states).all()


def test_wrong_graph_raises(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_graph(path, V2, reader(random_weights(V2)), "encoder")
    other = build_model(V2, reader(random_weights(V2, seed=1)))
    with pytest.raises(CheckpointError, match="differs from our model"):
        check_graph(path, other, "encoder", tiny_tokenizer(), "fp32")
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    with pytest.raises(CheckpointError, match="onnxruntime cannot load"):
        graph_runner(tmp_path / "broken.onnx", "encoder")


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"needs onnxruntime.*megatron-deberta\[onnx\]"):
        require_libraries()
    out = tmp_path / "out"
    assert main(["convert", "--checkpoint", "none", "--to", "onnx", "--output", str(out)]) == 2
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "onnx", "--dtype", "bf16"], "--dtype bf16: onnxruntime"),
        (["--to", "hf", "--dtype", "int8"], "--dtype int8 is for --to onnx"),
        (["--to", "hf", "--encoder"], "--encoder is for --to onnx"),
    ],
)
def test_contradicting_options_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["convert", "--checkpoint", "none", "--output", str(tmp_path / "out")]
    assert main([*common, *arguments]) == 2
    assert message in capsys.readouterr().err


def export_with_graph(config: ModelConfig, output: Path, **options: Any) -> Callable[[str], Tensor]:
    """Export a model and its graph; return the function that reads its weights."""
    read, tokenizer = reader(random_weights(config)), tiny_tokenizer()

    def extend(folder: Path) -> None:
        add_onnx(folder, config, read, tokenizer, **options)

    export_model(config, read, tokenizer, output, extend=extend)
    return read


def test_export_has_a_report_and_lines_in_the_card(tmp_path: Path) -> None:
    config, output = with_head(V2, "classification"), tmp_path / "out"
    score = {"task": "t", "split": "dev", "examples": 3, "metric": "accuracy"}
    scores = {**score, "torch": 1.0, "onnx": 0.75}
    read = export_with_graph(config, output, timing=False, accuracy=lambda path, kind: scores)
    report = json.loads((output / "onnx" / "report.json").read_text())
    assert (report["graph"], report["dtype"], report["opset"]) == ("rows", "fp32", 20)
    assert report["parity"]["max_error"] < 1e-5
    card = (output / "README.md").read_text()
    assert "`onnx/model.onnx`" in card
    assert "t, 3 dev examples, accuracy: 0.7500 (1.0000 in torch, fp32)." in card
    # As a server would call it.
    ids = torch.tensor([[1, 20, 21, 2]])
    logits = graph_logits(output / "onnx" / "model.onnx", "rows")(ModelInputs(ids))
    with torch.no_grad():
        expected = build_task_model(config, read).logits(ModelInputs(ids))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


def test_nothing_is_published_if_the_graph_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_deberta.hf.onnx.graph._MASKED", 0.0)
    with pytest.raises(CheckpointError, match="nothing was exported"):
        export_with_graph(V2, tmp_path / "out", timing=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_timing_against_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_deberta.hf.onnx.check._BUDGET_SECONDS", 0.0)
    pytest.importorskip("onnxscript", reason="extra [onnx] is not installed")
    config, output = with_head(V2, "classification"), tmp_path / "out"
    export_with_graph(config, output)
    speed = json.loads((output / "onnx" / "report.json").read_text())["speed"]
    assert "skipped" not in speed
    for case in speed["cases"]:
        assert set(case["seconds"]) == {"onnx", "transformers", "transformers_onnx"}
    assert "times torch's export of transformers' model" in (output / "README.md").read_text()
