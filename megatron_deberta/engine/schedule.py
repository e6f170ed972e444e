"""Learning-rate schedule: a pure function of the step."""

from __future__ import annotations

from megatron_deberta.config.schema import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Learning rate of the update after ``step`` completed updates.

    Linear warm-up, whose last step runs at the peak, then linear decay to 0 at ``total_steps``. No
    update has rate 0: the first one uses ``peak / warmup_steps``, the last one
    ``peak / (total_steps - warmup_steps)``. ``warmup_fraction`` of all steps replaces the number.

    Source: He et al. 2021, arXiv:2006.03654, Table 8 ("Learning Rate Decay: Linear").

    Args:
        step: completed optimizer steps, from 0.
        config: peak, warm-up and schedule.
        total_steps: ``train.steps``.

    Returns:
        The learning rate, 0 from ``total_steps`` on with the linear schedule.
    """
    peak = config.learning_rate
    warmup = round(config.warmup_fraction * total_steps) or config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    return peak * max(0, total_steps - step) / max(1, total_steps - warmup)
