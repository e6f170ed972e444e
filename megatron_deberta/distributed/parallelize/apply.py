"""Replaces the model's seams by their parallel forms.

=================  ==================================  =====================================
seam               tensor parallel                     with sequence parallelism
=================  ==================================  =====================================
SequenceEntry      identity                            this rank's rows
SequenceExit       identity                            all-gather; backward: own slice
BlockInput         identity; backward: all-reduce      all-gather; backward: reduce-scatter
BlockOutput        all-reduce                          reduce-scatter; bias gradient summed
LayerNorm          identity                            parameter gradients summed
PositionEmbedding  identity                            table gradient summed
ChannelExit        all-gather channels                 all-to-all channels to tokens
SharedInput        identity; backward: all-reduce      the same
token embedding    all-reduce                          reduce-scatter
TokenLoss          vocabulary-parallel                 the same
=================  ==================================  =====================================

The right column holds for rows of the token sequence only; rows picked by the mask decoder are
whole on every rank and take the middle column, whatever the mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from megatron_deberta.distributed.collectives import (
    channels_to_sequence,
    copy_to_tensor_parallel_region,
    gather_channels,
    gather_from_sequence_parallel_region,
    gather_sequence,
    scatter_sequence,
)
from megatron_deberta.distributed.linear import row_parallel
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.distributed.vocab import vocab_parallel_embedding, vocab_parallel_loss
from megatron_deberta.model import tp_hooks as seams
from megatron_deberta.model.attention import DisentangledSelfAttention
from megatron_deberta.model.fused import PendingResidual, layer_norm
from megatron_deberta.model.tp_hooks import TokenLayout
from megatron_deberta.objectives.mlm import TokenLoss


class _Split(nn.Module):
    """A seam's parallel form; ``sequence`` says whether the sequence is split, too."""

    def __init__(self, group: ProcessGroup | None, sequence: bool) -> None:
        super().__init__()
        self.group = group
        self.sequence = sequence


class _SequenceEntry(_Split):
    def forward(self, rows: TokenLayout) -> TokenLayout:
        if not self.sequence:
            return rows
        return replace(
            rows,
            positions=scatter_sequence(rows.positions, self.group),
            position_ids=scatter_sequence(rows.position_ids, self.group),
            real=scatter_sequence(rows.real, self.group),
            token_types=None
            if rows.token_types is None
            else scatter_sequence(rows.token_types, self.group),
        )


class _SequenceExit(_Split):
    def forward(self, hidden: Tensor) -> Tensor:
        return gather_from_sequence_parallel_region(hidden, self.group) if self.sequence else hidden


class _BlockInput(_Split):
    def forward(self, hidden: Tensor, rows: TokenLayout) -> Tensor:
        if self.sequence and rows.sequence:
            return gather_sequence(hidden, self.group)
        return copy_to_tensor_parallel_region(hidden, self.group)


class _SharedInput(_Split):
    def forward(self, value: Tensor) -> Tensor:
        return copy_to_tensor_parallel_region(value, self.group)


class _ChannelExit(_Split):
    def forward(self, value: Tensor, rows: TokenLayout) -> Tensor:
        if self.sequence and rows.sequence:
            return channels_to_sequence(value, self.group)
        return gather_channels(value, self.group)


class _BlockOutput(_Split):
    def __init__(
        self, whole: seams.BlockOutput, group: ProcessGroup | None, sequence: bool
    ) -> None:
        super().__init__(group, sequence)
        self.weight, self.bias = whole.weight, whole.bias

    def forward(self, input: Tensor, rows: TokenLayout) -> Tensor:
        sequence = self.sequence and rows.sequence
        return row_parallel(input, self.weight, self.bias, self.group, sequence=sequence)


class _PositionEmbedding(_Split):
    def __init__(
        self, whole: seams.PositionEmbedding, group: ProcessGroup | None, sequence: bool
    ) -> None:
        super().__init__(group, sequence)
        self.weight = whole.weight

    def forward(self, rows: TokenLayout) -> Tensor:
        own_tokens = self.sequence and rows.sequence
        weight = (
            copy_to_tensor_parallel_region(self.weight, self.group) if own_tokens else self.weight
        )
        return functional.embedding(rows.position_ids, weight)


class _TokenTypeEmbedding(_Split):
    def __init__(
        self, whole: seams.TokenTypeEmbedding, group: ProcessGroup | None, sequence: bool
    ) -> None:
        super().__init__(group, sequence)
        self.weight = whole.weight

    def forward(self, rows: TokenLayout) -> Tensor:
        weight = (
            copy_to_tensor_parallel_region(self.weight, self.group)
            if self.sequence
            else self.weight
        )
        return functional.embedding(seams.token_types(rows), weight)


class _LayerNorm(_Split):
    def __init__(self, whole: seams.LayerNorm, group: ProcessGroup | None, sequence: bool) -> None:
        super().__init__(group, sequence)
        self.weight, self.bias, self.eps = whole.weight, whole.bias, whole.eps

    def forward(self, input: Tensor | PendingResidual, rows: TokenLayout) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if self.sequence and rows.sequence:
            # Each rank normalises its own tokens, so its gradients are parts.
            weight, bias = (
                copy_to_tensor_parallel_region(weight, self.group),
                copy_to_tensor_parallel_region(bias, self.group),
            )
        return layer_norm(input, weight, bias, self.eps)


class _TokenEmbedding(_Split):
    def __init__(
        self, whole: nn.Embedding, start: int, group: ProcessGroup | None, sequence: bool
    ) -> None:
        super().__init__(group, sequence)
        self.weight, self.start = whole.weight, start

    def forward(self, input_ids: Tensor) -> Tensor:
        return vocab_parallel_embedding(
            input_ids, self.weight, self.start, self.group, sequence=self.sequence
        )


class _TokenLoss(_Split):
    def __init__(
        self, start: int, vocab_size: int, group: ProcessGroup | None, sequence: bool
    ) -> None:
        super().__init__(group, sequence)
        self.start, self.vocab_size = start, vocab_size

    def forward(
        self, states: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        return vocab_parallel_loss(
            states, weight, bias, labels, self.start, self.vocab_size, self.group
        )


def parallelize_module(
    model: nn.Module, groups: ProcessGroups, *, sequence: bool, vocab_start: int, vocab_size: int
) -> None:
    """Replace every seam of ``model`` in place; parameters keep their names and identity.

    Args:
        model: a single-device model.
        groups: the rank grid.
        sequence: split norms and dropouts along the sequence, too.
        vocab_start: first vocabulary row of this rank.
        vocab_size: size of the vocabulary, without padding.
    """
    group = groups.tp_group
    forms: dict[type[nn.Module], Callable[..., nn.Module]] = {
        seams.SequenceEntry: lambda _: _SequenceEntry(group, sequence),
        seams.SequenceExit: lambda _: _SequenceExit(group, sequence),
        seams.BlockInput: lambda _: _BlockInput(group, sequence),
        seams.SharedInput: lambda _: _SharedInput(group, sequence),
        seams.ChannelExit: lambda _: _ChannelExit(group, sequence),
        seams.BlockOutput: lambda whole: _BlockOutput(whole, group, sequence),
        seams.PositionEmbedding: lambda whole: _PositionEmbedding(whole, group, sequence),
        seams.TokenTypeEmbedding: lambda whole: _TokenTypeEmbedding(whole, group, sequence),
        seams.LayerNorm: lambda whole: _LayerNorm(whole, group, sequence),
        TokenLoss: lambda _: _TokenLoss(vocab_start, vocab_size, group, sequence),
    }
    for path, module in list(model.named_modules()):
        if type(module) in forms:
            _replace(model, path, forms[type(module)](module))
        elif path == "embeddings.token":
            assert isinstance(module, nn.Embedding)
            _replace(model, path, _TokenEmbedding(module, vocab_start, group, sequence))
        elif isinstance(module, DisentangledSelfAttention):
            local_heads = module.query.weight.size(0) // module.head_size
            module.first_head = groups.tp_rank * local_heads


def shard_parameters(
    model: nn.Module, local_shapes: dict[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    """Give every (meta) parameter of ``model`` its local shape and dtype, in place."""
    for name, shape in local_shapes.items():
        path, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        setattr(model.get_submodule(path), leaf, parameter)


def _replace(model: nn.Module, path: str, replacement: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, replacement)
