"""Score of an ONNX graph on its task, beside that of the model that it was exported from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.finetune.batches import OutputCollector, TaskBatches
from megatron_deberta.finetune.data import DEV, Split, read_split, task_rows
from megatron_deberta.hf.heads import GraphKind
from megatron_deberta.hf.onnx.check import Logits, graph_logits
from megatron_deberta.model import DebertaForTask
from megatron_deberta.model.heads import num_outputs
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.labelled import LabelledObjective
from megatron_deberta.tasks.scoring import score
from megatron_deberta.tasks.task import TaskConfig, load_task, run_task_name
from megatron_deberta.tokenizer import Tokenizer


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
    for batch in TaskBatches(rows, config.train.micro_batch_size, 0, 1):
        found = logits(batch.inputs)
        collector.add(batch, objective.outputs(found, batch))
    return score(task, split.examples, split.encoded, collector.outputs.numpy())
