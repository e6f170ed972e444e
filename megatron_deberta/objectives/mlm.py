"""Masked language modelling, the loss that DeBERTa is pretrained with, and BERT's for pairs."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model import DebertaForPretraining, DropoutSeeds, RuntimeOptions


class TokenLoss(nn.Module):
    """Vocabulary projection and cross-entropy, written out.

    ``sharding`` replaces it by one that splits the vocabulary and never holds all logits.
    """

    def forward(
        self, states: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compare what states ``[T, D]`` predict with labels int64 ``[T]`` (-100 = none).

        Args:
            states: of the tokens to predict.
            weight: ``[V, D]``.
            bias: ``[V]``.
            labels: the right tokens.

        Returns:
            fp32 scalar, the sum of the losses in nats, and int64 scalar, how often the most
            likely token is the label.
        """
        logits = F.linear(states, weight, bias)
        loss = F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")
        return loss, (logits.argmax(-1) == labels).sum()


class MaskedLanguageModel(DebertaForPretraining):
    """The pretraining model with its loss; parameters are those of the model."""

    def __init__(self, config: ModelConfig, execution: RuntimeOptions | None = None) -> None:
        super().__init__(config, execution)
        self.token_loss = TokenLoss()

    def forward(  # type: ignore[override]
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
        """Losses of a micro batch.

        Args:
            input_ids: int64 ``[B, N]`` tokens after masking.
            attention_mask: bool ``[B, N]``, True = real token.
            masked_positions: int64 ``[B, M]`` row positions to predict, -1 = padding.
            labels: int64 ``[B, M]`` original tokens there, -100 = padding.
            position_ids: int64 ``[B, N]`` or None.
            document_ids: int64 ``[B, N]`` or None.
            seeds: keys of dropout; None turns it off.
            token_type_ids: int64 ``[B, N]`` or None.
            next_sentence_labels: int64 ``[B]``, 0 = the second segment goes on from the first,
                1 = it does not, -100 = none; None where rows are not pairs.

        Returns:
            fp32 scalar, the **sum** of the losses in nats, and an int64 scalar, the number of
            right predictions; of pairs the same two again, for the next-sentence head. The caller
            divides by the number of labels of the global batch.
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
