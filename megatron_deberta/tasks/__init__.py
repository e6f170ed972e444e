"""Labelled tasks: their configs, reading, encoding, metrics and prediction files.

The package knows no model and no training loop: it turns files into arrays of tokens and labels,
and arrays of logits into metrics and predictions.
"""

from megatron_deberta.tasks.encoded import EncodedDataset
from megatron_deberta.tasks.encoding import encode
from megatron_deberta.tasks.examples import Answer, Example, Prediction
from megatron_deberta.tasks.leaderboard import json_lines, write_predictions
from megatron_deberta.tasks.reading import read_examples
from megatron_deberta.tasks.scoring import predict, score
from megatron_deberta.tasks.task import TaskConfig, load_task

__all__ = [
    "Answer",
    "EncodedDataset",
    "Example",
    "Prediction",
    "TaskConfig",
    "encode",
    "json_lines",
    "load_task",
    "predict",
    "read_examples",
    "score",
    "write_predictions",
]
