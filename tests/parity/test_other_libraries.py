"""Exports open in sentence-transformers and PEFT, and have what text-embeddings-inference reads."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file

from megatron_deberta.config.schema import with_task_head
from megatron_deberta.hf.export_model import export_model
from megatron_deberta.hf.loading import build_model
from megatron_deberta.model.inputs import ModelInputs
from tests.support.tiny_models import TEXT, V2, random_weights, reader, tiny_tokenizer

ENCODE = """
import json, sys
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu", trust_remote_code=True)
print(json.dumps(model.encode(sys.argv[2:]).tolist()))
"""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the export of a pretrained model."""
    output = tmp_path_factory.mktemp("pretrained") / "model"
    export_model(V2, reader(random_weights(V2)), tiny_tokenizer(), output)
    return output


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the export of a fine-tuned model."""
    output = tmp_path_factory.mktemp("fine_tuned") / "model"
    config = with_task_head(V2, "classification", ("no", "yes"))
    export_model(config, reader(random_weights(config)), tiny_tokenizer(), output)
    return output


def test_sentence_transformers_encodes_with_mean_pooling(encoder: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    model = library.SentenceTransformer(str(encoder), device="cpu")
    found = torch.from_numpy(model.encode(list(TEXT)))

    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    batch = tokenizer(list(TEXT), padding=True, return_tensors="pt")
    stock = transformers.AutoModel.from_pretrained(encoder).eval()
    with torch.no_grad():
        states = stock(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    expected = (states * mask).sum(1) / mask.sum(1)
    assert not mask.all()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert model.get_max_seq_length() == V2.max_position_embeddings


@pytest.mark.slow
def test_sentence_transformers_opens_our_own_architecture(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    config = replace(V2, p2c_index="paper")
    folder = tmp_path / "own"
    weights = random_weights(config)
    export_model(config, reader(weights), tiny_tokenizer(), folder)
    # After it has run a model's own code, transformers cannot do so in the same process.
    command = [sys.executable, "-c", ENCODE, str(folder), TEXT[0]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = torch.tensor(json.loads(done.stdout.splitlines()[-1]))

    row = transformers.AutoTokenizer.from_pretrained(folder)(TEXT[0], return_tensors="pt")
    with torch.no_grad():
        states = build_model(config, reader(weights)).encode(ModelInputs(row["input_ids"]))
    torch.testing.assert_close(found, states.mean(1), rtol=1e-5, atol=1e-5)
    assert ", trust_remote_code=True)" in (folder / "README.md").read_text()


def test_the_card_is_one_of_the_hub(encoder: Path) -> None:
    card = ModelCard.load(encoder / "README.md")
    assert card.data.library_name == "transformers"
    assert card.text.lstrip().startswith("# ")


def test_peft_trains_and_restores_an_adapter(classifier: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def load() -> torch.nn.Module:
        return transformers.AutoModelForSequenceClassification.from_pretrained(classifier)

    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["query_proj", "value_proj"], lora_dropout=0.0
    )
    model = peft.get_peft_model(load(), config)
    batch = {"input_ids": torch.tensor([[1, 20, 21, 22, 2]]), "labels": torch.tensor([1])}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    restored = peft.PeftModel.from_pretrained(load(), tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(restored(**batch).logits, model.eval()(**batch).logits)


def test_export_has_what_text_embeddings_inference_reads(encoder: Path, classifier: Path) -> None:
    """Fields without a default in its DebertaV2Config, and the tensors of its classifier."""
    for folder in (encoder, classifier):
        fields = json.loads((folder / "config.json").read_text())
        for key in (
            "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
            "intermediate_size", "hidden_act", "max_position_embeddings", "type_vocab_size",
            "initializer_range", "layer_norm_eps", "relative_attention", "max_relative_positions",
            "position_biased_input", "pos_att_type", "pooler_hidden_act",
            # Optional there; another architecture is assumed without them.
            "position_buckets", "share_att_key", "norm_rel_ebd", "conv_kernel_size", "conv_act",
        ):  # fmt: skip
            assert key in fields, key
        assert {fields["hidden_act"], fields["pooler_hidden_act"]} <= {"gelu", "relu"}
        assert fields["model_type"] == "deberta-v2"
    assert fields["architectures"] == ["DebertaV2ForSequenceClassification"]
    assert fields["id2label"] == {"0": "no", "1": "yes"}
    width = fields["pooler_hidden_size"]
    shapes = {
        name: tuple(x.shape) for name, x in load_file(classifier / "model.safetensors").items()
    }
    assert shapes["pooler.dense.weight"] == (width, width)
    assert shapes["classifier.weight"] == (2, width)
    assert {"pooler.dense.bias", "classifier.bias"} <= shapes.keys()
    pooling = json.loads((encoder / "1_Pooling" / "config.json").read_text())
    assert [key for key, value in pooling.items() if value is True] == ["pooling_mode_mean_tokens"]
    assert not (classifier / "1_Pooling").exists()
