"""DeBERTa models: the encoder, the pretraining model, and masked-language modelling.

Shapes: B batch, N sequence length, M selected positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.config.rules import check_model
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.attention import AttentionContext, dropout_sites
from megatron_deberta.model.dropout import Dropout, DropoutExecution, DropoutSeeds
from megatron_deberta.model.embeddings import Embeddings, Perturbation
from megatron_deberta.model.encoder import Encoder, EnhancedMaskDecoder
from megatron_deberta.model.heads import MaskedLanguageModelHead, NextSentenceHead
from megatron_deberta.model.inputs import ModelInputs, TokenInfo, check_inputs, gather_tokens
from megatron_deberta.model.layers import Layer
from megatron_deberta.model.parallel_layers import GatherFromSequenceParallelRegion
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

    position_places: ClassVar[tuple[str, ...]] = ("input",)
    """Values of ``absolute_positions`` with which the model reads absolute positions."""

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
        self.exit = GatherFromSequenceParallelRegion()
        execution = DropoutExecution(self.options.recompute != "selective", self.options.fuse)
        for module in self.modules():
            if isinstance(module, Dropout):
                module.execution = execution
        self._dropout_sites = dropout_sites(self.modules())
        self.build_heads(config)
        self.init_weights(seed)

    def build_heads(self, config: ModelConfig) -> None:
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
        inputs: ModelInputs,
        seeds: DropoutSeeds | None = None,
        perturbation: Perturbation | None = None,
    ) -> Tensor:
        """Run all layers.

        Args:
            inputs: the tokens ``[B, N]``.
            seeds: dropout keys; None: no dropout.
            perturbation: of the normalised embeddings (SiFT).

        Returns:
            ``[B, N, D]`` hidden states of the last layer, replicated on all ranks.
        """
        return self._run_layers(inputs, seeds, self.config.num_layers, perturbation)[0]

    def encode_selected(
        self,
        inputs: ModelInputs,
        positions: Tensor,
        seeds: DropoutSeeds | None = None,
        perturbation: Perturbation | None = None,
    ) -> Tensor:
        """Run all layers, the last one at selected positions only.

        Args:
            inputs: the tokens ``[B, N]``.
            positions: int64 ``[B, M]`` positions in the row, -1 = padding.
            seeds: dropout keys; None: no dropout.
            perturbation: of the normalised embeddings.

        Returns:
            ``[B, M, D]`` hidden states of the last layer, replicated on all ranks.
        """
        config = self.config
        if config.num_layers == 1 and config.conv_kernel_size:
            # The convolution is added to the first layer's output at every token.
            return gather_tokens(self.encode(inputs, seeds, perturbation), positions)
        hidden, tokens, context = self._run_layers(
            inputs, seeds, config.num_layers - 1, perturbation
        )
        last_layer = cast(Layer, self.encoder.layers[-1])
        key_value = last_layer.attention.project_key_value(hidden, tokens, context)
        states = gather_tokens(hidden, positions)
        out: Tensor = last_layer(states, tokens.select(positions), context, key_value)
        return out

    def _run_layers(
        self,
        inputs: ModelInputs,
        seeds: DropoutSeeds | None,
        num_layers: int,
        perturbation: Perturbation | None = None,
    ) -> tuple[Tensor, TokenInfo, AttentionContext]:
        """Run the embeddings and the first layers; return also their tokens and what layers share.

        States and tokens are replicated on all ranks.
        """
        tokens = TokenInfo.of_sequence(inputs)
        slots = self._table_slots(inputs.input_ids.size(1))
        if seeds is not None:
            seeds = seeds.of_sites(self._dropout_sites, self.config.mask_decoder_passes)
        context = AttentionContext(
            position_table=self.encoder.position_table(slots),
            attention_mask=None if inputs.attention_mask is None else tokens.is_token,
            document_ids=inputs.document_ids,
            seeds=seeds,
            backend=self.options.attention_backend,
            recompute_cheap=self.options.recompute == "selective" and self.training,
            causal=inputs.causal,
        )
        embedded, local_tokens = self.embeddings(inputs.input_ids, tokens, seeds, perturbation)
        hidden: Tensor = self.exit(self.encoder(embedded, local_tokens, context, num_layers))
        return hidden, tokens.replicated(), context

    def _table_slots(self, length: int) -> range | None:
        """Return the slots of the position table that rows of this length use; None: all."""
        return None

    def _check_inputs(self, inputs: ModelInputs, labels: Tensor | None = None) -> None:
        has_positions = self.config.absolute_positions in self.position_places
        check_inputs(self.config, inputs, labels, has_positions=has_positions)

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
        """Encode tokens; arguments as in `ModelInputs`, and ``seeds``, the dropout keys.

        In training mode without ``seeds``, the dropout key is drawn from torch's default
        generator, once per call.

        Raises:
            ModelInputError: a tensor has a wrong shape, or values out of range.
        """
        inputs = ModelInputs(input_ids, attention_mask, position_ids, token_type_ids, document_ids)
        self._check_inputs(inputs)
        return EncoderOutput(self.encode(inputs, seeds or self._default_seeds(input_ids)))


class DebertaForPretraining(DebertaBackbone):
    """Encoder, enhanced mask decoder, vocabulary head and, for pairs, next-sentence head."""

    position_places = ("input", "decoder")

    def build_heads(self, config: ModelConfig) -> None:
        """Add the mask decoder and the heads."""
        self.mask_decoder = EnhancedMaskDecoder(config) if config.mask_decoder_passes else None
        self.head = MaskedLanguageModelHead(config)
        self.next_sentence = NextSentenceHead(config) if config.next_sentence_head else None

    def decode(
        self,
        inputs: ModelInputs,
        masked_positions: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the hidden states that the vocabulary head reads, at selected positions.

        With the mask decoder, the last layer's ordinary output is used by the next-sentence head
        only, so the last layer runs inside the decoder only (docs/model.md).

        Args:
            inputs: the tokens ``[B, N]``.
            masked_positions: int64 ``[B, M]`` positions in the row, -1 = padding, in training each
                at most once; None: all N.
            seeds: dropout keys; None: no dropout.

        Returns:
            ``[B, M, D]`` decoded states, and the next-sentence head's logits ``[B, 2]`` or None.
        """
        first = None if self.next_sentence is None else torch.zeros_like(inputs.input_ids[:, :1])
        decoded, states, _ = self.decode_and_encode(inputs, masked_positions, seeds, first)
        if self.next_sentence is None or states is None:
            return decoded, None
        return decoded, self.next_sentence(states[:, 0])

    def decode_and_encode(
        self,
        inputs: ModelInputs,
        masked_positions: Tensor | None,
        seeds: DropoutSeeds | None,
        output_positions: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, AttentionContext]:
        """Compute the states of `decode`, and the encoder's output at other positions.

        Args:
            inputs: the tokens ``[B, N]``.
            masked_positions: as in `decode`.
            seeds: dropout keys; None: no dropout.
            output_positions: int64 ``[B, K]`` positions in the row, -1 = padding; None: nowhere.

        Returns:
            ``[B, M, D]`` decoded states; ``[B, K, D]`` outputs of the last layer, or None; what the
            layers share.
        """
        num_layers = self.config.num_layers - (1 if self.mask_decoder is not None else 0)
        hidden, tokens, context = self._run_layers(inputs, seeds, num_layers)
        if masked_positions is None:
            masked_positions = tokens.positions
        if self.mask_decoder is None:
            states = None if output_positions is None else gather_tokens(hidden, output_positions)
            return gather_tokens(hidden, masked_positions), states, context
        decoded, states = self.mask_decoder(
            hidden,
            tokens,
            masked_positions,
            self.encoder.layers[-1],
            context,
            output_positions=output_positions,
        )
        return decoded, states, context

    def masked_logits(
        self,
        inputs: ModelInputs,
        masked_positions: Tensor | None = None,
        seeds: DropoutSeeds | None = None,
    ) -> Tensor:
        """Compute logits at selected positions; arguments as in `decode`.

        Returns:
            ``[B, M, V]`` logits (the local part of V under tensor parallelism).

        Raises:
            ModelInputError: a tensor has a wrong shape, or values out of range.
        """
        self._check_inputs(inputs)
        decoded, _ = self.decode(inputs, masked_positions, seeds)
        logits: Tensor = self.head(decoded, self.embeddings.token.weight)
        return logits

    def logits(self, inputs: ModelInputs) -> Tensor:
        """Compute logits ``[B, N, V]`` at every position, in the head's form, without dropout."""
        if isinstance(inputs, ModelInputs) and self.config.head == "autoregressive":
            inputs = replace(inputs, causal=True)
        return self.masked_logits(inputs)

    def next_sentence_logits(self, inputs: ModelInputs) -> Tensor:
        """Compute the next-sentence head's logits ``[B, 2]``, without dropout."""
        assert self.next_sentence is not None
        out: Tensor = self.next_sentence(self.encode(inputs)[:, 0])
        return out


class DebertaForMaskedLM(DebertaForPretraining):
    """The pretraining model with the calling conventions of transformers' masked LM classes.

    For programs of one's own; ``pretrain`` trains the models of ``objectives``.
    """

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
            input_ids: int64 ``[B, N]``; this and the other tensors as in `ModelInputs`.
            attention_mask: ``[B, N]`` or None.
            labels: int64 ``[B, N]``, -100 = not scored.
            position_ids: int64 ``[B, N]`` or None.
            document_ids: int64 ``[B, N]`` or None.
            token_type_ids: int64 ``[B, N]`` or None.
            seeds: dropout keys.

        Raises:
            ModelInputError: a tensor has a wrong shape, or values out of range.
        """
        inputs = ModelInputs(input_ids, attention_mask, position_ids, token_type_ids, document_ids)
        self._check_inputs(inputs, labels)
        logits = self.masked_logits(inputs, seeds=seeds or self._default_seeds(input_ids))
        if labels is None:
            return MaskedLMOutput(None, logits)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        return MaskedLMOutput(loss, logits)
