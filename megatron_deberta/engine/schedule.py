"""Learning-rate schedules: pure functions of the step."""

from __future__ import annotations

import math

from megatron_deberta.config.schema import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of the update after ``step`` completed updates.

    Linear warm-up, whose last step runs at the peak, then the decay of ``config.schedule``, to 0 at
    ``total_steps``. No update has rate 0: with the linear schedule the first one uses ``peak /
    warmup_steps``, the last one ``peak / (total_steps - warmup_steps)``. ``warmup_fraction`` of all
    steps replaces the number.

    Sources: ``linear``: He et al. 2021, arXiv:2006.03654, Table 8 ("Learning Rate Decay: Linear").
    ``cosine``: Loshchilov and Hutter 2017, arXiv:1608.03983, Eq. 5, without restarts. ``wsd``:
    Hu et al. 2024, arXiv:2404.06395, section 4; its 1-sqrt decay: Haegele et al. 2024,
    arXiv:2405.18392, section 3. ``release``: ``warmup_linear`` of microsoft/DeBERTa.

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
    if config.schedule == "release":
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
