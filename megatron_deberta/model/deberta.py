"""Assembly: the encoder that users fine-tune, and the model that is pretrained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.attention import AttentionContext
from megatron_deberta.model.dropout import Dropout, DropoutExecution, DropoutSeeds
from megatron_deberta.model.embeddings import Embeddings
from megatron_deberta.model.encoder import Encoder
from megatron_deberta.model.heads import MaskedLanguageModelHead, NextSentenceHead
from megatron_deberta.model.mask_decoder import EnhancedMaskDecoder, pick_rows
from megatron_deberta.model.tp_hooks import SequenceExit, TokenLayout


@dataclass(frozen=True)
class RuntimeOptions:
    """How the model runs; changes speed and memory, never results."""

    recompute: Literal["none", "selective", "full"] = "none"
    attention_backend: str | None = None
    """None lets the operator choose."""
    fuse: bool = False
    """Compile dropout and what surrounds it; see `DropoutExecution`."""


class DebertaModel(nn.Module):
    """The DeBERTa encoder.

    Source: He et al. 2021, arXiv:2006.03654, section 3, with the release's choices where the two
    differ (docs/model.md).
    """

    def __init__(self, config: ModelConfig, execution: RuntimeOptions | None = None) -> None:
        super().__init__()
        self.config = config
        self.execution = execution or RuntimeOptions()
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config, recompute_layers=self.execution.recompute == "full")
        self.exit = SequenceExit()
        how = DropoutExecution(self.execution.recompute != "selective", self.execution.fuse)
        for module in self.modules():
            if isinstance(module, Dropout):
                module.how = how

    def context(
        self,
        attention_mask: Tensor,
        document_ids: Tensor | None,
        seeds: DropoutSeeds | None,
    ) -> AttentionContext:
        """What all attention layers of this forward pass share."""
        return AttentionContext(
            position_table=self.encoder.position_table(),
            key_padding=attention_mask,
            document_ids=document_ids,
            seeds=seeds,
            backend=self.execution.attention_backend,
            recompute_cheap=self.execution.recompute == "selective" and self.training,
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Encode; what downstream tasks read.

        Args:
            input_ids: int64 ``[B, N]``.
            attention_mask: bool ``[B, N]``, True = real token; None: all are.
            position_ids: int64 ``[B, N]`` absolute positions; None: 0 to N-1.
            document_ids: int64 ``[B, N]``, non-decreasing; attention, convolution and positions
                stay inside a document. None: a row is one sequence.
            seeds: keys of dropout; None turns it off.
            token_type_ids: int64 ``[B, N]`` segment of a pair; None: all of the first.

        Returns:
            ``[B, N, D]`` hidden states of the last layer, whole on every rank.
        """
        mask = _all_real(input_ids) if attention_mask is None else attention_mask
        layout = TokenLayout.of_sequence(mask, position_ids, token_type_ids)
        context = self.context(mask, document_ids, seeds)
        embedded, held = self.embeddings(input_ids, layout, seeds)
        out: Tensor = self.exit(self.encoder(embedded, held, context, self.config.num_layers))
        return out


class DebertaForPretraining(DebertaModel):
    """Encoder, enhanced mask decoder, vocabulary head and, for pairs, next-sentence head."""

    def __init__(self, config: ModelConfig, execution: RuntimeOptions | None = None) -> None:
        super().__init__(config, execution)
        self.mask_decoder = EnhancedMaskDecoder(config) if config.mask_decoder_passes else None
        self.head = MaskedLanguageModelHead(config)
        self.next_sentence = NextSentenceHead(config) if config.next_sentence_head else None

    def decode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        masked_positions: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        token_type_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """States that the vocabulary head reads, at picked positions only.

        With the mask decoder the ordinary output of the last layer reaches no loss but the
        next-sentence head's, so that layer runs only inside the decoder (docs/model.md).

        Args:
            input_ids: int64 ``[B, N]``.
            attention_mask: bool ``[B, N]``, True = real token.
            masked_positions: int64 ``[B, M]`` row positions, -1 = padding.
            position_ids: as in `DebertaModel.forward`.
            document_ids: as in `DebertaModel.forward`.
            seeds: keys of dropout; None turns it off.
            token_type_ids: as in `DebertaModel.forward`.

        Returns:
            ``[B, M, D]`` decoded states, and ``[B, 2]`` logits of the next-sentence head, None
            without one.
        """
        layout = TokenLayout.of_sequence(attention_mask, position_ids, token_type_ids)
        context = self.context(attention_mask, document_ids, seeds)
        embedded, held = self.embeddings(input_ids, layout, seeds)
        num_layers = self.config.num_layers - (1 if self.mask_decoder is not None else 0)
        hidden = self.exit(self.encoder(embedded, held, context, num_layers))
        first: Tensor | None
        if self.mask_decoder is None:
            decoded, first = pick_rows(hidden, masked_positions), hidden[:, 0]
        else:
            decoded, first = self.mask_decoder(
                hidden,
                layout.whole(),
                masked_positions,
                self.encoder.layers[-1],
                context,
                with_first=self.next_sentence is not None,
            )
        return decoded, None if self.next_sentence is None else self.next_sentence(first)

    def masked_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        masked_positions: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits at picked positions only; arguments as of `decode`.

        Returns:
            ``[B, M, V]`` logits (the local part of V where the vocabulary is split).
        """
        decoded, _ = self.decode(
            input_ids,
            attention_mask,
            masked_positions,
            position_ids,
            document_ids,
            seeds,
            token_type_ids,
        )
        logits: Tensor = self.head(decoded, self.embeddings.token.weight)
        return logits

    def logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[B, N, V]`` at every position, without dropout: what fill-mask reads."""
        mask = _all_real(input_ids) if attention_mask is None else attention_mask
        everywhere = torch.arange(input_ids.size(1), device=input_ids.device)
        everywhere = everywhere.expand(input_ids.shape)
        return self.masked_logits(input_ids, mask, everywhere, token_type_ids=token_type_ids)

    def next_sentence_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits ``[B, 2]`` of the next-sentence head, without dropout."""
        assert self.next_sentence is not None
        states = DebertaModel.forward(
            self, input_ids, attention_mask, token_type_ids=token_type_ids
        )
        out: Tensor = self.next_sentence(states[:, 0])
        return out


def _all_real(input_ids: Tensor) -> Tensor:
    return torch.ones_like(input_ids, dtype=torch.bool)
