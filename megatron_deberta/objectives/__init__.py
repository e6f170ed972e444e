"""Training objectives: models with their loss."""

from megatron_deberta.objectives.mlm import MaskedBatch, MaskedLanguageModel, TokenLoss

__all__ = ["MaskedBatch", "MaskedLanguageModel", "TokenLoss"]
