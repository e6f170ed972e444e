"""Attention maps of runs, checkpoints and exports are those of transformers' models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel

from megatron_deberta.attention_maps.compute import MEAN, compute_maps
from megatron_deberta.checkpoint.store import find_newest
from tests.support.selection import every
from tests.support.tiny_models import V1, V2, tiny_tokenizer
from tests.support.tiny_runs import export_run, save_run

TEXT = "The quick [MASK] jumps over the lazy dog near the river."
CONFIGS = {
    "v2": replace(V2, conv_kernel_size=3),
    "v1": V1,
    "c2p": replace(V2, position_terms="c2p"),
    "p2c": replace(V2, position_terms="p2c"),
    "none": replace(V2, position_terms="none"),
}


@pytest.mark.parametrize("name", every(2, CONFIGS, ["slow"]))
def test_maps_are_those_of_transformers(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, run_dir, export = CONFIGS[name], tmp_path / "run", tmp_path / "export"
    save_run(config, run_dir, tmp_path / "tokenizer")
    export_run(run_dir, export)
    maps = compute_maps(run_dir, TEXT, "all", "all")
    terms = {"v2": "c2p+p2c", "v1": "c2p+p2c", "none": ""}.get(name, name)
    assert maps.parts == ("probabilities", "c2c", *filter(None, terms.split("+")))

    tokenizer = tiny_tokenizer()
    ids = [tokenizer.cls_id, *tokenizer.encode(TEXT, parse_special=True), tokenizer.sep_id]
    model = AutoModel.from_pretrained(export, attn_implementation="eager")
    with torch.no_grad():
        stock = model(torch.tensor([ids]), output_attentions=True).attentions
    assert len(stock) == config.num_layers
    for layer, expected in enumerate(stock, start=1):
        for head in range(1, config.num_heads + 1):
            found = maps.map(layer, head, "probabilities")
            assert found is not None
            np.testing.assert_allclose(found, expected[0, head - 1].numpy(), atol=1e-5, rtol=0)
        mean = maps.map(layer, MEAN, "probabilities")
        np.testing.assert_allclose(mean, expected[0].mean(0).numpy(), atol=1e-5, rtol=0)

    for other in (find_newest(run_dir), export):
        assert other is not None
        again = compute_maps(other, TEXT, "all", "all")
        assert again.pieces == maps.pieces
        np.testing.assert_array_equal(again.values, maps.values)
