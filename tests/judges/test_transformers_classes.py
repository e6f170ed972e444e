"""What transformers' own model tests check, of its DeBERTa classes with ``use_fast_attention``.

Its ``ModelTesterMixin`` is not in the package, so the properties are restated here, of models that
are initialised by its classes and of exports of ours that its classes open. Outputs and gradients
of every head, dropout, copies and pickles are compared in ``tests/parity/test_fast_attention.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from megatron_deberta.config.schema import Head, ModelConfig, with_task_head
from megatron_deberta.hf import use_fast_attention
from megatron_deberta.hf.config import SpecialIds, choose_model_type
from megatron_deberta.hf.export_model import write_hf_model
from tests.support.judges import record
from tests.support.stock_models import (
    KINDS,
    VOCABULARY,
    OperatorCalls,
    assert_same,
    build,
    heads_of,
    inputs,
    labelled,
    results,
)
from tests.support.tiny_models import random_weights, reader

pytestmark = pytest.mark.slow

LAYERS, LIMIT = 2, 1e-5
LEGACY_FALSE = "5.20.0"
"""First transformers whose masked language models with ``legacy: false`` can be made."""
LEGACY = ("exported", "ForMaskedLM")
"""Source and head of models with ``legacy: false``."""
V2 = ModelConfig(
    num_layers=LAYERS, hidden_size=32, num_heads=4, ffn_hidden_size=48, vocab_size=VOCABULARY,
    max_position_embeddings=64, max_relative_positions=32, position_buckets=8, conv_kernel_size=3,
    mask_decoder_passes=0, absolute_positions="none", hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
EXPORTS = {
    "v1": replace(
        V2, position_buckets=0, share_position_projections=False, normalize_position_table=False,
        key_bias=False, position_key_bias=False, conv_kernel_size=None, pooler_activation="tanh",
    ),
    "v2": V2,
}  # fmt: skip
TASKS: dict[str, tuple[Head, tuple[str, ...]]] = {
    "ForSequenceClassification": ("classification", ("a", "b", "c")),
    "ForTokenClassification": ("tokens", ("O", "B", "I")),
    "ForQuestionAnswering": ("spans", ()),
    "ForMultipleChoice": ("choices", ()),
}
CLASSES = [
    pytest.param((source, kind, head), id=f"{source}-{KINDS[kind][0]}{head}")
    for source in ("initialised", "exported")
    for kind in EXPORTS
    for head in heads_of(kind)
]
Load = Callable[..., Any]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Return a function that makes a model in evaluation mode: by source, kind and head."""

    @cache
    def export(kind: str, head: str) -> Path:
        config = EXPORTS[kind]
        if head in TASKS:
            config = with_task_head(config, *TASKS[head], head_dropout=0.0)
        folder = tmp_path_factory.mktemp("exported")
        model_type, _ = choose_model_type(config)
        write_hf_model(folder, config, model_type, reader(random_weights(config)), SpecialIds())
        return folder

    def make(source: str, kind: str, head: str) -> Any:
        if source == "initialised":
            return build(kind, head, cls_dropout=0.0, hidden_dropout_prob=0.0).eval()
        if head == "ForMaskedLM" and Version(transformers.__version__) < Version(LEGACY_FALSE):
            pytest.skip("this version's class cannot be made with legacy: false, as exports have")
        named = getattr(transformers, f"{KINDS[kind][0]}{head}")
        model, report = named.from_pretrained(export(kind, head), output_loading_info=True)
        assert not report["missing_keys"]
        return align(model).eval()

    return make


@pytest.fixture(params=CLASSES)
def loaded(request: pytest.FixtureRequest, load: Load) -> tuple[Any, str]:
    """Return a model of every class, and its head."""
    return load(*request.param), request.param[2]


@pytest.fixture(scope="module")
def worst() -> Any:
    """Collect the largest differences from stock, and record them at the end."""
    found: dict[str, list[float]] = {}
    yield found
    for name, errors in found.items():
        record(
            "transformers",
            transformers.__version__,
            f"its 11 DeBERTa classes under use_fast_attention, initialised and as exports: {name}",
            f"{max(errors):.1e}",
            f"{LIMIT:.0e}",
            len(errors),
        )


def error_of(ours: Tensor, stock: Tensor) -> float:
    """Return the largest difference, relative to the largest value if that is above 1."""
    return float((ours - stock).detach().abs().max() / stock.detach().abs().max().clamp(min=1.0))


def batch_of(head: str, rows: int = 3, length: int = 11) -> dict[str, Tensor]:
    return labelled(head, inputs(rows, length))


def align(model: Any) -> Any:
    """Copy weights, because those of a mapped file may not be aligned, which changes rounding."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def tensors(out: Any) -> list[Tensor]:
    """Return the predictions of an output, without loss and states."""
    names = ("last_hidden_state", "logits", "start_logits", "end_logits")
    return [out[name] for name in names if name in out]


@torch.no_grad()
def predictions(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    return tensors(model(**without_labels(batch)))


def compare(worst: Any, name: str, ours: list[Tensor], stock: list[Tensor]) -> None:
    assert len(ours) == len(stock) > 0
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.shape == theirs.shape
        error = error_of(mine, theirs)
        worst.setdefault(name, []).append(error)
        assert error <= LIMIT


def test_save_and_load(loaded: tuple[Any, str], worst: Any, tmp_path: Path) -> None:
    model, head = loaded
    batch = batch_of(head)
    stock = predictions(model, batch)
    with use_fast_attention(model):
        ours = predictions(model, batch)
        model.save_pretrained(tmp_path)
        again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
    assert type(again) is type(model)
    align(again).eval()
    assert all(map(torch.equal, predictions(again, batch), stock))
    use_fast_attention(again)
    assert all(map(torch.equal, predictions(again, batch), ours))
    again.load_state_dict(model.state_dict(), strict=True)
    compare(worst, "after saving and loading", predictions(again, batch), stock)


def test_hidden_states_and_attentions(loaded: tuple[Any, str], worst: Any) -> None:
    model, head = loaded
    batch = without_labels(batch_of(head))
    stock = model(**batch, output_hidden_states=True, output_attentions=True)
    rows = batch["input_ids"].flatten(0, -2).shape[0]
    assert [tuple(a.shape) for a in stock.attentions] == [(rows, 4, 11, 11)] * LAYERS
    with use_fast_attention(model):
        ours = model(**batch, output_hidden_states=True)
        by_stock = model(**batch, output_attentions=True).attentions
        compare(worst, "attentions, by transformers' own", list(by_stock), list(stock.attentions))
        assert "hidden_states" not in model(**batch)
        model.config.output_hidden_states = True
        by_config = model(**batch).hidden_states
        as_tuple = model(**batch, return_dict=False)
        model.config.output_hidden_states = False
    assert [tuple(s.shape) for s in ours.hidden_states] == [(rows, 11, 32)] * (LAYERS + 1)
    compare(worst, "states of every layer", list(ours.hidden_states), list(stock.hidden_states))
    assert all(map(torch.equal, by_config, ours.hidden_states))
    assert all(map(torch.equal, as_tuple[-1], ours.hidden_states))
    assert all(map(torch.equal, as_tuple[:-1], tensors(ours)))


def test_gradients_of_retained_states(loaded: tuple[Any, str], worst: Any) -> None:
    model, head = loaded
    batch = batch_of(head)
    real = batch["attention_mask"].flatten(0, -2).bool()

    def gradients() -> list[Tensor]:
        out = model(**batch, output_hidden_states=True)
        for states in out.hidden_states:
            states.retain_grad()
        (out["loss"] if "loss" in out else out.last_hidden_state.square().mean()).backward()
        assert all(states.grad is not None for states in out.hidden_states)
        found = [states.grad[real] for states in out.hidden_states]
        # All padding positions of a row are one token to fast attention.
        padding = [states.grad.masked_fill(real[..., None], 0) for states in out.hidden_states]
        return found + [each.sum(1) for each in padding]

    stock = gradients()
    assert all(each.abs().max() > 0 for each in stock[: LAYERS + 1])
    with use_fast_attention(model):
        ours = gradients()
    compare(worst, "gradients of retained states", ours, stock)


# With ``legacy: false`` transformers' class resizes a layer of its head by mistake.
@pytest.mark.parametrize(
    "loaded",
    [each for each in CLASSES if (each.values[0][0], each.values[0][2]) != LEGACY],
    indirect=True,
)
@pytest.mark.parametrize("change", [10, -15])
def test_resized_embeddings(loaded: tuple[Any, str], change: int, worst: Any) -> None:
    model, head = loaded
    batch, size = batch_of(head), VOCABULARY + change
    batch["input_ids"] = batch["input_ids"].clamp(max=size - 1)
    if head == "ForMaskedLM":
        batch["labels"] = batch["labels"].clamp(max=size - 1)
    with use_fast_attention(model):
        torch.manual_seed(0)
        table = model.resize_token_embeddings(size)
        assert table.weight.shape[0] == model.config.vocab_size == size
        batch["input_ids"][..., 0, 1] = size - 1
        ours = results(model, batch)
        if head == "ForMaskedLM":
            assert ours["logits"].shape[-1] == size
            head_table = model.get_output_embeddings().weight
            assert head_table is model.get_input_embeddings().weight
    stock = results(model, batch)
    assert_same(ours, stock, LIMIT)
    compare(worst, "after resizing the embeddings", list(ours.values()), list(stock.values()))


def test_a_batch_is_its_rows_one_by_one(loaded: tuple[Any, str], worst: Any) -> None:
    model, head = loaded
    batch = without_labels(batch_of(head, 4, 13))
    use_fast_attention(model)
    together = predictions(model, batch)
    again = predictions(model, batch)
    assert all(map(torch.equal, again, together)), "another result of the same call"
    for row in range(4):
        one = {name: value[row : row + 1] for name, value in batch.items()}
        alone = predictions(model, one)
        rows = [each[row : row + 1] for each in together]
        compare(worst, "a batch and its rows one by one", rows, alone)
        if head == "ForMultipleChoice":
            continue
        # Without padding, the states of tokens stay the same.
        size = int(batch["attention_mask"][row].sum())
        for shorter, whole in zip(
            predictions(model, {name: value[:, :size] for name, value in one.items()}),
            alone,
            strict=True,
        ):
            error = error_of(shorter, whole if shorter.shape == whole.shape else whole[:, :size])
            assert error <= LIMIT


def test_training_with_gradient_checkpointing(
    loaded: tuple[Any, str], worst: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, head = loaded
    batch, calls = batch_of(head), OperatorCalls(monkeypatch)

    def train(accelerated: bool) -> tuple[dict[str, Tensor], list[float]]:
        model = copy.deepcopy(original).train()
        if accelerated:
            use_fast_attention(model)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        first, losses = results(model, batch), []
        # Each layer is computed again in the backward pass.
        assert calls.take() == 2 * LAYERS * accelerated
        descent = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            descent.zero_grad()
            out = model(**batch)
            loss = out["loss"] if "loss" in out else out.last_hidden_state.square().mean()
            loss.backward()
            descent.step()
            losses.append(loss.item())
        return first, losses

    (stock, stock_losses), (ours, losses) = train(False), train(True)
    assert_same(ours, stock, LIMIT)
    compare(worst, "gradients with checkpointing", list(ours.values()), list(stock.values()))
    assert losses == pytest.approx(stock_losses, abs=1e-4)
    assert losses[-1] < losses[0] or head == "Model"


def test_embeddings_in_the_place_of_ids(loaded: tuple[Any, str], worst: Any) -> None:
    model, head = loaded
    batch = without_labels(batch_of(head))
    stock = predictions(model, batch)
    embeds = model.get_input_embeddings()(batch["input_ids"])
    with use_fast_attention(model), torch.no_grad():
        ours = tensors(model(inputs_embeds=embeds, attention_mask=batch["attention_mask"]))
    compare(worst, "embeddings in the place of ids", ours, stock)


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize(
    ("problem", "dtype"),
    [
        ("regression", torch.float),
        ("single_label_classification", torch.long),
        ("multi_label_classification", torch.float),
    ],
)
def test_every_problem_type(kind: str, problem: str, dtype: torch.dtype) -> None:
    model = build(kind, "ForSequenceClassification", problem_type=problem)
    wide = problem != "single_label_classification"
    labels = torch.ones((3, 3) if wide else (3,), dtype=dtype)
    batch = {**inputs(3, 9), "labels": labels}
    stock = results(model, batch)
    with use_fast_attention(model):
        assert_same(results(model, batch), stock, LIMIT)
