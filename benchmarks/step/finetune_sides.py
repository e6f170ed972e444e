"""Sides of the fine-tuning comparison: this project's steps and transformers' ``Trainer``.

Each side trains whole epochs in a process of its own and waits for a line of standard input before
each, so that sides take turns.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import trainer_pt_utils

from benchmarks.lib.measuring import peak_resident_bytes
from benchmarks.lib.stock import stock_config
from megatron_deberta.config.schema import (
    FinetuneConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.data.loader import StepSampler, TrainLoader
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.evaluate.splits import TaskBatchBuilder, TaskRows
from megatron_deberta.finetune.data import epoch_order
from megatron_deberta.tasks.encoded import EncodedDataset
from megatron_deberta.train.prefetch import InputQueue
from megatron_deberta.train.setup import build_rank_model, set_determinism
from megatron_deberta.train.step import TrainStep

CPU = torch.device("cpu")
STOCK = {
    "classification": transformers.DebertaV2ForSequenceClassification,
    "spans": transformers.DebertaV2ForQuestionAnswering,
}


@dataclass(frozen=True)
class Work:
    """What all sides train: the same model, rows and batch size.

    Attributes:
        model: with the task's head.
        rows: encoded rows of an epoch.
        batch_size: rows per optimizer step, in one micro batch.
        epochs: number of epochs.
    """

    model: ModelConfig
    rows: EncodedDataset
    batch_size: int
    epochs: int

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch."""
        return -(-self.rows.num_rows // self.batch_size)

    def run(self, engine: str) -> RunConfig:
        """Return the run of this project."""
        return RunConfig(
            model=self.model,
            objective=ObjectiveConfig(name=self.model.head),
            optimizer=OptimizerConfig(learning_rate=2e-5, warmup_steps=2),
            parallel=ParallelConfig(engine=engine),  # type: ignore[arg-type]
            train=TrainConfig(
                steps=self.epochs * self.steps_per_epoch,
                global_batch_size=self.batch_size,
                micro_batch_size=self.batch_size,
            ),
            finetune=FinetuneConfig(task="benchmark", data="none"),
        )


class Turns:
    """Waits for turns on standard input and reports each on standard output."""

    def __init__(self) -> None:
        self._tokens = self._places = self._start = self._cpu_start = 0.0

    def wait(self) -> None:
        """Wait for the next turn; start its clock."""
        print("ready", flush=True)
        if not sys.stdin.readline():
            raise SystemExit("the comparison has ended")
        self._tokens = self._places = 0.0
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def count(self, mask: Tensor) -> None:
        """Count the tokens and the places of a batch by its attention mask."""
        self._tokens += int(mask.sum())
        self._places += mask.numel()

    def report(self) -> None:
        """Report time, processor time, tokens and places of this turn, and the peak memory."""
        record = {
            "seconds": time.perf_counter() - self._start,
            "cpu_seconds": time.process_time() - self._cpu_start,
            "tokens": self._tokens,
            "places": self._places,
            "peak_bytes": peak_resident_bytes(),
        }
        print(json.dumps(record), flush=True)


def train_ours(work: Work, engine_name: str) -> None:
    """Train with this project's loader, step and engine."""
    set_determinism(CPU, read_environment())
    config, groups, turns = work.run(engine_name), single_process_groups(CPU), Turns()
    rows = TaskRows(work.model.head, work.rows, (1, 2), 0)
    sampler = StepSampler(
        global_batch_size=work.batch_size, micro_batch_size=work.batch_size, dp_rank=0, dp_size=1
    )
    builder = TaskBatchBuilder(rows, epoch_order(config, rows).examples)
    loader = TrainLoader(builder, sampler, 0, num_workers=0, pin_memory=False)
    model = build_rank_model(config, groups)
    engine = build_engine(config, model.module, model.specs, groups)
    inputs, step = InputQueue(loader, CPU), TrainStep(engine, config, groups)
    try:
        for epoch in range(work.epochs):
            turns.wait()
            for number in range(work.steps_per_epoch):
                batches = inputs.take()
                step(epoch * work.steps_per_epoch + number, batches)
                for batch in inputs.host:
                    turns.count(batch.inputs.is_token[batch.row_index >= 0])
            turns.report()
    finally:
        engine.destroy()


def train_stock(work: Work, strategy: str) -> None:
    """Train with transformers' ``Trainer``.

    Args:
        work: model and rows.
        strategy: its ``train_sampling_strategy``.
    """
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=work.batch_size,
            num_train_epochs=work.epochs,
            train_sampling_strategy=strategy,
            learning_rate=2e-5,
            warmup_steps=2,
            weight_decay=0.01,
            adam_epsilon=1e-6,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = transformers.Trainer(
            STOCK[work.model.head](stock_config(work.model)),
            arguments,
            train_dataset=Rows(work.rows, work.model.head),  # type: ignore[arg-type]
            data_collator=lambda rows: collate(rows, turns),
            callbacks=[TurnCallback(turns)],
        )
        with whole_pools(work):
            trainer.train()


class TurnCallback(transformers.TrainerCallback):
    """Lets an epoch wait for its turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Wait."""
        self._turns.wait()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Report."""
        self._turns.report()


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Encoded rows with the argument names of transformers' models."""

    def __init__(self, rows: EncodedDataset, head: str) -> None:
        self._rows, self._head = rows, head

    def __len__(self) -> int:
        """Number of rows."""
        return self._rows.num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a row without padding."""
        place, labels = self._rows.row(index), self._rows.labels[index]
        row = {"input_ids": torch.from_numpy(self._rows.input_ids[place].astype("int64"))}
        if self._head == "spans":
            first, last = torch.from_numpy(labels.copy())
            return row | {"start_positions": first, "end_positions": last}
        return row | {"labels": torch.tensor(int(labels))}


def collate(rows: Sequence[Mapping[str, Tensor]], turns: Turns | None = None) -> dict[str, Tensor]:
    """Pad to the longest row of the batch."""
    ids = [row["input_ids"] for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    batch = {"input_ids": pad_sequence(ids, batch_first=True), "attention_mask": mask}
    for name in rows[0].keys() - batch.keys():
        batch[name] = torch.stack([row[name] for row in rows])
    if turns is not None:
        turns.count(mask)
    return batch


@contextmanager
def whole_pools(work: Work) -> Iterator[None]:
    """Sort as many batches together as transformers does for a large data set.

    It sorts 50 batches together, but at most a quarter of the data set. The rows of the comparison
    stand for those of a larger one.
    """
    original, batches = trainer_pt_utils.get_length_grouped_indices, min(50, work.steps_per_epoch)

    def grouped(lengths: Any, batch_size: int, mega_batch_mult: Any = None, **rest: Any) -> Any:
        return original(lengths, batch_size, mega_batch_mult or batches, **rest)

    trainer_pt_utils.get_length_grouped_indices = grouped
    try:
        yield
    finally:
        trainer_pt_utils.get_length_grouped_indices = original
