"""DeBERTa for transformers: with mask decoder, autoregressive, and with the heads of tasks.

Self-contained (torch and transformers only): ``megatron-deberta convert --to hf`` copies this file
into the export, and ``trust_remote_code=True`` runs that copy. Parameter names are those of
transformers' ``deberta`` and ``deberta-v2`` classes, so the stock ``AutoModel`` loads the same
encoder. In addition to those classes it supports the mask decoder, the paper's p2c index, absolute
positions at the input together with relative ones, and projections without bias. The heads of tasks
and their losses are those of transformers' DeBERTa-v2 classes.

Source: He et al. 2021, arXiv:2006.03654, and the code released with it.
Letters: B batch, N tokens, D hidden size, A heads, H head size, S position slots, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    DebertaConfig,
    DebertaV2Config,
    DebertaV2ForMultipleChoice,
    DebertaV2ForQuestionAnswering,
    DebertaV2ForSequenceClassification,
    DebertaV2ForTokenClassification,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput, MaskedLMOutput
from transformers.models.deberta_v2.modeling_deberta_v2 import ContextPooler


class MegatronDebertaConfig(DebertaV2Config):
    """Configuration of architectures that the stock classes do not support.

    Fields in addition to DeBERTa-v2's: ``absolute_positions`` (decoder, input, none),
    ``mask_decoder_passes``, ``p2c_index`` (microsoft, paper), ``key_bias``, ``position_key_bias``,
    ``causal`` (the model was trained to predict next tokens only).
    """

    model_type = "megatron-deberta"


def setting(config: PretrainedConfig, name: str) -> Any:
    """Return a field that the stock configurations may lack, or the released models' default."""
    input_positions = config.position_biased_input
    defaults = {
        "absolute_positions": "input" if input_positions else "decoder",
        "mask_decoder_passes": 0 if input_positions else 2,
        "p2c_index": "microsoft",
        "key_bias": config.model_type != "deberta",
        "position_key_bias": config.model_type != "deberta",
        "position_buckets": -1,
        "share_att_key": False,
        "norm_rel_ebd": "none",
        "conv_kernel_size": 0,
        "conv_act": "tanh",
        "causal": False,
    }
    return getattr(config, name, defaults[name])


def position_terms(config: PretrainedConfig) -> tuple[bool, bool]:
    """Return whether the content-to-position and position-to-content terms are enabled."""
    terms = (config.pos_att_type or []) if config.relative_attention else []
    return "c2p" in terms, "p2c" in terms


def max_distance(config: PretrainedConfig) -> int:
    """Return the largest relative distance that the position table distinguishes."""
    limit: int = config.max_relative_positions
    return limit if limit > 0 else config.max_position_embeddings


def position_slots(length: int, config: PretrainedConfig, device: torch.device) -> Tensor:
    """Return the relative-position table row of every pair, int64 ``[N query, N key]``.

    Source: section 3.1, Eq. 3; log buckets as in the released ``make_log_bucket_position``.

    Args:
        length: N.
        config: the architecture.
        device: of the result.
    """
    limit = max_distance(config)
    buckets: int = setting(config, "position_buckets")
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    if buckets <= 0:
        return (distance + limit).clamp(0, 2 * limit - 1)
    middle = buckets // 2
    far = distance.abs().clamp(min=middle).float() / middle
    steps = torch.log(far) / torch.log(torch.tensor((limit - 1) / middle)) * (middle - 1)
    logarithmic = (torch.ceil(steps).long() + middle) * distance.sign()
    bucket = torch.where(distance.abs() <= middle, distance, logarithmic)
    return (bucket + buckets).clamp(0, 2 * buckets - 1)


class SelfAttention(nn.Module):
    """Disentangled self-attention with separate query input (for the mask decoder).

    Source: section 3.1, Eq. 4; ``p2c_index="microsoft"`` reads the p2c term at delta(i, j).
    """

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.c2p, self.p2c = position_terms(config)
        self.paper_index = setting(config, "p2c_index") == "paper"
        self.shared = setting(config, "share_att_key")
        self.v1_names = config.model_type == "deberta"
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)
        self.pos_dropout = nn.Dropout(config.hidden_dropout_prob)
        if self.v1_names:
            self.in_proj = nn.Linear(width, 3 * width, bias=False)
            self.q_bias = nn.Parameter(torch.zeros(width))
            self.v_bias = nn.Parameter(torch.zeros(width))
        else:
            self.query_proj = nn.Linear(width, width)
            self.key_proj = nn.Linear(width, width, bias=setting(config, "key_bias"))
            self.value_proj = nn.Linear(width, width)
        v1_names = ("pos_proj", "pos_q_proj")
        separate = v1_names if self.v1_names else ("pos_key_proj", "pos_query_proj")
        self.position_projections = ("key_proj", "query_proj") if self.shared else separate
        if self.c2p and not self.shared:
            bias = setting(config, "position_key_bias")
            self.add_module(separate[0], nn.Linear(width, width, bias=bias))
        if self.p2c and not self.shared:
            self.add_module(separate[1], nn.Linear(width, width))

    def forward(
        self, hidden: Tensor, query: Tensor, mask: Tensor, slots: Tensor, table: Tensor | None
    ) -> Tensor:
        """Attend from ``query`` ``[B, N, D]`` to ``hidden`` ``[B, N, D]``.

        Args:
            hidden: input of the key and value projections.
            query: input of the query projection, at the same positions.
            mask: bool ``[B, 1, N]`` or ``[B, N, N]``, True = visible key.
            slots: int64 ``[N, N]`` rows of the position table.
            table: ``[S, D]`` relative-position embeddings, or None.

        Returns:
            ``[B, N, D]``.
        """
        queries, keys, values = self._project(query, hidden)
        scale = (queries.size(-1) * (1 + self.c2p + self.p2c)) ** -0.5
        queries = queries * scale
        scores = queries @ keys.transpose(-1, -2)
        pairs = slots.expand_as(scores)
        if table is not None:
            table = self.pos_dropout(table)
        if self.c2p:
            position_keys = self._split(self.get_submodule(self.position_projections[0])(table))
            c2p = queries @ position_keys.transpose(-1, -2)
            scores = scores + c2p.gather(-1, pairs)
        if self.p2c:
            projection = self.get_submodule(self.position_projections[1])
            position_queries = self._split(projection(table)) * scale
            p2c = keys @ position_queries.transpose(-1, -2)
            index = pairs if self.paper_index else pairs.transpose(-1, -2)
            scores = scores + p2c.gather(-1, index).transpose(-1, -2)
        scores = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min)
        probabilities = self.dropout(scores.float().softmax(-1).to(values.dtype))
        context: Tensor = (probabilities @ values).transpose(1, 2).flatten(2)
        return context

    def _project(self, query: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if not self.v1_names:
            projected = self.query_proj(query), self.key_proj(hidden), self.value_proj(hidden)
        else:
            width = query.size(-1)
            # in_proj holds query, key and value rows head by head.
            weights = self.in_proj.weight.view(self.num_heads, 3, -1, width)
            weight_q, weight_k, weight_v = (weights[:, i].reshape(-1, width) for i in range(3))
            projected = (
                F.linear(query, weight_q, self.q_bias),
                F.linear(hidden, weight_k),
                F.linear(hidden, weight_v, self.v_bias),
            )
        queries, keys, values = (self._split(part) for part in projected)
        return queries, keys, values

    def _split(self, projected: Tensor) -> Tensor:
        """Reshape ``[..., N, A * H]`` to ``[..., A, N, H]``."""
        heads: Tensor = projected.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)
        return heads


class ResidualOutput(nn.Module):
    """Projection, dropout, residual and LayerNorm at the end of attention and feed-forward."""

    def __init__(self, config: PretrainedConfig, input_size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(input_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, inner: Tensor, residual: Tensor) -> Tensor:
        """Return ``LayerNorm(residual + dropout(dense(inner)))``.

        Args:
            inner: ``[B, N, width]``, input of the projection.
            residual: ``[B, N, D]``.

        Returns:
            ``[B, N, D]``.
        """
        normalised: Tensor = self.LayerNorm(residual + self.dropout(self.dense(inner)))
        return normalised


class Layer(nn.Module):
    """Transformer layer whose queries and residual are computed from ``query``."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(config), "output": ResidualOutput(config, config.hidden_size)}
        )
        self.intermediate = nn.ModuleDict(
            {"dense": nn.Linear(config.hidden_size, config.intermediate_size)}
        )
        self.output = ResidualOutput(config, config.intermediate_size)

    def forward(self, hidden: Tensor, query: Tensor, *shared: Any) -> Tensor:
        """Map ``query`` ``[B, N, D]`` to ``[B, N, D]``; ``shared`` as in the attention."""
        context = self.attention["self"](hidden, query, *shared)
        attended = self.attention["output"](context, query)
        out: Tensor = self.output(F.gelu(self.intermediate["dense"](attended)), attended)
        return out


class ConvolutionBranch(nn.Module):
    """Convolution of the embeddings, added to the first layer's output."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        size = setting(config, "conv_kernel_size")
        self.conv = nn.Conv1d(config.hidden_size, config.hidden_size, size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.tanh = setting(config, "conv_act") == "tanh"

    def forward(
        self, embedded: Tensor, hidden: Tensor, mask: Tensor, causal: bool = False
    ) -> Tensor:
        """Compute ``LayerNorm(hidden + act(dropout(conv(embedded))))``.

        Args:
            embedded: ``[B, N, D]``, input of the first layer.
            hidden: ``[B, N, D]``, output of the first layer.
            mask: bool ``[B, N]``, True = real token.
            causal: no position sees a later one.

        Returns:
            ``[B, N, D]``, zero at padding.
        """
        radius = self.conv.kernel_size[0] // 2
        channels = F.pad(embedded.transpose(1, 2), (radius, 0 if causal else radius))
        weight = self.conv.weight[:, :, : radius + 1] if causal else self.conv.weight
        convolved = F.conv1d(channels, weight, self.conv.bias)
        convolved = self.dropout(convolved.transpose(1, 2) * mask.unsqueeze(-1))
        activated = torch.tanh(convolved) if self.tanh else F.gelu(convolved)
        out: Tensor = self.LayerNorm(hidden + activated)
        return out * mask.unsqueeze(-1)


class Embeddings(nn.Module):
    """Token embeddings, and absolute positions, added here or in the mask decoder."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.at_input = setting(config, "absolute_positions") == "input"
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        if setting(config, "absolute_positions") != "none":
            size = config.max_position_embeddings
            self.position_embeddings = nn.Embedding(size, config.hidden_size)
        self.has_types = config.type_vocab_size > 0
        if self.has_types:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, mask: Tensor, types: Tensor | None = None) -> Tensor:
        """Embed tokens, and absolute positions and token types if the model has them there.

        Args:
            input_ids: int64 ``[B, N]``.
            mask: bool ``[B, N]``, True = real token.
            types: int64 ``[B, N]`` token types; None: all 0.

        Returns:
            ``[B, N, D]``, zero at padding.
        """
        hidden = self.word_embeddings(input_ids)
        if self.at_input:
            hidden = hidden + self.position_embeddings.weight[: input_ids.size(1)]
        if self.has_types:
            types = torch.zeros_like(input_ids) if types is None else types
            hidden = hidden + self.token_type_embeddings(types)
        out: Tensor = self.dropout(self.LayerNorm(hidden) * mask.unsqueeze(-1))
        return out


class Encoder(nn.Module):
    """Transformer layers, their shared relative-position table, and the convolution."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.has_positions = any(position_terms(config))
        self.LayerNorm: nn.Module = nn.Identity()
        if self.has_positions:
            buckets = setting(config, "position_buckets")
            span = buckets if buckets > 0 else max_distance(config)
            self.rel_embeddings = nn.Embedding(2 * span, config.hidden_size)
            if "layer_norm" in setting(config, "norm_rel_ebd"):
                self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.conv = ConvolutionBranch(config) if setting(config, "conv_kernel_size") > 0 else None

    def table(self) -> Tensor | None:
        """Return the (normalised) relative-position table ``[S, D]``."""
        return self.LayerNorm(self.rel_embeddings.weight) if self.has_positions else None


class MegatronDebertaPreTrainedModel(PreTrainedModel):
    """Base class: weight initialisation and the encoder's name prefix."""

    config_class = MegatronDebertaConfig
    base_model_prefix = "deberta"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        for name in ("q_bias", "v_bias", "bias"):
            bias = getattr(module, name, None)
            if isinstance(module, SelfAttention | VocabularyHead) and bias is not None:
                nn.init.zeros_(bias)


class MegatronDebertaModel(MegatronDebertaPreTrainedModel):
    """DeBERTa encoder for downstream tasks."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embeddings."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embeddings."""
        self.embeddings.word_embeddings = value

    def checked_mask(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        types: Tensor | None,
        labels: Tensor | None = None,
        decodes: bool = False,
    ) -> Tensor:
        """Check the inputs, and return the mask of real tokens.

        Values are checked on the CPU only, where reading them waits for nothing, and nothing is
        checked in code that is compiled or traced.

        Args:
            input_ids: int64 ``[B, N]``.
            attention_mask: ``[B, N]``, non-zero = real token; None: no padding.
            types: token types; not checked if the model has no table for them.
            labels: token ids, or -100.
            decodes: the mask decoder runs, which may add absolute positions.

        Returns:
            Bool ``[B, N]``.

        Raises:
            ValueError: names the argument.
        """
        is_tracing = torch.jit.is_tracing()  # type: ignore[attr-defined]
        if is_tracing or torch.compiler.is_compiling():
            return as_mask(input_ids, attention_mask)
        if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
            found = list(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids)
            raise ValueError(f"input_ids: got {found}, expected a tensor [batch, tokens]")
        if input_ids.is_floating_point():
            raise ValueError(f"input_ids: got {input_ids.dtype}, expected int64")
        embeddings = self.embeddings
        others = {"attention_mask": attention_mask, "token_type_ids": types, "labels": labels}
        for name, tensor in others.items():
            if tensor is not None and tensor.shape != input_ids.shape:
                raise ValueError(
                    f"{name}: got shape {list(tensor.shape)}, expected {list(input_ids.shape)} as "
                    "input_ids"
                )
        if embeddings.at_input or (
            decodes and setting(self.config, "absolute_positions") != "none"
        ):
            limit = embeddings.position_embeddings.num_embeddings
            if input_ids.size(1) > limit:
                raise ValueError(
                    f"input_ids: got rows of {input_ids.size(1)} tokens, but the model has {limit} "
                    "positions (max_position_embeddings); cut the rows, as truncation=True does"
                )
        num_tokens = embeddings.word_embeddings.num_embeddings
        check_values("input_ids", input_ids, num_tokens)
        if types is not None and embeddings.has_types:
            check_values("token_type_ids", types, embeddings.token_type_embeddings.num_embeddings)
        if labels is not None and labels.device.type == "cpu":
            check_values("labels", labels.masked_fill(labels == -100, 0), num_tokens)
        return as_mask(input_ids, attention_mask)

    def shared_inputs(
        self, mask: Tensor, causal: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Compute the inputs of attention that all layers share.

        Args:
            mask: bool ``[B, N]``, True = real token.
            causal: no position sees a later one.

        Returns:
            Bool ``[B, 1, N]`` or ``[B, N, N]``, True = visible key; slots of `position_slots`;
            normalised position table or None.
        """
        length = mask.size(1)
        visible = mask[:, None]
        if causal:
            visible = visible & torch.ones(length, length, device=mask.device).tril().bool()
        return visible, position_slots(length, self.config, mask.device), self.encoder.table()

    def hidden_states(
        self, input_ids: Tensor, mask: Tensor, types: Tensor | None = None, causal: bool = False
    ) -> list[Tensor]:
        """Return the embeddings and the output of every layer, ``[B, N, D]`` each.

        Args:
            input_ids: int64 ``[B, N]``.
            mask: bool ``[B, N]``, True = real token.
            types: int64 ``[B, N]`` token types; None: all 0.
            causal: no position sees a later one.
        """
        shared = self.shared_inputs(mask, causal)
        states = [self.embeddings(input_ids, mask, types)]
        for index, layer in enumerate(self.encoder.layer):
            hidden = layer(states[-1], states[-1], *shared)
            if index == 0 and self.encoder.conv is not None:
                hidden = self.encoder.conv(states[0], hidden, mask, causal)
            states.append(hidden)
        return states

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **unsupported: Any,
    ) -> Any:
        """Encode tokens.

        Args:
            input_ids: int64 ``[B, N]``.
            attention_mask: ``[B, N]``, non-zero = real token; None: no padding.
            token_type_ids: int64 ``[B, N]``; ignored if the model has no table for them.
            output_hidden_states: also return the embeddings and the output of every layer; None: as
                the config says.
            return_dict: False: return a tuple.
            **unsupported: refused unless None or False.

        Returns:
            ``BaseModelOutput`` with ``last_hidden_state`` ``[B, N, D]``.

        Raises:
            ValueError: an argument is wrong or not supported; names it.
        """
        refuse(unsupported)
        mask = self.checked_mask(input_ids, attention_mask, token_type_ids)
        causal = setting(self.config, "causal")
        states = self.hidden_states(input_ids, mask, token_type_ids, causal)
        return_states = output_hidden_states or self.config.output_hidden_states
        out = BaseModelOutput(states[-1], tuple(states) if return_states else None)
        return out.to_tuple() if return_dict is False else out


class VocabularyHead(nn.Module):
    """Language-modeling head: dense, GELU, LayerNorm, tied token embeddings and a bias."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden: Tensor, token_table: Tensor) -> Tensor:
        """Map ``[B, N, D]`` to logits ``[B, N, V]``."""
        return F.linear(self.LayerNorm(F.gelu(self.dense(hidden))), token_table, self.bias)


class LanguageModel(MegatronDebertaPreTrainedModel):
    """Encoder, mask decoder and vocabulary head.

    Source: section 3.3 and the released code: the encoder's last layer runs ``mask_decoder_passes``
    times with keys and values from its input; the first query adds absolute positions to it.
    """

    causal = False
    """Whether each position predicts the next token and sees no later one."""
    accepts_loss_kwargs = False
    """transformers' ``Trainer`` must not pass ``num_items_in_batch``."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.deberta = MegatronDebertaModel(config)
        self.lm_predictions = nn.ModuleDict({"lm_head": VocabularyHead(config)})
        self.post_init()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the token embeddings and the head's bias, whose new entries are 0."""
        table: nn.Embedding = super().resize_token_embeddings(*args, **kwargs)
        head = self.lm_predictions["lm_head"]
        old = head.get_parameter("bias").detach()
        # A negative padding cuts.
        head.bias = nn.Parameter(F.pad(old, (0, table.num_embeddings - len(old))))
        return table

    def decode(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Run the mask decoder at every position.

        Args:
            hidden: ``[B, N, D]``, input of the encoder's last layer.
            mask: bool ``[B, N]``, True = real token.

        Returns:
            ``[B, N, D]``.
        """
        query = hidden
        if setting(self.config, "absolute_positions") == "decoder":
            positions = self.deberta.embeddings.position_embeddings.weight
            query = query + positions[: hidden.size(1)]
        shared = self.deberta.shared_inputs(mask, self.causal)
        for _ in range(setting(self.config, "mask_decoder_passes")):
            query = self.deberta.encoder.layer[-1](hidden, query, *shared)
        return query

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **unsupported: Any,
    ) -> Any:
        """Predict every token, or of a causal model the token after each.

        Args:
            input_ids: int64 ``[B, N]``.
            attention_mask: ``[B, N]``, non-zero = real token; None: no padding.
            token_type_ids: int64 ``[B, N]`` segments; ignored if the model has no table for them.
            labels: int64 ``[B, N]``, -100 = ignored; adds the mean ``loss``. Those of a causal
                model are tokens as in ``input_ids``, and are shifted here.
            output_hidden_states: also return the encoder's hidden states.
            return_dict: False returns a tuple.
            unsupported: other arguments of transformers' models; None or False.

        Returns:
            ``MaskedLMOutput`` or ``CausalLMOutput`` with ``logits`` ``[B, N, V]``.

        Raises:
            ValueError: another argument is given, a tensor has a wrong shape or values out of
                range, or rows of a causal model are padded on the left, which moves absolute
                positions.
        """
        refuse(unsupported)
        mask = self.deberta.checked_mask(
            input_ids, attention_mask, token_type_ids, labels, decodes=True
        )
        if self.causal and not torch.all(mask[:, 0]):
            raise ValueError("attention_mask: rows are padded on the left; pad on the right")
        states = self.deberta.hidden_states(input_ids, mask, token_type_ids, self.causal)
        has_decoder = setting(self.config, "mask_decoder_passes") > 0
        decoded = self.decode(states[-2], mask) if has_decoder else states[-1]
        head = self.lm_predictions["lm_head"]
        logits = head(decoded, self.deberta.embeddings.word_embeddings.weight)
        loss = None
        if labels is not None:
            scores, targets = (logits[:, :-1], labels[:, 1:]) if self.causal else (logits, labels)
            loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        return_states = output_hidden_states or self.config.output_hidden_states
        output = CausalLMOutput if self.causal else MaskedLMOutput
        out = output(loss, logits, tuple(states) if return_states else None)
        return out.to_tuple() if return_dict is False else out


class MegatronDebertaForMaskedLM(LanguageModel):
    """Masked language model with the enhanced mask decoder.

    ``from_pretrained`` returns the class for the configuration's ``model_type``; transformers
    matches classes by configuration.
    """

    config_class = MegatronDebertaConfig

    @classmethod
    def from_pretrained(
        cls, name_or_path: Any, *args: Any, **kwargs: Any
    ) -> MegatronDebertaForMaskedLM:
        """Load; same arguments as ``transformers.PreTrainedModel.from_pretrained``.

        Raises:
            ValueError: the model is not a DeBERTa.
        """
        config = kwargs.get("config") or PretrainedConfig.get_config_dict(name_or_path)[0]
        model_type = (config if isinstance(config, dict) else vars(type(config))).get("model_type")
        for kind in (
            MegatronDebertaForMaskedLM, MegatronDebertaV1ForMaskedLM, MegatronDebertaV2ForMaskedLM
        ):  # fmt: skip
            if kind.config_class.model_type == model_type:
                load = super(MegatronDebertaForMaskedLM, kind).from_pretrained
                model: MegatronDebertaForMaskedLM = load(name_or_path, *args, **kwargs)
                return model
        raise ValueError(
            f"{name_or_path}: model_type {model_type!r} is not a DeBERTa; "
            "load it with transformers.AutoModelForMaskedLM"
        )


class MegatronDebertaV1ForMaskedLM(MegatronDebertaForMaskedLM):
    """The same for type ``deberta``."""

    config_class = DebertaConfig


class MegatronDebertaV2ForMaskedLM(MegatronDebertaForMaskedLM):
    """The same for type ``deberta-v2``."""

    config_class = DebertaV2Config


class MegatronDebertaForCausalLM(LanguageModel, GenerationMixin):
    """Autoregressive language model: no position sees a later one, each predicts the next token.

    Source: He et al. 2021, arXiv:2006.03654, appendix A.4. ``generate`` runs the whole sequence for
    each new token.
    """

    config_class = MegatronDebertaConfig
    causal = True

    def prepare_inputs_for_generation(self, input_ids: Tensor, *_: Any, **inputs: Any) -> Any:
        """Return the whole sequence for each new token; there is no cache.

        Args:
            input_ids: int64 ``[B, N]``, all tokens so far.
            **inputs: of ``generate``; the attention mask is read.
        """
        return {"input_ids": input_ids, "attention_mask": inputs.get("attention_mask")}


class TaskModel(MegatronDebertaPreTrainedModel):
    """Encoder with a head on every token, without ``forward``."""

    head = "classifier"

    def __init__(self, config: PretrainedConfig) -> None:
        # Not the stock class's, which builds the stock encoder.
        PreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.deberta = MegatronDebertaModel(config)
        self.build_head(config)
        self.post_init()

    def build_head(self, config: PretrainedConfig) -> None:
        """Add the modules above the encoder, with the stock class's names."""
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.add_module(self.head, nn.Linear(config.hidden_size, config.num_labels))


class RowModel(TaskModel):
    """Encoder with a head on the first token, without ``forward``."""

    num_outputs: int | None = None

    def build_head(self, config: PretrainedConfig) -> None:
        """Add pooler and classifier."""
        outputs = self.num_outputs or config.num_labels
        self.pooler = ContextPooler(config)
        self.dropout = nn.Dropout(config.cls_dropout)
        self.classifier = nn.Linear(config.hidden_size, outputs)


class MegatronDebertaForSequenceClassification(RowModel, DebertaV2ForSequenceClassification):
    """Classification or regression of rows."""

    config_class = MegatronDebertaConfig


class MegatronDebertaForMultipleChoice(RowModel, DebertaV2ForMultipleChoice):
    """One logit per choice."""

    config_class = MegatronDebertaConfig
    num_outputs = 1


class MegatronDebertaV1ForMultipleChoice(MegatronDebertaForMultipleChoice):
    """The same for the type ``deberta``, for which transformers has no such class."""

    config_class = DebertaConfig


class MegatronDebertaForTokenClassification(TaskModel, DebertaV2ForTokenClassification):
    """Classification of tokens."""

    config_class = MegatronDebertaConfig


class MegatronDebertaForQuestionAnswering(TaskModel, DebertaV2ForQuestionAnswering):
    """First and last token of an answer."""

    config_class = MegatronDebertaConfig
    head = "qa_outputs"


def as_mask(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return a bool mask ``[B, N]``, True = real token; all True if none is given."""
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    return attention_mask.bool()


def check_values(name: str, tensor: Tensor, count: int) -> None:
    """Check that the values of a tensor are in 0 to ``count`` - 1.

    Args:
        name: of the tensor, for the message.
        tensor: integers, any shape; not checked on other devices than the CPU.
        count: number of allowed values.

    Raises:
        ValueError: a value is not.
    """
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return
    low, high = (bound.item() for bound in tensor.aminmax())
    if low < 0 or high >= count:
        wrong = low if low < 0 else high
        raise ValueError(f"{name}: got {wrong}, expected 0 to {count - 1}")


def refuse(arguments: dict[str, Any]) -> None:
    """Raise ValueError if an argument that is not supported is given."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: this model does not support it; omit it")


# Names in ``auto_map`` of exports of earlier revisions.
DebertaForMaskedLM = MegatronDebertaV1ForMaskedLM
DebertaV2ForMaskedLM = MegatronDebertaV2ForMaskedLM
DebertaForMultipleChoice = MegatronDebertaV1ForMultipleChoice
