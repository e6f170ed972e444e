"""Packing, padding, selected positions, dropout and recomputation of the whole model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.model import DropoutSeeds, RuntimeOptions
from megatron_deberta.model.dropout import site_id
from megatron_deberta.model.inputs import ModelInputs
from megatron_deberta.model.layers import TokenConv1d
from megatron_deberta.objectives import MaskedLanguageModel
from megatron_deberta.ops import disentangled_attention
from tests.support.stock_weights import randomize
from tests.support.tiny_models import V2
from tests.support.tolerances import FP64

CONFIG = replace(V2, max_relative_positions=16, position_buckets=4, conv_kernel_size=3)


def make(config: ModelConfig = CONFIG, **options: Any) -> MaskedLanguageModel:
    model = MaskedLanguageModel(config, RuntimeOptions(**options)).double()
    randomize(model)
    return model.train()


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, CONFIG.vocab_size, (1, length), generator=generator)


def real(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(ids, dtype=torch.bool)


def test_padding_does_not_change_logits() -> None:
    model = make()
    ids = tokens(9)
    padded = torch.cat([ids, tokens(4, seed=9)], 1)
    mask = torch.arange(13).unsqueeze(0) < 9
    torch.testing.assert_close(
        model.logits(ModelInputs(padded, mask))[:, :9], model.logits(ModelInputs(ids)), **FP64
    )


def test_logits_at_selected_positions() -> None:
    model = make()
    ids = tokens(12)
    selected = torch.tensor([[2, 11, -1, 0]])
    some = model.masked_logits(ModelInputs(ids, real(ids)), selected)
    all_rows = model.logits(ModelInputs(ids))
    torch.testing.assert_close(some[:, [0, 1, 3]], all_rows[:, [2, 11, 0]], **FP64)


def loss(model: MaskedLanguageModel, seeds: DropoutSeeds | None, ids: torch.Tensor) -> Any:
    selected = torch.tensor([[1, 5]]).expand(ids.size(0), 2)
    batch = Batch(
        ModelInputs(ids, real(ids)), selected, ids.gather(1, selected), torch.arange(ids.size(0))
    )
    return model(batch, seeds).losses["masked"].loss


def test_every_dropout_uses_a_site_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        f"encoder.layers.{index}.{part}"
        for index in range(CONFIG.num_layers)
        for part in ("attention", "attention.probabilities", "attention.table", "ffn")
    ]
    used: set[int] = set()
    for name in ("per_row", "shared"):
        original = getattr(DropoutSeeds, name)

        def noting(self: DropoutSeeds, site: int, original: Any = original) -> torch.Tensor:
            used.add(site)
            seed: torch.Tensor = original(self, site)
            return seed

        monkeypatch.setattr(DropoutSeeds, name, noting)
    loss(make(), DropoutSeeds(1, 2, torch.tensor([3])), tokens(12))
    assert used == {site_id(name) for name in (*names, "embeddings", "encoder.conv")}


def test_dropout_does_not_depend_on_the_batch() -> None:
    """A sample drops the same elements in any batch."""
    model = make(replace(CONFIG, conv_kernel_size=0))
    ids = torch.cat([tokens(12), tokens(12, seed=1)])
    # Losses are sums in float32; states are float64.
    together = model.encode(ModelInputs(ids), DropoutSeeds(1, 2, torch.tensor([3, 4])))
    alone = [
        model.encode(ModelInputs(row[None]), DropoutSeeds(1, 2, torch.tensor([sample])))
        for sample, row in zip((3, 4), ids, strict=True)
    ]
    assert together.dtype == torch.float64
    torch.testing.assert_close(together, torch.cat(alone), **FP64)
    other = model.encode(ModelInputs(ids), DropoutSeeds(1, 2, torch.tensor([4, 3])))
    assert not torch.allclose(together, other)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_gives_the_same_gradients(recompute: str) -> None:
    plain, again = make(), make(recompute=recompute)
    for model in (plain, again):
        loss(model, DropoutSeeds(1, 2, torch.tensor([3])), tokens(12)).backward()
    for (name, ours), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours.grad, other.grad), name


def test_every_parameter_has_a_gradient() -> None:
    model = make()
    loss(model, DropoutSeeds(1, 2, torch.tensor([3])), tokens(12)).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("documents", [False, True])
def test_convolution_as_one_product(documents: bool, causal: bool) -> None:
    torch.manual_seed(1)
    conv = TokenConv1d(6, 4, 5, padding=2).double()
    ids = torch.tensor([[0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]]) if documents else None
    results = []
    for apply in (conv, conv.as_one_product):
        hidden = torch.arange(84.0, dtype=torch.float64).view(2, 7, 6).sin().requires_grad_()
        conv.zero_grad()
        out = apply(hidden, ids, causal)
        out.square().sum().backward()
        results.append([out, hidden.grad, conv.weight.grad, conv.bias.grad])
    torch.testing.assert_close(*results, **FP64)


def test_convolution_is_one_product_off_the_cpu() -> None:
    conv = TokenConv1d(6, 4, 5, padding=2).to("meta")
    calls: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
        ) -> Any:
            calls.append(str(function))
            return function(*arguments, **(keywords or {}))

    with Recorder():
        conv(torch.empty(2, 7, 6, device="meta"), None)
    assert "aten.addmm.default" in calls
    assert not [name for name in calls if "convolution" in name]


def test_rows_without_padding_need_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.cat([tokens(12), tokens(12, 1)])
    batch = Batch(ModelInputs(ids, real(ids)), ids[:, :3] % 12, ids[:, :3], torch.tensor([3, 4]))
    seeds = DropoutSeeds(1, 2, batch.sample_index)
    model = make()
    masks: list[Tensor | None] = []

    def record(*tensors: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
        masks.append(attention_mask)
        return disentangled_attention(*tensors, attention_mask=attention_mask, **options)

    monkeypatch.setattr("megatron_deberta.model.attention.disentangled_attention", record)
    losses = []
    for padded in (True, False):
        masks.clear()
        mask = real(ids) if padded else None
        changed = replace(batch, inputs=ModelInputs(ids, mask))
        losses.append(model(changed, seeds).losses["masked"].loss)
        assert masks
        assert all((mask is not None) == padded for mask in masks)
    assert torch.equal(*losses)
