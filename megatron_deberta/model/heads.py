"""Masked-language-model head with tied embeddings, and next-sentence head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.parallel_layers import CopyToTensorParallelRegion
from megatron_deberta.ops.cross_entropy import (
    CrossEntropy,
    Draw,
    Vocabulary,
    linear_cross_entropy,
)


class MaskedLanguageModelHead(nn.Module):
    """Dense, GELU, LayerNorm, then the tied vocabulary projection with its own bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.shared = CopyToTensorParallelRegion()
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(
        self,
        hidden: Tensor,
        token_weight: Tensor,
        loss: Callable[..., Any] | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Compute logits, or a loss that projects to the vocabulary itself.

        Args:
            hidden: ``[..., D]``.
            token_weight: ``[V, D]`` embedding table (the local rows under tensor parallelism).
            loss: called with (transformed states, ``token_weight``, bias, ``labels``).
            labels: passed to ``loss``.

        Returns:
            Logits ``[..., V]`` (local V under tensor parallelism), or the result of ``loss``.
        """
        transformed = self.shared(self.norm(F.gelu(self.transform(hidden))))
        if loss is None:
            return F.linear(transformed, token_weight, self.bias)
        return loss(transformed, token_weight, self.bias, labels)


class TokenLoss(nn.Module):
    """Cross-entropy of the vocabulary projection, without keeping all logits.

    Attributes:
        vocabulary: the part of it that the rank holds; set by ``distributed.parallelize``.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocabulary = Vocabulary(vocab_size)

    def forward(
        self,
        states: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        *,
        reduction: Literal["sum", "none"] = "sum",
        draw: Draw | None = None,
    ) -> CrossEntropy:
        """Compute the loss; see `ops.cross_entropy.linear_cross_entropy`."""
        return linear_cross_entropy(
            states, weight, bias, labels, self.vocabulary, reduction=reduction, draw=draw
        )


class NextSentenceHead(nn.Module):
    """Next-sentence prediction from the [CLS] state.

    Source: Devlin et al. 2019 (BERT), section 3.1, task 2. Equivalent to the sequence
    classification heads of transformers, as which it is exported.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 2)

    def forward(self, first: Tensor) -> Tensor:
        """Map [CLS] states ``[B, D]`` to logits ``[B, 2]``: is next, is random."""
        out: Tensor = self.classifier(torch.tanh(self.dense(first)))
        return out


class ReplacedTokenHead(nn.Module):
    """Replaced-token detection at every token.

    Source: the release's ``LMMaskPredictionHead``.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``[B, N, D]`` to the logits ``[B, N]`` of being replaced."""
        states = self.norm(hidden[:, :1] + hidden)
        out: Tensor = self.classifier(F.gelu(self.dense(states)))
        return out[..., 0]


def mean_state(states: Tensor, is_token: Tensor) -> Tensor:
    """Return the mean ``[B, D]``, at least fp32, of states ``[B, N, D]`` over tokens ``[B, N]``."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    total = wide.masked_fill(~is_token.unsqueeze(-1), 0.0).sum(1)
    return total / is_token.sum(1, keepdim=True).clamp(min=1)


class ContextPooler(nn.Module):
    """Dense layer with activation on the state of the first token.

    Source: the release's ``ContextPooler`` (GELU unless its ``pooler_hidden_act`` differs); for the
    architecture of RoBERTa, the first half of its classification head (tanh).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = pooler_activation(config)

    def forward(self, first: Tensor) -> Tensor:
        """Map ``[B, 1, D]`` to ``[B, 1, D]``."""
        projected = self.dense(first)
        return torch.tanh(projected) if self.activation == "tanh" else F.gelu(projected)


def pooler_activation(config: ModelConfig) -> Literal["gelu", "tanh"]:
    """Return the activation of the pooler, with ``auto`` replaced by the architecture's own."""
    if config.pooler_activation != "auto":
        return config.pooler_activation
    is_roberta = config.absolute_positions == "input" and config.position_terms == "none"
    return "tanh" if is_roberta else "gelu"


def num_outputs(config: ModelConfig) -> int:
    """Return the number of values that a task's head computes for a row, or for a token."""
    fixed = {"regression": 1, "choices": 1, "rerank": 1, "spans": 2, "discriminator": 1}
    fixed["embed"] = config.hidden_size
    return fixed.get(config.head, len(config.labels))
