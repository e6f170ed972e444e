"""Optimizer step: forward and backward passes of all micro batches, then the update."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.batch import MicroBatch
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine
from megatron_deberta.engine.schedule import learning_rate
from megatron_deberta.errors import LossScaleError, NumericsError
from megatron_deberta.model.dropout import DropoutSeeds
from megatron_deberta.objectives import NO_COUNTS, Mean, Objective, Sums, build_objective
from megatron_deberta.train.forward_timer import ForwardTimer
from megatron_deberta.train.stability.guard import Guard, Skip
from megatron_deberta.train.stability.nonfinite_gradients import NonfiniteGradients
from megatron_deberta.train.state import StepResult

logger = logging.getLogger(__name__)


def forward(
    module: nn.Module, batch: MicroBatch, seeds: DropoutSeeds | None, objective: Objective
) -> Sums:
    """Compute the objective of a micro batch.

    Args:
        module: the objective's model with its loss.
        batch: on the model's device.
        seeds: dropout seeds; None disables dropout.
        objective: the training task.
    """
    return objective.sums(module(batch, seeds))


def sum_over_batch_ranks(numbers: Tensor, groups: ProcessGroups) -> Tensor:
    """Sum a tensor over data-parallel ranks, in place. Collective over them."""
    if groups.dp_group is not None:
        dist.all_reduce(numbers, group=groups.dp_group)
    return numbers


class TrainStep:
    """Executes optimizer steps.

    The objective is the sum of its losses, each the mean over all targets of the **global** batch.
    So it does not depend on data-parallel size, micro batch size or gradient accumulation.

    Args:
        engine: backward and update.
        config: the run.
        groups: the rank grid.
        guard: decides whether updates are made; None: a fresh one.
        on_progress: called at fixed points of a step, the same number of times on every rank.
    """

    def __init__(
        self,
        engine: Engine,
        config: RunConfig,
        groups: ProcessGroups,
        guard: Guard | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._objective = build_objective(config)
        self._groups = groups
        self._is_fp16 = config.precision.dtype == "fp16"
        self._guard = guard or Guard.of_run(config)
        # The first step after a resume may follow nonfinite gradients, too.
        self._watch_gradients = True
        self._on_progress = on_progress
        self._forward_timer = ForwardTimer(groups.device)

    def __call__(
        self,
        step: int,
        batches: Sequence[MicroBatch],
        prefetch: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Execute one step. Collective over all ranks.

        Args:
            step: completed optimizer steps; determines dropout and the learning rate.
            batches: this rank's micro batches, preferably on the device already.
            prefetch: called once all forward and backward passes are queued on the device, before
                the host waits for them.

        Raises:
            NumericsError: on all ranks, before any weight has changed: the loss or a gradient is
                not finite and ``guard.non_finite=stop``; gradients overflow fp16 at the minimum
                loss scale; or too many updates were skipped and no rollback is left.
        """
        groups = self._groups
        batches = [batch.to(groups.device) for batch in batches]
        num_targets = self._count_targets(batches)
        self._on_progress()
        with NonfiniteGradients(
            self._engine.module, groups, enabled=self._watch_gradients
        ) as gradients:
            totals = self._accumulate(step, batches, num_targets)
        prefetch()
        means, counts = self._reduce(totals, num_targets)
        self._on_progress()
        mean_loss = self._objective.step_loss(means)
        skip = self._guard.check_loss(mean_loss)
        if skip == "loss not finite":
            self._report_nonfinite_loss(step, totals, batches)
        rate = learning_rate(step, self._config.optimizer, self._config.train.steps)
        try:
            outcome = self._engine.step(rate, -math.inf if skip else self._guard.norm_limit())
        except LossScaleError as error:
            raise LossScaleError(
                f"step {step + 1}: {error}; {gradients.first_nonfinite()}"
            ) from error
        skip = skip or self._guard.check_outcome(outcome)
        self._guard.record(step + 1, mean_loss, outcome, skip)
        self._raise_if_unrecoverable(step, skip, gradients)
        self._watch_gradients = not math.isfinite(outcome.grad_norm) or (
            self._is_fp16 and outcome.loss_scale <= self._config.precision.min_loss_scale
        )
        return StepResult(
            loss=mean_loss,
            learning_rate=rate,
            outcome=outcome,
            metrics=self._objective.step_metrics(means, counts),
            skip=skip,
            rollback=self._guard.too_many_skips,
            forward_time=self._forward_timer.take(),
        )

    def _accumulate(self, step: int, batches: Sequence[MicroBatch], num_targets: Tensor) -> Tensor:
        """Run forward and backward of all micro batches.

        Returns:
            fp64 [2 P + C]: this rank's sums of each of the P losses, then of correct predictions,
            then of the objective's C counters.
        """
        groups, parts = self._groups, self._objective.parts
        size = 2 * len(parts) + len(self._objective.counters)
        totals = torch.zeros(size, dtype=torch.float64, device=groups.device)
        for batch in batches:
            seeds = DropoutSeeds(self._config.train.seed, step, batch.dropout_keys)
            with self._forward_timer.measure():
                sums = forward(self._engine.module, batch, seeds, self._objective)
            # The engine averages over data-parallel ranks; the factor turns that into a sum.
            factors = [groups.dp_size / count for count in num_targets]
            loss = sums.losses[0] * factors[0]
            for part, summed, factor in zip(parts[1:], sums.losses[1:], factors[1:], strict=True):
                loss = loss + summed * factor * part.weight
            totals += sums.totals()
            self._engine.backward(loss)
            self._on_progress()
        return totals

    def _count_targets(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Count the targets of each loss in the global batch, without a host synchronization."""
        counts = [torch.stack(self._objective.count_targets(batch)) for batch in batches]
        total = torch.stack(counts).sum(0).to(torch.float32)
        return sum_over_batch_ranks(total, self._groups).clamp_min(1.0)

    def _reduce(self, totals: Tensor, num_targets: Tensor) -> tuple[list[Mean], Mapping[str, int]]:
        """Compute the mean of each loss and the counts over all ranks; NaN if a sum is not finite.

        The result is the same on every rank, so all ranks make the same decision. This is the only
        host synchronization of a step besides the engine's gradient norm.
        """
        groups = self._groups
        totals = sum_over_batch_ranks(totals.clone(), groups)
        # Sent separately, because a maximum may lose NaN.
        nonfinite = torch.isfinite(totals).all().logical_not()
        totals = totals.masked_fill(nonfinite, 0.0)
        numbers = torch.cat([totals, num_targets.double(), nonfinite.double().unsqueeze(0)])
        if groups.tp_group is not None:
            # Tensor-parallel ranks compute the same loss, unless one of them is faulty.
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=groups.tp_group)
        *sums, is_nonfinite = numbers.tolist()
        size = len(num_targets)
        rows = zip(sums[:size], sums[size : 2 * size], sums[-size:], strict=True)
        if is_nonfinite:
            return [Mean(math.nan, math.nan, int(count)) for _, _, count in rows], NO_COUNTS
        means = [Mean(loss / count, correct / count, int(count)) for loss, correct, count in rows]
        counts = map(int, sums[2 * size : -size])
        return means, dict(zip(self._objective.counters, counts, strict=True))

    def _report_nonfinite_loss(
        self, step: int, totals: Tensor, batches: Sequence[MicroBatch]
    ) -> None:
        """Log this rank's samples; raise with ``guard.non_finite=stop``."""
        if not torch.isfinite(totals).all():
            samples = [index for batch in batches for index in batch.sample_index.tolist()]
            logger.error("step %d: the loss of samples %s is not finite", step + 1, samples)
        if self._config.guard.non_finite == "stop":
            raise NumericsError(
                f"step {step + 1}: the loss is not finite; weights are those of step {step}; lower "
                "optimizer.learning_rate or check the batch"
            )

    def _raise_if_unrecoverable(
        self, step: int, skip: Skip | None, gradients: NonfiniteGradients
    ) -> None:
        """Raise if training cannot continue. Collective if the message names a parameter."""
        if skip == "gradient not finite" and self._config.guard.non_finite == "stop":
            raise NumericsError(
                f"step {step + 1}: a gradient is not finite ({gradients.first_nonfinite()}); "
                f"weights are those of step {step}; lower optimizer.learning_rate or check the "
                "batch"
            )
        if self._guard.too_many_skips and not self._guard.can_roll_back:
            state = self._guard.state
            is_nonfinite = str(skip).endswith("not finite")
            cause = f" ({gradients.first_nonfinite()})" if is_nonfinite else ""
            raise NumericsError(
                f"step {step + 1}: {skip}{cause}; {len(state.skips)} updates of the last "
                f"{self._config.guard.spike_window} steps were skipped (steps "
                f"{', '.join(map(str, state.skips))}) after {state.vain_rollbacks} rollbacks "
                "without progress; lower optimizer.learning_rate"
            )
