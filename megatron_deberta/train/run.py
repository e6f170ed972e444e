"""Training run of one rank: builds all components, trains, and closes them."""

from __future__ import annotations

import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_deberta.checkpoint.background import Saved, Saver
from megatron_deberta.checkpoint.fence import Fence
from megatron_deberta.checkpoint.layout import CheckpointMetadata
from megatron_deberta.checkpoint.retention import Retention, delete_leftovers
from megatron_deberta.config import batch_arithmetic, config_to_dict, validate_for_world
from megatron_deberta.config.phases import Segment, segment_at, segments
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.sample_log import SampleLog
from megatron_deberta.distributed.control import (
    all_reduce_any,
    broadcast_from_rank_zero,
    raise_on_all_ranks,
)
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.parallelize.build import ShardedModel, initial_weights
from megatron_deberta.distributed.topology import ProcessGroups, init_process_groups, shutdown
from megatron_deberta.engine.base import Engine
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REQUEUE, ReplicaError
from megatron_deberta.observe.json_lines import JsonLines
from megatron_deberta.observe.logs import setup_logging
from megatron_deberta.observe.metrics import RecordKind
from megatron_deberta.observe.progress import ProgressObserver, Section
from megatron_deberta.observe.throughput import ThroughputMeter
from megatron_deberta.observe.timeline import SectionTimer, Timeline
from megatron_deberta.train.data import OpenData, RunData, Validator, open_pretraining_data
from megatron_deberta.train.hooks import EvaluateHook, Hook, LogHook, PeriodicHook, SaveHook
from megatron_deberta.train.local_checkpoints import LocalCheckpoints
from megatron_deberta.train.minimal_pairs import MinimalPairTask, open_minimal_pairs
from megatron_deberta.train.preemption import Requests, StopSignal
from megatron_deberta.train.prefetch import InputQueue
from megatron_deberta.train.records import RunRecords
from megatron_deberta.train.selection import (
    Selection,
    open_selection,
    record_selection,
    select_committed,
)
from megatron_deberta.train.setup import (
    build_meter,
    build_rank_model,
    choose_background_saves,
    choose_device,
    set_determinism,
)
from megatron_deberta.train.stability.faults import FaultReports
from megatron_deberta.train.stability.guard import Guard
from megatron_deberta.train.stability.replicas import check_replicas
from megatron_deberta.train.stability.rerun import RerunStep
from megatron_deberta.train.stability.rollback import Rollback, rollback
from megatron_deberta.train.start import OpenWeights, choose_start, load_start, refusals
from megatron_deberta.train.state import Ending, FolderLock, Outcome, TrainState
from megatron_deberta.train.step import TrainStep
from megatron_deberta.train.summary import describe_end, describe_nothing_left, describe_start
from megatron_deberta.train.trainer import Trainer, last_step
from megatron_deberta.train.validation_samples import FILE_NAME as SAMPLES_FILE
from megatron_deberta.train.validation_samples import SampleRecorder, SampleWriter
from megatron_deberta.train.vocab_size import with_vocab_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Components:
    """Components that live as long as the process; the guard and the loaders do not."""

    config: RunConfig
    groups: ProcessGroups
    data: RunData
    minimal_pairs: MinimalPairTask | None
    model: ShardedModel
    engine: Engine
    saver: Saver
    observer: ProgressObserver
    stop: StopSignal
    terminal: Console
    lock: FolderLock
    timeline: Timeline | None  # on rank 0
    local: LocalCheckpoints | None
    faults: FaultReports
    in_background: bool


def pretrain(
    config: RunConfig,
    stop: StopSignal,
    run_lock: FolderLock,
    observer: ProgressObserver | None = None,
    *,
    allow_config_change: bool = False,
    predict_bytes: Callable[[RunConfig], int] = lambda config: 0,
    open_data: OpenData = open_pretraining_data,
    open_weights: OpenWeights | None = None,
) -> int:
    """Train as one rank of a run. Collective over all ranks of the job.

    Args:
        config: the run.
        stop: records signals that ask the run to stop.
        run_lock: entered on rank 0 before anything is written to the run folder.
        observer: notified of this rank's progress.
        allow_config_change: resume with other optimizer settings than the checkpoint's.
        predict_bytes: predicts the peak memory of a rank, to be shown; 0: not predicted.
        open_data: opens the run's data.
        open_weights: opens ``checkpoint.load_from`` if it is no checkpoint.

    Returns:
        The exit code of ``errors``: done, or stopped by a signal.

    Raises:
        InterruptedError: stopped while waiting for the other ranks.
        MegatronDebertaError: see ``errors``.
    """
    began = time.monotonic()
    terminal = Console(file=sys.stdout)
    observer = SectionTimer(observer or ProgressObserver())
    with ExitStack() as stack:
        config, groups = _init_rank(config, terminal, stack, stop)
        # Before the lock, so that a run with unusable data creates no folder.
        with raise_on_all_ranks(groups), refusals():
            config, data = open_data(config, groups)
            path = data.identity.tokenizer_path
            minimal_pairs = open_minimal_pairs(config, path)
        fence = _enter_folder(config, groups, run_lock, stack)
        with refusals():
            local = LocalCheckpoints.open(config, groups, fence)
            start = choose_start(config, groups, data.identity, allow_config_change, open_weights)
        model = build_rank_model(config, groups)
        in_background, saves = choose_background_saves(config, groups, model.specs)
        is_finished = start.state.step >= last_step(config)
        if groups.rank == 0 and not is_finished:
            size = sum(math.prod(spec.logical_shape) for spec in model.specs.values())
            amount = [*data.describe(config, groups.dp_size), ("checkpoints", saves)]
            text = describe_start(config, groups, amount, start, size, predict_bytes(config))
            terminal.out(text, highlight=False)
        first = segment_at(config, start.state.step).config
        engine = build_engine(first, model.module, model.specs, groups)
        stack.callback(engine.destroy)
        with refusals():
            load_start(start, engine, model.specs, functools.partial(initial_weights, config))
        timeout = config.cluster.collective_timeout_minutes
        saver = Saver(config.train.run_dir, engine, model.specs, groups, fence, timeout)
        if local is not None:
            local.start_saving(start.state.step, engine, model.specs)
        timeline = None
        if groups.rank == 0:
            step, device = start.state.step, groups.device
            run_lock.record("resume", step=step, samples=start.state.consumed_samples)
            timeline = Timeline(
                config.train.run_dir, observer, device, step, groups.world_size, fence.check
            )
            stack.enter_context(timeline)
        run = _Components(
            config, groups, data, minimal_pairs, model, engine, saver, observer, stop, terminal,
            run_lock, timeline, local, FaultReports(groups, run_lock), in_background,
        )  # fmt: skip
        outcome = _train_with_rollbacks(run, start.state, Guard.of_run(config, start.guard))
        if local is not None:
            local.close(is_finished=outcome.state.step >= config.train.steps)
        if groups.rank == 0:
            seconds = time.monotonic() - began
            text = describe_end(config, outcome, seconds, stop.received)
            terminal.out(describe_nothing_left(config) if is_finished else text, highlight=False)
        observer.enter(Section.END)
    codes = {Ending.PREEMPTED: EXIT_REQUEUE, Ending.INTERRUPTED: EXIT_INTERRUPTED}
    return codes.get(outcome.ending, EXIT_DONE)


def _init_rank(
    config: RunConfig, terminal: Console, stack: ExitStack, stop: StopSignal
) -> tuple[RunConfig, ProcessGroups]:
    """Set up logging, determinism and process groups; return the config without ``auto``."""
    environment = read_environment()
    setup_logging(
        config.log.level,
        rank=environment.rank,
        world_size=environment.world_size,
        console=terminal,
    )
    config = with_vocab_size(config)
    validate_for_world(config, environment.world_size)
    device = choose_device(config)
    set_determinism(device, environment)
    stack.callback(shutdown)
    groups = init_process_groups(
        config.parallel.tensor_parallel_size,
        device,
        config.cluster.collective_timeout_minutes,
        environment,
        lambda: stop.received is not None,
    )
    return config, groups


def _enter_folder(
    config: RunConfig, groups: ProcessGroups, run_lock: FolderLock, stack: ExitStack
) -> Fence:
    """Take the run folder's lock on rank 0. Collective over all ranks."""
    with raise_on_all_ranks(groups):
        if groups.rank == 0:
            stack.enter_context(run_lock)
            # A former holder that still runs cannot commit what it has staged.
            delete_leftovers(config.train.run_dir)
    return Fence(broadcast_from_rank_zero(run_lock.number, groups), run_lock.check)


def _train_with_rollbacks(run: _Components, state: TrainState, guard: Guard) -> Outcome:
    """Train phase by phase, returning to a checkpoint whenever skipped updates do not help."""
    done: Rollback | None = None
    first_step = state.step
    while True:
        outcome = _train(run, state, guard, done, is_start=state.step == first_step)
        if outcome.ending is Ending.PHASE:
            state, done = outcome.state, None
            continue
        if outcome.ending is not Ending.ROLLBACK:
            return outcome
        with run.observer.section(Section.SAVE):
            # The save may be of a step that is rolled back; it must end before that is deleted.
            run.saver.finish()
        if run.local is not None:
            # First: after a kill in between, none of the skipped steps is resumed.
            run.local.begin(0)
        with run.observer.section(Section.STARTUP):
            state, guard_state, done = rollback(
                run.config,
                run.groups,
                run.engine,
                run.model.specs,
                outcome.state,
                guard,
                run.saver.fence,
            )
        guard = Guard.of_run(run.config, guard_state)


def _train(
    run: _Components, state: TrainState, guard: Guard, done: Rollback | None, *, is_start: bool
) -> Outcome:
    """Train from a state to the end of its segment or of the run, a stop request or a rollback.

    Args:
        run: the components.
        state: the position to train from.
        guard: the numeric guard at that position.
        done: the rollback that led to this position, if any.
        is_start: this process has not trained yet.
    """
    segment = segment_at(run.config, state.step)
    config, groups, data = segment.config, run.groups, run.data
    accumulation = batch_arithmetic(config, groups.dp_size).accumulation_steps
    run.engine.set_accumulation_steps(accumulation)
    with ExitStack() as stack:
        records: RunRecords | None = None
        sample_log: SampleLog | None = None
        with raise_on_all_ranks(groups), refusals():
            consumed = state.consumed_samples
            train_loader, validate = data.build_loaders(config, groups, consumed, segment.stage)
            if segment.phase_config != config:
                rest = segment.phase_config
                _, validate = data.build_loaders(rest, groups, consumed, segment.stage)
            if groups.rank == 0:
                records = stack.enter_context(_open_records(run, segment, state))
                if done is not None:
                    records.record_rollback(done)
                data.prepare_records(records)
            if config.data.sample_log and groups.tp_rank == 0:
                folder = Path(config.train.run_dir) / "ledger"
                sample_log = SampleLog(folder, groups.dp_rank, groups.dp_size, state.step)
                stack.callback(sample_log.close)
        meter = build_meter(config, groups, state.step, data.step_work(config))
        requests = Requests(run.stop, config.train.run_dir, groups)
        run_dir = None if records is None else records.run_dir
        examples = data.identity.validation_fingerprint
        with refusals():
            selection = open_selection(config, groups, run_dir, state.step, examples)
        evaluations = _evaluations(run, validate, requests, meter, records, selection)
        for kind, hook in evaluations.items():
            _evaluate_if_missing(run, state, kind, hook, records, requests)
        run.faults.records = records
        train_step = _train_step(run, config, guard, requests)
        outcome = Trainer(
            config,
            state,
            InputQueue(train_loader, groups.device),
            train_step,
            _hooks(
                run, segment, meter, guard, evaluations.values(), records, sample_log, selection
            ),
            requests,
            run.observer,
            segment.end if segment.end < run.config.train.steps else 0,
            is_start,
            lambda: 0 < config.finetune.patience <= selection.num_worse,
        ).run()
    if outcome.ending in (Ending.FINISHED, Ending.STOPPED) and records is not None:
        records.plot()
    return outcome


def _train_step(run: _Components, config: RunConfig, guard: Guard, requests: Requests) -> TrainStep:
    """Return what executes the steps of a segment."""
    options: dict[str, Any] = {"guard": guard, "on_progress": run.observer.mark, "flags": requests}
    if not config.guard.rerun:
        return TrainStep(run.engine, config, run.groups, **options)
    run.faults.train_step = RerunStep(
        run.engine, config, run.groups, on_verdict=run.faults.report, **options
    )
    return run.faults.train_step


def _open_records(run: _Components, segment: Segment, state: TrainState) -> RunRecords:
    """Open the records of a segment on rank 0."""
    config = run.config
    if len(segments(config)) > 1:
        now = segment.config
        logger.info(
            "phase %d from step %d: %d sequences of %d tokens", segment.phase + 1, state.step + 1,
            now.train.global_batch_size, now.data.sequence_length,
        )  # fmt: skip
    return RunRecords(
        segment.phase_config, state.step, last_step(config), run.terminal, run.saver.fence, config
    )


def _evaluate_if_missing(
    run: _Components,
    state: TrainState,
    kind: RecordKind,
    hook: EvaluateHook,
    records: RunRecords | None,
    requests: Requests,
) -> None:
    """Evaluate the last step if an interrupted process did not. Collective over all ranks."""
    config, groups = run.config, run.groups
    due = hook.is_due(state.step) or state.step >= last_step(config)
    missing = due and records is not None and records.lacks(kind, state.step)
    if not (due and all_reduce_any(missing, groups)):
        return
    before, now = (segment_at(config, step) for step in (max(0, state.step - 1), state.step))
    if kind == "validation" and before.phase != now.phase:
        _, validate = run.data.build_loaders(before.phase_config, groups, state.consumed_samples)
        if validate is None:
            return
        compute = functools.partial(validate, run.engine.module, must_stop=requests.must_stop)
        hook = replace(hook, evaluate=compute)
    selection = hook.selection
    if selection.best_step == state.step:
        # Its record was removed; the repeated validation does not count again.
        hook = replace(hook, selection=Selection())
    with run.observer.section(Section.EVALUATION):
        hook.validate(state.step)
    if kind == "validation" and config.finetune.task and config.finetune.keep_best:
        folder = None if records is None else records.run_dir
        select_committed(selection, state.step, groups, folder)


def _evaluations(
    run: _Components,
    validate: Validator | None,
    requests: Requests,
    meter: ThroughputMeter,
    records: RunRecords | None,
    selection: Selection,
) -> dict[RecordKind, EvaluateHook]:
    """Return the validation and the evaluation of minimal pairs, if the run has them."""
    train, module, must_stop = run.config.train, run.engine.module, requests.must_stop
    hooks: dict[RecordKind, EvaluateHook] = {}
    if validate is not None:
        recorder = SampleRecorder(module, run.groups, run.config.log.samples)
        compute = recorder.watch(functools.partial(validate, module, must_stop=must_stop))
        report = None
        if records is not None:
            lines = JsonLines(records.run_dir / SAMPLES_FILE, run.saver.fence.check)
            report = SampleWriter(lines, recorder, run.data.identity.tokenizer_path, records).report
        hooks["validation"] = EvaluateHook(
            train.eval_every, compute, meter, report, selection, train.steps
        )
    if run.minimal_pairs is not None:
        score = functools.partial(run.minimal_pairs.evaluate, module, run.groups, must_stop)
        show = None if records is None else records.report_minimal_pairs
        hooks["minimal_pairs"] = EvaluateHook(train.blimp_every, score, meter, show)
    return hooks


def _hooks(
    run: _Components,
    segment: Segment,
    meter: ThroughputMeter,
    guard: Guard,
    evaluations: Iterable[EvaluateHook],
    records: RunRecords | None,
    sample_log: SampleLog | None,
    selection: Selection,
) -> list[Hook]:
    """Build this rank's hooks, in the order in which they are called."""
    config = run.config
    hooks: list[Hook] = []
    if sample_log is not None:
        append = sample_log.append
        hooks.append(PeriodicHook(1, lambda event: append(event.state.step, event.batches)))
    if records is not None:
        hooks.append(PeriodicHook(1, records.note_step))
        hooks.append(_log_hook(run, segment, meter, records))
    if (timeline := run.timeline) is not None:
        record = timeline.record
        hooks.append(PeriodicHook(config.log.every, lambda event: record(event.state.step)))
    hooks.extend(evaluations)
    if every := config.guard.replica_check_every:
        hooks.append(
            PeriodicHook(every, lambda event: _check_replicas(run, records, event.state.step))
        )
    if run.local is not None:
        describe = functools.partial(_metadata, run, guard, records)
        hooks += run.local.hooks(describe, meter, sample_log, records)
    best = selection if config.finetune.task and config.finetune.keep_best else None
    begin = functools.partial(_save, run, guard, records, best)
    report = functools.partial(_record_saved, run, records, best) if records is not None else None
    schedule = replace(config.checkpoint, asynchronous=run.in_background)
    hooks.append(SaveHook(schedule, begin, run.saver, meter, sample_log, report, best))
    return hooks


def _log_hook(
    run: _Components, segment: Segment, meter: ThroughputMeter, records: RunRecords
) -> LogHook:
    config, parts = run.config, segments(run.config)
    last = last_step(config)
    hook = LogHook(config.log.every, last, meter, records.writer, records.console)
    if len(parts) == 1:
        return hook
    flops = [
        (part.first_step, min(part.end, last), work.tokens * work.flops_per_token)
        for part in parts
        for work in [run.data.step_work(part.config)[0]]
    ]
    hook.segment_end = segment.end
    hook.labels = {
        "phase": segment.phase + 1,
        "global_batch_size": segment.config.train.global_batch_size,
        "sequence_length": segment.config.data.sequence_length,
    }
    hook.remaining_flops = lambda step: sum(
        max(0, end - max(first, step)) * each for first, end, each in flops
    )
    return hook


def _record_saved(
    run: _Components, records: RunRecords, selection: Selection | None, step: int, saved: Saved
) -> None:
    records.record_checkpoint(step, saved)
    run.lock.record(
        "checkpoint",
        step=saved.step,
        samples=saved.consumed_samples,
        # A check of replicas may follow a step. That of a save is part of its time; adding the
        # longest one bounds those of later saves.
        save_seconds=saved.seconds + records.longest_check,
        step_seconds=records.longest_step + records.longest_check,
    )
    if selection is not None and selection.best_step == saved.step:
        record_selection(records.run_dir, selection)


def _check_replicas(run: _Components, records: RunRecords | None, step: int) -> None:
    began = time.monotonic()
    try:
        check_replicas(run.engine.module, run.model.specs, run.groups, step)
    except ReplicaError as error:
        if not run.config.guard.rerun:
            raise
        raise run.faults.explained(error, run.engine.module, run.model.specs) from error
    if records is not None:
        records.longest_check = max(records.longest_check, time.monotonic() - began)


def _save(
    run: _Components,
    guard: Guard,
    records: RunRecords | None,
    selection: Selection | None,
    state: TrainState,
    wait: bool,
    began: float,
) -> Saved | None:
    metadata = _metadata(run, guard, records, state)
    checkpoint = run.config.checkpoint
    best = None if selection is None else selection.best_after(state.step)
    retention = Retention(checkpoint.keep_last, checkpoint.keep_every, guard.last_good_step, best)
    if wait:
        return run.saver.save(metadata, retention, began)
    run.saver.start(metadata, retention, began)
    return None


def _metadata(
    run: _Components, guard: Guard, records: RunRecords | None, state: TrainState
) -> CheckpointMetadata:
    """Check the state and describe its checkpoint. Collective over all ranks."""
    if run.config.guard.replica_check_every:
        # A checkpoint must not contain weights that a faulty rank has corrupted.
        _check_replicas(run, records, state.step)
    identity = run.data.identity
    return CheckpointMetadata(
        step=state.step,
        consumed_samples=state.consumed_samples,
        config=config_to_dict(run.config),
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
        tokenizer_path=identity.tokenizer_path,
        data_fingerprint=identity.data_fingerprint,
        guard=asdict(guard.state),
    )
