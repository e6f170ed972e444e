"""Entry point of disentangled attention and choice of its backend."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Literal, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from typing_extensions import TypedDict, Unpack

from megatron_deberta.ops import chunked, efficient, reference
from megatron_deberta.ops.arguments import (
    AttentionArguments,
    MaskCache,
    P2CIndex,
    check_arguments,
    current_p2c_index,
    default_scale,
    row_seeds,
    without_idle_masks,
)
from megatron_deberta.ops.native import backend as native_backend
from megatron_deberta.ops.native.backend import why_not_native
from megatron_deberta.ops.relative_positions import RelativePositions
from megatron_deberta.ops.triton import why_not_fused

_BACKENDS = ("reference", "chunked", "efficient", "native", "triton")
# Looked up at import: torch 2.11 cannot compile a function that looks it up.
_log = logging.getLogger(__name__)


class _Options(TypedDict, total=False):
    """Keyword arguments of ``disentangled_attention`` besides ``return_lse``."""

    q_positions: Tensor | None
    distinct_positions: bool
    attention_mask: Tensor | None
    document_ids: Tensor | None
    causal: bool
    dropout_p: float
    seed: int | Tensor | None
    head_offset: int
    scale: float | None
    p2c_index: P2CIndex
    backend: str | None
    masks: MaskCache | None


@overload
def disentangled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    positions: RelativePositions,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...


@overload
def disentangled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    positions: RelativePositions,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...


def disentangled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    positions: RelativePositions,
    *,
    q_positions: Tensor | None = None,
    distinct_positions: bool = False,
    attention_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    head_offset: int = 0,
    scale: float | None = None,
    p2c_index: P2CIndex = "microsoft",
    return_lse: bool = False,
    backend: str | None = None,
    masks: MaskCache | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax attention with relative-position terms in the scores.

    With i the position of the query, j that of the key and delta the slot of a distance::

        score[i, j] = scale * (q_i . k_j + q_i . pos_key[delta(i - j)]
                                         + k_j . pos_query[delta(i - j)])

    With ``p2c_index="paper"`` the last term takes delta(j - i), as in Eq. 4 of the paper;
    the released models were trained with delta(i - j).

    Args:
        q: ``[batch, heads, q_len, head_dim]``, local heads under tensor parallelism, any strides.
        k: ``[batch, heads, k_len, head_dim]``, same dtype; key j stands at position j.
        v: like ``k``.
        pos_key: ``[heads, 2 * span, head_dim]``, or None without the content-to-position term.
        pos_query: likewise for the position-to-content term.
        positions: map from distances to slots.
        q_positions: int ``[batch, q_len]``, positions of gathered queries in ``[0, k_len)``, or
            -1 for padding (zero output, no gradient). None: query i is at i, q_len = k_len.
        distinct_positions: no position occurs twice among the queries of a row, padding aside. The
            fused kernels are then faster.
        attention_mask: bool ``[batch, k_len]``, True = real key; real keys form one run.
        document_ids: int ``[batch, k_len]``, non-decreasing along a row; a query sees only keys
            of its own document.
        causal: a query sees only keys at or before its own position.
        dropout_p: dropout of attention probabilities, rounded to a multiple of 1/256.
        seed: int64 ``[batch]``, one per row; an int stands for that seed plus the row's index.
        head_offset: global index of the first local head; only dropout depends on it.
        scale: factor on scores; None: 1 / sqrt(terms * head_dim), terms = 1 + position terms.
        p2c_index: which distance the position-to-content term takes.
        return_lse: also return the log-sum-exp of the scores, which is not differentiable.
        backend: ``"reference"``, ``"chunked"``, ``"efficient"`` (torch's kernel, which drops other
            elements), ``"native"`` (compiled for this CPU), ``"triton"`` or ``"auto"`` (None),
            which takes the value of the environment variable ``MEGATRON_DEBERTA_ATTENTION`` if that
            is set.
        masks: the same dictionary, empty at first, in all calls with the same ``attention_mask``,
            ``document_ids`` and ``causal``, so that only the first one converts them.

    Returns:
        Output like ``q``, zero where a query sees no key; with ``return_lse`` also float32
        ``[batch, heads, q_len]``, -inf there.

    Raises:
        ValueError: an argument is invalid, or the backend does not exist or cannot run here.

    Source: He et al. 2021, arXiv:2006.03654, section 3.1 and Algorithm 1.
    """
    if torch.compiler.is_dynamo_compiling() and not _is_traceable(backend, q):
        return _outside_graph(
            q, k, v, pos_key, pos_query, positions, q_positions=q_positions,
            distinct_positions=distinct_positions, attention_mask=attention_mask,
            document_ids=document_ids, causal=causal, dropout_p=dropout_p, seed=seed,
            head_offset=head_offset, scale=scale, p2c_index=p2c_index, return_lse=return_lse,
            backend=backend, masks=masks,
        )  # fmt: skip
    if scale is None:
        scale = default_scale(q.shape[-1], pos_key, pos_query)
    arguments = AttentionArguments(
        q, k, v, pos_key, pos_query, positions, q_positions, attention_mask, document_ids, causal,
        dropout_p, row_seeds(seed, dropout_p, q), head_offset, scale,
        current_p2c_index(p2c_index), return_lse, masks, distinct_positions,
    )  # fmt: skip
    check_arguments(arguments)
    chosen = choose_backend(backend, q)
    if not torch.compiler.is_compiling():
        _log_once(chosen, q.device.type, q.dtype)
    output, lse = _backend(chosen)(without_idle_masks(arguments))
    return output if lse is None else (output, lse)


_outside_graph: Callable[..., Tensor | tuple[Tensor, Tensor]] = _disable_dynamo(
    disentangled_attention
)
"""The operator behind a graph break of ``torch.compile``. ``torch.compiler.disable`` does the same
and imports the compiler at once, which takes most of a second."""


def _is_traceable(requested: str | None, q: Tensor) -> bool:
    """Return whether ``torch.compile`` can trace the backend that would be chosen."""
    _, name = _requested_backend(requested)
    if name == "auto":
        return q.device.type == "cuda" and not why_not_fused(q)
    return name in ("reference", "triton")


def choose_backend(requested: str | None, q: Tensor) -> str:
    """Return the backend to use: the requested one, else the environment's, else the fastest.

    Args:
        requested: the caller's choice; None and ``"auto"`` mean no choice.
        q: queries ``[batch, heads, q_len, head_dim]``; its device, dtype and head size limit the
            choice.

    Raises:
        ValueError: there is no such backend, or it cannot run here.
    """
    source, name = _requested_backend(requested)
    if name == "auto":
        if q.device.type == "cuda":
            return "chunked" if why_not_fused(q) else "triton"
        return "chunked" if why_not_native(q) else "native"
    if name not in _BACKENDS:
        expected = ", ".join(["auto", *_BACKENDS])
        raise ValueError(f"{source}: got {name!r}, expected one of {expected}")
    reason = _LIMITS[name](q) if name in _LIMITS else None
    if reason is not None:
        raise ValueError(f"{source}: got {name!r}, but {reason}; expected 'chunked' or 'auto'")
    return name


def _requested_backend(requested: str | None) -> tuple[str, str]:
    """Return the argument or variable that chooses the backend, and its value."""
    if requested is not None and requested != "auto":
        return "backend", requested
    source = "MEGATRON_DEBERTA_ATTENTION"
    return source, os.environ.get(source) or "auto"


_LIMITS = {
    "triton": why_not_fused,
    "native": why_not_native,
    "efficient": efficient.why_not_efficient,
}
"""Why a backend cannot run on some queries."""


def _backend(name: str) -> Callable[[AttentionArguments], tuple[Tensor, Tensor | None]]:
    """Return the function of a backend; Triton is imported only when it is used."""
    if name == "triton":
        from megatron_deberta.ops.triton import backend as triton_backend

        return triton_backend.attend
    if name == "native":
        return native_backend.attend
    if name == "efficient":
        return efficient.attend
    return reference.attend if name == "reference" else chunked.attend


@cache
def _log_once(backend: str, device: str, dtype: torch.dtype) -> None:
    """Log a choice the first time it is made in this process."""
    _log.info("disentangled attention: %s backend on %s, %s", backend, device, dtype)
