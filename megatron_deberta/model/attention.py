"""Multi-head disentangled self-attention with its output projection and LayerNorm.

Source: He et al. 2021, arXiv:2006.03654, section 3.1, Eq. 2 to 4, through the operator of ``ops``.
The number of local heads is read off the width of the projections, so a split layer needs nothing
but narrower weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model.dropout import Dropout, DropoutSeeds, site_id
from megatron_deberta.model.projections import project_together
from megatron_deberta.model.tp_hooks import BlockInput, BlockOutput, LayerNorm, TokenLayout
from megatron_deberta.ops import RelativePositions, disentangled_attention


@dataclass(frozen=True)
class AttentionContext:
    """What all attention layers of one forward pass share."""

    position_table: Tensor | None
    """``[S, D]`` normalised relative-position table, or None without position terms."""
    key_padding: Tensor | None
    """bool ``[B, N]``, True = real token; None where every token is."""
    document_ids: Tensor | None
    """int64 ``[B, N]`` if attention stays inside packed documents."""
    seeds: DropoutSeeds | None
    """Keys of dropout; None turns it off."""
    backend: str | None
    """Backend of the operator; None lets it choose."""
    recompute_cheap: bool
    """Compute again in backward what takes no matrix product: dropout masks, activations."""


@dataclass(frozen=True)
class KeyValue:
    """What queries read: keys, values and projected positions."""

    key: Tensor
    """``[B, A, N, H]``."""
    value: Tensor
    """``[B, A, N, H]``."""
    position_key: Tensor | None
    """``[A, S, H]``, or None without the c2p term."""
    position_query: Tensor | None
    """``[A, S, H]``, or None without the p2c term."""


class DisentangledSelfAttention(nn.Module):
    """The attention block of one layer, post-LayerNorm.

    Args:
        config: the architecture.
        index: number of the layer, from 0; it keys dropout.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_size = width // config.num_heads
        self.c2p = config.position_terms in ("c2p+p2c", "c2p")
        self.p2c = config.position_terms in ("c2p+p2c", "p2c")
        self.p2c_index = config.p2c_index
        self.positions = RelativePositions(config.max_relative_positions, config.position_buckets)
        self.attention_dropout = config.attention_dropout
        self.first_head = 0
        """Global number of the first local head; ``sharding`` sets it on split layers."""
        separate = not config.share_position_projections
        self.input = BlockInput()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=config.key_bias)
        self.value = nn.Linear(width, width)
        self.position_key = (
            nn.Linear(width, width, bias=config.position_key_bias)
            if separate and self.c2p
            else None
        )
        self.position_query = nn.Linear(width, width) if separate and self.p2c else None
        self.output = BlockOutput(width, width)
        self.norm = LayerNorm(width, eps=config.layer_norm_eps)
        site = f"encoder.layers.{index}.attention"
        self.site = site_id(f"{site}.probabilities")
        self.dropout = Dropout(config.hidden_dropout, site)
        self.table_dropout = Dropout(config.hidden_dropout, f"{site}.table")

    def forward(
        self,
        hidden: Tensor,
        layout: TokenLayout,
        context: AttentionContext,
        memory: KeyValue | None = None,
    ) -> Tensor:
        """Attend, project, drop, add the residual and normalise.

        Args:
            hidden: ``[B, R, D]`` residual stream, also the residual.
            layout: which rows those are; picked rows ask from their own positions.
            context: what all layers share.
            memory: what to read; None reads ``hidden`` itself (self-attention).

        Returns:
            ``[B, R, D]``.
        """
        inner = self.input(hidden, layout)
        if memory is None:
            query, key, value = project_together(inner, (self.query, self.key, self.value))
            memory = self._memory(key, value, context)
        else:
            query = self.query(inner)
        queries_at = None if layout.sequence else layout.positions
        attended = self._core(self._split_heads(query), memory, queries_at, context)
        merged = attended.transpose(1, 2).flatten(2)
        out = self.output(merged, layout)
        normalised: Tensor = self.norm(
            self.dropout.before_norm(out, layout.positions, context.seeds, residual=hidden), layout
        )
        return normalised

    def project_key_value(self, inner: Tensor, context: AttentionContext) -> KeyValue:
        """Project keys, values and positions from ``[B, N, D]`` (after the block input)."""
        key, value = project_together(inner, (self.key, self.value))
        return self._memory(key, value, context)

    def _memory(self, key: Tensor, value: Tensor, context: AttentionContext) -> KeyValue:
        heads = (self._split_heads(key), self._split_heads(value))
        return KeyValue(*heads, *self._project_positions(context))

    def _project_positions(self, context: AttentionContext) -> tuple[Tensor | None, Tensor | None]:
        table = context.position_table
        if table is None:
            return None, None
        # One mask a layer and step, which the passes of the mask decoder share, too.
        slots = torch.arange(table.size(0), device=table.device)
        table = self.table_dropout(table, slots, context.seeds)
        of_keys = self.key if self.position_key is None else self.position_key
        of_queries = self.query if self.position_query is None else self.position_query
        wanted = [layer for layer, on in ((of_keys, self.c2p), (of_queries, self.p2c)) if on]
        projected = project_together(table, wanted)
        heads = [self._split_heads(one.unsqueeze(0))[0] for one in projected]
        return heads[0] if self.c2p else None, heads[-1] if self.p2c else None

    def _core(
        self, query: Tensor, memory: KeyValue, queries_at: Tensor | None, context: AttentionContext
    ) -> Tensor:
        seeds = context.seeds
        dropout_p = self.attention_dropout if seeds is not None else 0.0
        return disentangled_attention(
            query,
            memory.key,
            memory.value,
            memory.position_key,
            memory.position_query,
            self.positions,
            q_positions=queries_at,
            key_padding=context.key_padding,
            document_ids=context.document_ids,
            dropout_p=dropout_p,
            seed=seeds.per_row(self.site) if seeds is not None and dropout_p > 0 else None,
            head_offset=self.first_head,
            p2c_index=self.p2c_index,
            backend=context.backend,
        )

    def _split_heads(self, projected: Tensor) -> Tensor:
        """``[B, R, A * H]`` -> ``[B, A, R, H]``."""
        heads: Tensor = projected.unflatten(-1, (-1, self.head_size))
        return heads.transpose(1, 2)
