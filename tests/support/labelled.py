"""Tiny labelled data of every head, and the runs that train on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from megatron_deberta.config.schema import (
    CLASS_HEADS,
    GROUPED_HEADS,
    LORA_TARGETS,
    FinetuneConfig,
    Head,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
    with_task_head,
)
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.data.loader import StepSampler
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.evaluate.splits import TaskBatchBuilder, TaskRows
from megatron_deberta.finetune.data import EpochOrder
from megatron_deberta.tasks.encoded import EncodedDataset

HEADS: tuple[Head, ...] = (
    "classification", "multilabel", "regression", "spans", "tokens", "choices", "rerank",
)  # fmt: skip
"""Heads of transformers' classes."""
LABELS = ("no", "maybe", "yes")
SMALL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    ffn_hidden_size=64,
    vocab_size=97,
    max_position_embeddings=64,
    max_relative_positions=32,
    position_buckets=8,
)


def encoded(
    head: Head,
    num_examples: int = 24,
    *,
    vocab_size: int = 97,
    choices: tuple[int, ...] = (2, 3, 4),
    lengths: tuple[int, int] = (5, 19),
) -> EncodedDataset:
    """Return random examples.

    Those of grouped heads have these numbers of choices in turn, those to embed a text, one that
    matches in three of four, and one that does not.
    """
    random = np.random.default_rng(7)
    counts = choices if head in GROUPED_HEADS else (3,) if head == "embed" else (1,)
    rows_of = [counts[i % len(counts)] for i in range(num_examples)]
    sizes = random.integers(*lengths, sum(rows_of), endpoint=True)
    offsets = np.concatenate([[0], sizes.cumsum()]).astype(np.int64)
    ids = random.integers(4, vocab_size, offsets[-1]).astype(np.int32)
    ids[offsets[:-1]], ids[offsets[1:] - 1] = 1, 2
    labels: Any = random.integers(0, len(LABELS), num_examples)
    if head == "multilabel":
        labels = (random.random((num_examples, len(LABELS))) < 0.25).astype(np.int8)
    elif head == "regression":
        labels = random.normal(0, 1, num_examples).astype(np.float32)
    elif head == "spans":
        labels = np.sort(random.integers(0, sizes[:, None], (num_examples, 2)), axis=1)
    elif head == "tokens":
        labels = random.integers(0, len(LABELS), offsets[-1]).astype(np.int32)
        labels[random.random(offsets[-1]) < 0.3] = -100
    elif head == "embed":
        labels = random.choice([0.5, 1.0], num_examples, p=[0.25, 0.75]).astype(np.float32)
    elif head == "choices":
        labels = random.integers(0, rows_of)
    elif head == "rerank":
        labels = (random.integers(0, 3, sum(rows_of)) / 2).astype(np.float32)
    return EncodedDataset(
        input_ids=ids,
        token_type_ids=np.zeros(offsets[-1], np.uint8),
        row_offsets=offsets,
        example_index=np.repeat(np.arange(num_examples), rows_of),
        labels=labels,
        char_offsets=np.zeros((0, 2), np.int32),
        word_index=np.zeros(0, np.int32),
    )


def labelled_run(
    head: Head,
    *,
    dropout: float = 0.0,
    sift: float = 0.0,
    model: ModelConfig = SMALL,
    parallel: ParallelConfig | None = None,
    precision: PrecisionConfig | None = None,
    micro_batch_size: int = 4,
    learning_rate: float = 1e-3,
    **finetune: Any,
) -> RunConfig:
    """Return a run of 20 steps of 8 samples; ``finetune``: values of this section."""
    finetune = {"ranking_loss": "ranknet", "lora_targets": LORA_TARGETS, **finetune}
    labels = LABELS if head in CLASS_HEADS else ()
    model = replace(model, hidden_dropout=dropout, attention_dropout=dropout)
    return RunConfig(
        model=with_task_head(model, head, labels, dropout),
        objective=ObjectiveConfig(name=head, sift_weight=sift),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=2),
        precision=precision or PrecisionConfig(),
        parallel=parallel or ParallelConfig(engine="plain"),
        train=TrainConfig(steps=20, global_batch_size=8, micro_batch_size=micro_batch_size),
        finetune=FinetuneConfig(task="tiny", data="nowhere", **finetune),
    )


def labelled_rows(config: RunConfig, data: EncodedDataset | None = None) -> TaskRows:
    """Return the samples of a run."""
    head = config.model.head
    parallel = config.parallel
    multiple = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
    pack = config.finetune.pack_rows
    return TaskRows(head, data or encoded(head), (1, 2), 0, multiple, pack)


def labelled_steps(
    config: RunConfig, groups: ProcessGroups, data: EncodedDataset | None = None
) -> Iterator[list[TaskBatch]]:
    """Yield this rank's micro batches of each step."""
    rows, train = labelled_rows(config, data), config.train
    order = EpochOrder(rows.lengths, train.global_batch_size, train.seed, by_length=True)
    builder = TaskBatchBuilder(rows, order.examples)
    sampler = StepSampler(
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        dp_rank=groups.dp_rank,
        dp_size=groups.dp_size,
    )
    for step in range(train.steps):
        first = step * train.global_batch_size
        yield [builder.build(samples) for samples in sampler.micro_batches(first)]
