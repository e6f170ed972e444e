"""Disentangled attention and dropout by compiled CPU kernels, in float32.

The slow twin is `megatron_deberta.ops.chunked`. Formulas and layout are in ``kernels.cpp``. Each
thread computes its own heads, so results do not depend on the number of threads. No scores are
kept: backward computes them again from the log-sum-exp.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_deberta.ops.arguments import (
    AttentionArguments,
    gathered_ranges,
    query_positions,
    visible_ranges,
)
from megatron_deberta.ops.dropout_bits import drop_threshold, keep_scale, pairs, row_keys
from megatron_deberta.ops.head_threads import for_heads
from megatron_deberta.ops.native.build import SOURCE, library
from megatron_deberta.ops.relative_positions import RelativePositions

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LANES = 16
"""Head sizes are multiples of the floats in a vector register."""


def why_not_native(q: Tensor) -> str | None:
    """Return why the kernels cannot run on these queries, or None if they can.

    Args:
        q: queries ``[batch, heads, q_len, head_dim]``.
    """
    if q.device.type != "cpu":
        return f"the kernels run on CPUs, not on {q.device.type}"
    if q.dtype not in _DTYPES:
        return f"the kernels do not support {q.dtype}"
    if q.shape[-1] % _LANES:
        return f"heads have {q.shape[-1]} features and the kernels need a multiple of {_LANES}"
    if torch.compiler.is_compiling() or type(q) not in (Tensor, nn.Parameter):
        return "a tensor without values cannot be given to them"
    if library() is None:
        return "they cannot be compiled: there is no C++ compiler, or it failed"
    return None


@dataclass(frozen=True)
class RowOptions:
    """What is not differentiable: where the rows are among the tokens, what their queries see.

    Attributes:
        relative: map from distances to slots.
        p2c_index: see ``disentangled_attention``.
        scale: factor on scores.
        dropout_p: dropout probability.
        row_keys: int32 ``[rows, heads, queries]``, of each query's pair; None: no dropout.
        starts: int64 ``[rows]``, first token.
        lengths: int64 ``[rows]``.
        longest: tokens of the longest row.
        first_key: int32 ``[queries of all rows]``, first key that a query sees, counted in its row;
            None: all.
        last_key: likewise, end of the keys that it sees.
        positions: int32 ``[rows, queries]``, positions of gathered queries; None: every token is a
            query.
    """

    relative: RelativePositions
    p2c_index: str
    scale: float
    dropout_p: float
    row_keys: Tensor | None
    starts: Tensor
    lengths: Tensor
    longest: int
    first_key: Tensor | None = None
    last_key: Tensor | None = None
    positions: Tensor | None = None

    @property
    def num_queries(self) -> int:
        """Queries of a row, the most of any."""
        return self.longest if self.positions is None else self.positions.shape[1]


def attend(a: AttentionArguments) -> tuple[Tensor, Tensor | None]:
    """Compute attention.

    Args:
        a: checked arguments.

    Returns:
        Output like ``q``, and if requested the log-sum-exp of the scores, float32
        ``[batch, heads, q_len]``.
    """
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (a.q, a.k, a.v))
    output, lse = attend_rows(q, k, v, a.pos_key, a.pos_query, _row_options(a))
    by_head = output.unflatten(0, (len(a.q), a.q.shape[2])).transpose(1, 2)
    return by_head, lse if a.return_lse else None


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    options: RowOptions,
) -> tuple[Tensor, Tensor]:
    """Compute attention inside rows of tokens.

    Args:
        q: ``[tokens, heads, head_dim]``, any strides; gathered queries ``[rows * queries, ...]``.
        k: ``[tokens, heads, head_dim]``.
        v: like ``k``.
        pos_key: ``[heads, 2 * span, head_dim]`` or None.
        pos_query: likewise.
        options: the rows and the rest.

    Returns:
        Output like ``q``, zero for tokens of no row, and the log-sum-exp of the scores, float32
        ``[rows, heads, queries]``, not differentiable.
    """
    output, lse = _NativeAttention.apply(q, k, v, pos_key, pos_query, options)
    return output, lse


class _NativeAttention(torch.autograd.Function):
    """Autograd function of the kernels."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *tensors, options = args
        call = _Call(tensors, options)
        q = call.tokens[0]
        output = call.new_like_queries(*q.shape)
        lse = q.new_empty(len(options.starts), q.shape[1], options.num_queries)
        call.run("attention_forward", lse, out=output)
        ctx.save_for_backward(*tensors, lse)
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        return output.to(args[0].dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, lse = ctx.saved_tensors
        call = _Call(tensors, ctx.options)
        d_q, d_k, d_v = call.vector_gradients()
        d_tables = call.table_gradients()
        grads = {f"d_{name}": x for name, x in d_tables.items()}
        call.run(
            "attention_backward", lse, d_out=_dense(d_output), d_q=d_q, d_k=d_k, d_v=d_v, **grads
        )
        results = (d_q, d_k, d_v, d_tables.get("c2p"), d_tables.get("p2c"))
        dtype = tensors[0].dtype
        return (*(None if x is None else x.to(dtype) for x in results), None)


class _Tokens(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("token", ctypes.c_int64),
        ("head", ctypes.c_int64),
    )


_INTEGERS = ("rows", "heads", "head_dim", "length", "all_heads")
_POINTERS = ("positions", "first_key", "last_key", "row_keys")
_TOKENS = ("d_out", "d_q", "d_k", "d_v", "d_c2p", "d_p2c")


class _Arguments(ctypes.Structure):
    """``Call`` of ``kernels.cpp``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _INTEGERS),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("queries", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        ("threshold", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("keep_scale", ctypes.c_float),
        *((name, _Tokens) for name in ("q", "k", "v", "out", "c2p", "p2c")),
        *((name, ctypes.c_void_p) for name in ("c2p_slots", "p2c_slots", "lse")),
        *((name, _Tokens) for name in _TOKENS),
    )


class _Call:
    """Arguments of a call in float32.

    Args:
        tensors: the differentiable arguments of ``attend_rows``.
        options: the rows and the rest.
    """

    def __init__(self, tensors: Sequence[Tensor | None], options: RowOptions) -> None:
        self.options = options
        self.tokens = [_dense(x) for x in tensors[:3] if x is not None]
        num_queries, longest = len(options.starts) * options.num_queries, options.longest
        if options.positions is None:
            num_queries = int(options.lengths.sum())
        self.skips_queries = num_queries < len(self.tokens[0]) or longest == 0
        names = zip(("c2p", "p2c"), tensors[3:5], strict=True)
        self._tables = {name: _dense(table) for name, table in names if table is not None}
        rising = torch.arange(1 - longest, longest, device="cpu")
        # Distances decrease along a score row and increase along a score column.
        signs = {"c2p": -1, "p2c": 1 if options.p2c_index == "microsoft" else -1}
        self._slots = {name: options.relative.slots(signs[name] * rising) for name in self._tables}

    def table_gradients(self) -> dict[str, Tensor]:
        """Return zeros for the gradients of the position tables, in one buffer for both."""
        if not self._tables:
            return {}
        first = next(iter(self._tables.values()))
        heads, slots, size = first.shape
        buffer = first.new_zeros(slots, len(self._tables), heads, size)
        return {name: buffer[:, i].transpose(0, 1) for i, name in enumerate(self._tables)}

    def vector_gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return where the gradients of q, k and v go: one buffer where all have the same tokens.

        The backward pass of a projection of all three then needs no copy.
        """
        q, k, _ = self.tokens
        if self.options.positions is not None:
            d_k, d_v = k.new_zeros(len(k), 2, *k.shape[1:]).unbind(1)
            return self.new_like_queries(*q.shape), d_k, d_v
        d_q, d_k, d_v = self.new_like_queries(len(q), 3, *q.shape[1:]).unbind(1)
        return d_q, d_k, d_v

    def new_like_queries(self, *shape: int) -> Tensor:
        """Return a float32 tensor on the CPU, zeros where some tokens belong to no row."""
        q = self.tokens[0]
        return q.new_zeros(shape) if self.skips_queries else q.new_empty(shape)

    def run(self, function: str, lse: Tensor, **more: Tensor) -> None:
        """Call a function of the kernels for all heads.

        Args:
            function: its name.
            lse: log-sum-exp, float32 ``[rows, heads, queries]``.
            **more: other tensors by the names of ``Call``.
        """
        loaded = library()
        assert loaded is not None
        if loaded.call_size() != ctypes.sizeof(_Arguments):
            raise RuntimeError(
                f"{SOURCE} was replaced after this process had started; start it again"
            )
        kernel = getattr(loaded, function)
        q, k, v = self.tokens
        if not len(q):
            return
        tensors = {"q": q, "k": k, "v": v, **self._tables, **more}

        def work(heads: slice) -> None:
            kernel(ctypes.byref(self._arguments(heads, lse, tensors)))

        scores = len(q) * q.shape[1] * self.options.longest
        for_heads(work, q.shape[1], scores)

    def _arguments(self, heads: slice, lse: Tensor, tensors: dict[str, Tensor]) -> _Arguments:
        options = self.options
        arguments = _Arguments(
            rows=len(options.starts),
            heads=heads.stop - heads.start,
            head_dim=self.tokens[0].shape[2],
            length=options.longest,
            all_heads=self.tokens[0].shape[1],
            starts=options.starts.data_ptr(),
            lengths=options.lengths.data_ptr(),
            queries=options.num_queries,
            positions=_pointer(options.positions),
            first_key=_pointer(options.first_key),
            last_key=_pointer(options.last_key),
            row_keys=_pointer(options.row_keys, heads.start),
            threshold=drop_threshold(options.dropout_p),
            scale=options.scale,
            keep_scale=keep_scale(options.dropout_p),
            lse=_pointer(lse, heads.start),
            **{f"{name}_slots": slots.data_ptr() for name, slots in self._slots.items()},
        )
        for name, x in tensors.items():
            # [heads, slots, size] of the tables, [tokens, heads, size] of the others
            at = x.transpose(0, 1) if name.endswith(("c2p", "p2c")) else x
            at = at[:, heads]
            setattr(arguments, name, _Tokens(at.data_ptr(), at.stride(0), at.stride(1)))
        return arguments


def _pointer(x: Tensor | None, head: int = 0) -> int | None:
    """Return the address of a tensor, or of a head in ``[rows, heads, longest]``."""
    if x is None:
        return None
    return x.data_ptr() if head == 0 else x[:, head:].data_ptr()


def _dense(x: Tensor) -> Tensor:
    """Return float32 values with adjacent features."""
    wide = x.float()
    return wide if wide.stride(-1) == 1 else wide.contiguous()


def _row_options(a: AttentionArguments) -> RowOptions:
    """Return the rows of a batch and the rest; what all queries see is kept in ``a.masks``."""
    batch, _, length, _ = a.k.shape
    names = ("native first key", "native last key")
    cache = {} if a.masks is None else a.masks
    if not set(names) <= set(cache):
        cache.update(zip(names, visible_ranges(a) or (None, None), strict=True))
    ranges = [x for name in names if (x := cache[name]) is not None]
    positions = None
    if a.q_positions is not None:
        positions = a.q_positions.int().contiguous()
        ranges = list(gathered_ranges(positions, ranges or None, length))
    first, last = [x.int().contiguous() for x in ranges] or (None, None)
    starts = torch.arange(batch, device="cpu") * length
    lengths = torch.full((batch,), length, device="cpu")
    keys = None
    if a.seed is not None:
        keys = row_keys(a.seed, pairs(query_positions(a)), a.q.shape[1], a.head_offset)
    return RowOptions(
        a.positions, a.p2c_index, a.scale, a.dropout_p, keys,
        starts, lengths, length, first, last, positions,
    )  # fmt: skip


def can_drop(x: Tensor) -> bool:
    """Return whether the kernel supports a tensor: a float32 CPU tensor, not traced or fake.

    Args:
        x: any shape.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.compiler.is_compiling():
        return False
    return type(x) in (Tensor, nn.Parameter) and library() is not None


def drop(
    x: Tensor, residual: Tensor | None, seed: Tensor, positions: Tensor, probability: float
) -> Tensor:
    """Return ``residual + scale * mask * x``; bits as in `megatron_deberta.ops.dropout_bits`.

    Args:
        x: float32 ``[B, R, D]`` or a table ``[S, D]``.
        residual: like ``x``, or None.
        seed: int64 ``[B]``, or ``[1]`` for a table.
        positions: ``[B, R]`` or ``[S]``.
        probability: dropout probability, rounded to a multiple of 1/256.
    """
    keys = row_keys(seed, positions, 1, 0).contiguous()
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    out = torch.empty_like(x)
    loaded = library()
    assert loaded is not None
    loaded.dropout(
        *(ctypes.c_void_p(None if t is None else t.data_ptr()) for t in (x, residual, out, keys)),
        ctypes.c_int64(keys.numel()),
        ctypes.c_int64(x.shape[-1]),
        ctypes.c_int32(drop_threshold(probability)),
        ctypes.c_float(keep_scale(probability)),
    )
    return out
