"""Models of labelled tasks: the encoder with the heads that transformers' classes have.

Shapes: B rows, N tokens, K outputs of the head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.deberta import DebertaBackbone, DebertaForPretraining
from megatron_deberta.model.dropout import Dropout, DropoutSeeds
from megatron_deberta.model.embeddings import Perturbation
from megatron_deberta.model.heads import ContextPooler, num_outputs
from megatron_deberta.model.replaced_tokens import DebertaDiscriminator, DebertaForReplacedTokens
from megatron_deberta.ops import RelativePositions


class DebertaForTask(DebertaBackbone):
    """Base class: an encoder with a head whose outputs are ``logits``."""

    def _table_slots(self, length: int) -> range | None:
        """Return the slots that rows of this length use.

        Rows are often so short that projecting the whole table in every layer would cost more than
        projecting the tokens.
        """
        config = self.config
        positions = RelativePositions(config.max_relative_positions, config.position_buckets)
        return positions.slots_of_length(length)

    def logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        perturbation: Perturbation | None = None,
    ) -> Tensor:
        """Compute the head's outputs.

        Args:
            input_ids: int64 ``[B, N]``.
            attention_mask: bool (or 0 and 1) ``[B, N]``, True = token; None: no padding.
            token_type_ids: int64 ``[B, N]``; ignored by models without token types.
            seeds: dropout keys; None: no dropout.
            perturbation: of the normalised embeddings (SiFT).

        Returns:
            ``[B, K]`` for a head on rows, ``[B, N, K]`` for a head on tokens.
        """
        raise NotImplementedError


class DebertaForRows(DebertaForTask):
    """Head on the first token: classes, a score, or one logit per choice."""

    def _build_heads(self, config: ModelConfig) -> None:
        self.pooler = ContextPooler(config)
        self.dropout = Dropout(config.head_dropout, "head")
        self.classifier = nn.Linear(config.hidden_size, num_outputs(config))

    def logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        perturbation: Perturbation | None = None,
    ) -> Tensor:
        """Compute ``[B, K]``; arguments as in the base class.

        The last layer runs at the first token only, which is exact.
        """
        first = torch.zeros_like(input_ids[:, :1])
        state = self.encode_selected(
            input_ids, first, attention_mask, seeds, token_type_ids, perturbation
        )
        pooled = self.dropout(self.pooler(state), first, seeds)
        out: Tensor = self.classifier(pooled)
        return out[:, 0]


class DebertaForTokens(DebertaForTask):
    """Head on every token: classes."""

    def _build_heads(self, config: ModelConfig) -> None:
        self.dropout = Dropout(config.head_dropout, "head")
        self.classifier = nn.Linear(config.hidden_size, num_outputs(config))

    def _project(self, states: Tensor, positions: Tensor, seeds: DropoutSeeds | None) -> Tensor:
        """Return the outputs for ``states`` ``[B, N, H]`` at ``positions`` ``[B, N]``."""
        out: Tensor = self.classifier(self.dropout(states, positions, seeds))
        return out

    def logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        perturbation: Perturbation | None = None,
    ) -> Tensor:
        """Compute ``[B, N, K]``; arguments as in the base class."""
        states = self.encode(
            input_ids,
            attention_mask,
            seeds=seeds,
            token_type_ids=token_type_ids,
            perturbation=perturbation,
        )
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        return self._project(states, positions.expand(input_ids.shape), seeds)


class DebertaForSpans(DebertaForTokens):
    """Head on every token: logits of being the first and the last token of the answer."""

    def _build_heads(self, config: ModelConfig) -> None:
        self.qa_outputs = nn.Linear(config.hidden_size, num_outputs(config))

    def _project(self, states: Tensor, positions: Tensor, seeds: DropoutSeeds | None) -> Tensor:
        out: Tensor = self.qa_outputs(states)
        return out


def task_model(config: ModelConfig) -> type[DebertaForTask]:
    """Return the class of the model that ``config.head`` names."""
    classes: dict[str, type[DebertaForTask]] = {
        "spans": DebertaForSpans,
        "tokens": DebertaForTokens,
    }
    return classes.get(config.head, DebertaForRows)


def model_class(config: ModelConfig) -> type[DebertaBackbone] | type[DebertaForReplacedTokens]:
    """Return the class of a model with the head that ``config.head`` names."""
    pretraining: dict[str, type[DebertaBackbone] | type[DebertaForReplacedTokens]] = {
        "mlm": DebertaForPretraining,
        "autoregressive": DebertaForPretraining,
        "rtd": DebertaForReplacedTokens,
        "discriminator": DebertaDiscriminator,
    }
    return pretraining.get(config.head) or task_model(config)
