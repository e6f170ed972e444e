r"""Fine-tune a classifier with a head of one's own: a residual layer before the classes.

Usage: PYTHONPATH=examples megatron-deberta finetune TASK --model MODEL --data DATA \
         objective.class_path=finetune_with_head.ClassificationWithResidual [KEY=VALUE ...]

Parameters whose names begin with `classifier.`, `pooler.` or `qa_outputs.` belong to the head and
start anew where the model has none; all are initialised, saved and resumed by their names. Exports
know the heads of transformers only.
"""

from torch import Tensor, nn
from torch.nn import functional

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.heads import num_outputs
from megatron_deberta.objectives.labelled import Classification, RowsModel


class ResidualClassifier(nn.Module):
    """A residual layer, then the classes."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.residual = nn.Linear(width, width)
        self.out = nn.Linear(width, outputs)

    def forward(self, states: Tensor) -> Tensor:
        """Map states ``[..., D]`` to logits ``[..., K]``."""
        logits: Tensor = self.out(states + functional.gelu(self.residual(states)))
        return logits


class ModelWithResidual(RowsModel):
    """A model of rows with that classifier on the pooled first token."""

    def build_heads(self, config: ModelConfig) -> None:
        """Replace the classifier of the base class."""
        super().build_heads(config)
        self.classifier = ResidualClassifier(config.hidden_size, num_outputs(config))


class ClassificationWithResidual(Classification):
    """Classification of rows by that model."""

    model_class = ModelWithResidual
