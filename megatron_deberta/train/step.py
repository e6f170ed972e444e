"""One optimizer step: forward and backward of every micro batch, then the update.

Owns the scaling that makes the update the same on every layout, and that all ranks make or skip it
together. Refuses to choose data or to write anything.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.cluster.watchdog.heartbeat import Heartbeat
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.batch import IGNORED_LABEL, Batch
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.protocol import Engine
from megatron_deberta.engine.schedule import learning_rate
from megatron_deberta.errors import LossScaleError, NumericsError
from megatron_deberta.model.dropout import DropoutSeeds
from megatron_deberta.train.forward_timer import ForwardTimer
from megatron_deberta.train.stability.guard import Guard, Skip
from megatron_deberta.train.stability.nonfinite_gradients import NonfiniteGradients
from megatron_deberta.train.state import PairResult, StepResult

logger = logging.getLogger(__name__)


class Sums(NamedTuple):
    """What the objective gives for a micro batch, summed over targets."""

    loss: Tensor
    """fp32 scalar: losses of masked tokens, in nats."""
    right: Tensor
    """int64 scalar: masked tokens predicted right."""
    pair_loss: Tensor | None = None
    """fp32 scalar: losses of next-sentence labels, in nats; None where rows are not pairs."""
    pair_right: Tensor | None = None
    """int64 scalar: labels predicted right."""


def forward(module: nn.Module, batch: Batch, seeds: DropoutSeeds | None = None) -> Sums:
    """Run the objective on a micro batch.

    Args:
        module: a model with its loss, as ``objectives.MaskedLanguageModel``.
        batch: on the model's device.
        seeds: keys of dropout; None turns it off.
    """
    pairs: dict[str, Tensor] = {}
    if batch.token_type_ids is not None and batch.next_sentence_labels is not None:
        pairs["token_type_ids"] = batch.token_type_ids
        pairs["next_sentence_labels"] = batch.next_sentence_labels
    sums = module(
        batch.input_ids,
        batch.attention_mask,
        batch.masked_positions,
        batch.labels,
        position_ids=batch.position_ids,
        document_ids=batch.document_ids,
        seeds=seeds,
        **pairs,
    )
    return Sums(*sums)


def sum_over_batch_ranks(numbers: Tensor, groups: ProcessGroups) -> Tensor:
    """Add up a tensor over data-parallel ranks, in place. Collective over them."""
    if groups.dp_group is not None:
        dist.all_reduce(numbers, group=groups.dp_group)
    return numbers


class TrainStep:
    """Takes optimizer steps.

    The objective of a step is the sum of the losses of all masked tokens of the **global** batch
    over their number, plus, of pairs, the mean loss of the next-sentence labels; so data-parallel
    size, micro batch and accumulation do not change it.

    Args:
        engine: backward and update.
        config: the run.
        groups: the rank grid.
        guard: judges updates; None is one without a past.
        heartbeat: shown how far the step is.
    """

    def __init__(
        self,
        engine: Engine,
        config: RunConfig,
        groups: ProcessGroups,
        guard: Guard | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._groups = groups
        self._is_fp16 = config.precision.dtype == "fp16"
        self._guard = guard or Guard.of_run(config)
        # The first step may follow on trouble, too.
        self._watches = True
        self._heartbeat = heartbeat or Heartbeat()
        self._forward_timer = ForwardTimer(groups.device)

    def __call__(
        self,
        step: int,
        batches: Sequence[Batch],
        while_busy: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Take one step. Collective over all ranks.

        Args:
            step: optimizer steps done before; keys dropout and the learning rate.
            batches: this rank's micro batches, best on the device already.
            while_busy: called once, when the device has all forward and backward passes before
                it and the host is about to wait for them.

        Raises:
            NumericsError: on all ranks, before any weight has changed: the loss or a gradient is
                not finite and ``guard.non_finite`` is ``stop``; gradients overflow fp16 at the
                smallest loss scale; or skipping updates has not helped and the guard may not go
                back once more.
        """
        groups = self._groups
        batches = [batch.to(groups.device) for batch in batches]
        num_targets = self._count_targets(batches)
        self._heartbeat.mark()
        with NonfiniteGradients(self._engine.module, groups, armed=self._watches) as watch:
            totals = self._accumulate(step, batches, num_targets)
        while_busy()
        total, pair_total, pairs_right, count = self._agree(totals, num_targets)
        self._heartbeat.mark()
        mean_loss = total / count
        skip = self._guard.judge_loss(mean_loss)
        if skip is not None:
            self._tell(step, skip, totals, batches)
        rate = learning_rate(step, self._config.optimizer, self._config.train.steps)
        try:
            outcome = self._engine.step(rate, -math.inf if skip else self._guard.norm_limit())
        except LossScaleError as error:
            raise LossScaleError(f"step {step + 1}: {error}; {watch.culprit()}") from error
        self._heartbeat.add_times(forward=self._forward_timer.take())
        skip = skip or self._guard.judge_outcome(outcome)
        self._guard.settle(step + 1, mean_loss, outcome, skip)
        self._refuse_to_go_on(step, skip, watch)
        self._watches = not math.isfinite(outcome.grad_norm) or self._at_floor(outcome.loss_scale)
        pairs = None
        if self._config.model.next_sentence_head:
            num_rows = self._config.train.global_batch_size
            pairs = PairResult(pair_total / num_rows, pairs_right / num_rows)
        return StepResult(mean_loss, rate, outcome, pairs, skip, self._guard.in_trouble)

    def _accumulate(self, step: int, batches: Sequence[Batch], num_targets: Tensor) -> Tensor:
        """Forward and backward of all micro batches.

        Returns:
            fp64 [3]: this rank's losses of masked tokens and of pairs, and pairs told right.
        """
        groups, num_rows = self._groups, self._config.train.global_batch_size
        totals = torch.zeros(3, dtype=torch.float64, device=groups.device)
        for batch in batches:
            seeds = DropoutSeeds(self._config.train.seed, step, batch.sample_index)
            with self._forward_timer.running():
                sums = forward(self._engine.module, batch, seeds)
            # The engine averages over data-parallel ranks; this makes it a sum.
            loss = sums.loss * (groups.dp_size / num_targets)
            totals[0] += sums.loss.detach()
            if sums.pair_loss is not None and sums.pair_right is not None:
                loss = loss + sums.pair_loss * (groups.dp_size / num_rows)
                totals[1] += sums.pair_loss.detach()
                totals[2] += sums.pair_right
            self._engine.backward(loss)
            self._heartbeat.mark()
        return totals

    def _count_targets(self, batches: Sequence[Batch]) -> Tensor:
        """Masked tokens of the global batch, as a scalar on the device: no host waits for it."""
        count = torch.stack([(batch.labels != IGNORED_LABEL).sum() for batch in batches]).sum()
        return sum_over_batch_ranks(count.to(torch.float32), self._groups).clamp_min(1.0)

    def _agree(self, totals: Tensor, num_targets: Tensor) -> list[float]:
        """Totals of all ranks and the number of targets; NaN if any rank's is not finite.

        The same numbers on every rank, so that all of them come to the same decision. The one time
        in a step that the host waits, besides the engine's look at the gradients.
        """
        groups = self._groups
        everywhere = sum_over_batch_ranks(totals.clone(), groups)
        # Beside the numbers whether they are any, as a maximum may lose NaN.
        broken = torch.isfinite(everywhere).all().logical_not()
        everywhere = everywhere.masked_fill(broken, 0.0)
        numbers = torch.cat([everywhere, torch.stack([num_targets, broken]).double()])
        if groups.tp_group is not None:
            # Tensor-parallel ranks compute the same loss, unless one of them is broken.
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=groups.tp_group)
        *found, count, is_broken = numbers.tolist()
        return [*([math.nan] * len(found) if is_broken else found), count]

    def _tell(self, step: int, skip: Skip, totals: Tensor, batches: Sequence[Batch]) -> None:
        """Name the samples, and stop where a loss that is not finite shall stop the run."""
        if skip != "loss not finite":
            return
        if not torch.isfinite(totals).all():
            samples = [index for batch in batches for index in batch.sample_index.tolist()]
            logger.error("step %d: the loss of samples %s is not finite", step + 1, samples)
        if self._config.guard.non_finite == "stop":
            raise NumericsError(
                f"step {step + 1}: the loss is not finite; weights are those of step {step}; lower "
                "optimizer.learning_rate or look at the batch"
            )

    def _refuse_to_go_on(self, step: int, skip: Skip | None, watch: NonfiniteGradients) -> None:
        """Raise where another step would be in vain. Collective where it names a parameter."""
        if skip == "gradient not finite" and self._config.guard.non_finite == "stop":
            raise NumericsError(
                f"step {step + 1}: a gradient is not finite ({watch.culprit()}); weights are those "
                f"of step {step}; lower optimizer.learning_rate or look at the batch"
            )
        if self._guard.in_trouble and not self._guard.may_roll_back:
            state = self._guard.state
            cause = f" ({watch.culprit()})" if str(skip).endswith("not finite") else ""
            raise NumericsError(
                f"step {step + 1}: {skip}{cause}; {len(state.skips)} updates of the last "
                f"{self._config.guard.spike_window} steps were skipped (steps "
                f"{', '.join(map(str, state.skips))}), and going back "
                f"{state.vain_rollbacks} times has not helped; lower optimizer.learning_rate"
            )

    def _at_floor(self, loss_scale: float) -> bool:
        return self._is_fp16 and loss_scale <= self._config.precision.min_loss_scale
