"""Dynamic loss scaling for fp16, by DeepSpeed's and Megatron's rules."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_deberta.config.schema import PrecisionConfig
from megatron_deberta.errors import LossScaleError

# Overflows before the scale is halved
HYSTERESIS = 2

FACTOR = 2.0


class DynamicLossScale:
    """Loss scale and its counters; constant 1 outside fp16.

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
