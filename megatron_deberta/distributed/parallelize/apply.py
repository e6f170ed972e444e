"""Replacement of the model's parallel layers by communicating ones.

A column-parallel layer is ``torch.nn.Linear`` with fewer outputs, behind
``copy_to_tensor_parallel_region`` or ``gather_from_sequence_parallel_region``.

================================  =======================  =====================================
layer                             tensor parallel          with sequence parallelism
================================  =======================  =====================================
ScatterToSequenceParallelRegion   identity                 local slice of tokens
GatherFromSequenceParallelRegion  identity                 all-gather; backward: local slice
CopyToTensorParallelRegion        backward: all-reduce     the same
GatherFromTensorParallelRegion    all-gather of channels   all-to-all: channels to tokens
ColumnParallelInput               backward: all-reduce     all-gather; backward: reduce-scatter
... .project                      the same, during the gradients of the weights
RowParallelLinear                 all-reduce               reduce-scatter; bias gradient summed
VocabParallelEmbedding            all-reduce               reduce-scatter
ReplicatedEmbedding, LayerNorm    identity                 gradients of parameters summed
GatherFromDataParallelRegion      data-parallel all-gather; backward: reduce-scatter
TokenLoss                         part of the vocabulary   the same
================================  =======================  =====================================

The right column applies where ``is_sequence`` is true. The mask decoder's rows are replicated on
all ranks and use the middle column in either mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.collectives import (
    TokenOrder,
    all_gather,
    all_gather_first,
    all_gather_sequence,
    all_to_all_hp2sp,
    copy_to_tensor_parallel_region,
    gather_from_data_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    group_rank,
    group_size,
    reduce_from_tensor_parallel_region,
    reduce_scatter_first,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    start_all_reduce_sum,
    start_reduce_scatter,
)
from megatron_deberta.distributed.parallelize.plan import vocabulary_offset
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.model import parallel_layers
from megatron_deberta.model.attention import DisentangledSelfAttention
from megatron_deberta.model.fused import PendingResidual, layer_norm
from megatron_deberta.model.heads import TokenLoss
from megatron_deberta.model.inputs import TokenInfo
from megatron_deberta.model.parallel_layers import InputExchange, project_together
from megatron_deberta.ops.cross_entropy import Vocabulary


def vocab_parallel_embedding(
    ids: Tensor,
    weight_local: Tensor,
    vocab_start: int,
    group: ProcessGroup | None,
    *,
    sequence: bool,
) -> Tensor:
    """Look up tokens in a table whose rows are split over ranks. Collective over ``group``.

    Exact: every sum over ranks has one non-zero term.

    Args:
        ids: ``[B, N]`` int64, equal on all ranks.
        weight_local: ``[V/tp, C]``, rows from ``vocab_start``.
        vocab_start: first row of this rank.
        group: the tensor-parallel ranks.
        sequence: scatter the tokens over ranks (sequence parallelism).

    Returns:
        ``[B, N, C]``, replicated, or with ``sequence`` ``[B, N/tp, C]``.

    Raises:
        TopologyError: ``sequence``, and N is not divisible by the number of ranks.
    """
    if group_size(group) == 1:
        return functional.embedding(ids, weight_local)
    rows = ids - vocab_start
    elsewhere = (rows < 0) | (rows >= weight_local.shape[0])
    local = functional.embedding(rows.masked_fill(elsewhere, 0), weight_local)
    local = local.masked_fill(elsewhere.unsqueeze(-1), 0)
    if sequence:
        return reduce_scatter_to_sequence_parallel_region(local, group)
    return reduce_from_tensor_parallel_region(local, group)


def vocabulary_part(
    size: int, start: int, group: ProcessGroup | None, *, fuse: bool = False
) -> Vocabulary:
    """Return a rank's part of the vocabulary for `ops.cross_entropy.linear_cross_entropy`.

    Its functions are collective over ``group``: per chunk of tokens one all-gather and one
    all-reduce, and two more all-gathers where pieces are drawn.

    Args:
        size: of the whole vocabulary, without padding.
        start: vocabulary index of this rank's first row.
        group: the tensor-parallel ranks, in ascending order of their rows.
        fuse: use the kernels where they are supported.
    """
    if group is None:
        return Vocabulary(size, start, fuse)

    def total(x: Tensor) -> Tensor:
        dist.all_reduce(x, group=group)
        return x

    return Vocabulary(size, start, fuse, group_rank(group), lambda x: all_gather(x, group), total)


def row_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup | None,
    *,
    sequence: bool,
    order: TokenOrder = "batch",
    adapter: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Apply a linear layer whose input features are split over ranks. Collective over ``group``.

    Args:
        x: ``[B, N, in/tp]``, this rank's input features of all tokens.
        weight: ``[out, in/tp]``, local.
        bias: ``[out]``, replicated, or None.
        group: the tensor-parallel ranks.
        sequence: scatter the output tokens over ranks (sequence parallelism).
        order: with ``sequence``, of the tokens: ``sequence``: ``x`` is a view of
            ``[N, B, in/tp]``; ``rank``: ``x`` is ``[tp * B, N/tp, in/tp]``.
        adapter: returns this rank's summand of what a low-rank adapter adds; None: there is none.

    Returns:
        ``[B, N, out]``, replicated, or with ``sequence`` ``[B, N/tp, out]``, contiguous.

    Raises:
        TopologyError: ``sequence``, and N is not divisible by the number of ranks.
    """

    def product(tokens: Tensor) -> Tensor:
        # First: selective recomputation stops before the product that is saved last.
        added = None if adapter is None else adapter(tokens)
        out = functional.linear(tokens, weight)
        return out if added is None else out + added

    if group_size(group) == 1 and x.device.type != "cpu" and adapter is None:
        # The bias is added inside the product. On CPU, where that is no faster, results keep
        # their rounding.
        return functional.linear(x, weight, bias)
    if sequence and group_size(group) > 1:
        if order == "batch":
            summand = product(x)
            out = reduce_scatter_to_sequence_parallel_region(summand, group)
        elif order == "sequence":
            summand = product(x.transpose(0, 1))
            out = reduce_scatter_first(summand, group).transpose(0, 1).contiguous()
        else:
            out = reduce_scatter_first(product(x), group)
        # Each rank adds the bias to its own tokens only, so the gradient must be summed.
        bias = None if bias is None else copy_to_tensor_parallel_region(bias, group)
    else:
        out = reduce_from_tensor_parallel_region(product(x), group)
    return out if bias is None else out + bias


class _ParallelLayer(nn.Module):
    """Base class: keeps parameters, adapter and ``options`` of the layer that it replaces."""

    weight: Tensor
    bias: Tensor
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, layer: nn.Module, groups: ProcessGroups, sequence: bool, vocab_start: int
    ) -> None:
        super().__init__()
        self.group, self.batch_group = groups.tp_group, groups.dp_group
        self.sequence, self.vocab_start = sequence, vocab_start
        for name, parameter in layer.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in layer.named_children():
            self.register_module(name, child)
        for name in self.options:
            setattr(self, name, getattr(layer, name))

    def _replicated(self, name: str, is_sequence: bool) -> Tensor:
        """Return a replicated parameter, its gradient summed if ranks hold different tokens."""
        parameter: Tensor = getattr(self, name)
        if self.sequence and is_sequence:
            return copy_to_tensor_parallel_region(parameter, self.group)
        return parameter


class _ScatterToSequenceParallelRegion(_ParallelLayer):
    def forward(self, tokens: TokenInfo) -> TokenInfo:
        if not self.sequence:
            return tokens
        types = tokens.types
        return replace(
            tokens,
            positions=self._scatter(tokens.positions),
            position_ids=self._scatter(tokens.position_ids),
            is_token=self._scatter(tokens.is_token),
            types=None if types is None else self._scatter(types),
        )

    def _scatter(self, x: Tensor) -> Tensor:
        return scatter_to_sequence_parallel_region(x, self.group)


class _GatherFromSequenceParallelRegion(_ParallelLayer):
    def forward(self, hidden: Tensor) -> Tensor:
        if not self.sequence:
            return hidden
        return gather_from_sequence_parallel_region(
            hidden, self.group, tensor_parallel_output_grad=False
        )


class _ColumnParallelInput(_ParallelLayer):
    options = ("per_token",)
    per_token: bool

    def forward(self, hidden: Tensor, is_sequence: bool) -> Tensor:
        if self.sequence and is_sequence:
            return gather_from_sequence_parallel_region(hidden, self.group)
        return copy_to_tensor_parallel_region(hidden, self.group)

    def project(
        self,
        hidden: Tensor,
        is_sequence: bool,
        layers: Sequence[nn.Linear],
        *,
        with_bias: bool = True,
    ) -> tuple[Tensor, ...]:
        exchange = None
        if self.group is not None:
            gathers = self.sequence and is_sequence
            order = token_order(hidden, self.per_token) if gathers else None
            exchange = _exchange(self.group, order)
        return project_together(hidden, layers, with_bias=with_bias, exchange=exchange)


def token_order(x: Tensor, per_token: bool) -> TokenOrder:
    """Return the order in which a block computes the tokens that it gathers.

    Args:
        x: tensor of the block, any shape; only its device is read.
        per_token: the block treats tokens independently.
    """
    if x.device.type == "cpu":
        # Results keep their rounding: gradients of weights are sums over tokens.
        return "batch"
    return "rank" if per_token else "sequence"


def _exchange(group: ProcessGroup, order: TokenOrder | None) -> InputExchange:
    """Return the collectives that gather a block's input and reduce its gradient.

    Args:
        group: the tensor-parallel ranks.
        order: in which tokens are gathered; None: all ranks have all tokens.
    """
    if order is None:
        return InputExchange(lambda x: x, partial(start_all_reduce_sum, group=group))
    if order == "batch":
        return InputExchange(
            partial(all_gather_sequence, group=group),
            partial(start_reduce_scatter, group=group, dim=1),
        )
    if order == "rank":
        return InputExchange(
            partial(all_gather_first, group=group), partial(start_reduce_scatter, group=group)
        )
    # Each rank transposes its own tokens, which are fewer than the gathered ones.
    return InputExchange(
        lambda x: all_gather_first(x.transpose(0, 1), group),
        lambda grad: _transposed(start_reduce_scatter(grad, group)),
        sequence_first=True,
    )


def _transposed(wait: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: wait().transpose(0, 1).contiguous()


class _CopyToTensorParallelRegion(_ParallelLayer):
    def forward(self, value: Tensor) -> Tensor:
        return copy_to_tensor_parallel_region(value, self.group)


class _GatherFromTensorParallelRegion(_ParallelLayer):
    def forward(self, value: Tensor, is_sequence: bool) -> Tensor:
        if self.sequence and is_sequence:
            return all_to_all_hp2sp(value, self.group)
        return gather_from_tensor_parallel_region(value, self.group)


class _GatherFromDataParallelRegion(_ParallelLayer):
    def forward(self, rows: Tensor) -> tuple[Tensor, int]:
        group = self.batch_group
        first = 0 if group is None else group.rank() * len(rows)
        return gather_from_data_parallel_region(rows, group), first


class _RowParallelLinear(_ParallelLayer):
    options = ("per_token",)
    per_token: bool

    def forward(self, input: Tensor, is_sequence: bool) -> Tensor:
        sequence, order = self.sequence and is_sequence, token_order(input, self.per_token)
        adapter = parallel_layers.adapter_of(self)
        return row_parallel(
            input, self.weight, self.bias, self.group,
            sequence=sequence, order=order, adapter=adapter,
        )  # fmt: skip


class _ReplicatedEmbedding(_ParallelLayer):
    def forward(self, input: Tensor, is_sequence: bool) -> Tensor:
        return functional.embedding(input, self._replicated("weight", is_sequence))


class _LayerNorm(_ParallelLayer):
    options = ("eps",)
    eps: float

    def forward(self, input: Tensor | PendingResidual, is_sequence: bool) -> Tensor:
        weight, bias = (self._replicated(name, is_sequence) for name in ("weight", "bias"))
        return layer_norm(input, weight, bias, self.eps)


class _VocabParallelEmbedding(_ParallelLayer):
    def forward(self, input_ids: Tensor) -> Tensor:
        return vocab_parallel_embedding(
            input_ids, self.weight, self.vocab_start, self.group, sequence=self.sequence
        )


_PARALLEL_LAYERS: dict[type[nn.Module], type[_ParallelLayer]] = {
    parallel_layers.ScatterToSequenceParallelRegion: _ScatterToSequenceParallelRegion,
    parallel_layers.GatherFromSequenceParallelRegion: _GatherFromSequenceParallelRegion,
    parallel_layers.ColumnParallelInput: _ColumnParallelInput,
    parallel_layers.CopyToTensorParallelRegion: _CopyToTensorParallelRegion,
    parallel_layers.GatherFromDataParallelRegion: _GatherFromDataParallelRegion,
    parallel_layers.GatherFromTensorParallelRegion: _GatherFromTensorParallelRegion,
    parallel_layers.RowParallelLinear: _RowParallelLinear,
    parallel_layers.VocabParallelEmbedding: _VocabParallelEmbedding,
    parallel_layers.ReplicatedEmbedding: _ReplicatedEmbedding,
    parallel_layers.LayerNorm: _LayerNorm,
}


def parallelize_module(
    model: nn.Module, config: RunConfig, groups: ProcessGroups, *, fuse: bool
) -> None:
    """Replace every parallel layer of ``model`` in place; parameters keep their names and identity.

    Args:
        model: a single-device model with this rank's parameter shapes.
        config: the run.
        groups: process groups.
        fuse: fuse the vocabulary's cross-entropy where its kernels are supported.
    """
    vocab_size, sequence = config.model.vocab_size, config.parallel.sequence_parallel
    vocab_start = vocabulary_offset(vocab_size, groups.tp_rank, groups.tp_size)
    for path, module in list(model.named_modules()):
        layer = _PARALLEL_LAYERS.get(type(module))
        if layer is not None:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, layer(module, groups, sequence, vocab_start))
        elif isinstance(module, DisentangledSelfAttention):
            local_heads = module.query.weight.size(0) // module.head_size
            module.first_head = groups.tp_rank * local_heads
        elif isinstance(module, parallel_layers.LowRankAdapter):
            module.copy = partial(copy_to_tensor_parallel_region, group=groups.tp_group)
        elif isinstance(module, TokenLoss):
            module.vocabulary = vocabulary_part(vocab_size, vocab_start, groups.tp_group, fuse=fuse)


def shard_parameters(
    model: nn.Module, local_shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Replace every (meta) parameter of ``model`` by one of its local shape and dtype, in place.

    Args:
        model: on the meta device.
        local_shapes: shape of this rank's shard, padding included, by parameter name.
        dtype: of all parameters.
    """
    for name, shape in local_shapes.items():
        path, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        setattr(model.get_submodule(path), leaf, parameter)
