"""Masked-language-modelling objective, with BERT's next-sentence objective for pairs."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model import DebertaForPretraining, DropoutSeeds


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

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        masked_positions: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        token_type_ids: Tensor | None = None,
        next_sentence_labels: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute the losses of a micro batch.

        Args:
            input_ids: int64 ``[B, N]`` tokens after masking.
            attention_mask: bool ``[B, N]``, True = token.
            masked_positions: int64 ``[B, M]`` positions to predict, -1 = padding.
            labels: int64 ``[B, M]`` original tokens at those positions, -100 = padding.
            position_ids: int64 ``[B, N]`` or None.
            document_ids: int64 ``[B, N]`` or None.
            seeds: dropout keys; None: no dropout.
            token_type_ids: int64 ``[B, N]`` or None.
            next_sentence_labels: int64 ``[B]``, 0 = is next, 1 = is random, -100 = not scored;
                None: rows are not pairs.

        Returns:
            fp32 scalar, the **sum** of the losses in nats, and int64 scalar, the number of correct
            predictions; for pairs, the same for the next-sentence head. The caller divides by the
            number of labels of the global batch.
        """
        decoded, pair_logits = self.decode(
            input_ids,
            attention_mask,
            masked_positions,
            position_ids,
            document_ids,
            seeds,
            token_type_ids,
        )
        sums: tuple[Tensor, Tensor] = self.head(
            decoded.flatten(0, 1), self.embeddings.token.weight, self.token_loss, labels.flatten()
        )
        if next_sentence_labels is None or pair_logits is None:
            return sums
        pair_loss = F.cross_entropy(pair_logits.float(), next_sentence_labels, reduction="sum")
        return (*sums, pair_loss, (pair_logits.argmax(-1) == next_sentence_labels).sum())
