"""Prediction and evaluation with a fine-tuned model, on one or more ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from megatron_deberta.checkpoint.layout import checkpoints_dir
from megatron_deberta.config.schema import DataConfig, ModelConfig, ObjectiveConfig, RunConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.evaluate.models import (
    SourceModel,
    evaluation_config,
    open_ranks,
    open_source_model,
    with_classes,
)
from megatron_deberta.evaluate.splits import (
    OutputCollector,
    Split,
    check_task,
    class_names,
    read_split,
    run_split,
    task_rows,
)
from megatron_deberta.evaluate.thresholds import model_thresholds
from megatron_deberta.hf.heads import GraphKind
from megatron_deberta.model import DebertaForTask
from megatron_deberta.model.flops import is_task_head
from megatron_deberta.model.heads import num_outputs
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.labelled import LabelledObjective
from megatron_deberta.tasks.encoding import encode
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.scoring import Outputs, score, with_best_thresholds
from megatron_deberta.tasks.task import DEV, METRICS, Head, TaskConfig, load_task, run_task_name
from megatron_deberta.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron_deberta.hf.onnx.check import Logits


@dataclass(frozen=True, slots=True)
class Predictor:
    """A fine-tuned model on this rank, with its task.

    Attributes:
        config: the run.
        task: the task.
        tokenizer: the model's tokenizer.
        module: this rank's part of the model.
        groups: the rank grid.
        run_dir: folder of the run that trained the model, where encoded examples are kept; None:
            there is none, or nothing can be written there.
        is_multi_label: each class has a probability of its own (sigmoid instead of softmax).
    """

    config: RunConfig
    task: TaskConfig
    tokenizer: Tokenizer
    module: nn.Module
    groups: ProcessGroups
    run_dir: Path | None = None
    is_multi_label: bool = False

    def run(self, split: str) -> tuple[Split, Outputs, float]:
        """Return a split, the model's outputs for it, and the mean loss. Collective: all ranks."""
        found = read_split(self.config, self.task, split, self.tokenizer, self.run_dir)
        outputs, loss = self._outputs(found)
        return found, outputs, loss

    def run_texts(self, texts: Sequence[str], pairs: Sequence[str] = ()) -> tuple[Split, Outputs]:
        """Return texts as examples, and the model's outputs for them. Collective: all ranks.

        Args:
            texts: first segments, for spans the questions.
            pairs: second segments, for spans the passages; empty: none.

        Raises:
            ConfigError: the head needs something else.
        """
        examples = text_examples(self.task, texts, pairs)
        length = self.config.data.sequence_length
        split = Split(examples, encode(self.task, examples, self.tokenizer, length))
        return split, self._outputs(split)[0]

    def _outputs(self, split: Split) -> tuple[Outputs, float]:
        result = run_split(self.module, self.config, split.encoded, self.tokenizer, self.groups)
        assert result is not None
        outputs, evaluation = result
        return outputs, evaluation.metrics["loss"]


@contextmanager
def open_predictor(
    task_name: str, model: Path, data: str, overrides: tuple[str, ...] = (), tokenizer: str = ""
) -> Iterator[Predictor]:
    """Load a fine-tuned model. Collective over the ranks of the launcher.

    Args:
        task_name: task file or name of a packaged task; empty: that of the run, or of an export
            a task with the model's head and labels, without files.
        model: run, checkpoint or export of a fine-tuned model.
        data: folder of the task's files.
        overrides: ``section.key=value``.
        tokenizer: the model's tokenizer; empty: its own.

    Raises:
        ConfigError: the model is not fine-tuned on this task.
    """
    source = open_source_model(model, tokenizer)
    if not is_task_head(source.config):
        raise ConfigError(f"{model} is not fine-tuned; run megatron-deberta finetune first")
    if source.missing:
        raise CheckpointError(
            f"{model} lacks {source.missing[0]} of the shape that its config.json says, so "
            "predictions would come from random weights; give a fine-tuned model"
        )
    if not task_name and source.run is not None:
        task_name = run_task_name(source.run.finetune.task or "", source.path.parents[1])
    task = load_task(task_name) if task_name else model_task(source.config)
    source = with_classes(source, class_names(task))
    # A published model for any number of labels can also choose the most probable one.
    is_multi_label = source.config.head == "multilabel"
    if is_multi_label and source.run is None and task.head == "classification":
        source = replace(source, config=replace(source.config, head="classification"))
    task = model_thresholds(task, source)
    config = prediction_config(task, task_name, source, data, overrides)
    check_task(config, task)
    with open_ranks(config, source) as (module, groups):
        loaded = source.load_tokenizer(config.tokenizer.path or "")
        yield Predictor(config, task, loaded, module, groups, _run_dir(source), is_multi_label)


def _run_dir(source: SourceModel) -> Path | None:
    """Return the folder of the run that a checkpoint is in, if it can be written.

    It may have another name than when the run trained, which its config has.
    """
    folder = source.path.parent.parent
    is_there = source.run is not None and source.path.parent == checkpoints_dir(folder)
    return folder if is_there and os.access(folder, os.W_OK) else None


def prediction_config(
    task: TaskConfig, task_name: str, source: SourceModel, data: str, overrides: tuple[str, ...]
) -> RunConfig:
    """Return the config of predictions: other data than in training, one whole model per rank.

    Args:
        task: the task.
        task_name: name or path of the task; empty: that of the fine-tuned run.
        source: the model.
        data: folder of the data.
        overrides: ``section.key=value``.
    """
    run = source.run
    if run is None:
        run = RunConfig(
            model=source.config,
            objective=ObjectiveConfig(name=source.config.head),
            data=DataConfig(sequence_length=task.max_length, num_workers=0),
        )
    run = replace(
        run,
        finetune=replace(run.finetune, task=task_name or task.name, data=data, epochs=None),
        optimizer=replace(run.optimizer, warmup_steps=0),
    )
    return evaluation_config(run, source, overrides)


def model_task(config: ModelConfig) -> TaskConfig:
    """Return a task without files for a model whose task is not known, such as an export."""
    return TaskConfig(
        name="text",
        head=cast(Head, config.head),
        reader="jsonl",
        splits={},
        labels=config.labels,
        metrics=METRICS[config.head][:1],
        max_length=min(512, config.max_position_embeddings),
    )


def text_examples(
    task: TaskConfig, texts: Sequence[str], pairs: Sequence[str] = ()
) -> list[Example]:
    """Return texts as unlabelled examples of a task, numbered from 0.

    Args:
        task: the task.
        texts: first segments; of spans the questions; of tokens, words separated by spaces.
        pairs: second segments, of spans the passages; empty: none.

    Raises:
        ConfigError: the task has a second segment and none is given, or the other way round, or
            its examples are more than one or two texts.
    """
    if task.head == "choices":
        raise ConfigError("--text: multiple choice has several texts per example; predict a file")
    is_pair = task.head == "spans" or "text_pair" in task.columns
    # A task without columns is that of an export, of which it is not known.
    if is_pair and not pairs:
        first, second = ("question", "passage") if task.head == "spans" else ("text", "second text")
        raise ConfigError(
            f"task {task.name} has a {first} and a {second}; give the {second} with --text-pair"
        )
    if pairs and not is_pair and (task.columns or task.head == "tokens"):
        raise ConfigError(f"task {task.name} has no second text; omit --text-pair")
    if empty := [text for text in (*texts, *pairs) if not text.strip()]:
        raise ConfigError(f"--text {empty[0]!r} is empty; give a text")
    if task.head == "tokens":
        return [Example(id=str(n), words=tuple(text.split())) for n, text in enumerate(texts)]
    seconds: Sequence[str | None] = pairs or [None] * len(texts)
    return [
        Example(id=str(number), text=text, text_pair=second)
        for number, (text, second) in enumerate(zip(texts, seconds, strict=True))
    ]


def compare_accuracy(
    config: RunConfig, tokenizer: Tokenizer, ours: DebertaForTask, path: Path, kind: GraphKind
) -> dict[str, Any]:
    """Score a graph and our fp32 model on the dev split of the run's task.

    Args:
        config: the fine-tuning run; ``finetune.data`` is the folder of the task's files.
        tokenizer: the model's tokenizer.
        ours: our model.
        path: the graph.
        kind: its head.

    Returns:
        JSON values: task, split, number of examples, the task's first metric, its value of both,
        and ``metrics`` with all values of both.

    Raises:
        DataError: a file of the task is missing or malformed.
    """
    from megatron_deberta.hf.onnx.check import graph_logits

    task = load_task(run_task_name(config.finetune.task or "", Path(config.train.run_dir)))
    split = read_split(config, task, DEV, tokenizer, Path(config.train.run_dir))
    sides: dict[str, Logits] = {"torch": ours.logits, "onnx": graph_logits(path, kind)}
    metrics = {
        name: score_logits(config, task, split, tokenizer, logits) for name, logits in sides.items()
    }
    metric = task.metrics[0]
    return {
        "task": task.name,
        "split": DEV,
        "examples": len(split.examples),
        "metric": metric,
        **{name: values[metric] for name, values in metrics.items()},
        "metrics": metrics,
    }


@torch.no_grad()
def score_logits(
    config: RunConfig, task: TaskConfig, split: Split, tokenizer: Tokenizer, logits: Logits
) -> dict[str, float]:
    """Compute a task's metrics from a function that returns logits.

    Args:
        config: the run.
        task: its task.
        split: labelled examples.
        tokenizer: the model's tokenizer.
        logits: has the arguments and result of `DebertaForTask.logits`.
    """
    objective = build_objective(config)
    assert isinstance(objective, LabelledObjective)
    rows = task_rows(config, split.encoded, tokenizer)
    outputs = num_outputs(config.model)
    collector = OutputCollector(config.model.head, split.encoded, outputs, torch.device("cpu"))
    for batch in rows.batches(config.train.micro_batch_size, 0, 1):
        collector.add(batch, objective.outputs(logits(batch.inputs), batch))
    found = collector.outputs.numpy()
    task = with_best_thresholds(task, split.examples, found)
    return score(task, split.examples, split.encoded, found)
