"""The one entry to disentangled attention; chooses the backend."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Literal, overload

import torch
from torch import Tensor

from megatron_deberta.ops import chunked, reference
from megatron_deberta.ops.arguments import (
    AttentionArguments,
    AttentionRules,
    P2CIndex,
    check_arguments,
    default_scale,
    row_seeds,
    without_idle_masks,
)
from megatron_deberta.ops.relative_positions import RelativePositions

_BACKENDS = {"reference": reference.attend, "chunked": chunked.attend}
_log = logging.getLogger(__name__)


@overload
def disentangled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    positions: RelativePositions,
    *,
    q_positions: Tensor | None = ...,
    key_padding: Tensor | None = ...,
    document_ids: Tensor | None = ...,
    causal: bool = ...,
    dropout_p: float = ...,
    seed: int | Tensor | None = ...,
    head_offset: int = ...,
    scale: float | None = ...,
    p2c_index: P2CIndex = ...,
    return_lse: Literal[False] = ...,
    backend: str | None = ...,
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
    q_positions: Tensor | None = ...,
    key_padding: Tensor | None = ...,
    document_ids: Tensor | None = ...,
    causal: bool = ...,
    dropout_p: float = ...,
    seed: int | Tensor | None = ...,
    head_offset: int = ...,
    scale: float | None = ...,
    p2c_index: P2CIndex = ...,
    return_lse: Literal[True],
    backend: str | None = ...,
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
    key_padding: Tensor | None = None,
    document_ids: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    head_offset: int = 0,
    scale: float | None = None,
    p2c_index: P2CIndex = "released",
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention whose scores know the distance between query and key.

    With i where the query stands, j where the key does and delta the slot of a distance::

        score[i, j] = scale * (q_i . k_j + q_i . pos_key[delta(i - j)]
                                         + k_j . pos_query[delta(i - j)])

    With ``p2c_index="paper"`` the last term takes delta(j - i), as Eq. 4 of the paper writes;
    the released models were trained with delta(i - j).

    Args:
        q: ``[batch, heads, q_len, head_dim]``, local heads under tensor parallelism, any strides.
        k: ``[batch, heads, k_len, head_dim]``, same dtype; key j stands at position j.
        v: like ``k``.
        pos_key: ``[heads, 2 * span, head_dim]``, or None without the content-to-position term.
        pos_query: likewise for the position-to-content term.
        positions: which slot stands for which distance.
        q_positions: int ``[batch, q_len]``, where gathered queries stand, in ``[0, k_len)``, or
            -1 for padding (zero output, no gradient). None: query i stands at i, q_len = k_len.
        key_padding: bool ``[batch, k_len]``, True = real key; real keys form one run.
        document_ids: int ``[batch, k_len]``, non-decreasing along a row; a query sees only keys
            of its own document.
        causal: a query sees only keys at or before its own position.
        dropout_p: dropout of attention probabilities, rounded to a multiple of 1/256.
        seed: int64 ``[batch]``, one a row; an int stands for that seed plus the row's index.
        head_offset: global index of the first local head; only dropout depends on it.
        scale: factor on scores; None: 1 / sqrt(terms * head_dim), terms = 1 + position terms.
        p2c_index: which distance the position-to-content term takes.
        return_lse: also return the log-sum-exp of the scores, which is not differentiable.
        backend: ``"reference"``, ``"chunked"`` or ``"auto"`` (None); where nothing is asked for,
            the environment variable ``MEGATRON_DEBERTA_ATTENTION`` decides.

    Returns:
        Output like ``q``, zero where a query sees no key; with ``return_lse`` also float32
        ``[batch, heads, q_len]``, -inf there.

    Raises:
        ValueError: if an argument breaks this contract or the backend does not exist.

    Source: section 3.1 and Algorithm 1 of the paper (arXiv:2006.03654).
    """
    arguments = AttentionArguments(
        q=q,
        k=k,
        v=v,
        pos_key=pos_key,
        pos_query=pos_query,
        rules=AttentionRules(
            positions=positions,
            q_positions=q_positions,
            key_padding=key_padding,
            document_ids=document_ids,
            causal=causal,
            dropout_p=dropout_p,
            seed=row_seeds(seed, dropout_p, q),
            head_offset=head_offset,
            scale=default_scale(q.shape[-1], pos_key, pos_query) if scale is None else scale,
            p2c_index=p2c_index,
            return_lse=return_lse,
        ),
    )
    check_arguments(arguments)
    chosen = choose_backend(backend)
    _log_once(chosen, q.device.type, q.dtype)
    output, lse = _BACKENDS[chosen](without_idle_masks(arguments))
    return output if lse is None else (output, lse)


def choose_backend(requested: str | None) -> str:
    """Name of the backend that runs: the one asked for, else the environment's, else chunked.

    Args:
        requested: the caller's choice; None and ``"auto"`` leave it open.

    Raises:
        ValueError: if there is no such backend.
    """
    source, name = "backend", requested
    if name is None or name == "auto":
        source = "MEGATRON_DEBERTA_ATTENTION"
        name = os.environ.get(source, "auto")
    if name == "auto":
        return "chunked"
    if name == "triton":
        raise ValueError(f"{source}: got 'triton', which is not built in yet, expected 'chunked'")
    if name not in _BACKENDS:
        expected = ", ".join(["auto", *_BACKENDS])
        raise ValueError(f"{source}: got {name!r}, expected one of {expected}")
    return name


@cache
def _log_once(backend: str, device: str, dtype: torch.dtype) -> None:
    """Logs a choice the first time it is made in this process."""
    _log.info("disentangled attention: %s backend on %s, %s", backend, device, dtype)
