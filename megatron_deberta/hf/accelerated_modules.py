"""transformers' DeBERTa modules with another forward pass; parameters and names are the same.

An accelerated module is the stock module with its class replaced by a subclass, so ``isinstance``,
``state_dict``, hooks, copies and pickles work as before. Projections, dropouts and layers are
called as modules, so that wrappers such as LoRA's take part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

from megatron_deberta.hf.row_layout import Heads, Layout, PackedLayout, PaddedLayout, layout_of
from megatron_deberta.ops import RelativePositions

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object
_UNDO = "undo the acceleration for this call"
LAST_STATE_ONLY: tuple[()] = ()
"""Value of the encoder's ``output_attentions`` by which the model's hook says that the caller does
not use the states of every layer, which the model's own call of its encoder always requests."""


def positions_of(module: Any) -> RelativePositions:
    """Return the relative distances that a stock self-attention distinguishes.

    Raises:
        ValueError: they are out of the operator's range.
    """
    buckets = getattr(module, "position_buckets", -1)
    return RelativePositions(module.max_relative_positions, max(0, buckets))


class _Accelerated(_Base):
    """Base class of accelerated modules."""

    stock_class: type[nn.Module]
    """The class that `restore` gives back."""
    acceleration: Any
    """The acceleration, also of deep copies; None in a module that was pickled."""

    def __setstate__(self, state: Any) -> None:
        """Restore a copy, and let the acceleration of the original undo it, too."""
        super().__setstate__(state)
        if self.acceleration is not None:
            self.acceleration.modules.add(self)


def restore(module: nn.Module) -> None:
    """Set the class of an accelerated module back to the original; others are unchanged."""
    accelerated: Any = module
    if isinstance(module, _Accelerated):
        accelerated.__class__ = module.stock_class
        for name in ("remove_padding", "stock_class", "acceleration"):
            vars(module).pop(name, None)


class _SelfAttention(_Accelerated):
    """Attention through ``disentangled_attention``; see the stock class for the parameters."""

    pos_att_type: Any
    relative_attention: bool
    num_attention_heads: int
    dropout: nn.Dropout
    pos_dropout: nn.Dropout

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Layout | Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Attend within rows.

        Args:
            hidden_states: states in the layout that ``attention_mask`` describes.
            attention_mask: the layout, from the accelerated encoder.
            output_attentions: must be False.
            query_states: must be None.
            relative_pos: must be None.
            rel_embeddings: ``[2 * span, D]`` relative-position table, or None.

        Raises:
            ValueError: an argument is not supported.
        """
        if not isinstance(attention_mask, (PaddedLayout, PackedLayout)):
            raise ValueError(
                "attention_mask: got a tensor, expected the layout of an accelerated encoder; "
                f"call the encoder instead of its attention, or {_UNDO}"
            )
        refuse(output_attentions=output_attentions, query_states=query_states)
        refuse(relative_pos=relative_pos)
        query, key, value = self._project(hidden_states)
        pos_key, pos_query = self._position_tables(rel_embeddings, attention_mask.longest)
        heads = Heads(
            query,
            key,
            value,
            pos_key,
            pos_query,
            positions_of(self) if self.relative_attention else RelativePositions(),
            1 / math.sqrt(query.shape[-1] * self._scale_factor()),
            self.dropout.p if self.dropout.training else 0.0,
        )
        return attention_mask.attend(heads), None

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def _position_projections(self) -> tuple[nn.Module | None, nn.Module | None]:
        raise NotImplementedError

    def _scale_factor(self) -> int:
        raise NotImplementedError

    def _position_tables(
        self, table: Tensor | None, length: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Project the slots that rows of ``length`` tokens reach; the others are zero."""
        if table is None or not self.relative_attention:
            return None, None
        slots = 2 * positions_of(self).span
        used = range(slots) if _compiling() else positions_of(self).slots_of_length(length)
        rows: Tensor = self.pos_dropout(table[used.start : used.stop])

        def project(layer: nn.Module | None) -> Tensor | None:
            if layer is None:
                return None
            projected: Tensor = layer(rows[None])[0]
            if len(used) < slots:
                projected = F.pad(projected, (0, 0, used.start, slots - used.stop))
            return self._split(projected).transpose(0, 1)

        key, query = self._position_projections()
        return project(key), project(query)

    def _split(self, x: Tensor) -> Tensor:
        """``[..., A * H]`` -> ``[..., A, H]``."""
        heads: Tensor = x.unflatten(-1, (self.num_attention_heads, -1))
        return heads


class _V1SelfAttention(_SelfAttention):
    in_proj: nn.Module
    q_bias: Tensor
    v_bias: Tensor

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self._split(self.in_proj(hidden)).chunk(3, dim=-1)
        # Under autocast the projection has another dtype than the biases.
        query, value = query + self._split(self.q_bias), value + self._split(self.v_bias)
        return query.to(key.dtype), key, value.to(key.dtype)

    def _position_projections(self) -> tuple[nn.Module | None, nn.Module | None]:
        names = {"c2p": "pos_proj", "p2c": "pos_q_proj"}
        key, query = (
            getattr(self, name) if term in self.pos_att_type else None
            for term, name in names.items()
        )
        return key, query

    def _scale_factor(self) -> int:
        return 1 + len(self.pos_att_type)


class _V2SelfAttention(_SelfAttention):
    query_proj: nn.Module
    key_proj: nn.Module
    value_proj: nn.Module
    share_att_key: bool

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (
            self._split(layer(hidden))
            for layer in (self.query_proj, self.key_proj, self.value_proj)
        )
        return query, key, value

    def _position_projections(self) -> tuple[nn.Module | None, nn.Module | None]:
        separate = {"c2p": "pos_key_proj", "p2c": "pos_query_proj"}
        shared = {"c2p": "key_proj", "p2c": "query_proj"}
        names = shared if self.share_att_key else separate
        key, query = (
            getattr(self, name) if term in self.pos_att_type else None
            for term, name in names.items()
        )
        return key, query

    def _scale_factor(self) -> int:
        return 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)


class _Encoder(_Accelerated):
    """The stack of layers, on packed tokens; see the stock class for the parameters."""

    layer: nn.ModuleList
    remove_padding = True
    """Whether rows with padding are packed; set by ``accelerate``."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_hidden_states: bool = True,
        output_attentions: bool | tuple[()] = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        return_dict: bool = True,
    ) -> tuple[Any, ...] | BaseModelOutput:
        """Compute all layers; arguments and result as in transformers.

        Raises:
            ValueError: an argument is not supported: attention matrices, query states, relative
                positions, a mask of pairs of tokens, or padding between tokens.
        """
        every = output_hidden_states and output_attentions != LAST_STATE_ONLY
        refuse(output_attentions=output_attentions or False, query_states=query_states)
        refuse(relative_pos=relative_pos)
        if attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask: got shape {list(attention_mask.shape)}, expected [batch, length] "
                f"(masks of pairs of tokens are not supported); {_UNDO}"
            )
        layout = layout_of(attention_mask, hidden_states, remove_padding=self.remove_padding)
        stock: Any = self
        table = stock.get_rel_embedding()
        states = layout.pack(hidden_states)
        collected = [hidden_states] if every else []
        for index, layer in enumerate(self.layer):
            states, _ = layer(states, layout, rel_embeddings=table)
            if index == 0 and getattr(self, "conv", None) is not None:
                states = self._convolve(hidden_states, states, attention_mask, layout)
            if every:
                collected.append(layout.unpack(states))
        last = collected[-1] if every and len(self.layer) else layout.unpack(states)
        everything = tuple(collected) if every else (last,)
        if not return_dict:
            return (last, everything) if output_hidden_states else (last,)
        return BaseModelOutput(
            last_hidden_state=last, hidden_states=everything if output_hidden_states else None
        )

    def _convolve(self, embedded: Tensor, states: Tensor, mask: Tensor, layout: Layout) -> Tensor:
        """Add the convolution branch to the first layer's states, as the stock ``ConvLayer``."""
        branch: Any = self.conv
        out = branch.conv(embedded.transpose(1, 2)).transpose(1, 2)
        out = layout.pack(out.masked_fill(~mask.bool().unsqueeze(-1), 0.0))
        out = ACT2FN[branch.conv_act](branch.dropout(out))
        normalised: Tensor = branch.LayerNorm(states + out).to(states.dtype)
        return normalised * layout.pack(mask.unsqueeze(-1).to(normalised.dtype))


class AcceleratedV1SelfAttention(_V1SelfAttention, v1.DisentangledSelfAttention):
    """DeBERTa self-attention computed by ``disentangled_attention``."""


class AcceleratedV2SelfAttention(_V2SelfAttention, v2.DisentangledSelfAttention):
    """DeBERTa-v2 self-attention computed by ``disentangled_attention``."""


class AcceleratedV1Encoder(_Encoder, v1.DebertaEncoder):
    """DeBERTa's encoder without padding."""


class AcceleratedV2Encoder(_Encoder, v2.DebertaV2Encoder):
    """DeBERTa-v2's encoder without padding."""


class AcceleratedV1LayerNorm(_Accelerated, v1.DebertaLayerNorm):
    """DeBERTa's LayerNorm as one operation."""

    weight: nn.Parameter
    bias: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise over the last dimension, in fp32 as the stock class does.

        Args:
            hidden_states: ``[..., D]``.
        """
        weight, bias, eps = self.weight, self.bias, self.variance_epsilon
        shape = list(weight.shape)
        if hidden_states.dtype == weight.dtype == torch.float32:
            return F.layer_norm(hidden_states, shape, weight, bias, eps)
        normalised = F.layer_norm(hidden_states.float(), shape, eps=eps).to(hidden_states.dtype)
        return weight * normalised + bias


def refuse(**unsupported: Any) -> None:
    """Reject arguments that are given.

    Raises:
        ValueError: one is neither None nor False.
    """
    for name, value in unsupported.items():
        if value is not None and value is not False:
            shown = value if isinstance(value, (bool, int, str)) else type(value).__name__
            raise ValueError(f"{name}: got {shown}, which acceleration does not support; {_UNDO}")


def _compiling() -> bool:
    return bool(torch.compiler.is_compiling())
