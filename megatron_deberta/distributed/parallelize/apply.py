"""Replacement of the model's tensor-parallel hooks by communicating modules.

=================  ==================================  =====================================
hook               tensor parallel                     with sequence parallelism
=================  ==================================  =====================================
SequenceEntry      identity                            local slice of tokens
SequenceExit       identity                            all-gather; backward: local slice
BlockInput         identity; backward: all-reduce      all-gather; backward: reduce-scatter
... .project       the same, during the gradients of the weights
BlockOutput        all-reduce                          reduce-scatter; bias gradient summed
LayerNorm          identity                            parameter gradients summed
PositionEmbedding  identity                            table gradient summed
ChannelExit        all-gather channels                 all-to-all channels to tokens
SharedInput        identity; backward: all-reduce      the same
TokenEmbedding     all-reduce                          reduce-scatter
TokenLoss          its part of the vocabulary          the same
=================  ==================================  =====================================

The right column applies to the token sequence only. The mask decoder's rows are replicated on all
ranks and use the middle column in either mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from megatron_deberta.distributed.collectives import (
    TokenOrder,
    all_gather_first,
    all_gather_sequence,
    all_to_all_hp2sp,
    copy_to_tensor_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_parallel_region,
    scatter_to_sequence_parallel_region,
    start_all_reduce_sum,
    start_reduce_scatter,
)
from megatron_deberta.distributed.linear import row_parallel
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.distributed.vocab import vocab_parallel_embedding, vocabulary_part
from megatron_deberta.model import tp_hooks
from megatron_deberta.model.attention import DisentangledSelfAttention
from megatron_deberta.model.fused import PendingResidual, layer_norm
from megatron_deberta.model.heads import TokenLoss
from megatron_deberta.model.projections import InputExchange, project_together
from megatron_deberta.model.tp_hooks import TokenLayout


@dataclass(frozen=True, slots=True)
class _Parallelism:
    """How a model is split over the tensor-parallel ranks."""

    group: ProcessGroup | None
    sequence: bool
    vocab_start: int


class _ParallelHook(nn.Module):
    """Base class: keeps the parameters of the hook that it replaces."""

    weight: Tensor
    bias: Tensor

    def __init__(self, hook: nn.Module, parallelism: _Parallelism) -> None:
        super().__init__()
        self.group = parallelism.group
        self.sequence = parallelism.sequence
        self.vocab_start = parallelism.vocab_start
        for name, parameter in hook.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    def _replicated(self, name: str, layout: TokenLayout) -> Tensor:
        """Return a replicated parameter, its gradient summed if ranks hold different tokens."""
        parameter: Tensor = getattr(self, name)
        if self.sequence and layout.sequence:
            return copy_to_tensor_parallel_region(parameter, self.group)
        return parameter


class _SequenceEntry(_ParallelHook):
    def forward(self, layout: TokenLayout) -> TokenLayout:
        if not self.sequence:
            return layout
        types = layout.token_types
        return replace(
            layout,
            positions=self._scatter(layout.positions),
            position_ids=self._scatter(layout.position_ids),
            is_token=self._scatter(layout.is_token),
            token_types=None if types is None else self._scatter(types),
        )

    def _scatter(self, x: Tensor) -> Tensor:
        return scatter_to_sequence_parallel_region(x, self.group)


class _SequenceExit(_ParallelHook):
    def forward(self, hidden: Tensor) -> Tensor:
        if not self.sequence:
            return hidden
        return gather_from_sequence_parallel_region(
            hidden, self.group, tensor_parallel_output_grad=False
        )


class _BlockInput(_ParallelHook):
    def __init__(self, hook: tp_hooks.BlockInput, parallelism: _Parallelism) -> None:
        super().__init__(hook, parallelism)
        self.per_token = hook.per_token

    def forward(self, hidden: Tensor, layout: TokenLayout) -> Tensor:
        if self.sequence and layout.sequence:
            return gather_from_sequence_parallel_region(hidden, self.group)
        return copy_to_tensor_parallel_region(hidden, self.group)

    def project(
        self,
        hidden: Tensor,
        layout: TokenLayout,
        layers: Sequence[nn.Linear],
        *,
        with_bias: bool = True,
    ) -> tuple[Tensor, ...]:
        exchange = None
        if self.group is not None:
            gathers = self.sequence and layout.sequence
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


class _SharedInput(_ParallelHook):
    def forward(self, value: Tensor) -> Tensor:
        return copy_to_tensor_parallel_region(value, self.group)


class _ChannelExit(_ParallelHook):
    def forward(self, value: Tensor, layout: TokenLayout) -> Tensor:
        if self.sequence and layout.sequence:
            return all_to_all_hp2sp(value, self.group)
        return gather_from_tensor_parallel_region(value, self.group)


class _BlockOutput(_ParallelHook):
    def __init__(self, hook: tp_hooks.BlockOutput, parallelism: _Parallelism) -> None:
        super().__init__(hook, parallelism)
        self.per_token = hook.per_token

    def forward(self, input: Tensor, layout: TokenLayout) -> Tensor:
        sequence = self.sequence and layout.sequence
        order = token_order(input, self.per_token)
        return row_parallel(
            input, self.weight, self.bias, self.group, sequence=sequence, order=order
        )


class _PositionEmbedding(_ParallelHook):
    def forward(self, layout: TokenLayout) -> Tensor:
        return functional.embedding(layout.position_ids, self._replicated("weight", layout))


class _TokenTypeEmbedding(_ParallelHook):
    def forward(self, layout: TokenLayout) -> Tensor:
        weight = self._replicated("weight", layout)
        return functional.embedding(tp_hooks.token_types(layout), weight)


class _LayerNorm(_ParallelHook):
    def __init__(self, hook: tp_hooks.LayerNorm, parallelism: _Parallelism) -> None:
        super().__init__(hook, parallelism)
        self.eps = hook.eps

    def forward(self, input: Tensor | PendingResidual, layout: TokenLayout) -> Tensor:
        weight, bias = self._replicated("weight", layout), self._replicated("bias", layout)
        return layer_norm(input, weight, bias, self.eps)


class _TokenEmbedding(_ParallelHook):
    def forward(self, input_ids: Tensor) -> Tensor:
        return vocab_parallel_embedding(
            input_ids, self.weight, self.vocab_start, self.group, sequence=self.sequence
        )


_PARALLEL_HOOKS: dict[type[nn.Module], type[_ParallelHook]] = {
    tp_hooks.SequenceEntry: _SequenceEntry,
    tp_hooks.SequenceExit: _SequenceExit,
    tp_hooks.BlockInput: _BlockInput,
    tp_hooks.SharedInput: _SharedInput,
    tp_hooks.ChannelExit: _ChannelExit,
    tp_hooks.BlockOutput: _BlockOutput,
    tp_hooks.TokenEmbedding: _TokenEmbedding,
    tp_hooks.PositionEmbedding: _PositionEmbedding,
    tp_hooks.TokenTypeEmbedding: _TokenTypeEmbedding,
    tp_hooks.LayerNorm: _LayerNorm,
}


def parallelize_module(
    model: nn.Module,
    groups: ProcessGroups,
    *,
    sequence: bool,
    vocab_start: int,
    vocab_size: int,
    fuse: bool,
) -> None:
    """Replace every hook of ``model`` in place; parameters keep their names and identity.

    Args:
        model: a single-device model with this rank's parameter shapes.
        groups: process groups.
        sequence: sequence parallelism.
        vocab_start: first vocabulary row of this rank.
        vocab_size: size of the vocabulary, without padding.
        fuse: fuse the vocabulary's cross-entropy where its kernels are supported.
    """
    parallelism = _Parallelism(groups.tp_group, sequence, vocab_start)
    for path, module in list(model.named_modules()):
        hook = _PARALLEL_HOOKS.get(type(module))
        if hook is not None:
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, hook(module, parallelism))
        elif isinstance(module, DisentangledSelfAttention):
            local_heads = module.query.weight.size(0) // module.head_size
            module.first_head = groups.tp_rank * local_heads
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
