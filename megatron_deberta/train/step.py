"""Optimizer step: forward and backward passes of all micro batches, then the update."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.batch import MicroBatch
from megatron_deberta.distributed.control import sum_over_batch_ranks
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.engine.base import Engine, StepOutcome
from megatron_deberta.engine.schedule import learning_rate
from megatron_deberta.errors import LossScaleError, NumericsError
from megatron_deberta.model.dropout import DropoutSeeds
from megatron_deberta.objectives import NO_COUNTS, Mean, Update, build_objective
from megatron_deberta.train.preemption import Requests
from megatron_deberta.train.stability.guard import Guard, NonfiniteGradients, Skip
from megatron_deberta.train.state import StepResult

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class UpdatePass:
    """One update of a step: its forward and backward passes, and what came of them.

    Attributes:
        step: completed steps.
        engine: makes the update.
        update: its losses.
        num_targets: fp32 ``[losses]``: of each loss, in the global batch, or their weights' sum.
        first: the first update of the step; None if this is it.
        gradients: origin of gradients that are not finite.
        totals: fp64 ``[2 L + C]``: this rank's sums of each of the L losses, then of correct
            predictions, then of the C counters.
        means: of each loss over the global batch; NaN if a sum is not finite.
        counts: totals of the counters; empty if a sum is not finite.
        rate: learning rate.
        outcome: what the engine did; None: it raised ``error``.
        error: the gradient overflows at the smallest loss scale.
        skip: why nothing was updated; None if it was.
    """

    step: int
    engine: Engine
    update: Update
    num_targets: Tensor
    first: UpdatePass | None
    gradients: NonfiniteGradients
    totals: Tensor
    means: dict[str, Mean] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=lambda: NO_COUNTS)
    rate: float = 0.0
    outcome: StepOutcome | None = None
    error: LossScaleError | None = None
    skip: Skip | None = None

    @property
    def is_first(self) -> bool:
        """Whether no update of the step precedes this one."""
        return self.first is None


class ForwardTimer:
    """Accumulates the time of forward passes.

    By CUDA events on GPUs; never synchronizes with the device.

    Args:
        device: the device they run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_on_gpu = device.type == "cuda"
        self._done = 0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time one pass."""
        if not self._is_on_gpu:
            start = time.perf_counter_ns()
            yield
            self._done += time.perf_counter_ns() - start
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))

    def take(self) -> int:
        """Return the nanoseconds of passes completed since the last call."""
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            self._done += round(begin.elapsed_time(end) * 1e6)
        done, self._done = self._done, 0
        return done


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
        requests: to stop or to save, exchanged beside the losses of each step; None: there are
            none.
    """

    def __init__(
        self,
        engine: Engine,
        config: RunConfig,
        groups: ProcessGroups,
        guard: Guard | None = None,
        on_progress: Callable[[], None] = lambda: None,
        requests: Requests | None = None,
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
        self._requests = requests
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
            ReplicaError: with ``stability.rerun``: a device computes wrong, again and again.
            NumericsError: on all ranks, before the update changes a weight: the loss or a gradient
                is not finite and ``stability.non_finite=stop``; gradients overflow fp16 at the
                minimum loss scale; or too many updates were skipped and no rollback is left.
        """
        batches = [batch.to(self._groups.device) for batch in batches]
        outputs: list[Tensor | None] = [None] * len(batches)
        passes: list[UpdatePass] = []
        for current in self._passes(step, batches):
            current.first = passes[0] if passes else None
            self._run(current, batches, outputs, prefetch if current.is_first else lambda: None)
            self._raise_if_nonfinite(current, batches)
            passes.append(current)
        first, skipped = passes[0], next((each for each in passes if each.skip), passes[0])
        assert first.outcome is not None
        loss = self._objective.step_loss(first.means)
        self._guard.record(step + 1, loss, first.outcome, skipped.skip)
        self._raise_if_out_of_rollbacks(skipped)
        self._watch_gradients = any(self._is_suspicious(each.outcome) for each in passes)
        return StepResult(
            loss=loss,
            learning_rate=first.rate,
            outcome=first.outcome,
            metrics=self._metrics(passes),
            skip=skipped.skip,
            rollback=self._guard.too_many_skips,
            forward_time=self._forward_timer.take(),
        )

    def _passes(self, step: int, batches: Sequence[MicroBatch]) -> Iterable[UpdatePass]:
        """Yield the updates of a step, not yet made."""
        num_targets = self._count_targets(batches)
        self._on_progress()
        for engine, update in zip(self._engine.parts, self._objective.updates, strict=True):
            targets, num_targets = num_targets.tensor_split([len(update.losses)])
            gradients = NonfiniteGradients(
                self._engine.module, self._groups, enabled=self._watch_gradients
            )
            yield UpdatePass(step, engine, update, targets, None, gradients, self._step_number)

    def _run(
        self,
        current: UpdatePass,
        batches: Sequence[MicroBatch],
        outputs: list[Tensor | None],
        prefetch: Callable[[], None],
    ) -> None:
        """Run forward and backward of all micro batches, and update.

        The engine computes the norm of the gradient and passes it to ``decide``, which reads it
        together with losses and requests, and returns the norm and its limit. A gradient above the
        limit is not applied; the limit is -inf where the loss forbids the update.

        Args:
            current: the update; its results are set.
            batches: this rank's micro batches.
            outputs: of each micro batch in the update before; replaced by those of this one.
            prefetch: see ``__call__``.
        """
        with current.gradients:
            current.totals = self._accumulate(current, batches, outputs)
        prefetch()
        requests = self._requests if current.is_first else None
        flags = requests.own() if requests else ()
        numbers = self._reduce(current.totals, current.num_targets, flags)
        self._on_progress()
        current.rate = self._learning_rate(current.step, current.update)

        def decide(norm: Tensor) -> tuple[float, float]:
            # The only host synchronization of an update
            *found, norm_read = torch.cat([numbers, norm.to(numbers).view(1)]).tolist()
            exchanged = self._read(current, found)
            if requests:
                requests.receive(exchanged)
            current.skip, limit = self._check_loss(current)
            return norm_read, -math.inf if current.skip else limit

        try:
            current.outcome = current.engine.step(current.rate, decide)
        except LossScaleError as error:
            current.error = error
        if current.outcome is not None:
            current.skip = current.skip or self._guard.check_outcome(current.outcome)

    def _accumulate(
        self, current: UpdatePass, batches: Sequence[MicroBatch], outputs: list[Tensor | None]
    ) -> Tensor:
        """Run forward and backward of all micro batches; return ``UpdatePass.totals``."""
        groups, losses, counters = self._groups, current.update.losses, current.update.counters
        size = 2 * len(losses) + len(counters)
        totals = torch.zeros(size, dtype=torch.float64, device=groups.device)
        num_targets = dict(zip(losses, current.num_targets.unbind(), strict=True))
        self._step_number.fill_(current.step)
        for index, batch in enumerate(batches):
            seeds = DropoutSeeds(self._config.train.seed, self._step_number, batch.dropout_keys)
            with self._forward_timer.measure():
                result = current.update.compute(self._engine.module, batch, seeds, outputs[index])
            # The engine averages over data-parallel ranks; the factor turns that into a sum.
            summands = [
                found.loss * (groups.dp_size / num_targets[name]) * self._weights[name]
                for name, found in result.losses.items()
            ]
            totals += result.totals(losses, counters)
            self._on_losses(totals)
            current.engine.backward(sum(summands[1:], summands[0]))
            outputs[index] = result.outputs
            self._on_progress()
        return totals

    def _on_losses(self, totals: Tensor) -> None:
        """Called after each forward pass with the sums so far."""

    def _count_targets(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Count the targets of each loss in the global batch, without a host synchronization."""
        names = tuple(self._objective.losses)
        counts = [self._objective.count_targets(batch) for batch in batches]
        rows = [torch.stack([each[name] for name in names]) for each in counts]
        total = torch.stack(rows).sum(0).to(torch.float32)
        total = sum_over_batch_ranks(total, self._groups)
        # Of weighted targets it may be below 1. Without targets, the sum of losses is 0.
        return torch.where(total > 0, total, 1.0)

    def _reduce(self, totals: Tensor, num_targets: Tensor, flags: Sequence[bool]) -> Tensor:
        """Sum over all ranks, without a host synchronization.

        Returns:
            fp64, the same on every rank, so that all make the same decisions: totals (0 if one is
            not finite), numbers of targets, whether a total is not finite, and how many ranks have
            set each flag.
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

    def _read(self, current: UpdatePass, numbers: Iterable[float]) -> list[bool]:
        """Set means and counts from the numbers of ``_reduce``; return the flags."""
        losses, counters, read = current.update.losses, current.update.counters, iter(numbers)
        sums, correct, counts, targets = (
            list(islice(read, size))
            for size in (len(losses), len(losses), len(counters), len(losses))
        )
        if is_nonfinite := bool(next(read)):
            sums, correct = [math.nan] * len(losses), [math.nan] * len(losses)
        current.means = {
            name: Mean(loss / count, hits / count, int(count))
            for name, loss, hits, count in zip(losses, sums, correct, targets, strict=True)
        }
        if not is_nonfinite:
            current.counts = dict(zip(counters, map(int, counts), strict=True))
        return [flag > 0 for flag in read]

    def _check_loss(self, current: UpdatePass) -> tuple[Skip | None, float]:
        """Return why an update is skipped, or None, and the limit of its gradient norm."""
        if current.first is None:
            loss = self._objective.step_loss(current.means)
            return self._guard.check_loss(loss), self._guard.norm_limit()
        if not all(math.isfinite(mean.loss) for mean in current.means.values()):
            return "loss not finite", math.inf
        return None if current.first.skip == "overflow" else current.first.skip, math.inf

    def _learning_rate(self, step: int, update: Update) -> float:
        optimizer = self._config.optimizer
        if update.learning_rate is not None:
            optimizer = replace(optimizer, learning_rate=update.learning_rate)
        return learning_rate(step, optimizer, self._config.train.steps)

    def _is_suspicious(self, outcome: StepOutcome | None) -> bool:
        """Return whether the next gradients are likely not to be finite."""
        return (
            outcome is None
            or not math.isfinite(outcome.grad_norm)
            or (self._is_fp16 and outcome.loss_scale <= self._config.precision.min_loss_scale)
        )

    def _metrics(self, passes: Sequence[UpdatePass]) -> dict[str, float]:
        """Return the objective's metrics, and what later updates did."""
        means = {name: mean for each in passes for name, mean in each.means.items()}
        counts = {name: count for each in passes for name, count in each.counts.items()}
        metrics = self._objective.step_metrics(means, counts)
        for each in passes[1:]:
            assert each.outcome is not None
            name = each.update.losses[0]
            metrics[f"{name}_learning_rate"] = each.rate
            metrics[f"{name}_grad_norm"] = each.outcome.grad_norm
            if self._is_fp16:
                metrics[f"{name}_loss_scale"] = each.outcome.loss_scale
        return metrics

    def _raise_if_nonfinite(self, current: UpdatePass, batches: Sequence[MicroBatch]) -> None:
        """Raise if an update that is not finite ends the run.

        The weights are those before the step. Collective if the message names a parameter.
        """
        step, ends_run = current.step, self._config.stability.non_finite == "stop"
        if current.skip == "loss not finite":
            if not torch.isfinite(current.totals).all():
                samples = [index for batch in batches for index in batch.sample_index.tolist()]
                logger.error("step %d: the loss of samples %s is not finite", step + 1, samples)
            if ends_run:
                raise NumericsError(
                    f"step {step + 1}: the loss is not finite; weights are those of step {step}; "
                    "lower optimizer.learning_rate or check the batch"
                )
        if current.error is not None:
            raise LossScaleError(
                f"step {step + 1}: {current.error}; {current.gradients.first_nonfinite()}"
            ) from current.error
        if current.skip == "gradient not finite" and ends_run:
            where = current.gradients.first_nonfinite()
            raise NumericsError(
                f"step {step + 1}: a gradient is not finite ({where}); weights are those of step "
                f"{step}; lower optimizer.learning_rate or check the batch"
            )

    def _raise_if_out_of_rollbacks(self, skipped: UpdatePass) -> None:
        """Raise if training cannot continue. Collective if the message names a parameter."""
        if self._guard.too_many_skips and not self._guard.can_roll_back:
            state, skip = self._guard.state, skipped.skip
            is_nonfinite = str(skip).endswith("not finite")
            cause = f" ({skipped.gradients.first_nonfinite()})" if is_nonfinite else ""
            raise NumericsError(
                f"step {skipped.step + 1}: {skip}{cause}; {len(state.skips)} updates of the last "
                f"{self._config.stability.spike_window} steps were skipped (steps "
                f"{', '.join(map(str, state.skips))}) after {state.vain_rollbacks} rollbacks "
                "without progress; lower optimizer.learning_rate"
            )
