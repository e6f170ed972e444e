"""Token, absolute-position and token-type embeddings, and the relative-position table."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.dropout import Dropout, DropoutSeeds
from megatron_deberta.model.inputs import TokenInfo
from megatron_deberta.model.parallel_layers import (
    CopyToTensorParallelRegion,
    LayerNorm,
    ReplicatedEmbedding,
    ScatterToSequenceParallelRegion,
    VocabParallelEmbedding,
)

# Epsilon of the normalisation before a perturbation, as in the release
_PERTURBATION_EPS = 1e-7


@dataclass
class Perturbation:
    """Normalisation, and perturbation if given, of the sum of embeddings before their LayerNorm.

    Source: He et al. 2021, arXiv:2006.03654, section 4 (SiFT), and the release's
    ``PerturbationLayer``. The perturbed input is detached: no gradient reaches the embeddings.

    Attributes:
        delta: ``[B, R, D]``; None: normalise only.
    """

    delta: Tensor | None = None

    def __call__(self, hidden: Tensor, tokens: TokenInfo) -> Tensor:
        """Return the normalised, perturbed embeddings."""
        normalised = F.layer_norm(hidden, hidden.shape[-1:], eps=_PERTURBATION_EPS)
        if self.delta is None:
            return normalised
        return (normalised.detach().to(self.delta.dtype) + self.delta).to(hidden.dtype)


class Embeddings(nn.Module):
    """Sum of the embeddings, then LayerNorm, padding mask and dropout.

    Source: He et al. 2021, arXiv:2006.03654, section 3.2; order as in the released code.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.entry = ScatterToSequenceParallelRegion()
        self.token: nn.Module = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.position = (
            ReplicatedEmbedding(config.max_position_embeddings, config.hidden_size)
            if config.absolute_positions == "input"
            else None
        )
        self.token_type = (
            ReplicatedEmbedding(config.type_vocab_size, config.hidden_size)
            if config.type_vocab_size > 0
            else None
        )
        self.norm = LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout, "embeddings")

    def forward(
        self,
        input_ids: Tensor,
        tokens: TokenInfo,
        seeds: DropoutSeeds | None,
        perturbation: Perturbation | None = None,
    ) -> tuple[Tensor, TokenInfo]:
        """Return hidden states ``[B, R, D]`` and the tokens of their (local) rows.

        Args:
            input_ids: int64 ``[B, N]``.
            tokens: all N tokens of the batch.
            seeds: dropout keys; None: no dropout.
            perturbation: of the normalised embeddings (SiFT).
        """
        local_tokens = self.entry(tokens)
        hidden = self.token(input_ids)
        if self.position is not None:
            hidden = hidden + self.position(local_tokens.position_ids, local_tokens.is_sequence)
        if self.token_type is not None:
            types = local_tokens.types
            if types is None:
                types = torch.zeros_like(local_tokens.positions)
            hidden = hidden + self.token_type(types, local_tokens.is_sequence)
        if perturbation is not None:
            hidden = perturbation(hidden, local_tokens)
        hidden = self.norm(hidden, local_tokens.is_sequence) * local_tokens.is_token.unsqueeze(-1)
        return self.dropout(hidden, local_tokens.positions, seeds), local_tokens


class SharedTokenEmbedding(nn.Module):
    """Token embeddings of a model that shares those of another one.

    Source: He et al. 2021, arXiv:2111.09543 (DeBERTaV3), section 3.3, Eq. 7 (gradient-disentangled
    embedding sharing): E = stop_gradient(E_shared) + E_delta, where E_delta starts at zero. Rows
    are looked up in both tables and added, which is the same as adding the tables.

    Args:
        shared: the other model's embeddings.
        config: the architecture.
        disentangled: with a delta, and no gradient to the shared table.
    """

    def __init__(self, shared: Embeddings, config: ModelConfig, *, disentangled: bool) -> None:
        super().__init__()
        # In a tuple, so that it is no submodule here
        self._shared = (shared,)
        self.delta = (
            VocabParallelEmbedding(config.vocab_size, config.hidden_size) if disentangled else None
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the embeddings ``[B, N, D]`` (of the local rows under sequence parallelism)."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.delta is None):
            states: Tensor = self._shared[0].token(input_ids)
        return states if self.delta is None else states + self.delta(input_ids)


class RelativePositionTable(nn.Module):
    """Relative-position embeddings, shared by all layers.

    Source: He et al. 2021, arXiv:2006.03654, section 3.1 (P); LayerNorm as in the released v2.
    """

    def __init__(self, config: ModelConfig, num_slots: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_slots, config.hidden_size))
        self.norm = (
            nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            if config.normalize_position_table
            else nn.Identity()
        )
        self.shared = CopyToTensorParallelRegion()

    def forward(self, slots: range | None = None) -> Tensor:
        """Return the normalised table ``[S, D]``, or some of its rows."""
        weight = self.weight if slots is None else self.weight[slots.start : slots.stop]
        table: Tensor = self.shared(self.norm(weight))
        return table
