"""A whole run of one rank: everything is built, connected, run and closed here.

Owns the order of start-up, from the environment to the loop. Refuses what the parts do themselves.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from megatron_deberta.checkpoint.background import Saved, Saver
from megatron_deberta.checkpoint.layout import CheckpointMetadata
from megatron_deberta.checkpoint.retention import Retention
from megatron_deberta.cluster import preflight
from megatron_deberta.cluster.run_lock import RunLock
from megatron_deberta.cluster.watchdog.heartbeat import Heartbeat, Section
from megatron_deberta.config import config_to_dict, validate_for_world
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.build import (
    Corpora,
    build_loaders,
    open_corpora,
    tokenizer_path,
    validation_loader,
)
from megatron_deberta.data.loader import ValidationLoader
from megatron_deberta.data.sample_log import SampleLog
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.distributed.control import all_reduce_max, raise_on_all_ranks
from megatron_deberta.distributed.environment import RankEnvironment, read_environment
from megatron_deberta.distributed.parallelize.build import ShardedModel, build_model
from megatron_deberta.distributed.topology import ProcessGroups, init_process_groups, shutdown
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.engine.protocol import Engine
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE, ConfigError
from megatron_deberta.model.flops import recomputed_flops, training_flops_per_token
from megatron_deberta.observe.logs import setup_logging
from megatron_deberta.observe.throughput import (
    StepWork,
    ThroughputMeter,
    measure_matmul_rate,
)
from megatron_deberta.tokenizer import load_tokenizer
from megatron_deberta.train.evaluate import Evaluation, evaluate
from megatron_deberta.train.fingerprint import data_fingerprint
from megatron_deberta.train.hooks import (
    EvaluateHook,
    Hook,
    LogHook,
    ReplicaHook,
    SampleLogHook,
    SaveHook,
)
from megatron_deberta.train.preemption import Requests, StopSignal
from megatron_deberta.train.prefetch import InputQueue
from megatron_deberta.train.records import RunRecords
from megatron_deberta.train.stability.guard import Guard
from megatron_deberta.train.stability.replicas import check_replicas
from megatron_deberta.train.stability.rollback import Rollback, rollback
from megatron_deberta.train.start import Identity, Start, choose_start, load_start
from megatron_deberta.train.state import TrainState
from megatron_deberta.train.step import TrainStep
from megatron_deberta.train.trainer import Trainer, last_step

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Torch's names of ``precision.dtype``."""


@dataclass(frozen=True, slots=True)
class _Data:
    """What a run is trained on."""

    vocabulary: Vocabulary
    corpora: Corpora
    identity: Identity


@dataclass(frozen=True, slots=True)
class _Assembled:
    """What the loop connects."""

    config: RunConfig
    groups: ProcessGroups
    data: _Data
    model: ShardedModel
    engine: Engine
    heartbeat: Heartbeat
    saver: Saver


def pretrain(
    config: RunConfig,
    stop: StopSignal,
    heartbeat: Heartbeat | None = None,
    *,
    allow_config_change: bool = False,
) -> int:
    """Train as one rank of a run. Collective over all ranks of the job.

    Args:
        config: the run.
        stop: remembers signals.
        heartbeat: shows a supervisor where this rank is.
        allow_config_change: continue with other optimizer settings than the checkpoint's.

    Returns:
        The exit code of ``errors``: done, or stopped by a signal with a committed checkpoint.

    Raises:
        MegatronDebertaError: see ``errors``.
    """
    environment = read_environment()
    terminal = Console(file=sys.stdout)
    setup_logging(
        config.log.level,
        rank=environment.rank,
        world_size=environment.world_size,
        console=terminal,
    )
    validate_for_world(config, environment.world_size)
    preflight.check_torch_version(torch.__version__)
    device = choose_device(config)
    set_determinism(device, environment)
    variables = dict(os.environ)
    try:
        groups = init_process_groups(
            config.parallel.tensor_parallel_size,
            device,
            config.cluster.collective_timeout_minutes,
            environment,
        )
        # First, so that what cannot be trained leaves no folder behind.
        with raise_on_all_ranks(groups):
            data = _open_data(config, groups.rank)
        with _locked(config.train.run_dir, groups):
            start = choose_start(config, groups, data.identity, allow_config_change)
            model = build_rank_model(config, groups)
            engine = build_engine(config, model.module, model.specs, groups)
            load_start(start, engine, model.specs)
            heartbeat = heartbeat or Heartbeat()
            saver = Saver(config.train.run_dir, engine, model.specs, groups)
            parts = _Assembled(config, groups, data, model, engine, heartbeat, saver)
            code = _train_to_the_end(parts, start, stop, terminal)
            heartbeat.enter(Section.END)
            engine.destroy()
            return code
    finally:
        shutdown()
        # DeepSpeed was told its rank there; the next run in this process may have another.
        os.environ.clear()
        os.environ.update(variables)


@contextmanager
def _locked(run_dir: str, groups: ProcessGroups) -> Iterator[None]:
    """Hold the lock of the run's folder, on rank 0. Collective over all ranks, at the start."""
    with ExitStack() as held:
        with raise_on_all_ranks(groups):
            if groups.rank == 0:
                held.enter_context(RunLock(run_dir))
        yield


def choose_device(config: RunConfig) -> torch.device:
    """``train.device``, resolved on this machine.

    Raises:
        ConfigError: CUDA is asked for and there is none, or torch has no kernels for its devices.
    """
    available = torch.cuda.is_available()
    if config.train.device == "cuda" and not available:
        raise ConfigError("train.device=cuda but this machine has none; use auto or cpu")
    if not available or config.train.device == "cpu":
        return torch.device("cpu")
    for index in range(torch.cuda.device_count()):
        preflight.check_architecture(
            torch.cuda.get_device_capability(index), torch.cuda.get_arch_list()
        )
    return torch.device("cuda")


def set_determinism(device: torch.device, environment: RankEnvironment) -> None:
    """Make the same run give the same bits, and divide the cores of a node among its ranks.

    To be called before CUDA starts. On CPU an operator that cannot do so is an error (tested:
    runs, resumes and kills repeat bit for bit). On CUDA it is a warning, because which ones cannot
    depends on torch's and cuBLAS' versions; that GPU runs repeat their bits is not tested.
    """
    if device.type == "cuda":
        # cuBLAS reads it when it starts; without it the order of its sums is open.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        return
    torch.use_deterministic_algorithms(True)
    # That would also fill every new tensor, to show reads of memory nobody wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if "OMP_NUM_THREADS" not in os.environ:
        # Every rank would take all cores.
        torch.set_num_threads(max(1, torch.get_num_threads() // environment.local_world_size))


def _open_data(config: RunConfig, rank: int) -> _Data:
    path = tokenizer_path(config)
    tokenizer = load_tokenizer(path)
    vocabulary = Vocabulary.of(tokenizer)
    if vocabulary.size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the {vocabulary.size} ids "
            f"of tokenizer.path={path}; set model.vocab_size={vocabulary.size}"
        )
    corpora = open_corpora(config, vocabulary, config.data.verify_hashes and rank == 0)
    identity = Identity(
        tokenizer_path=str(Path(path).resolve()),
        tokenizer_fingerprint=tokenizer.fingerprint,
        data_fingerprint=data_fingerprint(config.data),
    )
    return _Data(vocabulary, corpora, identity)


def build_rank_model(config: RunConfig, groups: ProcessGroups) -> ShardedModel:
    """This rank's filled part of the model, in ``precision.dtype``; partitioned under ZeRO-3."""
    partition = None
    if config.precision.engine == "deepspeed" and config.precision.zero_stage == 3:
        # Only here: importing DeepSpeed takes time and reads its environment.
        from megatron_deberta.engine.deepspeed_runtime import zero3_partition

        def partition(module: nn.Module) -> None:
            zero3_partition(module, groups, config)

    return build_model(config, groups, DTYPES[config.precision.dtype], partition=partition)


def _train_to_the_end(parts: _Assembled, start: Start, stop: StopSignal, terminal: Console) -> int:
    """Train, going back to a checkpoint as often as the guard asks for and allows."""
    state, memory, went_back = start.state, start.guard, None
    while True:
        guard = Guard.of_run(parts.config, memory)
        ended = _train(parts, state, guard, stop, terminal, went_back)
        if not isinstance(ended, TrainState):
            return ended
        # It may be of a step that is given up; nothing may be under way when that is deleted.
        with parts.heartbeat.section(Section.SAVE):
            parts.saver.finish()
        with parts.heartbeat.section(Section.STARTUP):
            state, memory, went_back = rollback(
                parts.config, parts.groups, parts.engine, parts.model.specs, ended, guard
            )


def _train(
    parts: _Assembled,
    state: TrainState,
    guard: Guard,
    stop: StopSignal,
    terminal: Console,
    went_back: Rollback | None,
) -> int | TrainState:
    """Train on; returns the exit code, or where the run is when it has to go back."""
    config, groups = parts.config, parts.groups
    vocabulary, corpora = parts.data.vocabulary, parts.data.corpora
    with ExitStack() as open_files:
        records: RunRecords | None = None
        sample_log: SampleLog | None = None
        with raise_on_all_ranks(groups):
            train_loader, validation = build_loaders(
                config, vocabulary, groups.dp_rank, groups.dp_size, state.consumed_samples, corpora
            )
            if groups.rank == 0:
                records = RunRecords(config, state.step, last_step(config), terminal)
                open_files.enter_context(records)
                if went_back is not None:
                    records.tell_of_roll_back(went_back)
                everything = validation_loader(config, vocabulary, 0, 1, corpora)
                if everything is not None:
                    records.measure_unigram(corpora, vocabulary.size, everything)
            if config.data.sample_log and groups.tp_rank == 0:
                folder = Path(config.train.run_dir) / "ledger"
                sample_log = SampleLog(folder, groups.dp_rank, groups.dp_size, state.step)
                open_files.callback(sample_log.close)
        meter = _meter(config, groups, state.step)
        evaluation = _evaluation(parts, meter, validation, records)
        if evaluation is not None and evaluation.is_due(state.step):
            _make_up_for_validation(evaluation, state.step, records, groups)
        hooks = _hooks(parts, meter, guard, evaluation, records, sample_log)
        train_step = TrainStep(parts.engine, config, groups, guard, parts.heartbeat)
        requests = Requests(stop, config.train.run_dir, groups)
        inputs = InputQueue(train_loader, groups.device)
        trainer = Trainer(config, state, inputs, train_step, hooks, requests, parts.heartbeat)
        code = trainer.run()
    if code == EXIT_REQUEUE and stop.received is not None:
        logger.warning("stopped by %s with a checkpoint; requeue", stop.received.name)
    if code == EXIT_DONE and records is not None:
        records.plot()
    return code


def _evaluation(
    parts: _Assembled,
    meter: ThroughputMeter,
    validation: ValidationLoader | None,
    records: RunRecords | None,
) -> EvaluateHook | None:
    if validation is None:
        return None

    def validate() -> Evaluation:
        with parts.heartbeat.section(Section.EVALUATION):
            return evaluate(parts.engine.module, validation, parts.groups)

    report = records.report if records is not None else None
    return EvaluateHook(parts.config.train.eval_every, validate, meter, report)


def _make_up_for_validation(
    evaluation: EvaluateHook, step: int, records: RunRecords | None, groups: ProcessGroups
) -> None:
    """Validate a step after which the process before was interrupted, and had a deadline."""
    lacking = records is not None and records.lack_validation(step)
    if all_reduce_max(torch.tensor(int(lacking), device=groups.device), groups).item():
        evaluation.validate(step)


def _hooks(
    parts: _Assembled,
    meter: ThroughputMeter,
    guard: Guard,
    evaluation: EvaluateHook | None,
    records: RunRecords | None,
    sample_log: SampleLog | None,
) -> list[Hook]:
    """What this rank does after a step, in order."""
    config = parts.config
    hooks: list[Hook] = []
    if sample_log is not None:
        hooks.append(SampleLogHook(sample_log))
    if records is not None:
        hooks.append(
            LogHook(config.log.every, last_step(config), meter, records.writer, records.console)
        )
    if evaluation is not None:
        hooks.append(evaluation)
    if every := config.guard.replica_check_every:
        hooks.append(ReplicaHook(every, functools.partial(_check_replicas, parts)))
    begin = functools.partial(_save, parts, guard)
    tell = records.tell_of_checkpoint if records is not None else None
    save = SaveHook(config.checkpoint, begin, parts.saver, meter, sample_log, tell, parts.heartbeat)
    hooks.append(save)
    return hooks


def _meter(config: RunConfig, groups: ProcessGroups, first_step: int) -> ThroughputMeter:
    rate = measure_matmul_rate(groups.device, DTYPES[config.precision.dtype])
    short = config.data.short_sequence_length
    return ThroughputMeter(
        work=_step_work(config, config.data.sequence_length),
        matmul_rate=rate * groups.world_size,
        first_work=_step_work(config, short),
        first_steps=config.data.short_steps - first_step,
    )


def _step_work(config: RunConfig, length: int) -> StepWork:
    model, micro = config.model, config.train.micro_batch_size
    return StepWork(
        config.train.global_batch_size * length,
        training_flops_per_token(model, length, micro, config.objective.mask_probability),
        recomputed_flops(model, length, micro, config.parallel.recompute),
    )


def _check_replicas(parts: _Assembled, step: int) -> None:
    check_replicas(parts.engine.module, parts.model.specs, parts.groups, step)


def _save(parts: _Assembled, guard: Guard, state: TrainState, wait: bool) -> Saved | None:
    if parts.config.guard.replica_check_every:
        # A checkpoint must not hold what a faulty rank has made of the weights.
        _check_replicas(parts, state.step)
    identity = parts.data.identity
    metadata = CheckpointMetadata(
        step=state.step,
        consumed_samples=state.consumed_samples,
        config=config_to_dict(parts.config),
        tokenizer_fingerprint=identity.tokenizer_fingerprint,
        tokenizer_path=identity.tokenizer_path,
        data_fingerprint=identity.data_fingerprint,
        guard=asdict(guard.state),
    )
    keep = parts.config.checkpoint
    retention = Retention(keep.keep_last, keep.keep_every, guard.last_good_step)
    if wait:
        return parts.saver.save(metadata, retention)
    parts.saver.start(metadata, retention)
    return None
