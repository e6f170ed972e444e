"""transformers' models with ``use_fast_attention`` against stock ones."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatron_deberta import hf
from megatron_deberta.hf import FastAttentionHandle, fast_attention, use_fast_attention
from tests.support.compiler import needs_compiler
from tests.support.selection import every
from tests.support.stock_models import (
    HEADS,
    KINDS,
    VOCABULARY,
    assert_same,
    build,
    compare,
    heads_of,
    inputs,
    labelled,
    results,
)


@pytest.mark.parametrize(
    ("kind", "head"), every(2, [(k, h) for h in HEADS for k in KINDS if h in heads_of(k)], ["slow"])
)
def test_outputs_and_gradients_of_every_head(kind: str, head: str) -> None:
    # Left padding: pooled heads read the state of a padding position, as in transformers.
    for side in ("right", "left"):
        compare(build(kind, head), labelled(head, inputs(3, 11, side)))


@pytest.mark.parametrize("kind", ["v1", "v1_p2c", "v2", "v3", "v3_c2p"])
def test_random_shapes(kind: str) -> None:
    draw = random.Random(kind)
    heads = heads_of(kind)
    models = {head: build(kind, head) for head in heads}
    for number in range(16):
        head = heads[number % len(heads)]
        rows, length = draw.randint(1, 9), draw.choice([1, 2, 7, 20, 33, 64])
        batch = labelled(head, inputs(rows, length, draw.choice(["left", "right"]), number))
        compare(models[head], batch, remove_padding=draw.random() < 0.7)


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_empty_rows_and_no_mask(kind: str) -> None:
    batch = inputs(4, 9)
    batch["attention_mask"][2] = 0
    model = build(kind)
    compare(model, batch)
    compare(model, batch, remove_padding=False)
    compare(model, {"input_ids": batch["input_ids"]})
    compare(model, {"inputs_embeds": torch.randn(2, 5, 32), "attention_mask": torch.ones(2, 5)})


def test_calls_of_several_threads_do_not_mix() -> None:
    """Each call has as many states as its caller wants, also while others run."""
    model, batch = build("v2").eval(), inputs(2, 6)

    def states(wanted: bool) -> int:
        with torch.no_grad():
            return len(model(**batch, output_hidden_states=wanted).hidden_states or ())

    wanted = [number % 2 == 0 for number in range(160)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with use_fast_attention(model), ThreadPoolExecutor(4) as threads:
            found = list(threads.map(states, wanted))
    finally:
        sys.setswitchinterval(interval)
    assert found == [3 if wish else 0 for wish in wanted]


@pytest.mark.parametrize("positional", [False, True])
def test_a_wish_ends_with_a_call_that_raises(positional: bool) -> None:
    model, batch = build("v2").eval(), inputs(3, 9)
    with use_fast_attention(model):
        embedded = model.embeddings(batch["input_ids"], mask=batch["attention_mask"])
        with pytest.raises(IndexError):
            model(input_ids=batch["input_ids"] + VOCABULARY, output_hidden_states=False)
        # The encoder by itself returns every state, as transformers' own.
        assert len(model.encoder(embedded, batch["attention_mask"]).hidden_states) == 3
        ids, mask = batch["input_ids"], batch["attention_mask"]
        if positional:
            out = model(ids, mask, None, None, None, False, True)
            assert model(ids, mask, None, None, None, None, False).hidden_states is None
        else:
            out = model(**batch, output_hidden_states=True)
        assert len(out.hidden_states) == 3
        for wish in (True, None):
            model.config.output_attentions = wish is None
            assert len(model(**batch, output_attentions=wish).attentions) == 2
            model.config.output_attentions = False
        assert model(**batch).attentions is None


def test_encoder_with_states_at_padding() -> None:
    """As GLiNER calls encoders of its own; stock's padding positions then differ."""
    encoder, states = build("v2").encoder.eval(), torch.randn(3, 9, 32)
    mask = inputs(3, 9)["attention_mask"]
    stock = encoder(states, mask).hidden_states
    with use_fast_attention(encoder):
        torch.testing.assert_close(encoder(states, mask).hidden_states, stock, atol=1e-5, rtol=1e-5)


def test_bfloat16_and_autocast() -> None:
    batch = inputs(3, 12)
    for kind in ("v1", "v2"):
        model = build(kind).eval()
        exact = model(**batch).last_hidden_state
        with torch.autocast("cpu", torch.bfloat16), use_fast_attention(model):
            torch.testing.assert_close(
                model(**batch).last_hidden_state.float(), exact, atol=0.1, rtol=0.1
            )
        model.bfloat16()
        with use_fast_attention(model):
            states = model(**batch).last_hidden_state
        assert states.dtype == torch.bfloat16
        torch.testing.assert_close(states.float(), exact, atol=0.2, rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "remove_padding"),
    [("v1", False), ("v3", True), pytest.param("v1", True, marks=pytest.mark.nightly)],
)
def test_dropout_has_the_statistics_of_transformers(kind: str, remove_padding: bool) -> None:
    # Rows are copies of one another: their mean and variance are over dropout masks.
    model = build(kind, num_hidden_layers=1, attention_probs_dropout_prob=0.25)
    copies, length = 2000, 6
    ids = torch.randint(5, VOCABULARY, (1, length)).expand(copies, -1)
    mask = (torch.arange(length) < 5).long().expand(copies, -1)
    batch = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        stock = model(**batch).last_hidden_state[:, :5]
        with use_fast_attention(model, remove_padding=remove_padding):
            ours = model(**batch).last_hidden_state[:, :5]
            again = model(**batch).last_hidden_state[:, :5]
            assert not torch.equal(ours, again)
            model.eval()
            assert torch.equal(model(**batch)[0], model(**batch)[0])
    error = stock.std(0) * (2 / copies) ** 0.5
    assert ((ours.mean(0) - stock.mean(0)).abs() < 6 * error + 1e-5).all()
    assert ((ours.var(0) / stock.var(0) - 1).abs().mean()) < 0.1


# The reentrant variant goes twice through the LayerNorm of v2's position table, also in stock.
@pytest.mark.parametrize(("kind", "variants"), [("v1", (False, True)), ("v2", (False,))])
def test_dropout_follows_the_generator_and_gradient_checkpointing(
    kind: str, variants: tuple[bool, ...]
) -> None:
    fields = {"attention_probs_dropout_prob": 0.3, "hidden_dropout_prob": 0.2}
    model, batch = build(kind, "ForMaskedLM", **fields), inputs(4, 12)
    batch = labelled("ForMaskedLM", batch)

    def run() -> dict[str, Tensor]:
        torch.manual_seed(5)
        return results(model, batch)

    with use_fast_attention(model):
        plain = run()
        assert_same(run(), plain, 0.0)
        for reentrant in variants:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
            assert_same(run(), plain, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("v1", marks=pytest.mark.nightly), "v2"])
def test_compiled_model_trains(kind: str) -> None:
    model = build(kind, "ForSequenceClassification", num_hidden_layers=1)
    batch = labelled("ForSequenceClassification", inputs(3, 9))
    stock = results(model, batch)
    with use_fast_attention(model):
        torch._dynamo.reset()
        model.compile(backend="eager")
        ours = results(model, batch)
        model._compiled_call_impl = None
    assert_same(ours, stock)


@pytest.mark.nightly
@needs_compiler
def test_compiled_by_inductor_with_dropout() -> None:
    model = build(
        "v3", "ForSequenceClassification", num_hidden_layers=1, attention_probs_dropout_prob=0.3
    )
    batches = [labelled("ForSequenceClassification", inputs(*size)) for size in ((3, 9), (5, 20))]
    exact = [results(model.eval(), batch) for batch in batches]
    with use_fast_attention(model):
        torch._dynamo.reset()
        model.compile()
        for batch, expected in zip(batches, exact, strict=True):
            assert_same(results(model.eval(), batch), expected)
            dropped = [results(model.train(), batch) for _ in range(2)]
            for one, other in (dropped, (dropped[0], expected)):
                assert torch.isfinite(one["loss"])
                assert not torch.equal(one["logits"], other["logits"])
        model._compiled_call_impl = None


def test_copies_pickles_and_files(tmp_path: Path) -> None:
    model, batch = build("v3", "ForSequenceClassification").eval(), inputs(2, 7)
    names = list(model.state_dict())
    stock = model(**batch).logits
    handle = use_fast_attention(model)
    assert list(model.state_dict()) == names
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for twin in twins:
        assert type(twin.deberta.encoder) is type(model.deberta.encoder)
        torch.testing.assert_close(twin(**batch).logits, stock, atol=1e-5, rtol=1e-5)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(loaded.eval()(**batch).logits, stock)
    handle.undo()
    handle.undo()
    assert torch.equal(model(**batch).logits, stock)
    copied, unpickled = twins
    with pytest.raises(ValueError, match=r"or FastAttentionHandle\(model\)\.undo\(\)"):
        use_fast_attention(unpickled)
    assert "FastV" in repr(unpickled)
    FastAttentionHandle(unpickled).undo()
    for own in (model, copied, unpickled):
        assert torch.equal(own(**batch).logits, stock)
        assert "FastV" not in repr(own)
        assert vars(own.deberta.encoder).keys() == vars(loaded.deberta.encoder).keys()
        with use_fast_attention(own):
            assert len(own.deberta._forward_pre_hooks) == 1
            torch.testing.assert_close(own(**batch).logits, stock, atol=1e-5, rtol=1e-5)
        assert not own.deberta._forward_pre_hooks


@pytest.mark.parametrize("kind", ["v1", "v2", "v3"])
@pytest.mark.parametrize("remove_padding", [True, False])
def test_calls_that_transformers_itself_computes(
    kind: str, remove_padding: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = build(kind).eval(), inputs(2, 6)["input_ids"]
    gap = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0]])
    states, pairs = torch.randn(2, 6, 32), torch.ones(2, 6, 6).tril()
    calls: dict[str, Callable[[], Any]] = {
        "padding between tokens": lambda: model(ids, gap, output_hidden_states=True).hidden_states,
        "output_attentions": lambda: model(ids, gap, output_attentions=True).attentions,
    }
    if kind == "v3":  # with the others, these calls fail in transformers
        calls |= {
            "attention_mask has": lambda: model.encoder(states, pairs[:, None])[0],
            "query_states": lambda: model.encoder(states, pairs[:, -1], query_states=states)[0],
        }
    expected = {reason: call() for reason, call in calls.items()}
    fast_attention._warn.cache_clear()
    with use_fast_attention(model, remove_padding=remove_padding):
        for _ in range(2):
            for reason, call in calls.items():
                torch.testing.assert_close(call(), expected[reason], atol=1e-6, rtol=1e-6)
        # A call without these is computed by the operator again.
        tokens = model.encoder(states, torch.ones(2, 6))
    torch.testing.assert_close(
        tokens.last_hidden_state,
        model.encoder(states, torch.ones(2, 6)).last_hidden_state,
        atol=1e-5,
        rtol=1e-5,
    )
    messages = [record.message for record in caplog.records if "own attention" in record.message]
    assert len(messages) == len(calls)
    assert all(reason in text for reason, text in zip(calls, messages, strict=True))


class Adapted(nn.Module):
    """Low-rank update of a linear layer, as PEFT wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.update = nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.update(x)


def test_wrapped_projections_take_part() -> None:
    model = build("v2")
    for layer in model.encoder.layer:
        for name in ("query_proj", "key_proj", "value_proj"):
            attention = layer.attention.self
            setattr(attention, name, Adapted(getattr(attention, name)))
    compare(model, inputs(3, 9))


def test_distributed_data_parallel(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = build("v2", "ForMaskedLM")
        batch = labelled("ForMaskedLM", inputs(3, 9))
        compare(nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), batch)
    finally:
        torch.distributed.destroy_process_group()


def test_unsupported_models_are_refused_and_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="model: got Linear without an encoder"):
        use_fast_attention(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="talking_head: got True"):
        use_fast_attention(build("v1", talking_head=True))
    with pytest.raises(ValueError, match="buckets: got 7"):
        use_fast_attention(build("v3", position_buckets=7))
    model = build("v3")
    model.encoder.layer[1].attention.self.forward = lambda *_: None
    with pytest.raises(ValueError, match=r"encoder\.layer\.1\.attention\.self: .* another forward"):
        use_fast_attention(model)
    assert "FastV" not in repr(model)
    model = build("v3")
    use_fast_attention(model)
    with pytest.raises(ValueError, match="fast attention already"):
        use_fast_attention(model)
    # Importing a modeling file replaces the module `transformers`, so this file's may be another.
    monkeypatch.setattr("megatron_deberta.hf.fast_attention.transformers.__version__", "4.57.0")
    with pytest.raises(ImportError, match="transformers: got version 4.57.0"):
        use_fast_attention(build("v3"))


def test_old_names_warn_once() -> None:
    for name in ("accelerate", "Acceleration"):
        vars(hf).pop(name, None)
        with pytest.warns(DeprecationWarning, match=f"{name} was renamed to") as found:
            values = [getattr(hf, name) for _ in range(2)]
        assert len(found) == 1
        assert values[0] is values[1] is getattr(hf, hf._RENAMED[name])


def test_inside_other_modules() -> None:
    model = nn.ModuleDict({"text": build("v3"), "words": build("v1"), "head": nn.Linear(32, 1)})
    batch = inputs(3, 8)
    stock = [model[name](**batch)[0] for name in ("text", "words")]
    with use_fast_attention(model):
        ours = [model[name](**batch)[0] for name in ("text", "words")]
        assert repr(model).count("FastV1Encoder") == 1
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=1e-5)
