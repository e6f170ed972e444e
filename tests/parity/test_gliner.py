"""GLiNER with random weights, stock and with fast attention.

GLiNER requires an older transformers than requirements.txt: ``tests/oldest_transformers.sh``
installs both beside the environment and runs this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_deberta.hf import use_fast_attention
from megatron_deberta.hf.export_model import export_model
from tests.support.tiny_models import TEXT, V2, random_weights, reader, tiny_tokenizer

gliner = pytest.importorskip("gliner", reason="run tests/oldest_transformers.sh")
LABELS = ["animal", "place", "time"]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Return a GLiNER of a local encoder; its own layers have random weights."""
    encoder = tmp_path / "encoder"
    export_model(V2, reader(random_weights(V2)), tiny_tokenizer(), encoder)
    torch.manual_seed(0)
    config = {"model_name": str(encoder), "hidden_size": 32, "max_width": 4, "max_len": 64}
    return gliner.GLiNER.from_config(config).eval()


def test_entities_are_those_of_the_stock_model(model: Any) -> None:
    def predict() -> list[dict[str, Any]]:
        found = model.inference(list(TEXT), LABELS, threshold=0.0, flat_ner=False)
        return [entity for entities in found for entity in entities]

    stock = predict()
    with use_fast_attention(model):
        assert "FastV2SelfAttention" in repr(model)
        ours = predict()
    assert len(stock) > len(TEXT)
    assert len({round(entity["score"], 3) for entity in stock}) > 1
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.pop("score") == pytest.approx(theirs.pop("score"), abs=1e-5)
        assert mine == theirs
