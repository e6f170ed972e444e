"""``use_fast_attention``: transformers' DeBERTa models on our attention operator, without padding.

An encoder of transformers gets another forward pass by replacing the classes of its modules by
subclasses, so ``isinstance``, ``state_dict``, hooks, copies and pickles work as before.
Projections, dropouts and layers are called as modules, so that wrappers such as LoRA's take part.

transformers computes every padding position, and its attention there is uniform over all positions
of the row. Padding positions enter the encoder as zeros, so without dropout all padding of a row
has the same states in every layer. Packed tokens therefore include one padding token per row with
padding, which gives the same states as transformers at every position.

Letters: B rows, N positions per row, T real tokens, P rows with padding, D features, A heads,
H features per head.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
import transformers
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta import modeling_deberta as v1
from transformers.models.deberta_v2 import modeling_deberta_v2 as v2

from megatron_deberta.hf.packed_attention import PackedRows, packed_attention
from megatron_deberta.ops import RelativePositions, disentangled_attention

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object
SUPPORTED_TRANSFORMERS = ">=5.0,<6"
"""Versions of transformers; 5.0.0 and 5.23.0 are tested."""
_ATTENTIONS = (v1.DisentangledSelfAttention, v2.DisentangledSelfAttention)
_MODELS = (v1.DebertaModel, v2.DebertaV2Model)
_LAST_STATE_ONLY: tuple[()] = ()
"""Value of the encoder's ``output_attentions`` by which the model's hook says that the caller does
not use the states of every layer, which the model's own call of its encoder always requests."""


def use_fast_attention(model: nn.Module, *, remove_padding: bool = True) -> FastAttentionHandle:
    """Let every DeBERTa in a model compute attention through ``disentangled_attention``.

    transformers' DeBERTa, DeBERTa-v2 and DeBERTa-v3 encoders are found at any depth, under any
    head. Outputs and gradients stay the same up to rounding, at padding as well; only attention
    dropout draws other random bits, at a probability rounded to a multiple of 1/256. Parameters,
    their names and the modules' order do not change.

    Args:
        model: a model that contains at least one of transformers' DeBERTa encoders.
        remove_padding: compute the tokens of a padded batch only. Between the layers states are
            then ``[1, tokens, hidden]``, as forward hooks on layers can observe. False: they are
            ``[batch, length, hidden]`` as in transformers.

    Returns:
        A handle: call its ``undo()``, or use it in a ``with`` statement.

    Raises:
        ValueError: there is no such encoder, or one that is not supported; the model is then
            unchanged.
        ImportError: this version of transformers is not supported.
    """
    if Version(transformers.__version__) not in SpecifierSet(SUPPORTED_TRANSFORMERS):
        raise ImportError(
            f"transformers: got version {transformers.__version__}, use_fast_attention supports "
            f"{SUPPORTED_TRANSFORMERS}; install such a version"
        )
    found = [
        (name or type(model).__name__, module, stock, fast)
        for name, module in model.named_modules()
        for stock, fast in _REPLACEMENTS
        if isinstance(module, stock)
    ]
    if not any(isinstance(module, _ATTENTIONS) for _, module, _, _ in found):
        raise ValueError(
            f"model: got {type(model).__name__} without an encoder of transformers' DeBERTa or "
            "DeBERTa-v2; give a model that has one"
        )
    for name, module, stock, fast in found:
        _check_module(name, module, stock, fast)
    handle = FastAttentionHandle(model)
    for _, module, _, fast in found:
        handle._replace_class(module, fast)
        if isinstance(module, _FastEncoder):
            module.remove_padding = remove_padding
    for module in model.modules():
        if isinstance(module, _MODELS):
            _remove_hook(module)
            module.register_forward_pre_hook(_ask_for_last_state, with_kwargs=True)
    return handle


class FastAttentionHandle:
    """Undoes `use_fast_attention`; as a context manager, at the end of the block.

    ``FastAttentionHandle(copy).undo()`` undoes that of a model which was pickled.

    Args:
        model: the model.

    Attributes:
        model: as given.
        modules: the replaced modules, with those of deep copies.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: WeakSet[nn.Module] = WeakSet()

    def undo(self) -> None:
        """Restore transformers' own forward pass; parameters are untouched. May be repeated.

        Deep copies of the model are restored, too.
        """
        for module in [*self.modules, *self.model.modules()]:
            if isinstance(module, _FastModule):
                module.__class__ = module.stock_class
                for name in ("remove_padding", "stock_class", "handle"):
                    vars(module).pop(name, None)
        self.modules.clear()
        for module in self.model.modules():
            _remove_hook(module)

    def __enter__(self) -> FastAttentionHandle:
        """Return the handle."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Undo."""
        self.undo()

    def __deepcopy__(self, memo: object) -> FastAttentionHandle:
        """Return itself: a deep copy of a module has the same handle."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return None in the place of a pickled handle: it belongs to this process."""
        return type(None), ()

    def _replace_class(self, module: Any, fast: type[nn.Module]) -> None:
        module.stock_class, module.handle = type(module), self
        module.__class__ = fast
        self.modules.add(module)


def _ask_for_last_state(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tell the encoder if the caller of a DeBERTa model does not use the states of every layer.

    The wish is an argument, so that it belongs to one call, of one thread.
    """
    # The sixth and seventh arguments of transformers' forward methods.
    attentions = args[5] if len(args) > 5 else kwargs.get("output_attentions")
    states = args[6] if len(args) > 6 else kwargs.get("output_hidden_states")
    given = (
        (attentions, model.config.output_attentions),
        (states, model.config.output_hidden_states),
    )
    if any(default if value is None else value for value, default in given):
        return None
    if not isinstance(model.encoder, _FastEncoder):
        return None
    if len(args) > 5:
        return (*args[:5], _LAST_STATE_ONLY, *args[6:]), kwargs
    return args, {**kwargs, "output_attentions": _LAST_STATE_ONLY}


def _remove_hook(module: nn.Module) -> None:
    """Remove the hook, which deep copies and pickles have as well."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _ask_for_last_state:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def _check_module(name: str, module: Any, stock: type[nn.Module], fast: type[nn.Module]) -> None:
    """Reject a module whose forward pass would not be that of the class that replaces its own.

    Raises:
        ValueError: it would not.
    """
    if isinstance(module, fast):
        raise ValueError(
            f"{name}: has fast attention already; call undo() of its handle first, or "
            "FastAttentionHandle(model).undo()"
        )
    if type(module).forward is not stock.forward or "forward" in vars(module):
        raise ValueError(
            f"{name}: {type(module).__name__} has another forward method than transformers' own, "
            "which would be lost or would hide ours; call use_fast_attention before it is changed"
        )
    if getattr(module, "talking_head", False):
        raise ValueError(
            f"{name}: talking_head: got True, which mixes attention matrices of heads and is not "
            "supported; use the model without use_fast_attention"
        )
    if isinstance(module, _ATTENTIONS) and module.relative_attention:
        try:
            positions = _positions_of(module)
        except ValueError as error:
            raise ValueError(
                f"{name}: position_buckets={getattr(module, 'position_buckets', -1)} with "
                f"max_relative_positions={module.max_relative_positions}: {error}; use the model "
                "without use_fast_attention"
            ) from None
        if not _same_slots(positions):
            raise ValueError(
                f"{name}: {positions} differ from this version of transformers; use the model "
                "without use_fast_attention"
            )


@cache
def _same_slots(positions: RelativePositions) -> bool:
    """Return whether our slots of all distances are those of transformers."""
    reach, span = positions.reach, positions.span
    distance = torch.arange(-reach, reach + 1, device="cpu")
    bucket = distance
    if positions.buckets:
        bucket = v2.make_log_bucket_position(distance, positions.buckets, positions.max_distance)
    expected = (bucket.long() + span).clamp(0, 2 * span - 1)
    return bool(torch.equal(expected, positions.slots(distance)))


def _positions_of(module: Any) -> RelativePositions:
    """Return the relative distances that a stock self-attention distinguishes.

    Raises:
        ValueError: they are out of the operator's range.
    """
    buckets = getattr(module, "position_buckets", -1)
    return RelativePositions(module.max_relative_positions, max(0, buckets))


class _FastModule(_Base):
    """Base class of the classes that replace those of transformers."""

    stock_class: Any
    """The class that `FastAttentionHandle.undo` gives back."""
    handle: FastAttentionHandle | None
    """Of deep copies, too; None in a module that was pickled."""

    def __setstate__(self, state: Any) -> None:
        """Restore a copy, and let the handle of the original undo it, too."""
        super().__setstate__(state)
        if self.handle is not None:
            self.handle.modules.add(self)


class _FastSelfAttention(_FastModule):
    """Attention through ``disentangled_attention``; see the stock class for the parameters."""

    pos_att_type: Any
    relative_attention: bool
    num_attention_heads: int
    dropout: nn.Dropout
    pos_dropout: nn.Dropout

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tokens | Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within rows.

        Args:
            hidden_states: ``[B, N, D]`` or ``[1, T + P, D]``, as ``attention_mask`` describes.
            attention_mask: the tokens, from the encoder; a tensor: the stock class computes the
                layer, as transformers documents.
            output_attentions: of the stock class.
            query_states: likewise.
            relative_pos: likewise.
            rel_embeddings: ``[2 * span, D]`` relative-position table, or None.
        """
        if isinstance(attention_mask, Tensor):
            result: tuple[Tensor, Tensor | None] = self.stock_class.forward(
                self, hidden_states, attention_mask, output_attentions, query_states, relative_pos,
                rel_embeddings,
            )  # fmt: skip
            return result
        query, key, value = self._project(hidden_states)
        pos_key, pos_query = self._position_tables(rel_embeddings, attention_mask.longest)
        heads = Heads(
            query,
            key,
            value,
            pos_key,
            pos_query,
            _positions_of(self) if self.relative_attention else RelativePositions(),
            1 / math.sqrt(query.shape[-1] * self._scale_factor()),
            self.dropout.p if self.dropout.training else 0.0,
        )
        return attention_mask.attend(heads), None

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def _position_layers(self) -> tuple[str, str]:
        """Return the names of the projections of position keys and position queries."""
        raise NotImplementedError

    def _scale_factor(self) -> int:
        raise NotImplementedError

    def _position_tables(
        self, table: Tensor | None, length: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Project the slots that rows of ``length`` tokens reach; the others are zero."""
        if table is None or not self.relative_attention:
            return None, None
        slots = 2 * _positions_of(self).span
        is_compiling = torch.compiler.is_compiling()
        used = range(slots) if is_compiling else _positions_of(self).slots_of_length(length)
        rows: Tensor = self.pos_dropout(table[used.start : used.stop])

        def project(term: str, layer: str) -> Tensor | None:
            if term not in self.pos_att_type:
                return None
            projected: Tensor = getattr(self, layer)(rows[None])[0]
            if len(used) < slots:
                projected = F.pad(projected, (0, 0, used.start, slots - used.stop))
            return self._split(projected).transpose(0, 1)

        key, query = self._position_layers()
        return project("c2p", key), project("p2c", query)

    def _split(self, x: Tensor) -> Tensor:
        """``[..., A * H]`` -> ``[..., A, H]``."""
        heads: Tensor = x.unflatten(-1, (self.num_attention_heads, -1))
        return heads


class FastV1SelfAttention(_FastSelfAttention, v1.DisentangledSelfAttention):
    """DeBERTa self-attention computed by ``disentangled_attention``."""

    in_proj: nn.Module
    q_bias: Tensor
    v_bias: Tensor

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self._split(self.in_proj(hidden)).chunk(3, dim=-1)
        # Under autocast the projection has another dtype than the biases.
        query, value = query + self._split(self.q_bias), value + self._split(self.v_bias)
        return query.to(key.dtype), key, value.to(key.dtype)

    def _position_layers(self) -> tuple[str, str]:
        return "pos_proj", "pos_q_proj"

    def _scale_factor(self) -> int:
        return 1 + len(self.pos_att_type)


class FastV2SelfAttention(_FastSelfAttention, v2.DisentangledSelfAttention):
    """DeBERTa-v2 self-attention computed by ``disentangled_attention``."""

    query_proj: nn.Module
    key_proj: nn.Module
    value_proj: nn.Module

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        layers = (self.query_proj, self.key_proj, self.value_proj)
        query, key, value = (self._split(layer(hidden)) for layer in layers)
        return query, key, value

    def _position_layers(self) -> tuple[str, str]:
        if self.share_att_key:
            return "key_proj", "query_proj"
        return "pos_key_proj", "pos_query_proj"

    def _scale_factor(self) -> int:
        return 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)


class _FastEncoder(_FastModule):
    """The stack of layers, on packed tokens; see the stock class for the parameters."""

    layer: nn.ModuleList
    remove_padding = True
    """Whether rows with padding are packed; set by `use_fast_attention`."""

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

        What the operator does not support, the stock class computes, with a warning.
        """
        every = output_hidden_states and output_attentions != _LAST_STATE_ONLY
        unsupported = {
            "output_attentions": output_attentions or None,
            "query_states": query_states,
            "relative_pos": relative_pos,
        }
        given = [name for name, value in unsupported.items() if value is not None]
        tokens = None
        if given:
            why = f"{given[0]} is given"
        elif attention_mask.dim() != 2:
            why = f"attention_mask has shape {list(attention_mask.shape)}"
        else:
            why = "there is padding between tokens"
            tokens = _describe(attention_mask, hidden_states, remove_padding=self.remove_padding)
        if tokens is None:
            _warn(f"this call is computed by transformers' own attention, because {why}")
            result: tuple[Any, ...] | BaseModelOutput = self.stock_class.forward(
                self, hidden_states, attention_mask, output_hidden_states, bool(output_attentions),
                query_states, relative_pos, return_dict,
            )  # fmt: skip
            return result
        stock: Any = self
        table = stock.get_rel_embedding()
        states = tokens.pack(hidden_states)
        collected = [hidden_states] if every else []
        for index, layer in enumerate(self.layer):
            states, _ = layer(states, tokens, rel_embeddings=table)
            if index == 0 and getattr(self, "conv", None) is not None:
                states = self._convolve(hidden_states, states, attention_mask, tokens)
            if every:
                collected.append(tokens.unpack(states))
                if states.requires_grad:
                    # Gradients of the next layers flow through the states that are returned.
                    states = tokens.pack(collected[-1])
        last = collected[-1] if every and len(self.layer) else tokens.unpack(states)
        everything = tuple(collected) if every else (last,)
        if not return_dict:
            return (last, everything) if output_hidden_states else (last,)
        return BaseModelOutput(
            last_hidden_state=last, hidden_states=everything if output_hidden_states else None
        )

    def _convolve(self, embedded: Tensor, states: Tensor, mask: Tensor, tokens: Tokens) -> Tensor:
        """Add the convolution branch to the first layer's states, as the stock ``ConvLayer``."""
        branch: Any = self.conv
        out = branch.conv(embedded.transpose(1, 2)).transpose(1, 2)
        out = tokens.pack(out.masked_fill(~mask.bool().unsqueeze(-1), 0.0))
        out = ACT2FN[branch.conv_act](branch.dropout(out))
        normalised: Tensor = branch.LayerNorm(states + out).to(states.dtype)
        return normalised * tokens.pack(mask.unsqueeze(-1).to(normalised.dtype))


class FastV1Encoder(_FastEncoder, v1.DebertaEncoder):
    """DeBERTa's encoder without padding."""


class FastV2Encoder(_FastEncoder, v2.DebertaV2Encoder):
    """DeBERTa-v2's encoder without padding."""


class FastV1LayerNorm(_FastModule, v1.DebertaLayerNorm):
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


_REPLACEMENTS: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (v1.DisentangledSelfAttention, FastV1SelfAttention),
    (v2.DisentangledSelfAttention, FastV2SelfAttention),
    (v1.DebertaEncoder, FastV1Encoder),
    (v2.DebertaV2Encoder, FastV2Encoder),
    (v1.DebertaLayerNorm, FastV1LayerNorm),
)


@cache
def _warn(text: str) -> None:
    """Log a warning once."""
    logger.warning("%s", text)


class Heads(NamedTuple):
    """Inputs of one attention layer, by head.

    Attributes:
        query: ``[rows or 1, positions or T + P, A, H]``.
        key: like ``query``.
        value: like ``query``.
        pos_key: ``[A, 2 * span, H]``; None: no content-to-position term.
        pos_query: likewise of the position-to-content term.
        positions: map from distances to rows of the two tables.
        scale: factor on scores.
        dropout_p: dropout of probabilities; 0 in evaluation.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    pos_key: Tensor | None
    pos_query: Tensor | None
    positions: RelativePositions
    scale: float
    dropout_p: float

    def options(self, rows: int) -> dict[str, Any]:
        """Return what the operators take beside query, key and value.

        Without dropout there is no seed; else one per row is drawn from torch's generator.
        """
        seed = torch.randint(2**62, (rows,), device=self.query.device) if self.dropout_p else None
        return {
            "pos_key": self.pos_key, "pos_query": self.pos_query, "positions": self.positions,
            "scale": self.scale, "dropout_p": self.dropout_p, "seed": seed,
        }  # fmt: skip


@dataclass(frozen=True)
class PaddedTokens:
    """Rows with their padding, ``[B, N, D]``.

    Attributes:
        mask: bool ``[B, N]``, True = token; None: no padding.
        longest: N, upper bound of the tokens per row.
    """

    mask: Tensor | None
    longest: int

    def pack(self, x: Tensor) -> Tensor:
        """Return ``[B, N, D]`` unchanged."""
        return x

    def unpack(self, x: Tensor) -> Tensor:
        """Return ``[B, N, D]`` unchanged."""
        return x

    def attend(self, heads: Heads) -> Tensor:
        """Return ``[B, N, A * H]``."""
        query, key, value = (x.transpose(1, 2) for x in (heads.query, heads.key, heads.value))
        options = heads.options(len(heads.query))
        out: Tensor = disentangled_attention(
            query, key, value, attention_mask=self.mask, **options
        ).transpose(1, 2)
        if self.mask is not None:
            uniform = heads.value.mean(1, keepdim=True)
            out = torch.where(self.mask[:, :, None, None], out, uniform)
        return out.flatten(2)


@dataclass(frozen=True)
class PackedTokens:
    """Real tokens of all rows in order, then one padding token per padded row, ``[1, T + P, D]``.

    Attributes:
        rows: lengths of the rows.
        chosen: int64 ``[T + P]``, position of each packed token in the flattened ``[B * N]``.
        origin: int64 ``[B * N]``, packed token of each position.
        uniform: float32 ``[P, T + P]``, weights of the uniform attention of padding.
        shape: B and N.
    """

    rows: PackedRows
    chosen: Tensor
    origin: Tensor
    uniform: Tensor
    shape: tuple[int, int]

    @staticmethod
    def of_mask(mask: Tensor, lengths: Sequence[int]) -> PackedTokens:
        """Return the packed tokens of a mask.

        Args:
            mask: bool ``[B, N]``, True = token; the tokens of each row form one run.
            lengths: tokens of each row.
        """
        batch, length = mask.shape
        counts = mask.sum(1)
        padded = torch.nonzero(counts < length)[:, 0]
        first_padding = mask[padded].to(torch.uint8).argmin(1) + padded * length
        tokens = torch.nonzero(mask.flatten())[:, 0]
        origin = torch.empty(batch * length, dtype=torch.long, device=mask.device)
        padding_token = torch.zeros(batch, dtype=torch.long, device=mask.device)
        padding_token[padded] = torch.arange(len(padded), device=mask.device) + len(tokens)
        origin.view(batch, length)[:] = padding_token[:, None]
        origin[tokens] = torch.arange(len(tokens), device=mask.device)
        of_row = torch.cat([tokens // length, padded])
        uniform = (of_row == padded[:, None]).float() / length
        paddings = torch.arange(len(padded), device=mask.device)
        uniform[paddings, len(tokens) + paddings] *= (length - counts[padded]).float()
        return PackedTokens(
            PackedRows(tuple(lengths), mask.device),
            torch.cat([tokens, first_padding]),
            origin,
            uniform,
            (batch, length),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest row, at least 1."""
        return max(1, *self.rows.lengths)

    def pack(self, x: Tensor) -> Tensor:
        """Return the packed tokens of ``[B, N, D]``."""
        return x.flatten(0, 1).index_select(0, self.chosen)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """Return ``[B, N, D]`` of packed tokens."""
        states: Tensor = x[0].index_select(0, self.origin).unflatten(0, self.shape)
        return states

    def attend(self, heads: Heads) -> Tensor:
        """Return ``[1, T + P, A * H]``."""
        query, key, value = heads.query[0], heads.key[0], heads.value[0]
        options = heads.options(len(self.rows.lengths))
        out = packed_attention(query, key, value, rows=self.rows, **options).flatten(1)
        padding = self.uniform.to(value.dtype) @ value.flatten(1)
        return torch.cat([out[: self.rows.num_tokens], padding])[None]


Tokens = PaddedTokens | PackedTokens


def _describe(mask: Tensor, states: Tensor, *, remove_padding: bool) -> Tokens | None:
    """Choose whether the tokens of a batch are packed.

    Args:
        mask: ``[B, N]``, non-zero = token.
        states: ``[B, N, D]``, input of the first layer.
        remove_padding: pack rows with padding if it is zero, as in transformers' models; not in
            compiled graphs, whose shapes must not depend on the mask's values.

    Returns:
        The tokens; None if there is padding between those of a row, whose distances the operator
        would not know.
    """
    real = mask.bool()
    if torch.compiler.is_compiling():
        return PaddedTokens(real, mask.shape[1])
    if bool(real.all()):
        return PaddedTokens(None, mask.shape[1])
    runs = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0]
    lengths, num_runs = torch.stack([real.sum(1), runs]).tolist()
    if max(num_runs) > 1:
        return None
    if remove_padding and not bool(states.detach()[~real].any()):
        return PackedTokens.of_mask(real, lengths)
    return PaddedTokens(real, mask.shape[1])
