"""Data of fine-tuning runs: examples, batches and validation by the task's metrics."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from megatron_deberta.config import validate_for_world
from megatron_deberta.config.phases import Stage
from megatron_deberta.config.rules import batch_arithmetic
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.data.loader import StepSampler, TrainLoader
from megatron_deberta.distributed.control import broadcast_text, raise_on_all_ranks
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import ConfigError
from megatron_deberta.finetune.batches import (
    OutputCollector,
    TaskBatchBuilder,
    TaskBatches,
    TaskRows,
)
from megatron_deberta.finetune.order import EpochOrder
from megatron_deberta.model.heads import num_outputs
from megatron_deberta.objectives import build_objective
from megatron_deberta.observe.throughput import StepWork
from megatron_deberta.tasks.encoded import EncodedDataset
from megatron_deberta.tasks.encoding import encode
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.reading import read_examples
from megatron_deberta.tasks.scoring import Outputs, nonfinite_rows, score
from megatron_deberta.tasks.task import TaskConfig, load_task, run_task_name, save_task
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer
from megatron_deberta.train.data import Validator, rows_work
from megatron_deberta.train.evaluate import Evaluation, evaluate, never
from megatron_deberta.train.records import RunRecords
from megatron_deberta.train.selection import SCORE
from megatron_deberta.train.start import Identity
from megatron_deberta.train.step import sum_over_batch_ranks

TRAIN, DEV = "train", "dev"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Split:
    """Examples of one split and their encoding."""

    examples: Sequence[Example]
    encoded: EncodedDataset


@dataclass(frozen=True, slots=True)
class TaskData:
    """Training and validation examples of a run.

    Attributes:
        config: the run.
        task: the task.
        identity: of tokenizer and training examples.
        tokenizer: the model's tokenizer.
        train: training examples.
        dev: examples for validation; None: the task has none.
    """

    config: RunConfig
    task: TaskConfig
    identity: Identity
    tokenizer: Tokenizer
    train: Split
    dev: Split | None

    def train_loader(
        self, config: RunConfig, groups: ProcessGroups, consumed_samples: int, stage: Stage
    ) -> TrainLoader[TaskBatch]:
        """Build this rank's training loader; arguments as in `RunData`."""
        train, rows = config.train, task_rows(config, self.train.encoded, self.tokenizer)
        sampler = StepSampler(
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            dp_rank=groups.dp_rank,
            dp_size=groups.dp_size,
        )
        return TrainLoader(
            TaskBatchBuilder(rows, epoch_order(config, rows).examples),
            sampler,
            consumed_samples,
            num_workers=config.data.num_workers,
            pin_memory=torch.cuda.is_available() and train.device != "cpu",
        )

    def validator(self, config: RunConfig, groups: ProcessGroups) -> Validator | None:
        """Build the validation on the dev split, if there is one."""
        if self.dev is None:
            return None
        return functools.partial(
            validate_split,
            config=config,
            task=self.task,
            split=self.dev,
            tokenizer=self.tokenizer,
            groups=groups,
        )

    def prepare_records(self, records: RunRecords) -> None:
        """Keep the task in the run folder; record the metrics of a constant prediction.

        The task is kept for commands that find its file no longer. Metrics that are recorded
        already stay.
        """
        try:
            save_task(self.task, Path(records.run_dir))
        except OSError as error:
            raise ConfigError(f"{records.run_dir}: cannot be written: {error}") from error
        if self.dev is None:
            return
        outputs = constant_outputs(self.task, self.train, self.dev)
        if outputs is None:
            return
        found = score(self.task, self.dev.examples, self.dev.encoded, outputs)
        records.write_baseline({str(name): found[name] for name in self.task.metrics})

    def step_work(self, config: RunConfig) -> StepWork:
        """Return the work of a step of examples of mean length."""
        encoded = self.train.encoded
        samples = task_rows(config, encoded, self.tokenizer).num_samples
        return rows_work(config, len(encoded.input_ids) / samples)

    def describe(self, config: RunConfig, dp_size: int) -> list[tuple[str, str]]:
        """Return the examples per step, and the number of steps and epochs."""
        train, batch = config.train, batch_arithmetic(config, dp_size)
        encoded = self.train.encoded
        rows = task_rows(config, encoded, self.tokenizer)
        epochs = train.steps / epoch_order(config, rows).steps_per_epoch
        dev = "" if self.dev is None else f", {len(self.dev.examples):,} for validation"
        return [
            (
                "task",
                f"{self.task.name}: {len(self.train.examples):,} examples = {encoded.num_rows:,} "
                f"rows of {encoded.lengths.mean():.0f} tokens (mean){dev}",
            ),
            (
                "batch",
                f"{train.global_batch_size:,} examples per step ({batch.micro_batch_size} per "
                f"micro batch x {batch.accumulation_steps} accumulated x {batch.dp_size} "
                "data-parallel)",
            ),
            ("training", f"{train.steps:,} steps = {epochs:.3g} epochs"),
        ]


def open_task_data(config: RunConfig, groups: ProcessGroups) -> tuple[RunConfig, TaskData]:
    """Read and encode a run's examples; set the steps that depend on their number.

    Rank 0 encodes, the others read its cache.

    Raises:
        ConfigError: the task's head or labels are not the model's, or ``train.steps`` is too small
            for ``optimizer.warmup_steps``.
        DataError: a file is missing or malformed, or the tokenizer cannot be loaded.
    """
    task = load_training_task(config)
    check_task(config, task)
    tokenizer_path = config.tokenizer.path or ""
    tokenizer = load_tokenizer(tokenizer_path)
    splits: dict[str, Split] = {}
    for is_turn in (groups.rank == 0, groups.rank != 0):
        # The second pass finds the files of the first.
        with raise_on_all_ranks(groups):
            if is_turn:
                names = [name for name in (TRAIN, DEV) if name in task.splits]
                run_dir = Path(config.train.run_dir)
                splits = {
                    name: read_split(config, task, name, tokenizer, run_dir) for name in names
                }
    if TRAIN not in splits:
        raise ConfigError(f"task {task.name} has no split {TRAIN!r}; name its files")
    train = splits[TRAIN]
    identity = Identity(
        tokenizer_path=str(Path(tokenizer_path).resolve()),
        tokenizer_fingerprint=tokenizer.fingerprint,
        data_fingerprint=train.encoded.fingerprint,
        validation_fingerprint=splits[DEV].encoded.fingerprint if DEV in splits else "",
    )
    epochs = config.finetune.epochs
    config = with_steps(config, task_rows(config, train.encoded, tokenizer))
    if epochs:
        check_warmup(config, f"finetune.epochs={epochs:g} of {len(train.examples):,} examples")
    validate_for_world(config, groups.world_size)
    return config, TaskData(config, task, identity, tokenizer, train, splits.get(DEV))


def planned_steps(config: RunConfig) -> RunConfig:
    """Set the steps of a run before it starts, as ``open_task_data`` will.

    Raises:
        ConfigError: the task has no training data.
        DataError: a file is missing or malformed, or the tokenizer cannot be loaded.
    """
    task = load_task(config.finetune.task or "")
    tokenizer = load_tokenizer(config.tokenizer.path or "")
    if TRAIN not in task.splits:
        raise ConfigError(f"task {task.name} has no split {TRAIN!r}; name its files")
    examples = read_examples(task, config.finetune.data or "", TRAIN)
    encoded = encode(task, examples, tokenizer, config.data.sequence_length)
    rows = task_rows(config, encoded, tokenizer)
    return with_steps(config, rows)


def load_training_task(config: RunConfig) -> TaskConfig:
    """Load the task of a run that starts or resumes; its copy, if its file is gone since.

    Raises:
        ConfigError: see `load_task`.
    """
    name = config.finetune.task or ""
    is_gone = os.path.isabs(name) and not os.path.lexists(name)
    return load_task(run_task_name(name, Path(config.train.run_dir)) if is_gone else name)


def check_warmup(config: RunConfig, origin: str) -> None:
    """Check that the warm-up ends before the run.

    Args:
        config: the run with its number of steps.
        origin: epochs and examples that this number comes from, for the message.

    Raises:
        ConfigError: it does not.
    """
    steps, optimizer = config.train.steps, config.optimizer
    if optimizer.warmup_fraction is None and optimizer.warmup_steps > steps:
        raise ConfigError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} exceeds the {steps} steps of {origin}"
            "; published settings are meant for the whole data set: add "
            "optimizer.warmup_fraction=0.1"
        )


def with_steps(config: RunConfig, rows: TaskRows) -> RunConfig:
    """Set the numbers of steps that ``finetune`` states in epochs."""
    settings, train = config.finetune, config.train
    per_epoch = epoch_order(config, rows).steps_per_epoch
    if settings.epochs:
        train = replace(train, steps=math.ceil(settings.epochs * per_epoch))
    if settings.validations_per_epoch:
        every = max(1, round(per_epoch / settings.validations_per_epoch))
        train = replace(train, eval_every=every)
    return replace(config, train=train, finetune=replace(settings, epochs=None))


def check_task(config: RunConfig, task: TaskConfig) -> None:
    """Check that a run's model has the head and the classes of a task.

    Raises:
        ConfigError: it has not.
    """
    labels = class_names(task)
    if (task.head, labels) != (config.model.head, config.model.labels):
        raise ConfigError(
            f"task {task.name} has the head {task.head} with labels {list(labels)}, the model "
            f"{config.model.head} with {list(config.model.labels)}; use the task that the model "
            "was fine-tuned on, or fine-tune it again"
        )


def class_names(task: TaskConfig) -> tuple[str, ...]:
    """Return the names of a model's classes; empty for heads without classes."""
    if task.head not in ("classification", "tokens"):
        return ()
    return tuple(task.id2label.values())


def read_split(
    config: RunConfig, task: TaskConfig, name: str, tokenizer: Tokenizer, run_dir: Path | None
) -> Split:
    """Read and encode a split; encoded examples are kept in ``finetune.cache``.

    Args:
        config: the run.
        task: its task.
        name: the split.
        tokenizer: the model's tokenizer.
        run_dir: folder of the run, which keeps them if no other is set; None: they are not kept.
    """
    examples = read_examples(task, config.finetune.data or "", name)
    cache = (
        Path(config.finetune.cache) if config.finetune.cache else run_dir and run_dir / "encoded"
    )
    length = config.data.sequence_length
    return Split(examples, encode(task, examples, tokenizer, length, cache=cache))


def task_rows(config: RunConfig, encoded: EncodedDataset, tokenizer: Tokenizer) -> TaskRows:
    """Return the training or validation samples of encoded examples.

    Args:
        config: the run.
        encoded: the examples.
        tokenizer: the model's tokenizer.
    """
    parallel = config.parallel
    return TaskRows(
        config.model.head,
        encoded,
        (tokenizer.cls_id, tokenizer.sep_id),
        tokenizer.pad_id,
        parallel.tensor_parallel_size if parallel.sequence_parallel else 1,
        config.finetune.pack_rows,
    )


def epoch_order(config: RunConfig, rows: TaskRows) -> EpochOrder:
    """Return the order of a run's training samples."""
    return EpochOrder(
        rows.lengths,
        config.train.global_batch_size,
        config.train.seed,
        by_length=config.finetune.batch_by_length,
    )


def validate_split(
    module: nn.Module,
    *,
    config: RunConfig,
    task: TaskConfig,
    split: Split,
    tokenizer: Tokenizer,
    groups: ProcessGroups,
    must_stop: Callable[[], bool] = never,
) -> Evaluation | None:
    """Compute the loss and the task's metrics. Collective over all ranks.

    Args:
        module: the objective's model with its loss.
        config: the run.
        task: the task.
        split: examples to score.
        tokenizer: the model's tokenizer.
        groups: the rank grid.
        must_stop: called before each batch, with the same result on every rank.

    Returns:
        The metrics, NaN if an output is not finite; None: told to stop.
    """
    found = run_split(module, config, split.encoded, tokenizer, groups, must_stop)
    if found is None:
        return None
    outputs, evaluation = found
    metrics: dict[str, float] = {}
    with raise_on_all_ranks(groups):
        if groups.rank == 0:
            # A run goes on: the guard may roll it back, and no such step is the best.
            if bad := nonfinite_rows(split.encoded, outputs):
                logger.warning(
                    "validation: the model's outputs are infinite or not a number in %s of %s "
                    "rows, so the metrics are not a number",
                    f"{bad:,}",
                    f"{split.encoded.num_rows:,}",
                )
                metrics = {str(name): math.nan for name in task.metrics}
            else:
                metrics = score(task, split.examples, split.encoded, outputs)
    metrics = json.loads(broadcast_text(json.dumps(metrics), groups))
    values = {"loss": evaluation.metrics["loss"], **metrics, SCORE: metrics[task.metrics[0]]}
    shown = [f"{name.replace('_', ' ')} {values[name]:.4f}" for name in ("loss", *task.metrics)]
    return Evaluation(values, " | ".join(shown))


def constant_outputs(task: TaskConfig, train: Split, dev: Split) -> Outputs | None:
    """Return the outputs that predict the most frequent label of the training examples.

    Of multiple choice, it is the most frequent position of the right answer; in regression, the
    mean score.

    Args:
        task: the task.
        train: training examples.
        dev: the examples to predict.

    Returns:
        Outputs as for ``tasks.scoring.score``; None: the head has no such prediction (spans).
    """
    encoded = dev.encoded
    if task.head == "spans":
        return None
    if task.head == "regression":
        mean = np.mean([example.label for example in train.examples if example.label is not None])
        return np.full(encoded.num_rows, mean, np.float32)
    if task.head == "tokens":
        labels = [tag for example in train.examples for tag in example.tags]
    else:
        labels = [int(example.label) for example in train.examples if example.label is not None]
    most = int(np.bincount(labels or [0]).argmax())
    if task.head == "choices":
        chosen = np.zeros(encoded.num_rows, np.float32)
        first, end = encoded.example_offsets[:-1] + most, encoded.example_offsets[1:]
        chosen[first[first < end]] = 1
        return chosen
    rows = len(encoded.input_ids) if task.head == "tokens" else encoded.num_rows
    constant = np.zeros((rows, len(task.labels)), np.float32)
    constant[:, most] = 1
    return constant


def run_split(
    module: nn.Module,
    config: RunConfig,
    encoded: EncodedDataset,
    tokenizer: Tokenizer,
    groups: ProcessGroups,
    must_stop: Callable[[], bool] = never,
) -> tuple[Outputs, Evaluation] | None:
    """Compute a model's outputs for all rows, and its loss. Collective over all ranks.

    Args:
        module: the objective's model with its loss.
        config: the run.
        encoded: the examples.
        tokenizer: the model's tokenizer.
        groups: the rank grid.
        must_stop: called before each batch, with the same result on every rank.

    Returns:
        The outputs, fp32 of the shape of `output_shape`, equal on all ranks, and the loss; None:
        told to stop.
    """
    rows = task_rows(config, encoded, tokenizer)
    collector = OutputCollector(
        config.model.head, encoded, num_outputs(config.model), groups.device
    )
    batches = TaskBatches(rows, config.train.micro_batch_size, groups.dp_rank, groups.dp_size)
    objective = build_objective(config)
    evaluation = evaluate(module, batches, groups, objective, must_stop, collector.add)
    if evaluation is None:
        return None
    # Every row was computed by one data-parallel rank; the others hold zeros.
    outputs: Outputs = sum_over_batch_ranks(collector.outputs, groups).cpu().numpy()
    return outputs, evaluation
