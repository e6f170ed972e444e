"""Other people's training and inference with ``use_fast_attention``: ten steps and predictions.

``tests/oldest_transformers.sh`` runs this file with the oldest supported transformers, too, which
is in the range that GLiNER asks for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatron_deberta.config.schema import ModelConfig, with_task_head
from megatron_deberta.hf import use_fast_attention
from megatron_deberta.hf.export_model import export_model
from tests.support.judges import importable, record
from tests.support.stock_models import OperatorCalls
from tests.support.tiny_models import TEXT, V2, random_weights, reader, tiny_tokenizer

pytestmark = pytest.mark.slow

# Dropout draws other bits with fast attention.
CONFIG = replace(V2, num_layers=2, hidden_dropout=0.0, attention_dropout=0.0)
LAYERS, STEPS, LIMIT = CONFIG.num_layers, 10, 1e-5
LABELS = ["animal", "place", "time"]
ENTITIES = ({"animal": ["fox", "dog"], "place": ["river"]}, {"animal": ["model"], "time": ["text"]},
            {"place": ["sea shore"], "time": ["evening"]}, {"animal": ["children"]})  # fmt: skip
Wrap = Callable[[nn.Module], object]
Run = Callable[[Wrap], tuple[list[float], Any, nn.Module]]
"""Builds a model, wraps it, trains it, and returns its losses, predictions and itself."""


@pytest.fixture(scope="module", autouse=True)
def packages() -> Iterator[None]:
    with importable("gliner==0.2.29"), importable("gliner2==2.1.0"):
        yield


def export(config: ModelConfig, folder: Path) -> Path:
    export_model(config, reader(random_weights(config)), tiny_tokenizer(), folder)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export of a pretrained model."""
    return export(CONFIG, tmp_path_factory.mktemp("pretrained") / "model")


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an export of a fine-tuned model."""
    config = with_task_head(CONFIG, "classification", ("no", "yes"), head_dropout=0.0)
    return export(config, tmp_path_factory.mktemp("fine_tuned") / "model")


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that trains and predicts with stock and fast attention, and compares."""

    def compare(library: Any, name: str, run: Run, forward_passes: int) -> None:
        """Compare losses, predictions and trained parameters.

        Args:
            library: the imported library.
            name: what of it is run.
            run: runs it.
            forward_passes: of the encoder, at least.
        """
        calls = OperatorCalls(monkeypatch)

        def seeded(wrap: Wrap) -> tuple[list[float], Any, dict[str, Tensor]]:
            random.seed(0)
            torch.manual_seed(0)
            losses, found, model = run(wrap)
            return losses, found, {n: p.detach().clone() for n, p in model.named_parameters()}

        losses, expected, parameters = seeded(lambda model: None)
        assert calls.take() == 0
        own_losses, found, own_parameters = seeded(use_fast_attention)
        count = calls.take()
        assert count % LAYERS == 0
        assert count >= LAYERS * forward_passes
        assert len(losses) == STEPS
        assert len(set(losses)) > 1
        assert own_losses == pytest.approx(losses, rel=LIMIT)
        differences = [abs(a - b) / max(1, abs(b)) for a, b in zip(own_losses, losses, strict=True)]
        assert own_parameters.keys() == parameters.keys()
        for key, value in parameters.items():
            torch.testing.assert_close(own_parameters[key], value, rtol=0, atol=10 * LIMIT)
        scores = numbers(expected)
        assert len(scores) > 1
        assert max(scores) - min(scores) > 1e-3
        assert names(found) == names(expected)
        assert numbers(found) == pytest.approx(scores, abs=10 * LIMIT)
        differences += [abs(a - b) for a, b in zip(numbers(found), scores, strict=True)]
        record(
            library.__name__,
            library.__version__,
            f"{name}: ten training steps, then predictions, with use_fast_attention and without",
            f"{max(differences):.1e}; {count} calls of our operator",
            f"{LIMIT:.0e} of losses, {10 * LIMIT:.0e} of scores and weights",
            len(differences),
        )

    return compare


def numbers(value: Any) -> list[float]:
    """Return the fractional numbers inside lists and dictionaries, in order."""
    if isinstance(value, dict):
        return [each for item in value.values() for each in numbers(item)]
    if isinstance(value, list):
        return [each for item in value for each in numbers(item)]
    return [value] if isinstance(value, float) else []


def names(value: Any) -> Any:
    """Return everything else, such as texts, labels and places."""
    if isinstance(value, dict):
        return {key: names(item) for key, item in value.items()}
    if isinstance(value, list):
        return [names(item) for item in value]
    return None if isinstance(value, float) else value


def place(entity: dict[str, Any]) -> tuple[int, int, str]:
    """Return where an entity is: in the order of scores, equal ones could change places."""
    return entity["start"], entity["end"], entity.get("label", "")


@pytest.mark.parametrize("kind", ["uni-encoder", "bi-encoder"])
def test_gliner(kind: str, encoder: Path, tmp_path: Path, judge: Callable[..., None]) -> None:
    import gliner

    rows = [
        {"tokenized_text": text.split(), "ner": [[3, 3, "animal"], [5, 6, "place"]]}
        for text in TEXT
    ]
    fields = {"model_name": str(encoder), "hidden_size": 32, "max_width": 4, "max_len": 64}
    if kind == "bi-encoder":
        fields["labels_encoder"] = str(encoder)

    def run(wrap: Wrap) -> tuple[list[float], Any, nn.Module]:
        model = gliner.GLiNER.from_config(fields)
        wrap(model)
        trainer = model.train_model(
            rows, None, output_dir=str(tmp_path), max_steps=STEPS, learning_rate=1e-3,
            per_device_train_batch_size=2, use_cpu=True, dataloader_num_workers=0, seed=0,
            logging_steps=1, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
        found = model.eval().inference(list(TEXT), LABELS, threshold=0.0, flat_ner=False)
        return losses, [sorted(entities, key=place) for entities in found], model

    judge(gliner, f"GLiNER, {kind}", run, STEPS + 1)


@pytest.mark.parametrize("kind", ["span", "boundary"])
def test_gliner2(kind: str, encoder: Path, tmp_path: Path, judge: Callable[..., None]) -> None:
    import gliner2
    from gliner2.training.trainer import GLiNER2Trainer, TrainingConfig

    examples = [
        gliner2.InputExample(text=text, entities=entities)
        for text, entities in zip(TEXT, ENTITIES, strict=True)
    ]
    classes = {"span": gliner2.SpanExtractor, "boundary": gliner2.BoundaryExtractor}

    def run(wrap: Wrap) -> tuple[list[float], Any, nn.Module]:
        config = gliner2.ExtractorConfig(model_name=str(encoder), architecture=kind)
        model = classes[kind](config)
        wrap(model)
        settings = TrainingConfig(
            output_dir=str(tmp_path), max_steps=STEPS, batch_size=2, encoder_lr=1e-3, fp16=False,
            bf16=False, num_workers=0, eval_strategy="no", save_best=False, pin_memory=False,
            float32_matmul_precision="highest",
        )  # fmt: skip
        trained = GLiNER2Trainer(model, settings).train(train_data=examples)
        losses = [line["loss"] for line in trained["train_metrics_history"]]
        model.eval()
        options = {"threshold": 0.0, "include_confidence": True, "include_spans": True}
        found = [model.extract_entities(text, LABELS, **options)["entities"] for text in TEXT]
        return losses, [{k: sorted(v, key=place) for k, v in each.items()} for each in found], model

    judge(gliner2, f"GLiNER2, {kind} architecture", run, STEPS + 1)


def descend(model: nn.Module, loss_of: Callable[[], Tensor]) -> list[float]:
    """Train for ten steps, and return the losses."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-3), []
    model.train()
    for _ in range(STEPS):
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    return losses


def test_sentence_transformer(encoder: Path, judge: Callable[..., None]) -> None:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    def run(wrap: Wrap) -> tuple[list[float], Any, nn.Module]:
        model = library.SentenceTransformer(str(encoder), device="cpu")
        wrap(model)
        ranking = MultipleNegativesRankingLoss(model)
        sides = [list(TEXT), [text[:30] for text in TEXT]]
        losses = descend(
            model, lambda: ranking([model.tokenize(side) for side in sides], torch.arange(4))
        )
        return losses, model.encode(list(TEXT)).tolist(), model

    judge(library, "SentenceTransformer, ranking loss", run, 2 * STEPS + 1)


def test_cross_encoder(classifier: Path, judge: Callable[..., None]) -> None:
    library = pytest.importorskip("sentence_transformers")
    from sentence_transformers.cross_encoder.losses import CrossEntropyLoss

    pairs = [(TEXT[0], TEXT[1]), (TEXT[2], TEXT[2][:20]), (TEXT[3], TEXT[0]), (TEXT[1], TEXT[1])]

    def run(wrap: Wrap) -> tuple[list[float], Any, nn.Module]:
        model = library.CrossEncoder(str(classifier), device="cpu")
        wrap(model)
        entropy, sides = CrossEntropyLoss(model), [list(side) for side in zip(*pairs, strict=True)]
        losses = descend(model, lambda: entropy(sides, torch.tensor([0, 1, 0, 1])))
        return losses, model.predict(pairs, apply_softmax=True).tolist(), model

    judge(library, "CrossEncoder, cross-entropy", run, STEPS + 1)


LINEAR = ["query_proj", "value_proj", "dense"]
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 2, "target_modules": LINEAR, "lora_dropout": 0.0}),
    "DoRA": ("LoraConfig", {"r": 2, "target_modules": LINEAR, "use_dora": True}),
    "IA3": (
        "IA3Config",
        {"target_modules": ["key_proj", "value_proj", "dense"], "feedforward_modules": ["dense"]},
    ),
    "OFT": ("OFTConfig", {"target_modules": LINEAR[:2], "oft_block_size": 4}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "P-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3}),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_peft(adapter: str, classifier: Path, judge: Callable[..., None]) -> None:
    peft = pytest.importorskip("peft")
    name, options = ADAPTERS[adapter]
    tokenizer = transformers.AutoTokenizer.from_pretrained(classifier)
    batch = dict(tokenizer(list(TEXT), padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)

    def run(wrap: Wrap) -> tuple[list[float], Any, nn.Module]:
        base = transformers.AutoModelForSequenceClassification.from_pretrained(classifier)
        model = peft.get_peft_model(base, getattr(peft, name)(task_type="SEQ_CLS", **options))
        wrap(model)
        losses = descend(model, lambda: model(**batch, labels=torch.arange(4) % 2).loss)
        with torch.no_grad():
            return losses, model(**batch).logits.softmax(-1).tolist(), model

    judge(peft, adapter, run, STEPS + 1)
