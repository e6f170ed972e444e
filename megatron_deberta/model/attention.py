"""Multi-head disentangled self-attention with its output projection and LayerNorm.

Source: He et al. 2021, arXiv:2006.03654, section 3.1, Eq. 2 to 4; the operator is in ``ops``.
The number of local heads follows from the width of the projections, so tensor parallelism needs
only narrower weights.

Shapes: B batch, N sequence length, R rows, D hidden size, A (local) heads, H head size, S slots of
the position table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.dropout import Dropout, DropoutSeeds, site_id
from megatron_deberta.model.inputs import TokenInfo
from megatron_deberta.model.parallel_layers import (
    ColumnParallelInput,
    LayerNorm,
    RowParallelLinear,
    project_together,
)
from megatron_deberta.ops import RelativePositions, disentangled_attention
from megatron_deberta.ops.arguments import MaskCache
from megatron_deberta.ops.reference import AttentionMaps, attention_maps


class PositionTable(NamedTuple):
    """Normalised relative-position table, or those of its rows that a batch reaches.

    Attributes:
        rows: ``[S, D]``.
        slots: numbers of the rows; fewer than the model has if rows of tokens are too short for
            the others.
        keys: the same numbers, int64 ``[S]``, a dropout key.
    """

    rows: Tensor
    slots: range
    keys: Tensor


@dataclass(frozen=True)
class AttentionContext:
    """Inputs shared by all attention layers of one forward pass.

    Attributes:
        position_table: None: no position terms.
        attention_mask: bool ``[B, N]``, True = token; None: no padding.
        document_ids: int64 ``[B, N]``; attention stays inside packed documents. None: no
            restriction.
        seeds: dropout keys; None: no dropout.
        backend: backend of the operator; None: chosen automatically.
        recompute_cheap: selective recomputation: dropout masks and activations, but no matrix
            products.
        causal: attention sees no later token.
        masks: what the attention operator derives from the masks, kept from layer to layer.
        distinct_queries: gathered queries stand at distinct positions.
    """

    position_table: PositionTable | None
    attention_mask: Tensor | None
    document_ids: Tensor | None
    seeds: DropoutSeeds | None
    backend: str | None
    recompute_cheap: bool
    causal: bool = False
    masks: MaskCache = field(default_factory=dict)
    distinct_queries: bool = False


@dataclass(frozen=True)
class KeyValue:
    """Keys, values and projected positions.

    Attributes:
        key: ``[B, A, N, H]``.
        value: ``[B, A, N, H]``.
        position_key: ``[A, S, H]``; None: no c2p term.
        position_query: ``[A, S, H]``; None: no p2c term.
    """

    key: Tensor
    value: Tensor
    position_key: Tensor | None
    position_query: Tensor | None


class DisentangledSelfAttention(nn.Module):
    """The attention block of one layer, post-LayerNorm.

    Args:
        config: the architecture.
        index: index of the layer; part of the dropout sites' names.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_size = width // config.num_heads
        self.c2p = config.position_terms in ("c2p+p2c", "c2p")
        self.p2c = config.position_terms in ("c2p+p2c", "p2c")
        self.p2c_index = config.p2c_index
        self.positions = RelativePositions(
            config.max_relative_positions, config.position_buckets or 0
        )
        self.attention_dropout = config.attention_dropout
        # Global index of the first local head; set by ``distributed.parallelize``
        self.first_head = 0
        separate = not config.share_position_projections
        self.input = ColumnParallelInput()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=config.key_bias)
        self.value = nn.Linear(width, width)
        self.position_key = (
            nn.Linear(width, width, bias=config.position_key_bias)
            if separate and self.c2p
            else None
        )
        self.position_query = nn.Linear(width, width) if separate and self.p2c else None
        self.output = RowParallelLinear(width, width)
        self.norm = LayerNorm(width, eps=config.layer_norm_eps)
        site = f"encoder.layers.{index}.attention"
        self.site = site_id(f"{site}.probabilities")
        self.dropout = Dropout(config.hidden_dropout, site)
        self.table_dropout = Dropout(config.hidden_dropout, f"{site}.table")

    def forward(
        self,
        hidden: Tensor,
        tokens: TokenInfo,
        context: AttentionContext,
        key_value: KeyValue | None = None,
    ) -> Tensor:
        """Compute LayerNorm(hidden + dropout(output projection of the attention)).

        Args:
            hidden: ``[B, R, D]``.
            tokens: those of ``hidden``; selected rows attend from their own positions.
            context: inputs shared by all layers.
            key_value: keys and values; None: computed from ``hidden`` (self-attention).

        Returns:
            ``[B, R, D]``.
        """
        if key_value is None:
            layers = (self.query, self.key, self.value)
            query, key, value = self.input.project(hidden, tokens.is_sequence, layers)
            key_value = self._key_value(key, value, context)
        else:
            (query,) = self.input.project(hidden, tokens.is_sequence, (self.query,))
        query_positions = None if tokens.is_sequence else tokens.positions
        attended_BANH = self._attend(self._split_heads(query), key_value, query_positions, context)
        out = self.output(attended_BANH.transpose(1, 2).flatten(2), tokens.is_sequence)
        pre_norm = self.dropout.before_norm(out, tokens.positions, context.seeds, residual=hidden)
        normalised: Tensor = self.norm(pre_norm, tokens.is_sequence)
        return normalised

    def maps(self, hidden: Tensor, tokens: TokenInfo, context: AttentionContext) -> AttentionMaps:
        """Return the attention maps of the self-attention, before dropout of probabilities.

        Args:
            hidden: ``[B, N, D]``, input of the layer.
            tokens: those of ``hidden``.
            context: inputs shared by all layers; its padding and documents are ignored.
        """
        key_value = self.project_key_value(hidden, tokens, context)
        (query,) = self.input.project(hidden, tokens.is_sequence, (self.query,))
        return attention_maps(
            self._split_heads(query),
            key_value.key,
            key_value.position_key,
            key_value.position_query,
            self.positions,
            causal=context.causal,
            p2c_index=self.p2c_index,
        )

    def project_key_value(
        self, hidden: Tensor, tokens: TokenInfo, context: AttentionContext
    ) -> KeyValue:
        """Project the keys, values and positions that queries attend to.

        Args:
            hidden: ``[B, R, D]``.
            tokens: those of ``hidden``.
            context: inputs shared by all layers.
        """
        key, value = self.input.project(hidden, tokens.is_sequence, (self.key, self.value))
        return self._key_value(key, value, context)

    def _key_value(self, key: Tensor, value: Tensor, context: AttentionContext) -> KeyValue:
        return KeyValue(
            self._split_heads(key), self._split_heads(value), *self._project_positions(context)
        )

    def _project_positions(self, context: AttentionContext) -> tuple[Tensor | None, Tensor | None]:
        if context.position_table is None:
            return None, None
        rows, used, keys = context.position_table
        num_slots = 2 * self.positions.span
        # One mask per layer and step, shared by the passes of the mask decoder.
        table = self.table_dropout(rows, keys, context.seeds)
        key_projection = self.key if self.position_key is None else self.position_key
        query_projection = self.query if self.position_query is None else self.position_query
        projections = ((key_projection, self.c2p), (query_projection, self.p2c))
        projected = project_together(table, [layer for layer, enabled in projections if enabled])
        if len(used) < num_slots:
            unused = (0, 0, used.start, num_slots - used.stop)
            projected = tuple(F.pad(one, unused) for one in projected)
        heads = [self._split_heads(one.unsqueeze(0))[0] for one in projected]
        return heads[0] if self.c2p else None, heads[-1] if self.p2c else None

    def _attend(
        self,
        query: Tensor,
        key_value: KeyValue,
        query_positions: Tensor | None,
        context: AttentionContext,
    ) -> Tensor:
        seeds = context.seeds
        dropout_p = self.attention_dropout if seeds is not None else 0.0
        return disentangled_attention(
            query,
            key_value.key,
            key_value.value,
            key_value.position_key,
            key_value.position_query,
            self.positions,
            q_positions=query_positions,
            distinct_positions=context.distinct_queries,
            attention_mask=context.attention_mask,
            document_ids=context.document_ids,
            causal=context.causal,
            dropout_p=dropout_p,
            seed=seeds.per_row(self.site) if seeds is not None and dropout_p > 0 else None,
            head_offset=self.first_head,
            p2c_index=self.p2c_index,
            backend=context.backend,
            masks=context.masks,
        )

    def _split_heads(self, projected: Tensor) -> Tensor:
        """``[B, R, A * H]`` -> ``[B, A, R, H]``."""
        heads: Tensor = projected.unflatten(-1, (-1, self.head_size))
        return heads.transpose(1, 2)


def dropout_sites(modules: Iterable[nn.Module]) -> tuple[int, ...]:
    """Return the ids of all dropout sites of some modules, attention probabilities included."""
    kinds = (Dropout, DisentangledSelfAttention)
    return tuple(module.site for module in modules if isinstance(module, kinds))
