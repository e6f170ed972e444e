"""What changes from step to step: the learning rate, and the loss scale of fp16."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_deberta.config.schema import OptimizerConfig, PrecisionConfig
from megatron_deberta.errors import LossScaleError

# Overflows before the scale is halved
HYSTERESIS = 2

FACTOR = 2.0


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of the update after ``step`` completed updates.

    Linear warm-up, whose last step runs at the peak, then the decay of ``config.schedule``, to 0 at
    ``total_steps``. No update has rate 0: with the linear schedule the first one uses ``peak /
    warmup_steps``, the last one ``peak / (total_steps - warmup_steps)``. ``warmup_fraction`` of all
    steps replaces the number.

    Sources: ``linear``: He et al. 2021, arXiv:2006.03654, Table 8 ("Learning Rate Decay: Linear").
    ``cosine``: Loshchilov and Hutter 2017, arXiv:1608.03983, Eq. 5, without restarts. ``wsd``:
    Hu et al. 2024, arXiv:2404.06395, section 4; its 1-sqrt decay: Haegele et al. 2024,
    arXiv:2405.18392, section 3. ``microsoft``: ``warmup_linear`` of microsoft/DeBERTa.

    Args:
        step: completed optimizer steps, from 0.
        config: peak, warm-up and schedule.
        total_steps: ``train.steps``.

    Returns:
        The learning rate, 0 from ``total_steps`` on unless the schedule is constant.
    """
    peak = config.learning_rate
    warmup = round((config.warmup_fraction or 0) * total_steps) or config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    left, length = max(0, total_steps - step), max(1, total_steps - warmup)
    if config.schedule == "constant":
        return peak
    if config.schedule == "microsoft":
        return peak * left / total_steps
    if config.schedule == "cosine":
        return peak * (1 - math.cos(math.pi * left / length)) / 2
    if config.schedule == "wsd":
        length = decay_steps(config, total_steps)
        share = min(1.0, left / length)
        return peak * (share if config.decay_shape == "linear" else 1 - math.sqrt(1 - share))
    return peak * left / length


def decay_steps(config: OptimizerConfig, total_steps: int) -> int:
    """Return the number of last steps with a decaying rate of the ``wsd`` schedule."""
    return round((config.decay_fraction or 0) * total_steps) or config.decay_steps or 1


class DynamicLossScale:
    """Loss scale and its counters, by DeepSpeed's and Megatron's rules; constant 1 outside fp16.

    The scale is halved on an overflow once the hysteresis is used up, and doubled after
    ``precision.loss_scale_window`` steps without an overflow.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self.dynamic = config.dtype == "fp16"
        self.scale = 2.0**config.initial_loss_scale_power if self.dynamic else 1.0
        self._window = config.loss_scale_window
        self._minimum = config.min_loss_scale
        self._steps = 0
        self._last_overflow = -1
        self._hysteresis = HYSTERESIS

    def update(self, overflow: bool) -> None:
        """Update the scale after a step.

        Raises:
            LossScaleError: an overflow at ``precision.min_loss_scale``.
        """
        if not self.dynamic:
            return
        if overflow:
            self._shrink()
            self._last_overflow = self._steps
        else:
            stable_steps = self._steps - self._last_overflow - 1
            if stable_steps > 0 and stable_steps % self._window == 0:
                self._hysteresis = HYSTERESIS
                self.scale *= FACTOR
        self._steps += 1

    def state_dict(self) -> dict[str, int | float]:
        """Return the loss scale and its counters."""
        return {
            "loss_scale": self.scale,
            "loss_scale_steps": self._steps,
            "loss_scale_last_overflow": self._last_overflow,
            "loss_scale_hysteresis": self._hysteresis,
        }

    def load_state_dict(self, scalars: Mapping[str, int | float]) -> None:
        """Restore the values of ``state_dict``; no effect outside fp16."""
        if not self.dynamic:
            return
        self.scale = float(scalars["loss_scale"])
        self._steps = int(scalars["loss_scale_steps"])
        self._last_overflow = int(scalars["loss_scale_last_overflow"])
        self._hysteresis = int(scalars["loss_scale_hysteresis"])

    def _shrink(self) -> None:
        if self._hysteresis > 1:
            self._hysteresis -= 1
            return
        if self.scale <= self._minimum:
            raise LossScaleError(
                f"gradients overflow fp16 at precision.min_loss_scale={self._minimum:g}; lower it, "
                "lower optimizer.learning_rate, or use precision.dtype=bf16"
            )
        self.scale = max(self.scale / FACTOR, self._minimum)
