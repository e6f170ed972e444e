"""Training tasks: a model with a loss."""

from megatron_deberta.objectives.mlm import MaskedLanguageModel, TokenLoss

__all__ = ["MaskedLanguageModel", "TokenLoss"]
