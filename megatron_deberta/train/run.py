"""Training run of one rank: opens data and folder, builds model and engine, trains, closes."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from rich.console import Console

from megatron_deberta.checkpoint.retention import delete_leftovers
from megatron_deberta.checkpoint.saver import Saver
from megatron_deberta.checkpoint.writer import Fence
from megatron_deberta.config import validate_for_world
from megatron_deberta.config.phases import last_step, segment_at
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.control import broadcast_from_rank_zero, raise_on_all_ranks
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.parallelize.build import initial_weights
from megatron_deberta.distributed.topology import (
    ProcessGroups,
    choose_device,
    init_process_groups,
    shutdown,
)
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REQUEUE, refusals
from megatron_deberta.evaluate.minimal_pairs import open_minimal_pairs
from megatron_deberta.observe.console import setup_logging
from megatron_deberta.observe.progress import ProgressObserver, Section
from megatron_deberta.observe.timeline import SectionTimer, Timeline
from megatron_deberta.train.callbacks import (
    CheckReplicas,
    EvaluateMinimalPairs,
    LogMetrics,
    LogSamples,
    RecordTimeline,
    SaveCheckpoints,
    Validate,
)
from megatron_deberta.train.data import OpenData, open_pretraining_data
from megatron_deberta.train.local_checkpoints import LocalCheckpoints
from megatron_deberta.train.preemption import SignalRecorder
from megatron_deberta.train.setup import (
    build_rank_model,
    choose_background_saves,
    choose_precision,
    set_determinism,
)
from megatron_deberta.train.stability.guard import Guard
from megatron_deberta.train.start import OpenWeights, choose_start, load_start
from megatron_deberta.train.state import Ending, FolderLock
from megatron_deberta.train.summary import describe_end, describe_nothing_left, describe_start
from megatron_deberta.train.trainer import Callback, Trainer
from megatron_deberta.train.vocab_size import with_vocab_size

EXIT_CODES = {Ending.PREEMPTED: EXIT_REQUEUE, Ending.INTERRUPTED: EXIT_INTERRUPTED}


def train_rank(
    config: RunConfig,
    signals: SignalRecorder,
    run_lock: FolderLock,
    observer: ProgressObserver | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    allow_config_change: bool = False,
    predict_bytes: Callable[[RunConfig], int] = lambda config: 0,
    open_data: OpenData = open_pretraining_data,
    open_weights: OpenWeights | None = None,
) -> int:
    """Train as one rank of a run. Collective over all ranks of the job.

    Args:
        config: the run.
        signals: records signals that ask the run to stop.
        run_lock: entered on rank 0 before anything is written to the run folder.
        observer: notified of this rank's progress.
        callbacks: called after validations and before checkpoints are saved.
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
        config, groups = _init_rank(config, terminal, stack, signals)
        # Before the lock, so that a run with unusable data creates no folder.
        with raise_on_all_ranks(groups), refusals():
            config, data = open_data(config, groups)
            minimal_pairs = open_minimal_pairs(config, data.identity.tokenizer_path)
        fence = _enter_folder(config, groups, run_lock, stack)
        with refusals():
            local = LocalCheckpoints.open(config, groups, fence)
            start = choose_start(config, groups, data.identity, allow_config_change, open_weights)
        state = start.state
        model = build_rank_model(config, groups)
        in_background, saves = choose_background_saves(config, groups, model.specs)
        nothing_left = state.step >= last_step(config)
        if groups.rank == 0 and not nothing_left:
            size = sum(math.prod(spec.logical_shape) for spec in model.specs.values())
            amount = [*data.describe(config, groups.dp_size), ("checkpoints", saves)]
            text = describe_start(config, groups, amount, start, size, predict_bytes(config))
            terminal.out(text, highlight=False)
        first = segment_at(config, state.step).config
        engine = build_engine(first, model.module, model.specs, groups)
        stack.callback(engine.destroy)
        with refusals():
            load_start(start, engine, model.specs, functools.partial(initial_weights, config))
        saver = Saver(
            config.train.run_dir, engine, model.specs, groups, fence,
            config.cluster.collective_timeout_minutes,
        )  # fmt: skip
        if local is not None:
            local.start_saving(state.step, engine, model.specs)
        timeline = None
        if groups.rank == 0:
            run_lock.record("resume", step=state.step, samples=state.consumed_samples)
            timeline = Timeline(
                config.train.run_dir, observer, groups.device, state.step, groups.world_size,
                fence.check,
            )  # fmt: skip
            stack.enter_context(timeline)
        checkpoint = replace(config.checkpoint, asynchronous=in_background)
        keeps_best = bool(config.finetune.task) and config.finetune.keep_best
        # In the order in which they are called after a step
        chain: list[Callback | None] = [
            LogSamples(),
            LogMetrics(),
            None if timeline is None else RecordTimeline(timeline),
            Validate(),
            None if minimal_pairs is None else EvaluateMinimalPairs(minimal_pairs),
            *callbacks,
            CheckReplicas(),
            local,
            SaveCheckpoints(checkpoint, keeps_best=keeps_best),
        ]
        trainer = Trainer(
            config=config, groups=groups, data=data, model=model, engine=engine, saver=saver,
            state=state, guard=Guard.of_run(config, start.guard),
            callbacks=[callback for callback in chain if callback is not None], signals=signals,
            lock=run_lock, observer=observer, terminal=terminal,
        )  # fmt: skip
        ending = trainer.fit()
        if local is not None:
            local.close(is_finished=trainer.state.step >= config.train.steps)
        if groups.rank == 0:
            seconds = time.monotonic() - began
            text = describe_end(config, ending, trainer.state.step, seconds, signals.received)
            terminal.out(describe_nothing_left(config) if nothing_left else text, highlight=False)
        observer.enter(Section.END)
    return EXIT_CODES.get(ending, EXIT_DONE)


def _init_rank(
    config: RunConfig, terminal: Console, stack: ExitStack, signals: SignalRecorder
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
        lambda: signals.received is not None,
    )
    return choose_precision(config, groups), groups


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
