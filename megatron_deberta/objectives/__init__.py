"""Training objectives: models with their loss."""

from megatron_deberta.objectives.mlm import MaskedLanguageModel, TokenLoss

__all__ = ["MaskedLanguageModel", "TokenLoss"]
