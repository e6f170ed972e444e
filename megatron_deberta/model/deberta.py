"""DeBERTa models: the encoder, the pretraining model, and masked-language modelling.

Shapes: B batch, N sequence length, M selected positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.config.rules import check_model
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.attention import AttentionContext, dropout_sites
from megatron_deberta.model.dropout import Dropout, DropoutExecution, DropoutSeeds
from megatron_deberta.model.embeddings import Embeddings, Perturbation
from megatron_deberta.model.encoder import Encoder
from megatron_deberta.model.heads import MaskedLanguageModelHead, NextSentenceHead
from megatron_deberta.model.input_checks import check_inputs
from megatron_deberta.model.layers import Layer
from megatron_deberta.model.mask_decoder import EnhancedMaskDecoder, gather_tokens
from megatron_deberta.model.tp_hooks import SequenceExit, TokenLayout
from megatron_deberta.model.weight_init import init_parameters


@dataclass(frozen=True)
class RuntimeOptions:
    """Execution options, which affect speed and memory but not results.

    Attributes:
        recompute: activation recomputation.
        attention_backend: backend of the attention operator; None: chosen automatically.
        fuse: compile element-wise operations; see `DropoutExecution`.
    """

    recompute: Literal["none", "selective", "full"] = "none"
    attention_backend: str | None = None
    fuse: bool = False


class EncoderOutput(NamedTuple):
    """Output of `DebertaModel`.

    Attributes:
        last_hidden_state: ``[B, N, D]``.
    """

    last_hidden_state: Tensor


class MaskedLMOutput(NamedTuple):
    """Output of `DebertaForMaskedLM`.

    Attributes:
        loss: fp32 scalar, mean cross-entropy in nats over labels other than -100; None: no labels.
        logits: ``[B, N, V]``.
    """

    loss: Tensor | None
    logits: Tensor


class DebertaBackbone(nn.Module):
    """Embeddings and encoder, without a ``forward``; base class of the models.

    Source: He et al. 2021, arXiv:2006.03654, section 3, with the released code's choices where
    the two differ (docs/model.md).

    Args:
        config: the architecture.
        options: how it runs.
        seed: of the initial weights; None: drawn from torch's default generator
            (``torch.manual_seed``).

    Raises:
        ConfigError: the values of ``config`` contradict each other.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: RuntimeOptions | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_model(config)
        self.config = config
        self.options = options or RuntimeOptions()
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config, recompute_layers=self.options.recompute == "full")
        self.exit = SequenceExit()
        execution = DropoutExecution(self.options.recompute != "selective", self.options.fuse)
        for module in self.modules():
            if isinstance(module, Dropout):
                module.execution = execution
        self._dropout_sites = dropout_sites(self.modules())
        self._build_heads(config)
        self.init_weights(seed)

    def _build_heads(self, config: ModelConfig) -> None:
        """Add the modules of a subclass; weights are initialised afterwards."""

    def init_weights(self, seed: int | None = None) -> None:
        """Initialise every parameter as a function of (seed, canonical name, element index).

        Parameters on the ``meta`` device are skipped.

        Args:
            seed: as in the constructor.
        """
        init_parameters(self, self.config, seed)

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        token_type_ids: Tensor | None = None,
        perturbation: Perturbation | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Run all layers.

        Args:
            input_ids: int64 ``[B, N]``.
            attention_mask: bool (or 0 and 1) ``[B, N]``, True = token; None: no padding.
            position_ids: int64 ``[B, N]`` absolute positions; None: 0 to N-1.
            document_ids: int64 ``[B, N]``, non-decreasing; attention, convolution and positions
                stay inside a document. None: each row is one sequence.
            seeds: dropout keys; None: no dropout.
            token_type_ids: int64 ``[B, N]`` segments of a pair; None: all 0.
            perturbation: of the normalised embeddings (SiFT).
            causal: no state depends on later tokens.

        Returns:
            ``[B, N, D]`` hidden states of the last layer, replicated on all ranks.
        """
        layout = TokenLayout.of_sequence(
            _token_mask(input_ids, attention_mask),
            position_ids,
            token_type_ids,
            is_padded=attention_mask is not None,
        )
        num_layers = self.config.num_layers
        hidden, _ = self._run_layers(
            input_ids, layout, document_ids, seeds, num_layers, perturbation, causal
        )
        return hidden

    def encode_selected(
        self,
        input_ids: Tensor,
        selected: Tensor,
        attention_mask: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        token_type_ids: Tensor | None = None,
        perturbation: Perturbation | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Run all layers, the last one at selected positions only.

        Args:
            input_ids: int64 ``[B, N]``.
            selected: int64 ``[B, M]`` positions, -1 = padding.
            attention_mask: as in `encode`, like the following.
            seeds: dropout keys.
            token_type_ids: segments of a pair.
            perturbation: of the normalised embeddings.
            position_ids: absolute positions.
            document_ids: documents of each row.

        Returns:
            ``[B, M, D]`` hidden states of the last layer, replicated on all ranks.
        """
        config = self.config
        if config.num_layers == 1 and config.conv_kernel_size:
            # The convolution is added to the first layer's output at every token.
            states = self.encode(
                input_ids, attention_mask, position_ids, document_ids, seeds, token_type_ids,
                perturbation,
            )  # fmt: skip
            return gather_tokens(states, selected)
        layout = TokenLayout.of_sequence(
            _token_mask(input_ids, attention_mask),
            position_ids,
            token_type_ids,
            is_padded=attention_mask is not None,
        )
        hidden, context = self._run_layers(
            input_ids, layout, document_ids, seeds, config.num_layers - 1, perturbation
        )
        last_layer = cast(Layer, self.encoder.layers[-1])
        attention = last_layer.attention
        replicated = layout.replicated()
        key_value = attention.project_key_value(hidden, replicated, context)
        states = gather_tokens(hidden, selected)
        out: Tensor = last_layer(states, replicated.select(selected), context, key_value)
        return out

    def _run_layers(
        self,
        input_ids: Tensor,
        layout: TokenLayout,
        document_ids: Tensor | None,
        seeds: DropoutSeeds | None,
        num_layers: int,
        perturbation: Perturbation | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, AttentionContext]:
        slots = self._table_slots(input_ids.size(1))
        if seeds is not None:
            seeds = seeds.of_sites(self._dropout_sites, self.config.mask_decoder_passes)
        context = AttentionContext(
            position_table=self.encoder.position_table(slots),
            key_padding=layout.real if layout.is_padded else None,
            document_ids=document_ids,
            seeds=seeds,
            backend=self.options.attention_backend,
            recompute_cheap=self.options.recompute == "selective" and self.training,
            table_slots=slots,
            causal=causal,
            table_positions=self._table_positions(slots, input_ids.device),
        )
        embedded, local_layout = self.embeddings(input_ids, layout, seeds, perturbation)
        hidden: Tensor = self.exit(self.encoder(embedded, local_layout, context, num_layers))
        return hidden, context

    def _table_positions(self, slots: range | None, device: torch.device) -> Tensor | None:
        if self.encoder.relative_positions is None:
            return None
        used = slots or range(self.encoder.num_slots)
        return torch.arange(used.start, used.stop, device=device)

    def _table_slots(self, length: int) -> range | None:
        """Return the slots of the position table that rows of this length use; None: all."""
        return None

    def _default_seeds(self, input_ids: Tensor) -> DropoutSeeds | None:
        """Dropout keys of a forward pass without explicit ones; None in evaluation mode."""
        return DropoutSeeds.draw(input_ids.size(0), input_ids.device) if self.training else None


class DebertaModel(DebertaBackbone):
    """The DeBERTa encoder; constructed like `DebertaBackbone`."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> EncoderOutput:
        """Encode; arguments as in `encode`.

        In training mode without ``seeds``, the dropout key is drawn from torch's default
        generator, once per call.

        Raises:
            ModelInputError: a tensor has a wrong shape, or values out of range.
        """
        check_inputs(
            self.config,
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            has_positions=self.config.absolute_positions == "input",
        )
        seeds = seeds or self._default_seeds(input_ids)
        return EncoderOutput(
            self.encode(
                input_ids, attention_mask, position_ids, document_ids, seeds, token_type_ids
            )
        )


class DebertaForPretraining(DebertaBackbone):
    """Encoder, enhanced mask decoder, vocabulary head and, for pairs, next-sentence head."""

    def _build_heads(self, config: ModelConfig) -> None:
        self.mask_decoder = EnhancedMaskDecoder(config) if config.mask_decoder_passes else None
        self.head = MaskedLanguageModelHead(config)
        self.next_sentence = NextSentenceHead(config) if config.next_sentence_head else None

    def decode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        masked_positions: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        token_type_ids: Tensor | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the hidden states that the vocabulary head reads, at selected positions.

        With the mask decoder, the last layer's ordinary output is used by the next-sentence head
        only, so the last layer runs inside the decoder only (docs/model.md).

        Args:
            input_ids: int64 ``[B, N]``.
            attention_mask: as in `encode`.
            masked_positions: int64 ``[B, M]`` positions in the row, -1 = padding; None: all N.
            position_ids: as in `encode`.
            document_ids: as in `encode`.
            seeds: dropout keys; None: no dropout.
            token_type_ids: as in `encode`.
            causal: no state depends on later tokens (attention and convolution).

        Returns:
            ``[B, M, D]`` decoded states, and the next-sentence head's logits ``[B, 2]`` or None.
        """
        layout = TokenLayout.of_sequence(
            _token_mask(input_ids, attention_mask),
            position_ids,
            token_type_ids,
            is_padded=attention_mask is not None,
        )
        if masked_positions is None:
            masked_positions = layout.positions
        num_layers = self.config.num_layers - (1 if self.mask_decoder is not None else 0)
        hidden, context = self._run_layers(
            input_ids, layout, document_ids, seeds, num_layers, causal=causal
        )
        first: Tensor | None
        if self.mask_decoder is None:
            decoded, first = gather_tokens(hidden, masked_positions), hidden[:, 0]
        else:
            decoded, first = self.mask_decoder(
                hidden,
                layout.replicated(),
                masked_positions,
                self.encoder.layers[-1],
                context,
                with_first=self.next_sentence is not None,
            )
        return decoded, None if self.next_sentence is None else self.next_sentence(first)

    def masked_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        masked_positions: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
        token_type_ids: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Compute logits at selected positions; arguments as in `decode`.

        Returns:
            ``[B, M, V]`` logits (the local part of V under tensor parallelism).

        Raises:
            ModelInputError: a tensor has a wrong shape, or values out of range.
        """
        self._check_inputs(input_ids, attention_mask, token_type_ids, position_ids)
        decoded, _ = self.decode(
            input_ids,
            attention_mask,
            masked_positions,
            position_ids,
            document_ids,
            seeds,
            token_type_ids,
            causal,
        )
        logits: Tensor = self.head(decoded, self.embeddings.token.weight)
        return logits

    def _check_inputs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> None:
        check_inputs(
            self.config,
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            labels,
            has_positions=self.config.absolute_positions != "none",
        )

    def logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute logits ``[B, N, V]`` at every position, in the head's form, without dropout."""
        return self.masked_logits(
            input_ids,
            attention_mask,
            token_type_ids=token_type_ids,
            causal=self.config.head == "autoregressive",
        )

    def next_sentence_logits(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Compute the next-sentence head's logits ``[B, 2]``, without dropout."""
        assert self.next_sentence is not None
        states = self.encode(input_ids, attention_mask, token_type_ids=token_type_ids)
        out: Tensor = self.next_sentence(states[:, 0])
        return out


class DebertaForMaskedLM(DebertaForPretraining):
    """The pretraining model with the calling conventions of transformers' masked LM classes."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> MaskedLMOutput:
        """Predict the token at every position through the mask decoder.

        In training mode without ``seeds``, the dropout key is drawn from torch's default
        generator, once per call. For large vocabularies, `masked_logits` at the masked positions
        only is cheaper.

        Args:
            input_ids: int64 ``[B, N]``.
            attention_mask: bool (or 0 and 1) ``[B, N]``, True = token; None: no padding.
            labels: int64 ``[B, N]``, -100 = not scored.
            position_ids: as in `encode`, like the following.
            document_ids: int64 ``[B, N]`` or None.
            token_type_ids: int64 ``[B, N]`` or None.
            seeds: dropout keys.

        Raises:
            ModelInputError: a tensor has a wrong shape, or values out of range.
        """
        self._check_inputs(input_ids, labels=labels)
        logits = self.masked_logits(
            input_ids,
            attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            document_ids=document_ids,
            seeds=seeds or self._default_seeds(input_ids),
        )
        if labels is None:
            return MaskedLMOutput(None, logits)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        return MaskedLMOutput(loss, logits)


def _token_mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    return attention_mask.bool()
