"""Optimizer groups and the AdamW implementations."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import OptimizerConfig

logger = logging.getLogger(__name__)

# Keys of Adam's moments in an optimizer's state, whichever implementation runs
MOMENTS = ("exp_avg", "exp_avg_sq")


def decays(name: str) -> bool:
    """Whether weight decay applies to a canonical parameter name; biases and norms are exempt."""
    return not name.endswith((".bias", "norm.weight"))


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float
) -> list[dict[str, Any]]:
    """Split trainable parameters into those with and without weight decay, each in the given order.

    Args:
        named_parameters: by canonical name.
        weight_decay: of the first group.

    Returns:
        Optimizer groups of ``params`` and ``weight_decay``, without empty ones.
    """
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    decaying = [p for name, p in trainable if decays(name)]
    exempt = [p for name, p in trainable if not decays(name)]
    groups = ((decaying, weight_decay), (exempt, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def build_optimizer(
    groups: list[dict[str, Any]], config: OptimizerConfig, *, allow_apex: bool
) -> torch.optim.Optimizer:
    """Create the fastest AdamW that is installed.

    NVIDIA apex's if allowed, else torch's fused one, else (without bias correction)
    :class:`UncorrectedAdamW`. All use the state keys of ``MOMENTS``.

    Args:
        groups: from :func:`parameter_groups`.
        config: hyperparameters.
        allow_apex: the update runs on a GPU, once for each group.
    """
    arguments: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }
    fused_adam = apex_fused_adam() if allow_apex else None
    optimizer: torch.optim.Optimizer
    if fused_adam is not None:
        optimizer = fused_adam(
            groups, adam_w_mode=True, bias_correction=config.bias_correction, **arguments
        )
    elif config.bias_correction:
        optimizer = torch.optim.AdamW(groups, fused=True, **arguments)
    else:
        optimizer = UncorrectedAdamW(groups, **arguments)
    logger.info("optimizer: %s.%s", type(optimizer).__module__, type(optimizer).__name__)
    return optimizer


def apex_fused_adam() -> Callable[..., torch.optim.Optimizer] | None:
    """NVIDIA apex's ``FusedAdam``, or None if it is not installed.

    ``amp_C`` distinguishes it from PyPI's unrelated ``apex`` and from builds without kernels.
    """
    try:
        importlib.import_module("amp_C")
        optimizers = importlib.import_module("apex.optimizers")
    except ImportError:
        return None
    fused_adam: Callable[..., torch.optim.Optimizer] | None = getattr(optimizers, "FusedAdam", None)
    return fused_adam


class UncorrectedAdamW(torch.optim.Optimizer):
    """AdamW without bias correction, as in Microsoft's release.

    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``,
    ``p = p - lr (m / (sqrt(v) + eps) + decay p)``. Elementwise, so correct on flat
    partitions (ZeRO).

    Source: microsoft/DeBERTa, ``optims/xadam.py``.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; closures are not supported."""
        if closure is not None:
            raise ValueError("UncorrectedAdamW takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = state["exp_avg_sq"].sqrt().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(state["exp_avg"], root, value=-group["lr"])


def adam_step(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> int:
    """Number of Adam updates.

    Args:
        optimizer: from :func:`build_optimizer`.
        parameters: those it updates; ZeRO-3 removes them from the optimizer's groups.
    """
    if not _counts_in_state(optimizer):
        return int(optimizer.param_groups[0].get("step", 0))
    return max(int(optimizer.state[parameter].get("step", 0)) for parameter in parameters)


def set_adam_step(
    optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], step: int
) -> None:
    """Set the number of Adam updates; arguments as in :func:`adam_step`."""
    if not _counts_in_state(optimizer):
        for group in optimizer.param_groups:
            group["step"] = step
        return
    fused = optimizer.defaults.get("fused", False)
    for parameter in parameters:
        # One tensor per parameter: Adam increments each of them.
        optimizer.state[parameter]["step"] = torch.tensor(
            float(step), dtype=torch.float32, device=parameter.device if fused else "cpu"
        )


def _counts_in_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps are counted per parameter; apex counts them per group."""
    return isinstance(optimizer, torch.optim.AdamW | UncorrectedAdamW)
