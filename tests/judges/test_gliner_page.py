"""docs/gliner.md: its own code trains GLiNER2 and GLiNER on an export of ours, at a tiny size."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_deberta.hf.export_model import export_model
from megatron_deberta.tokenizer.loading import sentencepiece_tokenizer
from tests.support.jobs import ROOT
from tests.support.judges import package_folder
from tests.support.selection import every
from tests.support.tiny_models import TEXT, V2, random_weights, reader, sentencepiece_model

pytestmark = pytest.mark.slow

PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SENTENCES = (
    (("Anna Berg", "person"), ("plays at", ""), ("Ullevi", "location"), ("tonight", "")),
    (("my new", ""), ("Fairphone", "product"), ("came from", ""), ("Utrecht", "location")),
    (("Otto", "person"), ("bought a", ""), ("Volvo Amazon", "product")),
    (("nothing happened today", ""),),
)
STEPS = 20


def write_tagged(path: Path) -> None:
    """Write the sentences as words and labels, as WNUT-17 has them."""
    path.parent.mkdir()
    lines = []
    for sentence in SENTENCES:
        for text, kind in sentence:
            for number, word in enumerate(text.split()):
                lines.append(f"{word}\t{'BI'[number > 0]}-{kind}" if kind else f"{word}\tO")
        lines.append("")
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("architecture", every(2, ["span", "boundary"], ["nightly"]))
def test_the_code_of_the_page_trains_and_reloads(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for requirement in ("gliner==0.2.29", "gliner2==2.1.0"):
        monkeypatch.syspath_prepend(str(package_folder(requirement)))
    # GLiNER2 sets it for the whole process.
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    monkeypatch.chdir(tmp_path)
    write_tagged(tmp_path / "ner" / "wnut17train.conll")
    lines = [*TEXT, *(" ".join(text for text, _ in sentence) for sentence in SENTENCES)]
    model = sentencepiece_model(lines * 20, vocab_size=230, hard_vocab_limit=False)
    tokenizer = sentencepiece_tokenizer(model, "page")
    # Rows of the vocabulary are padded for tensor parallelism.
    config = replace(V2, num_layers=2, vocab_size=256)
    export_model(config, reader(random_weights(config)), tokenizer, tmp_path / "exports" / "small")
    blocks = PYTHON.findall((ROOT / "docs" / "gliner.md").read_text())
    assert len(blocks) == 3
    scope: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in blocks[:2]:
        code = block.replace("max_steps=300", f"max_steps={STEPS}")
        exec(code.replace('"boundary"', f'"{architecture}"'), scope)
    # So short a training may find no entity, and the page's comparison would say nothing.
    saved = scope["again"].state_dict()
    for name, value in scope["model"].state_dict().items():
        assert torch.equal(saved[name], value), name
    losses = scope["losses"]
    assert len(losses) == STEPS
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    # The encoder started from the export, with rows for the tokens that GLiNER2 adds.
    new = scope["AutoExtractor"].from_config(scope["config"])
    rows = new.encoder.get_input_embeddings().weight
    assert len(rows) == len(new.processor.tokenizer) > tokenizer.num_tokens
    expected = random_weights(config)["embeddings.token.weight"]
    assert torch.equal(rows[: tokenizer.num_tokens], expected[: tokenizer.num_tokens])
    if architecture == "boundary":
        exec(blocks[2].replace("max_steps=300", f"max_steps={STEPS}"), scope)
        # Training has changed the encoder.
        (trained,) = (
            parameter
            for name, parameter in scope["model"].named_parameters()
            if name.endswith("word_embeddings.weight")
        )
        assert not torch.equal(trained[: tokenizer.num_tokens], expected[: tokenizer.num_tokens])
        assert scope["again"].predict_entities(scope["text"], scope["types"], threshold=0.0)
