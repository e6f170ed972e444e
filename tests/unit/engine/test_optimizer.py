from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from megatron_deberta.config.schema import ModelConfig, OptimizerConfig
from megatron_deberta.engine.optimizer import (
    adam_step,
    build_optimizer,
    decays,
    parameter_groups,
    rate_scales,
    set_adam_step,
    set_learning_rate,
)
from megatron_deberta.errors import ConfigError
from megatron_deberta.model.task_models import parameter_shapes


def test_biases_and_norms_alone_are_exempt_from_decay() -> None:
    shapes = parameter_shapes(ModelConfig(conv_kernel_size=3, num_layers=2))
    # Matrices and the convolution's kernel are exactly the parameters of more than one dimension.
    assert {n for n in shapes if decays(n)} == {n for n, s in shapes.items() if len(s) > 1}
    assert not decays("head.bias")
    assert not decays("encoder.relative_positions.norm.weight")


def test_groups_keep_the_order_and_leave_frozen_parameters_out() -> None:
    a, b, c, d = (nn.Parameter(torch.zeros(1)) for _ in range(4))
    c.requires_grad = False
    named = [("x.weight", a), ("x.bias", b), ("y.weight", c), ("z.weight", d)]
    decaying, exempt = parameter_groups(named, 0.1)
    assert decaying["weight_decay"] == 0.1
    assert [id(p) for p in decaying["params"]] == [id(a), id(d)]
    assert exempt["weight_decay"] == 0
    assert [id(p) for p in exempt["params"]] == [id(b)]
    assert len(parameter_groups(named[:1], 0.1)) == 1


def _updated(bias_correction: bool, gradients: torch.Tensor) -> torch.Tensor:
    config = OptimizerConfig(bias_correction=bias_correction, weight_decay=0.1)
    parameter = nn.Parameter(torch.linspace(-1, 1, 5))
    groups = parameter_groups([("x.weight", parameter)], config.weight_decay)
    optimizer = build_optimizer(groups, config, allow_apex=False)
    for gradient in gradients:
        optimizer.param_groups[0]["lr"] = 0.01
        parameter.grad = gradient.clone()
        optimizer.step()
    assert adam_step(optimizer, [parameter]) == len(gradients)
    return parameter.detach()


@pytest.mark.parametrize("bias_correction", [True, False])
def test_update_is_adamw_written_out(bias_correction: bool) -> None:
    """Loshchilov and Hutter 2019, algorithm 2; without correction, the release's Adam."""
    gradients = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(-1, 1, 5, dtype=torch.float64)
    m = v = torch.zeros(5, dtype=torch.float64)
    for step, gradient in enumerate(gradients.double(), start=1):
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        c1, c2 = (1 - 0.9**step, 1 - 0.999**step) if bias_correction else (1.0, 1.0)
        weight = weight - 0.01 * (m / c1 / ((v / c2).sqrt() + 1e-6) + 0.1 * weight)
    torch.testing.assert_close(
        _updated(bias_correction, gradients), weight.float(), rtol=1e-5, atol=1e-6
    )


def test_step_counters_are_not_shared() -> None:
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        optimizer.state[parameter]["exp_avg"] = torch.zeros(2)
        optimizer.state[parameter]["exp_avg_sq"] = torch.zeros(2)
        parameter.grad = torch.ones(2)
    set_adam_step(optimizer, parameters, 5)
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in parameters] == [6, 6, 6]


class _CountingInGroups(torch.optim.Optimizer):
    """Stands in for apex's FusedAdam, which needs a GPU: same arguments, same place of the step."""

    def __init__(self, params: Any, **arguments: Any) -> None:
        super().__init__(params, arguments)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


@pytest.fixture
def nvidia_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    package, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    optimizers.FusedAdam = _CountingInGroups  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", package)
    monkeypatch.setitem(sys.modules, "apex.optimizers", optimizers)
    monkeypatch.setitem(sys.modules, "amp_C", ModuleType("amp_C"))


def groups_of(parameter: nn.Parameter) -> list[dict[str, Any]]:
    return parameter_groups([("x.weight", parameter)], 0.1)


@pytest.mark.usefixtures("nvidia_apex")
def test_apex_is_used_where_it_is_asked_for_and_its_step_is_kept() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    config = OptimizerConfig(bias_correction=False, implementation="apex")
    optimizer = build_optimizer(groups_of(parameter), config, allow_apex=True)
    assert isinstance(optimizer, _CountingInGroups)
    assert optimizer.defaults["bias_correction"] is False
    assert optimizer.defaults["adam_w_mode"] is True
    assert adam_step(optimizer, [parameter]) == 0
    set_adam_step(optimizer, [parameter], 7)
    optimizer.step()
    assert adam_step(optimizer, [parameter]) == 8
    with pytest.raises(ConfigError, match=r"implementation=apex.*needs a GPU and ZeRO stages 0"):
        build_optimizer(groups_of(parameter), config, allow_apex=False)


@pytest.mark.usefixtures("nvidia_apex")
def test_torch_is_the_default_where_apex_is_installed() -> None:
    """Otherwise the choice would depend on the image, and clipping would be a pass of its own."""
    groups = groups_of(nn.Parameter(torch.zeros(1)))
    optimizer = build_optimizer(groups, OptimizerConfig(), allow_apex=True)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["fused"] is True


@pytest.mark.parametrize("kernels", [None, ModuleType("amp_C")], ids=["pypi", "old"])
def test_apex_of_pypi_is_not_nvidias(
    kernels: ModuleType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyPI's has no ``apex.optimizers``, and no compiled ``amp_C`` beside it."""
    monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
    monkeypatch.setitem(sys.modules, "amp_C", kernels)
    config = OptimizerConfig(implementation="apex")
    with pytest.raises(ConfigError, match="NVIDIA's apex with its CUDA extensions is not"):
        build_optimizer(groups_of(nn.Parameter(torch.zeros(1))), config, allow_apex=True)


def test_rates_by_layer_and_frozen_parameters() -> None:
    config = OptimizerConfig(layer_decay=0.5, freeze=("embeddings", "encoder.layers.1.ffn.up.bias"))
    names = list(parameter_shapes(ModelConfig(num_layers=2)))
    scales = rate_scales(names, config)
    assert scales["embeddings.token.weight"] == 0
    assert scales["encoder.layers.1.ffn.up.bias"] == 0
    assert scales["encoder.relative_positions.weight"] == 0.125
    assert scales["encoder.layers.0.ffn.up.weight"] == 0.25
    assert scales["encoder.layers.1.ffn.up.weight"] == 0.5
    assert {scales[n] for n in names if n.startswith(("head.", "mask_decoder."))} == {1.0}
    assert set(rate_scales(names, OptimizerConfig()).values()) == {1.0}
    with pytest.raises(ConfigError, match=r"optimizer.freeze=encoder.layers.2: no parameter"):
        rate_scales(names, OptimizerConfig(freeze=("encoder.layers.2",)))


def test_each_model_of_replaced_token_detection_has_its_own_rates_by_layer() -> None:
    names = list(parameter_shapes(ModelConfig(head="rtd", num_layers=4, generator_layers=2)))
    scales = rate_scales(names, OptimizerConfig(layer_decay=0.5, freeze=("generator.head",)))
    assert scales["generator.encoder.layers.1.ffn.up.weight"] == 0.5
    assert scales["discriminator.encoder.layers.3.ffn.up.weight"] == 0.5
    assert scales["generator.embeddings.token.weight"] == 0.125
    assert scales["discriminator.embeddings.token.delta.weight"] == 0.5**5
    assert {scales[n] for n in names if n.startswith("generator.head.")} == {0.0}
    assert {scales[n] for n in names if n.startswith("discriminator.head.")} == {1.0}


@pytest.mark.parametrize("bias_correction", [True, False])
def test_a_frozen_parameter_keeps_its_bits(bias_correction: bool) -> None:
    config = OptimizerConfig(bias_correction=bias_correction, freeze=("embeddings",))
    names = ("embeddings.token.weight", "encoder.layers.0.ffn.up.weight")
    frozen, trained = (nn.Parameter(torch.randn(9)) for _ in names)
    groups = parameter_groups(
        zip(names, (frozen, trained), strict=True), 0.1, rate_scales(names, config)
    )
    optimizer = build_optimizer(groups, config, allow_apex=False)
    before = frozen.detach().clone(), trained.detach().clone()
    for _ in range(3):
        set_learning_rate(optimizer, 0.1)
        frozen.grad, trained.grad = torch.randn(9), torch.randn(9)
        optimizer.step()
    assert frozen.detach().equal(before[0])
    assert not trained.detach().equal(before[1])
