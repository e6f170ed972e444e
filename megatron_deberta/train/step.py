"""Optimizer step: forward and backward passes of all micro batches, then the update."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.batch import IGNORED_LABEL, Batch
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine
from megatron_deberta.engine.schedule import learning_rate
from megatron_deberta.errors import LossScaleError, NumericsError
from megatron_deberta.model.dropout import DropoutSeeds
from megatron_deberta.train.forward_timer import ForwardTimer
from megatron_deberta.train.stability.guard import Guard, Skip
from megatron_deberta.train.stability.nonfinite_gradients import NonfiniteGradients
from megatron_deberta.train.state import PairResult, StepResult

logger = logging.getLogger(__name__)


class Sums(NamedTuple):
    """Objective of a micro batch, summed over targets.

    Attributes:
        loss: fp32 scalar: cross-entropy of masked tokens, in nats.
        correct: int64 scalar: masked tokens predicted correctly.
        pair_loss: fp32 scalar: cross-entropy of next-sentence labels, in nats; None without pairs.
        pair_correct: int64 scalar: labels predicted correctly.
    """

    loss: Tensor
    correct: Tensor
    pair_loss: Tensor | None = None
    pair_correct: Tensor | None = None


def forward(module: nn.Module, batch: Batch, seeds: DropoutSeeds | None = None) -> Sums:
    """Compute the objective of a micro batch.

    Args:
        module: a model with its loss, such as ``objectives.MaskedLanguageModel``.
        batch: on the model's device.
        seeds: dropout seeds; None disables dropout.
    """
    return Sums(*module(batch, seeds))


def sum_over_batch_ranks(numbers: Tensor, groups: ProcessGroups) -> Tensor:
    """Sum a tensor over data-parallel ranks, in place. Collective over them."""
    if groups.dp_group is not None:
        dist.all_reduce(numbers, group=groups.dp_group)
    return numbers


class TrainStep:
    """Executes optimizer steps.

    The objective is the mean loss over all masked tokens of the **global** batch, plus the mean
    next-sentence loss where rows are pairs. So it does not depend on data-parallel size, micro
    batch size or gradient accumulation.

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
        batches: Sequence[Batch],
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
        loss_sum, pair_loss_sum, pairs_correct, count = self._reduce(totals, num_targets)
        self._on_progress()
        mean_loss = loss_sum / count
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
        pairs = None
        if self._config.model.next_sentence_head:
            num_rows = self._config.train.global_batch_size
            pairs = PairResult(pair_loss_sum / num_rows, pairs_correct / num_rows)
        return StepResult(
            loss=mean_loss,
            learning_rate=rate,
            outcome=outcome,
            pairs=pairs,
            skip=skip,
            rollback=self._guard.too_many_skips,
            forward_time=self._forward_timer.take(),
        )

    def _accumulate(self, step: int, batches: Sequence[Batch], num_targets: Tensor) -> Tensor:
        """Run forward and backward of all micro batches.

        Returns:
            fp64 [3]: this rank's sums of masked-token losses, pair losses and correct pairs.
        """
        groups, num_rows = self._groups, self._config.train.global_batch_size
        totals = torch.zeros(3, dtype=torch.float64, device=groups.device)
        for batch in batches:
            seeds = DropoutSeeds(self._config.train.seed, step, batch.sample_index)
            with self._forward_timer.measure():
                sums = forward(self._engine.module, batch, seeds)
            # The engine averages over data-parallel ranks; the factor turns that into a sum.
            loss = sums.loss * (groups.dp_size / num_targets)
            totals[0] += sums.loss.detach()
            if sums.pair_loss is not None and sums.pair_correct is not None:
                loss = loss + sums.pair_loss * (groups.dp_size / num_rows)
                totals[1] += sums.pair_loss.detach()
                totals[2] += sums.pair_correct
            self._engine.backward(loss)
            self._on_progress()
        return totals

    def _count_targets(self, batches: Sequence[Batch]) -> Tensor:
        """Count the masked tokens of the global batch, without a host synchronization."""
        count = torch.stack([(batch.labels != IGNORED_LABEL).sum() for batch in batches]).sum()
        return sum_over_batch_ranks(count.to(torch.float32), self._groups).clamp_min(1.0)

    def _reduce(self, totals: Tensor, num_targets: Tensor) -> list[float]:
        """Reduce totals over all ranks; NaN if any is not finite. The last item is the count.

        The result is the same on every rank, so all ranks make the same decision. This is the only
        host synchronization of a step besides the engine's gradient norm.
        """
        groups = self._groups
        totals = sum_over_batch_ranks(totals.clone(), groups)
        # Sent separately, because a maximum may lose NaN.
        nonfinite = torch.isfinite(totals).all().logical_not()
        totals = totals.masked_fill(nonfinite, 0.0)
        numbers = torch.cat([totals, torch.stack([num_targets, nonfinite]).double()])
        if groups.tp_group is not None:
            # Tensor-parallel ranks compute the same loss, unless one of them is faulty.
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=groups.tp_group)
        *sums, count, is_nonfinite = numbers.tolist()
        return [*([math.nan] * len(sums) if is_nonfinite else sums), count]

    def _report_nonfinite_loss(self, step: int, totals: Tensor, batches: Sequence[Batch]) -> None:
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
