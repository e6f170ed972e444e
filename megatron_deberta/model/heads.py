"""The masked-language-model head over tied embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.seams import SharedInput


class MaskedLanguageModelHead(nn.Module):
    """Dense, GELU, LayerNorm, then the (tied) vocabulary projection with a bias of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.shared = SharedInput()
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, hidden: Tensor, token_weight: Tensor) -> Tensor:
        """Map states ``[..., D]`` to logits ``[..., V]`` (the local part of V where split)."""
        transformed = self.shared(self.norm(F.gelu(self.transform(hidden))))
        return F.linear(transformed, token_weight, self.bias)
