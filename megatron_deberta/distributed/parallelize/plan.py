"""Sharding plan: the dimension of each parameter that is split over tensor-parallel ranks.

Column-parallel layers need only narrower weights; ``apply.py`` contains the communication.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from megatron_deberta.config.rules import check_tensor_parallel_divides
from megatron_deberta.errors import TopologyError
from megatron_deberta.model.replaced_tokens import DISCRIMINATOR, GENERATOR


@dataclass(frozen=True)
class ParameterSpec:
    """A rank's shard of one parameter: indices ``[offset, offset + length)`` of ``dim``.

    The local tensor may be longer along ``dim`` by zero padding (vocabulary).

    Attributes:
        name: canonical name (docs/architecture.md).
        logical_shape: shape of the whole parameter, without padding.
        dim: split dimension; None: the parameter is replicated.
        offset: first logical index along ``dim``; 0 if replicated.
        length: number of logical indices along ``dim``; the whole extent if replicated.
        local_shape: shape of the local tensor, padding included.
    """

    name: str
    logical_shape: tuple[int, ...]
    dim: int | None
    offset: int
    length: int
    local_shape: tuple[int, ...]

    @property
    def split_dim(self) -> int:
        """``dim``, or 0 if the parameter is replicated."""
        return 0 if self.dim is None else self.dim

    def true_part(self, local: Tensor) -> Tensor:
        """Return the local tensor without its padding, a view."""
        return local.narrow(self.split_dim, 0, self.length)


# Vocabulary rows per rank are padded to a multiple of this, for efficient matrix products
VOCABULARY_MULTIPLE = 64

# Name pattern and split dimension; the first match applies. -1 or no match: replicated
_SPLIT: tuple[tuple[str, int], ...] = (
    # Low-rank adapters are split as their layers; the other factor is replicated.
    ("LAYER.attention.output.lora.A", 1),
    ("LAYER.attention.output.lora.B", -1),
    ("LAYER.ffn.down.lora.A", 1),
    ("LAYER.*.lora.A", -1),
    ("LAYER.attention.output.weight", 1),
    ("LAYER.attention.output.bias", -1),
    ("LAYER.attention.norm.*", -1),
    ("LAYER.attention.*", 0),
    ("LAYER.ffn.up.*", 0),
    ("LAYER.ffn.down.weight", 1),
    ("encoder.conv.conv.*", 0),
)
_LAYER = re.compile(r"^(encoder\.layers\.\d+|row_decoder)(?=\.)")

# Parameters with one row per token, split with padding
_VOCABULARY = ("embeddings.token.weight", "embeddings.token.delta.weight", "head.bias")


def shard_spec(name: str, shape: tuple[int, ...], tp_rank: int, tp_size: int) -> ParameterSpec:
    """Return the shard of a parameter on rank ``tp_rank`` of ``tp_size``.

    Args:
        name: canonical name of the parameter.
        shape: logical shape, without padding.
        tp_rank: tensor-parallel rank.
        tp_size: number of tensor-parallel ranks.

    Raises:
        TopologyError: the split dimension is not divisible by ``tp_size``, or there is none.
    """
    if not shape:
        raise TopologyError(f"parameter {name} has no dimension; give it the shape (1,)")
    part = name.removeprefix(GENERATOR).removeprefix(DISCRIMINATOR)
    if part in _VOCABULARY:
        rows = vocabulary_rows(shape[0], tp_size)
        offset = vocabulary_offset(shape[0], tp_rank, tp_size)
        length = min(rows, shape[0] - offset)
        return ParameterSpec(name, shape, 0, offset, length, (rows, *shape[1:]))
    part = _LAYER.sub("LAYER", part)
    dim = next((dim for pattern, dim in _SPLIT if fnmatchcase(part, pattern)), -1)
    if dim < 0 or tp_size == 1:
        return ParameterSpec(name, shape, None, 0, shape[0], shape)
    check_tensor_parallel_divides(
        tp_size, {f"{name}.shape[{dim}]": shape[dim]}, error=TopologyError
    )
    length = shape[dim] // tp_size
    local = (*shape[:dim], length, *shape[dim + 1 :])
    return ParameterSpec(name, shape, dim, tp_rank * length, length, local)


def vocabulary_rows(vocab_size: int, tp_size: int) -> int:
    """Return the vocabulary rows per rank, padding included."""
    even = -(-vocab_size // tp_size)
    return -(-even // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def vocabulary_offset(vocab_size: int, tp_rank: int, tp_size: int) -> int:
    """Return the vocabulary index of a rank's first row; ``vocab_size`` if it has padding alone.

    Args:
        vocab_size: size of the vocabulary, without padding.
        tp_rank: tensor-parallel rank.
        tp_size: number of tensor-parallel ranks.
    """
    return min(tp_rank * vocabulary_rows(vocab_size, tp_size), vocab_size)
