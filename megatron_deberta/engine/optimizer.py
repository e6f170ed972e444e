"""Optimizer groups, the AdamW implementations, the gradient norm and clipping."""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.config.schema import OptimizerConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import ConfigError

logger = logging.getLogger(__name__)

# Keys of Adam's moments in an optimizer's state, whichever implementation runs
MOMENTS = ("exp_avg", "exp_avg_sq")
# Key of the moving average of the weights beside them, if there is one
EMA = "ema"
# Added to the norm before dividing by it, as in torch and DeepSpeed
CLIP_EPSILON = 1e-6
_BLOCK = 1 << 16


def decays(name: str) -> bool:
    """Return whether weight decay applies to a canonical name; biases and norms are exempt."""
    return not name.endswith((".bias", "norm.weight"))


RATE_SCALE = "rate_scale"
"""Key of an optimizer group: factor of its learning rate; missing: 1."""
_IN_ENCODER = re.compile(
    r"(?P<model>(?:generator\.|discriminator\.)?)"
    r"(?:embeddings|encoder)\.(?:layers\.(?P<layer>\d+)\.)?"
)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        rate = learning_rate * group.get(RATE_SCALE, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def rate_scales(names: Sequence[str], config: OptimizerConfig) -> dict[str, float]:
    """Factor of each parameter's learning rate: 0 if frozen, else by its layer.

    ``layer_decay`` to the power of the number of layers above it, where everything above the
    encoder counts as one. Source: Clark et al. 2020, ELECTRA, arXiv:2003.10555, appendix B
    ("layerwise learning rate decay").

    Args:
        names: canonical names of all parameters.
        config: ``layer_decay`` and ``freeze``.

    Raises:
        ConfigError: an entry of ``freeze`` is the name or its beginning of no parameter.
    """
    for frozen in config.freeze:
        if not any(_begins(name, frozen) for name in names):
            raise ConfigError(
                f"optimizer.freeze={frozen}: no parameter's name begins so; use names such as "
                f"{names[0].rpartition('.')[0]}"
            )
    depths = {name: _depth(name) for name in names}
    tops: dict[str, int] = {}
    for model, depth in filter(None, depths.values()):
        tops[model] = max(depth, tops.get(model, 0))
    scales = {}
    for name, place in depths.items():
        above = tops[place[0]] + 1 - place[1] if place else 0
        is_frozen = any(_begins(name, frozen) for frozen in config.freeze)
        scales[name] = 0.0 if is_frozen else config.layer_decay**above
    return scales


def _begins(name: str, beginning: str) -> bool:
    return name == beginning or name.startswith(f"{beginning}.")


def _depth(name: str) -> tuple[str, int] | None:
    """Return the model and the number of layers up to a parameter; None above the encoder."""
    match = _IN_ENCODER.match(name)
    return match and (match["model"], int(match["layer"]) + 1 if match["layer"] else 0)


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    scales: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Split trainable parameters by factor of the learning rate, and by whether weights decay.

    Args:
        named_parameters: by canonical name.
        weight_decay: of the parameters that decay.
        scales: factor of each parameter's learning rate; None: 1.

    Returns:
        Optimizer groups of ``params`` in the given order, ``weight_decay`` and ``rate_scale`` if
        it is not 1. Of a factor, the group with weight decay is the first one.
    """
    members: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            scale = scales[name] if scales else 1.0
            members.setdefault((scale, not decays(name)), []).append(parameter)
    groups = []
    for (scale, is_exempt), params in sorted(members.items(), key=lambda item: item[0]):
        group: dict[str, Any] = {
            "params": params,
            "weight_decay": 0.0 if is_exempt else weight_decay,
        }
        groups.append(group if scale == 1 else group | {RATE_SCALE: scale})
    return groups


def build_optimizer(
    groups: list[dict[str, Any]],
    config: OptimizerConfig,
    *,
    allow_apex: bool,
    offloads: bool = False,
) -> torch.optim.Optimizer:
    """Create the AdamW of ``optimizer.implementation``.

    ``torch``: torch's fused AdamW, or without bias correction :class:`UncorrectedAdamW`. All use
    the state keys of ``MOMENTS``.

    Args:
        groups: from :func:`parameter_groups`.
        config: hyperparameters.
        allow_apex: the update runs on a GPU, once for each group.
        offloads: the update runs on the CPU, the model elsewhere.

    Raises:
        ConfigError: apex is chosen, but not installed or not usable here.
    """
    arguments: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }
    optimizer: torch.optim.Optimizer
    if config.implementation == "apex":
        optimizer = _apex_fused_adam(allow_apex)(
            groups, adam_w_mode=True, bias_correction=config.bias_correction, **arguments
        )
    elif config.bias_correction:
        optimizer = torch.optim.AdamW(groups, fused=True, **arguments)
        for group in () if offloads else optimizer.param_groups:
            # On the device, so that no number of the update depends on the step. The kernels read
            # fp32 on GPUs and fp64 on CPU, where results keep their bits.
            device = group["params"][0].device
            wide = torch.float64 if device.type == "cpu" else torch.float32
            group["lr"] = torch.full((), config.learning_rate, dtype=wide, device=device)
    else:
        optimizer = UncorrectedAdamW(groups, **arguments)
    logger.info("optimizer: %s.%s", type(optimizer).__module__, type(optimizer).__name__)
    return optimizer


def _apex_fused_adam(is_usable: bool) -> Callable[..., torch.optim.Optimizer]:
    """NVIDIA apex's ``FusedAdam``.

    ``amp_C`` distinguishes it from PyPI's unrelated ``apex`` and from builds without kernels.

    Raises:
        ConfigError: it is not installed, or not usable here.
    """
    key = "optimizer.implementation=apex"
    if not is_usable:
        raise ConfigError(
            f"{key}: apex's FusedAdam needs a GPU and ZeRO stages 0 to 2 without offload; use "
            "optimizer.implementation=torch"
        )
    try:
        importlib.import_module("amp_C")
        optimizers = importlib.import_module("apex.optimizers")
        fused_adam: Callable[..., torch.optim.Optimizer] = optimizers.FusedAdam
    except (ImportError, AttributeError):
        raise ConfigError(
            f"{key}: NVIDIA's apex with its CUDA extensions is not installed (PyPI's apex is "
            "another package); install it, or use optimizer.implementation=torch"
        ) from None
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
    """Return the number of Adam updates made.

    Args:
        optimizer: from :func:`build_optimizer`.
        parameters: those it updates, any shape; ZeRO-3 removes them from the optimizer's groups.
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


def global_grad_norm(gradients: Iterable[tuple[Tensor, bool]], groups: ProcessGroups) -> Tensor:
    """2-norm of the whole model's gradient. Collective over all ranks, which get the same value.

    Squares of sharded gradients are summed over tensor-parallel ranks, those of replicated ones
    count once. Sums are in fp64, so that the order of parameters does not matter.

    Args:
        gradients: (gradient averaged over data-parallel ranks, whether its parameter is split over
            tensor-parallel ranks).
        groups: process groups.

    Returns:
        The norm, fp64 scalar; inf if any element on any rank is not finite.
    """
    sharded = torch.zeros((), dtype=torch.float64, device=groups.device)
    replicated = torch.zeros_like(sharded)
    for gradient, is_sharded in gradients:
        square = _square_sum(gradient)
        if is_sharded:
            sharded += square
        else:
            replicated += square
    # Replicated squares are equal on every rank; their mean has the same bits.
    total = sharded + replicated / groups.tp_size
    if groups.tp_group is not None:
        dist.all_reduce(total, group=groups.tp_group)
    # MAX may drop nan.
    total = total.nan_to_num(nan=math.inf, posinf=math.inf)
    if groups.dp_group is not None:
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=groups.dp_group)
    return total.sqrt()


def _square_sum(gradient: Tensor) -> Tensor:
    """Sum of squares in fp64, as an fp64 scalar."""
    blocks = [gradient]
    if gradient.device.type == "cpu":
        # PyTorch copies the tensor to fp64 on a CPU; copies of blocks stay in the cache.
        blocks = list(gradient.flatten().split(_BLOCK))
    norms = torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks])
    return norms.square().sum()


def clip_coefficient(grad_norm: float, max_norm: float | None) -> float:
    """Factor that scales a gradient of norm ``grad_norm`` down to ``max_norm``; None: 1."""
    if max_norm is None:
        return 1.0
    return 1.0 / max(1.0, (grad_norm + CLIP_EPSILON) / max_norm)
