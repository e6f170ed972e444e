"""The learning rate as a pure function of the step.

Owns the shape of the schedule. Refuses state: there is nothing to save or to restore.
"""

from __future__ import annotations

from megatron_deberta.config.schema import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Rate of the update that follows ``step`` finished updates.

    Linear warm-up over ``warmup_steps``, the last of which runs at the peak, then linear decay
    that would reach 0 at ``total_steps``. No update is spent at rate 0: the first one runs at
    ``peak / warmup_steps``, the last one at ``peak / (total_steps - warmup_steps)``.

    Source: He et al. 2021, arXiv:2006.03654, Table 8 ("Learning Rate Decay: Linear").

    Args:
        step: optimizer steps done so far, from 0.
        config: peak, warm-up and schedule.
        total_steps: ``train.steps``.

    Returns:
        The learning rate, 0 from ``total_steps`` on with the linear schedule.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if config.schedule == "constant":
        return peak
    return peak * max(0, total_steps - step) / max(1, total_steps - warmup)
