"""Attributes and scalar state that both engines share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.loss_scale import DynamicLossScale
from megatron_deberta.engine.optimizer import adam_step, set_adam_step


class EngineBase:
    """Part of :class:`~megatron_deberta.engine.protocol.Engine` that does not depend on ZeRO.

    Attributes:
        module: the model that was passed to the constructor.

    Attributes:
        _masters: the fp32 tensors that ``_adam`` updates.
    """

    _adam: torch.optim.Optimizer
    _masters: Sequence[Tensor]

    def __init__(self, config: RunConfig, module: nn.Module, groups: ProcessGroups) -> None:
        self.module = module
        self._groups = groups
        self._clip_grad_norm = config.optimizer.clip_grad_norm
        self._loss_scale = DynamicLossScale(config.precision)
        self._trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}

    def state_dict(self) -> dict[str, int | float]:
        """Adam's step count, the loss scale and its counters."""
        return {
            "adam_step": adam_step(self._adam, self._masters),
            **self._loss_scale.state_dict(),
        }

    def load_state_dict(self, scalars: Mapping[str, int | float]) -> None:
        """Restore the values of :meth:`state_dict`."""
        set_adam_step(self._adam, self._masters, int(scalars["adam_step"]))
        self._loss_scale.load_state_dict(scalars)
