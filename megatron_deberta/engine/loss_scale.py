"""The dynamic loss scale of fp16.

Owns the rules by which the scale moves, which are DeepSpeed's (and Megatron's): halve after an
overflow once the hysteresis is used up, double after a window of steps without one. Refuses to
look at gradients.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_deberta.config.schema import PrecisionConfig
from megatron_deberta.errors import LossScaleError

HYSTERESIS = 2
"""Overflows before the scale falls, DeepSpeed's and Megatron's default."""

FACTOR = 2.0


class DynamicLossScale:
    """The scale and the counters it moves by; fixed at 1 outside fp16."""

    def __init__(self, config: PrecisionConfig) -> None:
        self.dynamic = config.dtype == "fp16"
        self.scale = 2.0**config.initial_loss_scale_power if self.dynamic else 1.0
        self._window = config.loss_scale_window
        self._minimum = config.min_loss_scale
        self._steps = 0
        self._last_overflow = -1
        self._hysteresis = HYSTERESIS

    def update(self, overflow: bool) -> None:
        """Take note of a step that ended, with or without an overflow.

        Raises:
            LossScaleError: an overflow at the smallest scale allowed.
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
        """The scale and its counters, for a checkpoint."""
        return {
            "loss_scale": self.scale,
            "loss_scale_steps": self._steps,
            "loss_scale_last_overflow": self._last_overflow,
            "loss_scale_hysteresis": self._hysteresis,
        }

    def load_state_dict(self, scalars: Mapping[str, int | float]) -> None:
        """Continue from ``state_dict()``; outside fp16 there is nothing to continue."""
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
                f"gradients overflow fp16 at the smallest loss scale allowed, "
                f"precision.min_loss_scale={self._minimum:g}; lower it, lower "
                f"optimizer.learning_rate, or use precision.dtype=bf16"
            )
        self.scale = max(self.scale / FACTOR, self._minimum)
