"""Optimizer step: forward and backward passes of all micro batches, then the update."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.batch import MicroBatch
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine, StepOutcome
from megatron_deberta.engine.schedule import learning_rate
from megatron_deberta.errors import LossScaleError, NumericsError, ReplicaError
from megatron_deberta.model.dropout import DropoutSeeds
from megatron_deberta.objectives import (
    NO_COUNTS,
    Mean,
    ModelLosses,
    Update,
    build_objective,
)
from megatron_deberta.train.forward_timer import ForwardTimer
from megatron_deberta.train.stability.guard import NONFINITE, Guard, Skip
from megatron_deberta.train.stability.nonfinite_gradients import NonfiniteGradients
from megatron_deberta.train.stability.rerun import ComputationRecord, places, run_again
from megatron_deberta.train.stability.verdict import Verdict
from megatron_deberta.train.state import StepResult

logger = logging.getLogger(__name__)


def forward(
    module: nn.Module,
    batch: MicroBatch,
    seeds: DropoutSeeds | None,
    update: Update,
    outputs: Tensor | None = None,
) -> ModelLosses:
    """Compute an update's losses of a micro batch.

    Args:
        module: the objective's model with its loss.
        batch: on the model's device.
        seeds: dropout seeds; None disables dropout.
        update: the update.
        outputs: of this micro batch in the update before.
    """
    return update.compute(module, batch, seeds, outputs)


def sum_over_batch_ranks(numbers: Tensor, groups: ProcessGroups) -> Tensor:
    """Sum a tensor over data-parallel ranks, in place. Collective over them."""
    if groups.dp_group is not None:
        dist.all_reduce(numbers, group=groups.dp_group)
    return numbers


@dataclass(frozen=True, slots=True)
class _Task:
    """An update of a step.

    Attributes:
        step: completed steps.
        engine: makes the update.
        update: its losses.
        num_targets: fp32 ``[losses]``: of each loss, in the global batch.
    """

    step: int
    engine: Engine
    update: Update
    num_targets: Tensor


@dataclass(frozen=True, slots=True)
class _Done:
    """An update of a step: means of its losses, its counts, and what the engine did."""

    means: dict[str, Mean]
    counts: Mapping[str, int]
    rate: float
    outcome: StepOutcome
    skip: Skip | None
    gradients: NonfiniteGradients


class Flags(Protocol):
    """Flags of each rank that a step exchanges beside its losses: ``Requests``."""

    def own(self) -> Sequence[bool]:
        """Return those of this rank."""

    def receive(self, flags: Iterable[bool]) -> None:
        """Take those that any rank has set."""


@dataclass(slots=True)
class _Reading:
    """Reads the numbers of an update from the device, together with its gradient norm.

    Attributes:
        numbers: fp64, equal on all ranks: sums of losses, correct predictions and counters, numbers
            of targets, whether a sum is not finite, and flags.
        update: whose losses and counters they are.
        decide: given means, returns why the update is skipped, and the limit of its norm.
        means: of each loss; NaN if a sum is not finite; set by ``__call__`` like the following.
    """

    numbers: Tensor
    update: Update
    decide: Callable[[Mapping[str, Mean]], tuple[Skip | None, float]]
    means: dict[str, Mean] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=lambda: NO_COUNTS)
    flags: Sequence[bool] = ()
    skip: Skip | None = None

    def __call__(self, norm: Tensor) -> tuple[float, float]:
        """See `ReadNorm`. The only host synchronization of an update."""
        *numbers, norm_read = torch.cat([self.numbers, norm.to(self.numbers).view(1)]).tolist()
        names, counters, read = self.update.losses, self.update.counters, iter(numbers)
        sums, correct = list(islice(read, len(names))), list(islice(read, len(names)))
        counts = [int(count) for count in islice(read, len(counters))]
        targets = [int(count) for count in islice(read, len(names))]
        is_nonfinite = next(read)
        self.flags = [flag > 0 for flag in read]
        if is_nonfinite:
            means = [Mean(math.nan, math.nan, count) for count in targets]
        else:
            rows = zip(sums, correct, targets, strict=True)
            means = [Mean(loss / n, hits / n, n) for loss, hits, n in rows]
            self.counts = dict(zip(counters, counts, strict=True))
        self.means = dict(zip(names, means, strict=True))
        self.skip, limit = self.decide(self.means)
        return norm_read, -math.inf if self.skip else limit


class TrainStep:
    """Executes optimizer steps.

    The objective is the sum of its losses, each the mean over all targets of the **global** batch.
    So it does not depend on data-parallel size, micro batch size or gradient accumulation.

    Where an objective has several updates, each has its own forward and backward pass, and one of
    ``engine.parts``. The limits on spikes apply to the first; if that is skipped, so are the
    others, unless its gradient overflowed fp16.

    Args:
        engine: backward and update.
        config: the run.
        groups: the rank grid.
        guard: decides whether updates are made; None: a fresh one.
        on_progress: called at fixed points of a step, the same number of times on every rank.
        flags: exchanged by each step.
        on_verdict: called with what a second run of a step has shown.
    """

    def __init__(
        self,
        engine: Engine,
        config: RunConfig,
        groups: ProcessGroups,
        guard: Guard | None = None,
        on_progress: Callable[[], None] = lambda: None,
        flags: Flags | None = None,
        on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._objective = build_objective(config)
        self._weights = {name: term.weight for name, term in self._objective.losses.items()}
        self._groups = groups
        self._is_fp16 = config.precision.dtype == "fp16"
        self._guard = guard or Guard.of_run(config)
        # The first step after a resume may follow nonfinite gradients, too.
        self._watch_gradients = True
        self._on_progress = on_progress
        self._flags = flags
        self._on_verdict = on_verdict
        self._last: tuple[int, Sequence[MicroBatch]] | None = None
        self._forward_timer = ForwardTimer(groups.device)
        # On the device, so that no number of the recorded operations depends on the step.
        self._step_number = torch.zeros((), dtype=torch.int64, device=groups.device)

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
            ReplicaError: with ``guard.rerun``: a device computes wrong, again and again.
            NumericsError: on all ranks, before the update changes a weight: the loss or a gradient
                is not finite and ``guard.non_finite=stop``; gradients overflow fp16 at the minimum
                loss scale; or too many updates were skipped and no rollback is left.
        """
        batches = [batch.to(self._groups.device) for batch in batches]
        num_targets = self._count_targets(batches)
        self._on_progress()
        outputs: list[Tensor | None] = [None] * len(batches)
        done: list[_Done] = []
        if self._config.guard.rerun:
            self._last = step, batches
        for engine, update in zip(self._engine.parts, self._objective.updates, strict=True):
            targets, num_targets = num_targets.tensor_split([len(update.losses)])
            task = _Task(step, engine, update, targets)
            done.append(self._update(task, batches, outputs, done[:1], prefetch))
        first, skipped = done[0], next((update for update in done if update.skip), done[0])
        mean_loss, skip = self._objective.step_loss(first.means), skipped.skip
        self._guard.record(step + 1, mean_loss, first.outcome, skip)
        self._raise_if_out_of_rollbacks(step, skipped)
        self._watch_gradients = any(self._is_suspicious(update.outcome) for update in done)
        return StepResult(
            loss=mean_loss,
            learning_rate=first.rate,
            outcome=first.outcome,
            metrics=self._metrics(done),
            skip=skip,
            rollback=self._guard.too_many_skips,
            forward_time=self._forward_timer.take(),
        )

    def _update(
        self,
        task: _Task,
        batches: Sequence[MicroBatch],
        outputs: list[Tensor | None],
        first: Sequence[_Done],
        prefetch: Callable[[], None],
        *,
        is_repeated: bool = False,
    ) -> _Done:
        """Run forward and backward of all micro batches, and update.

        Args:
            task: the update.
            batches: this rank's micro batches.
            outputs: of each micro batch in the update before; replaced by those of this one.
            first: the first update of the step; empty if this is the first.
            prefetch: called by the first update.
            is_repeated: the update is made again after a passing fault.
        """
        before, is_first = list(outputs), not first and not is_repeated
        with (
            ComputationRecord(self._engine.module, enabled=self._config.guard.rerun) as record,
            NonfiniteGradients(
                self._engine.module, self._groups, enabled=self._watch_gradients
            ) as gradients,
        ):
            totals = self._accumulate(task, batches, outputs, record)
        if is_first:
            prefetch()
        flags = self._flags if is_first else None
        reading = _Reading(
            self._reduce(totals, task.num_targets, flags.own() if flags else ()),
            task.update,
            lambda means: self._check_loss(means, first),
        )
        self._on_progress()
        rate = self._learning_rate(task.step, task.update)
        problem = outcome = None
        try:
            outcome = task.engine.step(rate, reading)
        except LossScaleError as error:
            problem = error
        if flags:
            flags.receive(reading.flags)
        skip = reading.skip or (self._guard.check_outcome(outcome) if outcome else None)
        # An overflow is no fault, unless the loss scale cannot be lower.
        cause = "gradient overflows at the smallest loss scale" if problem else skip
        has_failed = problem is not None or skip in NONFINITE
        if has_failed and self._config.guard.rerun and not is_repeated:
            if self._diagnose(task, str(cause), record, batches, before).kind == "passing":
                outputs[:] = before
                return self._update(task, batches, outputs, first, prefetch, is_repeated=True)
        if skip == "loss not finite":
            self._report_nonfinite_loss(task.step, totals, batches)
        if outcome is None:
            raise LossScaleError(
                f"step {task.step + 1}: {problem}; {gradients.first_nonfinite()}"
            ) from problem
        if skip == "gradient not finite" and self._config.guard.non_finite == "stop":
            raise NumericsError(
                f"step {task.step + 1}: a gradient is not finite ({gradients.first_nonfinite()}); "
                f"weights are those of step {task.step}; lower optimizer.learning_rate or check "
                "the batch"
            )
        return _Done(reading.means, reading.counts, rate, outcome, skip, gradients)

    def _diagnose(
        self,
        task: _Task,
        cause: str,
        record: ComputationRecord,
        batches: Sequence[MicroBatch],
        outputs: Sequence[Tensor | None],
    ) -> Verdict:
        """Run an update again to find out why it failed. Collective over all ranks.

        Raises:
            ReplicaError: a device computes wrong.
        """
        compute = functools.partial(self._compute, task)
        first = record.table()
        verdict = run_again(task.step + 1, cause, first, compute, batches, outputs, self._groups)
        self._on_verdict(verdict)
        if verdict.kind == "lasting":
            raise ReplicaError(str(verdict))
        return verdict

    def _compute(
        self, task: _Task, batches: Sequence[MicroBatch], outputs: Sequence[Tensor | None]
    ) -> tuple[Tensor, bool]:
        """Run forward and backward without an update; see ``rerun.Compute``."""
        scalars = task.engine.state_dict()
        with ComputationRecord(self._engine.module, enabled=True) as record:
            totals = self._accumulate(task, batches, list(outputs), record)
        *_, is_nonfinite = self._reduce(totals, task.num_targets, ()).tolist()
        try:
            outcome = task.engine.step(self._learning_rate(task.step, task.update), -math.inf)
            is_nonfinite = is_nonfinite or not math.isfinite(outcome.grad_norm)
        except LossScaleError:
            is_nonfinite = True
        task.engine.load_state_dict(scalars)
        return record.table(), not is_nonfinite

    def check_last(self, cause: str, ranks: Sequence[int]) -> Verdict | None:
        """Run the last step again after its replicas were found to differ. Collective.

        Call it with equal replicas. The state is not to be trained on afterwards.

        Args:
            cause: for the verdict.
            ranks: whose replicas differed.

        Returns:
            The verdict; None: no step was taken, or ``guard.rerun`` is not set.
        """
        if self._last is None:
            return None
        step, batches = self._last
        update = self._objective.updates[0]
        targets = self._count_targets(batches)[: len(update.losses)]
        task = _Task(step, self._engine.parts[0], update, targets)
        compute, none = functools.partial(self._compute, task), [None] * len(batches)
        first, _ = compute(batches, none)
        verdict = run_again(
            step + 1, cause, first, compute, batches, none, self._groups, has_failed=False
        )
        verdict = verdict.about_replicas(places(ranks, self._groups))
        self._on_verdict(verdict)
        return verdict

    def _check_loss(
        self, means: Mapping[str, Mean], first: Sequence[_Done]
    ) -> tuple[Skip | None, float]:
        """Return why an update is skipped, or None, and the limit of its gradient norm."""
        if not first:
            loss = self._objective.step_loss(means)
            return self._guard.check_loss(loss), self._guard.norm_limit()
        if not all(math.isfinite(mean.loss) for mean in means.values()):
            return "loss not finite", math.inf
        return None if first[0].skip == "overflow" else first[0].skip, math.inf

    def _learning_rate(self, step: int, update: Update) -> float:
        optimizer = self._config.optimizer
        if update.learning_rate is not None:
            optimizer = replace(optimizer, learning_rate=update.learning_rate)
        return learning_rate(step, optimizer, self._config.train.steps)

    def _is_suspicious(self, outcome: StepOutcome) -> bool:
        """Whether the next gradients are likely not to be finite."""
        return not math.isfinite(outcome.grad_norm) or (
            self._is_fp16 and outcome.loss_scale <= self._config.precision.min_loss_scale
        )

    def _metrics(self, done: Sequence[_Done]) -> dict[str, float]:
        """Return the objective's metrics, and what later updates did."""
        means = {name: mean for update in done for name, mean in update.means.items()}
        counts = {name: count for update in done for name, count in update.counts.items()}
        metrics = self._objective.step_metrics(means, counts)
        for update, made in zip(self._objective.updates[1:], done[1:], strict=True):
            name = update.losses[0]
            metrics[f"{name}_learning_rate"] = made.rate
            metrics[f"{name}_grad_norm"] = made.outcome.grad_norm
            if self._is_fp16:
                metrics[f"{name}_loss_scale"] = made.outcome.loss_scale
        return metrics

    def _accumulate(
        self,
        task: _Task,
        batches: Sequence[MicroBatch],
        outputs: list[Tensor | None],
        record: ComputationRecord,
    ) -> Tensor:
        """Run forward and backward of all micro batches.

        Returns:
            fp64 ``[2 L + C]``: this rank's sums of each of the L losses, then of correct
            predictions, then of the C counters.
        """
        groups, losses, counters = self._groups, task.update.losses, task.update.counters
        size = 2 * len(losses) + len(counters)
        totals = torch.zeros(size, dtype=torch.float64, device=groups.device)
        num_targets = dict(zip(losses, task.num_targets.unbind(), strict=True))
        self._step_number.fill_(task.step)
        for index, batch in enumerate(batches):
            seeds = DropoutSeeds(self._config.train.seed, self._step_number, batch.dropout_keys)
            with self._forward_timer.measure():
                result = forward(self._engine.module, batch, seeds, task.update, outputs[index])
            # The engine averages over data-parallel ranks; the factor turns that into a sum.
            summands = [
                found.loss * (groups.dp_size / num_targets[name]) * self._weights[name]
                for name, found in result.losses.items()
            ]
            totals += result.totals(losses, counters)
            record.add(totals)
            task.engine.backward(sum(summands[1:], summands[0]))
            outputs[index] = result.outputs
            self._on_progress()
        return totals

    def _count_targets(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Count the targets of each loss in the global batch, without a host synchronization."""
        counts = [self._objective.count_targets(batch) for batch in batches]
        names = self._objective.losses
        rows = [torch.stack([each[name] for name in names]) for each in counts]
        total = torch.stack(rows).sum(0).to(torch.float32)
        return sum_over_batch_ranks(total, self._groups).clamp_min(1.0)

    def _reduce(self, totals: Tensor, num_targets: Tensor, flags: Sequence[bool]) -> Tensor:
        """Sum over all ranks, without a host synchronization; see `_Reading`.

        The result is the same on every rank, so all ranks make the same decision.
        """
        groups = self._groups
        own = torch.tensor(flags, dtype=totals.dtype).to(totals.device, non_blocking=True)
        summed = sum_over_batch_ranks(torch.cat([totals, own]), groups)
        totals, any_flag = summed.split([len(totals), len(own)])
        # Sent separately, because a maximum may lose NaN.
        nonfinite = torch.isfinite(totals).all().logical_not()
        totals = totals.masked_fill(nonfinite, 0.0)
        numbers = torch.cat(
            [totals, num_targets.double(), nonfinite.double().unsqueeze(0), any_flag]
        )
        if groups.tp_group is not None:
            # Tensor-parallel ranks compute the same loss, unless one of them is faulty.
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=groups.tp_group)
        return numbers

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

    def _raise_if_out_of_rollbacks(self, step: int, skipped: _Done) -> None:
        """Raise if training cannot continue. Collective if the message names a parameter."""
        if self._guard.too_many_skips and not self._guard.can_roll_back:
            state, skip = self._guard.state, skipped.skip
            is_nonfinite = str(skip).endswith("not finite")
            cause = f" ({skipped.gradients.first_nonfinite()})" if is_nonfinite else ""
            raise NumericsError(
                f"step {step + 1}: {skip}{cause}; {len(state.skips)} updates of the last "
                f"{self._config.guard.spike_window} steps were skipped (steps "
                f"{', '.join(map(str, state.skips))}) after {state.vain_rollbacks} rollbacks "
                "without progress; lower optimizer.learning_rate"
            )
