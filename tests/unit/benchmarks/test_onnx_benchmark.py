"""The ONNX benchmark: filled masks of real sentences, and the tables of its results."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.step.onnx import fill_masks, mask_batches
from tests.support.tiny_models import TEXT, V2, tiny_tokenizer
from tests.support.tiny_runs import save_run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Sentences of different lengths, two per line."""
    path = tmp_path / "text.txt"
    lines = [f"{first} {second}" for first, second in zip(TEXT, TEXT[::-1], strict=True)]
    path.write_text("\n".join(lines * 3))
    return path


def test_fill_mask_answers_as_torch_does(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="extra [onnx] is not installed")
    save_run(V2, tmp_path / "run", tmp_path / "tokenizer")
    found = fill_masks(tmp_path / "run", text, 20)
    assert found["masks"] >= 2 * found["sentences"] == 40
    assert found["same_first_answer"] == found["masks"]
    assert found["largest_difference_of_probability"] < 1e-5


def test_every_sentence_has_several_masks(text: Path) -> None:
    tokenizer = tiny_tokenizer()
    batches = list(mask_batches(text, tokenizer, 11))
    assert [len(batch["input_ids"]) for batch in batches] == [8, 3]
    for batch in batches:
        masked = batch["input_ids"] == tokenizer.mask_id
        positions = batch["masked_positions"]
        assert ((positions >= 0).sum(1) >= 2).all()
        assert masked.sum() == (positions >= 0).sum()
        assert masked.gather(1, positions.clamp(min=0))[positions >= 0].all()
    with pytest.raises(SystemExit, match="lacks"):
        list(mask_batches(text, tokenizer, 1000))
