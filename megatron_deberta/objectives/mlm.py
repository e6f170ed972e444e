"""Masked-language-modelling objective, with BERT's next-sentence objective for pairs."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model import DebertaForPretraining, DropoutSeeds


class MaskedBatch(Protocol):
    """A micro batch of masked rows; `data.batch.Batch` is one and describes the fields."""

    @property
    def input_ids(self) -> Tensor:
        """Tokens after masking."""

    @property
    def attention_mask(self) -> Tensor:
        """True = token."""

    @property
    def masked_positions(self) -> Tensor:
        """Positions to predict."""

    @property
    def labels(self) -> Tensor:
        """Original tokens at those positions."""

    @property
    def document_ids(self) -> Tensor | None:
        """Packed documents."""

    @property
    def position_ids(self) -> Tensor | None:
        """Positions in documents."""

    @property
    def token_type_ids(self) -> Tensor | None:
        """Segments of pairs."""

    @property
    def next_sentence_labels(self) -> Tensor | None:
        """0 = is next, 1 = is random."""


class TokenLoss(nn.Module):
    """Vocabulary projection and cross-entropy.

    ``distributed.parallelize`` replaces it by a vocabulary-parallel implementation that does not
    materialise all logits.
    """

    def forward(
        self, states: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss and the number of correct predictions.

        Args:
            states: ``[T, D]``.
            weight: ``[V, D]``.
            bias: ``[V]``.
            labels: int64 ``[T]``, -100 = not scored.

        Returns:
            fp32 scalar, the sum of the losses in nats, and int64 scalar, the number of tokens
            whose most likely prediction is the label.
        """
        logits = F.linear(states, weight, bias)
        loss = F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
        return loss, (logits.argmax(-1) == labels).sum()


class MaskedLanguageModel(DebertaForPretraining):
    """The pretraining model with its loss; constructed like `DebertaBackbone`."""

    def _build_heads(self, config: ModelConfig) -> None:
        super()._build_heads(config)
        self.token_loss = TokenLoss()

    def forward(self, batch: MaskedBatch, seeds: DropoutSeeds | None = None) -> tuple[Tensor, ...]:
        """Compute the losses of a micro batch.

        Args:
            batch: on the model's device.
            seeds: dropout keys; None: no dropout.

        Returns:
            fp32 scalar, the **sum** of the losses in nats, and int64 scalar, the number of correct
            predictions; for pairs, the same for the next-sentence head. The caller divides by the
            number of labels of the global batch.
        """
        decoded, pair_logits = self.decode(
            batch.input_ids,
            batch.attention_mask,
            batch.masked_positions,
            batch.position_ids,
            batch.document_ids,
            seeds,
            batch.token_type_ids,
        )
        weight, labels = self.embeddings.token.weight, batch.labels.flatten()
        sums: tuple[Tensor, Tensor] = self.head(
            decoded.flatten(0, 1), weight, self.token_loss, labels
        )
        is_random = batch.next_sentence_labels
        if is_random is None or pair_logits is None:
            return sums
        pair_loss = F.cross_entropy(pair_logits.float(), is_random, reduction="sum")
        return (*sums, pair_loss, (pair_logits.argmax(-1) == is_random).sum())
