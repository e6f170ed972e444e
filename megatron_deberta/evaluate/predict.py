"""Prediction and evaluation with a fine-tuned model, on one or more ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
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
from megatron_deberta.evaluate.zero_shot import ZeroShot, for_task
from megatron_deberta.hf.heads import GraphKind
from megatron_deberta.model import DebertaForTask
from megatron_deberta.model.flops import is_task_head
from megatron_deberta.model.heads import num_outputs
from megatron_deberta.model.task_models import DebertaForEmbedding
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.labelled import LabelledObjective
from megatron_deberta.tasks.encoding import encode, omitted_tokens
from megatron_deberta.tasks.examples import Example, Prediction
from megatron_deberta.tasks.scoring import Outputs, predict, score, with_best_thresholds
from megatron_deberta.tasks.task import DEV, METRICS, Head, TaskConfig, load_task, run_task_name
from megatron_deberta.tokenizer import Tokenizer

if TYPE_CHECKING:
    from megatron_deberta.hf.onnx.check import Logits


Advance = Callable[[float], None]

_BLOCK_TEXTS, _BLOCK_CHARACTERS = 1024, 1 << 22
"""Texts that are encoded, sorted by length and predicted together, at most."""


class Predicted(NamedTuple):
    """Examples and their predictions.

    Attributes:
        examples: in the order of the input.
        predictions: one per example.
        num_long: examples that are longer than a row.
        outputs: of all rows, see `tasks.scoring.predict`.
    """

    examples: Sequence[Example]
    predictions: Sequence[Prediction]
    num_long: int
    outputs: Outputs


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
        uses_sigmoid: as in `SourceModel`.
        null_threshold: see `tasks.scoring.predict`.
    """

    config: RunConfig
    task: TaskConfig
    tokenizer: Tokenizer
    module: nn.Module
    groups: ProcessGroups
    run_dir: Path | None = None
    uses_sigmoid: bool = False
    null_threshold: float = 0.0

    def run(self, split: str) -> tuple[Split, Outputs, float]:
        """Return a split, the model's outputs for it, and the mean loss. Collective: all ranks."""
        found = read_split(self.config, self.task, split, self.tokenizer, self.run_dir)
        outputs, loss = self._outputs(found)
        return found, outputs, loss

    def predict_split(self, name: str, advance: Advance | None = None) -> Predicted:
        """Predict a split of the task. Collective: all ranks.

        Args:
            name: of the split.
            advance: called with the share of the split that is done.

        Raises:
            DataError: a file of the split is missing or malformed.
        """
        split = read_split(self.config, self.task, name, self.tokenizer, self.run_dir)
        return self._predict(split, advance)

    def predict_texts(
        self, examples: Iterable[Example], advance: Advance | None = None
    ) -> Iterator[Predicted]:
        """Predict examples block by block, in their order. Collective: all ranks.

        Args:
            examples: in any number.
            advance: called with the share of the block that is done.
        """
        length = self.config.data.sequence_length
        for block in _blocks(examples):
            encoded = encode(self.task, block, self.tokenizer, length)
            yield self._predict(Split(block, encoded), advance)

    def _predict(self, split: Split, advance: Advance | None) -> Predicted:
        outputs, _ = self._outputs(split, advance)
        examples, encoded = split.examples, split.encoded
        predictions = predict(
            self.task, examples, encoded, outputs,
            null_threshold=self.null_threshold, uses_sigmoid=self.uses_sigmoid,
        )  # fmt: skip
        length = self.config.data.sequence_length
        omitted = omitted_tokens(self.task, examples, encoded, self.tokenizer, length)
        is_long = (omitted > 0) | np.array([each.windows > 1 for each in predictions])
        for index in np.flatnonzero(omitted).tolist():
            predictions[index] = replace(predictions[index], truncated=True)
        return Predicted(examples, predictions, int(is_long.sum()), outputs)

    def _outputs(self, split: Split, advance: Advance | None = None) -> tuple[Outputs, float]:
        result = run_split(
            self.module, self.config, split.encoded, self.tokenizer, self.groups, advance=advance
        )
        assert result is not None
        outputs, evaluation = result
        return outputs, evaluation.metrics["loss"]


def _blocks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    """Divide examples into blocks of a bounded size; a longer example is a block of its own."""
    block: list[Example] = []
    size = 0
    for example in examples:
        characters = len(example.text) + len(example.text_pair or "")
        characters += sum(map(len, (*example.words, *example.choices)))
        if block and (len(block) == _BLOCK_TEXTS or size + characters > _BLOCK_CHARACTERS):
            yield block
            block, size = [], 0
        block.append(example)
        size += characters
    if block:
        yield block


@contextmanager
def open_predictor(
    task_name: str,
    model: Path,
    data: str,
    overrides: tuple[str, ...] = (),
    tokenizer: str = "",
    zero_shot: ZeroShot | None = None,
) -> Iterator[Predictor]:
    """Load a fine-tuned model. Collective over the ranks of the launcher.

    Args:
        task_name: task file or name of a packaged task; empty: that of the run, or of an export
            a task with the model's head and labels, without files.
        model: run, checkpoint or export of a fine-tuned model.
        data: folder of the task's files.
        overrides: ``section.key=value``.
        tokenizer: the model's tokenizer; empty: its own.
        zero_shot: labels for a model of natural language inference, in place of a task.

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
    if not task_name and source.run is not None and zero_shot is None:
        task_name = run_task_name(source.run.finetune.task or "", source.path.parents[1])
    if zero_shot is not None:
        task = zero_shot.task(source.config)
    else:
        task = load_task(task_name) if task_name else model_task(source.config)
    source = with_classes(for_task(source, task, zero_shot), class_names(task))
    task = model_thresholds(task, source)
    config = prediction_config(task, task_name, source, data, overrides)
    check_task(config, task)
    with open_ranks(config, source) as (module, groups):
        loaded = source.load_tokenizer(config.tokenizer.path or "")
        yield Predictor(config, task, loaded, module, groups, _run_dir(source), source.uses_sigmoid)


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
    graph = graph_logits(path, kind)
    sides: dict[str, Logits] = {"torch": ours.logits, "onnx": graph}
    if isinstance(ours, DebertaForEmbedding):
        sides["onnx"] = lambda inputs: ours.pool(graph(inputs), inputs)
    outputs = {
        name: _outputs_of(config, split, tokenizer, logits) for name, logits in sides.items()
    }
    # Those of the export are of the model, whatever computes it.
    task = with_best_thresholds(task, split.examples, split.encoded, outputs["torch"])
    metrics = {
        name: score(task, split.examples, split.encoded, found) for name, found in outputs.items()
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
def _outputs_of(config: RunConfig, split: Split, tokenizer: Tokenizer, logits: Logits) -> Outputs:
    """Return the outputs of a function with arguments and result of `DebertaForTask.logits`."""
    objective = build_objective(config)
    assert isinstance(objective, LabelledObjective)
    rows = task_rows(config, split.encoded, tokenizer)
    outputs = num_outputs(config.model)
    collector = OutputCollector(config.model.head, split.encoded, outputs, torch.device("cpu"))
    for batch in rows.batches(config.train.micro_batch_size, 0, 1):
        collector.add(batch, objective.outputs(logits(batch.inputs), batch))
    found: Outputs = collector.outputs.numpy()
    return found
