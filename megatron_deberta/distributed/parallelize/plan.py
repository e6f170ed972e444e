"""Which dimension of which parameter is split over tensor-parallel ranks.

A column-parallel projection needs no module of its own: with narrower weights the same code gives
the local heads, inner features, channels or vocabulary. What communicates is in ``apply.py``.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from megatron_deberta.config.divisibility import check_tensor_parallel_divides
from megatron_deberta.distributed.parallelize.spec import ParameterSpec
from megatron_deberta.errors import TopologyError

VOCABULARY_MULTIPLE = 64
"""Vocabulary rows of a rank are padded to this multiple, which matrix units want."""

_SPLIT: tuple[tuple[str, int], ...] = (
    ("encoder.layers.*.attention.output.weight", 1),
    ("encoder.layers.*.attention.output.bias", -1),
    ("encoder.layers.*.attention.norm.*", -1),
    ("encoder.layers.*.attention.*", 0),
    ("encoder.layers.*.ffn.up.*", 0),
    ("encoder.layers.*.ffn.down.weight", 1),
    ("encoder.conv.conv.*", 0),
)
"""Name pattern -> split dimension, first match counts; -1 and no match: replicated."""

_VOCABULARY = ("embeddings.token.weight", "head.bias")
"""Parameters with one row a token, split in padded runs."""


def shard_spec(name: str, shape: tuple[int, ...], tp_rank: int, tp_size: int) -> ParameterSpec:
    """What rank ``tp_rank`` of ``tp_size`` holds of a parameter.

    Raises:
        TopologyError: the split dimension does not divide by ``tp_size``.
    """
    if name in _VOCABULARY:
        return _specify_vocabulary(name, shape, tp_rank, tp_size)
    dim = next((dim for pattern, dim in _SPLIT if fnmatchcase(name, pattern)), -1)
    if dim < 0 or tp_size == 1:
        return ParameterSpec(name, shape, None, 0, shape[0], shape)
    check_tensor_parallel_divides(
        tp_size, {f"{name}.shape[{dim}]": shape[dim]}, error=TopologyError
    )
    length = shape[dim] // tp_size
    local = (*shape[:dim], length, *shape[dim + 1 :])
    return ParameterSpec(name, shape, dim, tp_rank * length, length, local)


def vocabulary_rows(vocab_size: int, tp_size: int) -> int:
    """Vocabulary rows a rank holds, padding included."""
    even = -(-vocab_size // tp_size)
    return -(-even // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _specify_vocabulary(
    name: str, shape: tuple[int, ...], tp_rank: int, tp_size: int
) -> ParameterSpec:
    rows = vocabulary_rows(shape[0], tp_size)
    offset = min(tp_rank * rows, shape[0])
    length = min(rows, shape[0] - offset)
    return ParameterSpec(name, shape, 0, offset, length, (rows, *shape[1:]))
