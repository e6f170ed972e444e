"""One optimizer step: forward and backward of every micro batch, then the update.

Owns the scaling that makes the update the same on every layout, and the stop before a bad update.
Refuses to choose data or to write anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.cluster.heartbeat import Heartbeat
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.batch import IGNORED_LABEL, Batch
from megatron_deberta.engine.protocol import Engine
from megatron_deberta.engine.schedule import learning_rate
from megatron_deberta.errors import NumericsError
from megatron_deberta.model.dropout import DropoutSeeds
from megatron_deberta.parallel.agreement import largest
from megatron_deberta.parallel.topology import ProcessGroups
from megatron_deberta.train.own_time import ForwardTimer
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
        heartbeat: shown how far the step is.
    """

    def __init__(
        self,
        engine: Engine,
        config: RunConfig,
        groups: ProcessGroups,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._groups = groups
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
            NumericsError: the loss or a gradient is not finite on some rank; on all ranks, before
                any weight has changed. (In fp16 a gradient that is not finite lowers the loss
                scale and skips the update instead.)
        """
        groups = self._groups
        batches = [batch.to(groups.device) for batch in batches]
        num_targets = self._count_targets(batches)
        self._heartbeat.mark()
        num_rows = self._config.train.global_batch_size
        # Losses of masked tokens and of pairs, and pairs told right.
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
            self._engine.accumulate(loss)
            self._heartbeat.mark()
        while_busy()
        total, pair_total, pairs_right = self._check_finite(step, totals, batches)
        self._heartbeat.mark()
        rate = learning_rate(step, self._config.optimizer, self._config.train.steps)
        outcome = self._engine.step(rate)
        self._heartbeat.add_times(forward=self._forward_timer.take())
        if outcome.skipped and self._config.precision.dtype != "fp16":
            raise NumericsError(
                f"step {step + 1}: a gradient is not finite; weights are those of step {step}; "
                "lower optimizer.learning_rate or look at the batch"
            )
        pairs = None
        if self._config.model.next_sentence_head:
            pairs = PairResult(pair_total / num_rows, pairs_right / num_rows)
        return StepResult(total / float(num_targets), rate, outcome, pairs)

    def _count_targets(self, batches: Sequence[Batch]) -> Tensor:
        """Masked tokens of the global batch, as a scalar on the device: no host waits for it."""
        count = torch.stack([(batch.labels != IGNORED_LABEL).sum() for batch in batches]).sum()
        return sum_over_batch_ranks(count.to(torch.float32), self._groups).clamp_min(1.0)

    def _check_finite(self, step: int, totals: Tensor, batches: Sequence[Batch]) -> list[float]:
        """Totals of all ranks, or an error on all of them."""
        groups = self._groups
        everywhere = sum_over_batch_ranks(totals.clone(), groups)
        # Tensor-parallel ranks compute the same loss, unless one of them is broken.
        broken = largest(torch.isfinite(everywhere).all().logical_not().to(torch.int32), groups)
        if not broken.item():
            numbers: list[float] = everywhere.tolist()
            return numbers
        if not torch.isfinite(totals).all():
            samples = [index for batch in batches for index in batch.sample_index.tolist()]
            logger.error("step %d: the loss of samples %s is not finite", step + 1, samples)
        raise NumericsError(
            f"step {step + 1}: the loss is not finite; weights are those of step {step}; lower "
            "optimizer.learning_rate or look at the batch"
        )
