"""Initial weights: slices equal slices of the full parameter; distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model import DebertaModel
from megatron_deberta.model.weight_init import fill_initial

CONFIG = ModelConfig(conv_kernel_size=3)


def full_parameter(name: str, shape: tuple[int, ...], seed: int = 1) -> torch.Tensor:
    out = torch.full(shape, 99.0)
    fill_initial(out, name, shape, CONFIG, seed)
    return out


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_slice_equals_slice_of_full_parameter(dim: int) -> None:
    shape = (12, 10, 6)
    full = full_parameter("encoder.conv.conv.weight", shape)
    for offset, length in ((0, 2), (2, 3), (5, 1)):
        part = torch.empty(full.narrow(dim, offset, length).shape)
        fill_initial(part, "encoder.conv.conv.weight", shape, CONFIG, 1, dim=dim, offset=offset)
        assert torch.equal(part, full.narrow(dim, offset, length))


def test_result_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    full = full_parameter("a.weight", (50, 7))
    monkeypatch.setattr("megatron_deberta.model.weight_init._CHUNK_ELEMENTS", 13)
    assert torch.equal(full_parameter("a.weight", (50, 7)), full)


def test_distribution() -> None:
    values = full_parameter("embeddings.token.weight", (2000, 256)) / CONFIG.initializer_range
    assert abs(values.mean()) < 0.01
    assert values.std() == pytest.approx(1.0, abs=0.01)
    assert (values**4).mean() == pytest.approx(3.0, abs=0.05)
    # Neighbours along both dimensions are independent.
    for dim in (0, 1):
        shifted = values.roll(1, dim)
        assert abs((values * shifted).mean()) < 0.01


def test_names_and_seeds_differ() -> None:
    first = full_parameter("a.weight", (64, 64))
    assert not torch.equal(first, full_parameter("b.weight", (64, 64)))
    assert not torch.equal(first, full_parameter("a.weight", (64, 64), seed=2))
    assert abs((first * full_parameter("b.weight", (64, 64))).mean()) < 1e-4


def test_convolution_of_the_release_keeps_the_defaults_of_torch() -> None:
    config = ModelConfig(
        num_layers=1, hidden_size=64, num_heads=2, ffn_hidden_size=8, vocab_size=9,
        conv_kernel_size=3,
    )  # fmt: skip
    normal, release = (
        DebertaModel(model, seed=1).state_dict()
        for model in (replace(config, conv_init="normal"), config)
    )
    stock = torch.nn.Conv1d(64, 64, 3)
    for name, value in release.items():
        if not name.startswith("encoder.conv.conv."):
            assert torch.equal(value, normal[name]), name
            continue
        assert abs(normal[name].std() - (config.initializer_range if value.dim() > 1 else 0)) < 1e-3
        bound = (64 * 3) ** -0.5
        assert 0.9 * bound < value.abs().max() <= bound
        default = getattr(stock, name.rpartition(".")[2])
        assert value.shape == default.shape
        assert value.std() == pytest.approx(bound / 3**0.5, rel=0.02 if value.dim() > 1 else 0.25)
        assert abs(value.mean()) < 0.3 * bound
