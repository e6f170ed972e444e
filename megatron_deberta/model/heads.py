"""The masked-language-model head over tied embeddings, and the head for pairs of segments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.tp_hooks import SharedInput


class MaskedLanguageModelHead(nn.Module):
    """Dense, GELU, LayerNorm, then the (tied) vocabulary projection with a bias of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.shared = SharedInput()
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(
        self,
        hidden: Tensor,
        token_weight: Tensor,
        loss: nn.Module | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Score the vocabulary, or leave that to a loss that need not hold all scores.

        Args:
            hidden: ``[..., D]``.
            token_weight: ``[V, D]``, tied (the local part of V where split).
            loss: called with transformed states, ``token_weight``, the bias and ``labels``.
            labels: for ``loss``.

        Returns:
            Logits ``[..., V]`` (the local part of V where split), or what ``loss`` returns.
        """
        transformed = self.shared(self.norm(F.gelu(self.transform(hidden))))
        if loss is None:
            return F.linear(transformed, token_weight, self.bias)
        return loss(transformed, token_weight, self.bias, labels)


class NextSentenceHead(nn.Module):
    """Whether the second segment goes on from the first, read at [CLS].

    Source: Devlin et al. 2019 (BERT), section 3.1, task 2. Computes what the sequence
    classifiers of transformers do, under whose names it is exported.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 2)

    def forward(self, first: Tensor) -> Tensor:
        """Map [CLS] states ``[B, D]`` to logits ``[B, 2]``: goes on, does not."""
        out: Tensor = self.classifier(torch.tanh(self.dense(first)))
        return out
