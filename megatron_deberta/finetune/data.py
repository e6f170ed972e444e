"""Data of fine-tuning runs: examples, their order, and validation by the task's metrics."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron_deberta.checkpoint.resume import Identity
from megatron_deberta.config import validate_for_world
from megatron_deberta.config.phases import Stage
from megatron_deberta.config.rules import batch_arithmetic
from megatron_deberta.config.schema import BALANCED, RunConfig
from megatron_deberta.data import Integers
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.data.loader import StepSampler, TrainLoader
from megatron_deberta.data.randomness import Purpose, hash_values, mix64
from megatron_deberta.distributed.control import raise_on_all_ranks
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.evaluate.splits import (
    Split,
    TaskBatchBuilder,
    TaskRows,
    check_task,
    read_split,
    task_rows,
    validate_split,
)
from megatron_deberta.observe.throughput import StepWork
from megatron_deberta.tasks.encoded import IGNORED, EncodedDataset
from megatron_deberta.tasks.encoding import encode
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.reading import read_examples
from megatron_deberta.tasks.scoring import Outputs, score
from megatron_deberta.tasks.task import (
    DEV,
    POOLED_HEADS,
    TRAIN,
    TaskConfig,
    load_task,
    run_task_name,
    save_task,
)
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer
from megatron_deberta.train.data import Validator, rows_work
from megatron_deberta.train.records import RunRecords

# Batches whose examples are sorted by length together. Larger pools have less padding; smaller ones
# mix examples more.
_POOL_BATCHES = 50
_SHOWN = 12
"""Class weights that the log shows; all are in ``config.yaml``."""


class EpochOrder:
    """Permutes the examples of each epoch, in batches of similar length.

    An epoch has as many samples as its batches; the last batch of random examples is filled with
    -1, so that every example occurs once.

    Args:
        lengths: tokens of each example.
        batch_size: samples per optimizer step.
        seed: of the run.
        by_length: group examples of similar length; batches are in random order.
    """

    def __init__(self, lengths: Integers, batch_size: int, seed: int, *, by_length: bool) -> None:
        """See the class."""
        self._lengths = lengths
        self._batch_size = batch_size
        self._seed = seed
        self._by_length = by_length
        # Two epochs, because workers may build batches of the next one already.
        self._order = lru_cache(2)(self._permute)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return -(-len(self._lengths) // self._batch_size)

    def examples(self, samples: Sequence[int]) -> Integers:
        """Return the example of each global sample index, -1 for none."""
        size = self.steps_per_epoch * self._batch_size
        return np.array([self._order(s // size)[s % size] if s >= 0 else -1 for s in samples])

    def _permute(self, epoch: int) -> Integers:
        """Return the examples of an epoch in order."""
        number, steps = len(self._lengths), self.steps_per_epoch
        key = mix64(self._seed, Purpose.EXAMPLE_ORDER, epoch)
        order = np.full(steps * self._batch_size, -1, np.int64)
        order[:number] = np.argsort(hash_values(key, np.arange(number)), kind="stable")
        if not self._by_length:
            return order
        pool = np.arange(order.size) // (_POOL_BATCHES * self._batch_size)
        # Missing examples come last, with the longest.
        lengths = np.where(order < 0, np.iinfo(np.int64).max, self._lengths[order])
        order = order[np.lexsort((lengths, pool))]
        key = mix64(self._seed, Purpose.BATCH_ORDER, epoch)
        batches = np.argsort(hash_values(key, np.arange(steps)), kind="stable")
        return order.reshape(steps, self._batch_size)[batches].reshape(-1)


logger = logging.getLogger(__name__)


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
            raise ConfigError(
                f"{records.run_dir}: cannot be written: {error.strerror or error}"
            ) from error
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
        described = [
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
        if weights := config.finetune.class_weights:
            pairs = list(zip(config.model.labels, weights, strict=True))
            shown = ", ".join(f"{label} {float(weight):.3g}" for label, weight in pairs[:_SHOWN])
            described.append(("class weights", f"{shown}, ..." if len(pairs) > _SHOWN else shown))
        return described


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
                names = [TRAIN, DEV] if DEV in task.splits else [TRAIN]
                run_dir = Path(config.train.run_dir)
                splits = {
                    name: read_split(config, task, name, tokenizer, run_dir) for name in names
                }
    train = splits[TRAIN]
    _check_relevance(config, task, train.examples)
    identity = Identity(
        tokenizer_path=str(Path(tokenizer_path).resolve()),
        tokenizer_fingerprint=tokenizer.fingerprint,
        data_fingerprint=train.encoded.fingerprint,
        validation_fingerprint=splits[DEV].encoded.fingerprint if DEV in splits else "",
    )
    epochs = config.finetune.epochs
    config = with_steps(config, task_rows(config, train.encoded, tokenizer))
    config = with_class_weights(config, train.encoded)
    if epochs:
        check_warmup(config, f"finetune.epochs={epochs:g} of {len(train.examples):,} examples")
    validate_for_world(config, groups.world_size)
    return config, TaskData(config, task, identity, tokenizer, train, splits.get(DEV))


def _check_relevance(config: RunConfig, task: TaskConfig, examples: Sequence[Example]) -> None:
    """Check that the relevance of passages fits the loss.

    Raises:
        DataError: it does not.
    """
    if task.head != "rerank" or config.finetune.ranking_loss != "bce":
        return
    high = next((e for e in examples if max(e.relevance, default=0.0) > 1), None)
    if high is not None:
        raise DataError(
            f"task {task.name}: relevance {max(high.relevance):g} of example {high.id} is above 1, "
            "but finetune.ranking_loss=bce needs 0 to 1; use ranknet, listnet or softmax"
        )


def planned_steps(config: RunConfig) -> RunConfig:
    """Set the steps of a run before it starts, as ``open_task_data`` will.

    Raises:
        ConfigError: the task has no training data.
        DataError: a file is missing or malformed, or the tokenizer cannot be loaded.
    """
    task = load_task(config.finetune.task or "")
    tokenizer = load_tokenizer(config.tokenizer.path or "")
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


def with_class_weights(config: RunConfig, encoded: EncodedDataset) -> RunConfig:
    """Replace ``finetune.class_weights=balanced`` by numbers, which do not depend on the layout.

    Args:
        config: the run.
        encoded: all training examples.
    """
    if config.finetune.class_weights != BALANCED:
        return config
    labels = encoded.labels
    if config.model.head in POOLED_HEADS:
        # An example counts once, in however many windows it is.
        labels = labels[encoded.example_offsets[:-1]]
    numbers = balanced_weights(labels, len(config.model.labels))
    weights = tuple(map(repr, numbers.tolist()))
    return replace(config, finetune=replace(config.finetune, class_weights=weights))


def balanced_weights(labels: npt.NDArray[Any], num_classes: int) -> npt.NDArray[np.float64]:
    """Return class weights as scikit-learn's ``compute_class_weight("balanced")``.

    Args:
        labels: classes, -100 = not scored; or ``[examples, labels]`` of 1, 0 or -100.
        num_classes: number of classes or labels.

    Returns:
        Of classes, targets / (classes that occur * targets of the class). Of labels, the weight of
        examples that have it relative to those that have not: their ratio. 1 where there are no
        targets of a class, or of one side of a label.
    """
    if labels.ndim == 2:
        known = labels[labels[:, 0] != IGNORED]
        positive = (known == 1).sum(axis=0)
        ratio: npt.NDArray[np.float64] = (len(known) - positive) / np.maximum(positive, 1)
        return np.where((positive > 0) & (ratio > 0), ratio, 1.0)
    counts = np.bincount(labels[labels != IGNORED], minlength=num_classes)
    shares = np.maximum(counts, 1) * np.count_nonzero(counts)
    return np.where(counts > 0, counts.sum() / np.maximum(shares, 1), 1.0)


def epoch_order(config: RunConfig, rows: TaskRows) -> EpochOrder:
    """Return the order of a run's training samples."""
    return EpochOrder(
        rows.lengths,
        config.train.global_batch_size,
        config.train.seed,
        by_length=config.finetune.batch_by_length,
    )


def constant_outputs(task: TaskConfig, train: Split, dev: Split) -> Outputs | None:
    """Return the outputs that predict the most frequent label of the training examples.

    Of several labels per example, it is the only one. Of multiple choice, it is the most frequent
    position of the right answer; in regression, the mean score; of passages, the same score for
    all.

    Args:
        task: the task.
        train: training examples.
        dev: the examples to predict.

    Returns:
        Outputs as for ``tasks.scoring.score``; None: the head has no such prediction (spans,
        embed).
    """
    encoded = dev.encoded
    if task.head in ("spans", "embed"):
        return None
    if task.head == "regression":
        mean = np.mean([example.label for example in train.examples if example.label is not None])
        return np.full(encoded.num_rows, mean, np.float32)
    if task.head == "rerank":
        # Equal scores: metrics are then those that a random order has on average.
        return np.zeros(encoded.num_rows, np.float32)
    if task.head == "tokens":
        labels = [tag for example in train.examples for tag in example.tags]
    elif task.head == "multilabel":
        labels = [n for example in train.examples for n, has in enumerate(example.tags) if has]
    else:
        labels = [int(example.label) for example in train.examples if example.label is not None]
    most = int(np.bincount(labels or [0]).argmax())
    if task.head == "choices":
        chosen = np.zeros(encoded.num_rows, np.float32)
        first, end = encoded.example_offsets[:-1] + most, encoded.example_offsets[1:]
        chosen[first[first < end]] = 1
        return chosen
    rows = len(encoded.input_ids) if task.head == "tokens" else encoded.num_rows
    # Probabilities of several labels beyond any threshold.
    constant = np.full((rows, len(task.labels)), -30, np.float32)
    constant[:, most] = 30
    return constant
