"""Classification with any labels by a model of natural language inference, without training.

The text is the premise, and each label in a sentence the hypothesis (Yin et al. 2019,
arXiv:1909.00161), as in transformers' pipeline ``zero-shot-classification``. The score of a label
is linear in the state before the last projection, so the model becomes one of multiple choice: its
only output is the logit of entailment, or that logit minus the one of contradiction.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_deberta.config.schema import SINGLE_OUTPUT_HEADS, ModelConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.evaluate.models import SourceModel, with_head
from megatron_deberta.hf.heads import has_sigmoid
from megatron_deberta.tasks.task import TaskConfig, task_from_dict

HYPOTHESIS = "This example is {}."
"""Sentence of a label, transformers' default."""


@dataclass(frozen=True, slots=True)
class ZeroShot:
    """Labels that a model of natural language inference chooses from.

    Attributes:
        labels: the labels.
        hypothesis: sentence with ``{}`` for the label.
        is_multi_label: each label is decided by itself, entailment against contradiction; always
            so of a single label.
    """

    labels: tuple[str, ...]
    hypothesis: str = HYPOTHESIS
    is_multi_label: bool = False

    def task(self, config: ModelConfig) -> TaskConfig:
        """Return the task of choosing a label, without files.

        Args:
            config: the model, whose longest row is that of the task.

        Raises:
            ConfigError: a label occurs twice, or the sentence has no place for it.
        """
        values = {
            "name": "zero_shot",
            "head": "choices",
            "reader": "jsonl",
            "splits": {"predict": "none"},
            "columns": {"text": "text"},
            "labels": list(self.labels),
            "hypothesis": self.hypothesis,
            "metrics": ["accuracy"],
            "max_length": config.max_position_embeddings,
            # The hypothesis stays whole.
            "truncate": "first",
        }
        return task_from_dict(values, "--zero-shot")


def for_task(source: SourceModel, task: TaskConfig, zero_shot: ZeroShot | None) -> SourceModel:
    """Return a model with the head of a task, if its own computes the same outputs.

    Args:
        source: a fine-tuned model.
        task: the task.
        zero_shot: as given on the command line; None: the task's own labels.

    Raises:
        ConfigError: the task is classification without training, and no class of the model is
            entailment.
    """
    own = source.config
    if own.head != task.head and {own.head, task.head} <= {*SINGLE_OUTPUT_HEADS}:
        # Our own regression is trained on scores, a published one may be a cross-encoder.
        is_published = source.run is None
        sigmoid = task.head == "rerank" and is_published and has_sigmoid(source.fields)
        return with_head(source, task.head, uses_sigmoid=sigmoid)
    if own.head == "multilabel" and task.head == "classification" and source.run is None:
        # A published model for any number of labels can also choose the most probable one.
        return with_head(source, task.head, uses_sigmoid=True)
    if not task.hypothesis or own.head == "choices":
        return source
    names = [label.lower() for label in own.labels if own.head == "classification"]
    entailment = next((n for n, name in enumerate(names) if name.startswith("entail")), None)
    if entailment is None:
        raise ConfigError(
            f"{source.path}: labels are chosen by a model with a class named entailment, not by "
            f"head {own.head} with {list(own.labels)}; give one that is fine-tuned on mnli, rte or "
            "qnli"
        )
    contradiction = len(names) - 1 if entailment == 0 else 0
    is_multi = zero_shot is not None and (zero_shot.is_multi_label or len(zero_shot.labels) == 1)

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        if not name.startswith("classifier."):
            return tensor
        score = tensor[entailment : entailment + 1]
        return score - tensor[contradiction : contradiction + 1] if is_multi else score

    return with_head(source, "choices", read, uses_sigmoid=is_multi)
