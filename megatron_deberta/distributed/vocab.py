"""Vocabulary-parallel embedding, and output projection with cross-entropy.

The rows of the vocabulary are split over ranks. Without a group the same code is the single-device
path. The loss is a sum; the caller divides it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn import functional

from megatron_deberta.distributed.collectives import (
    all_gather,
    group_rank,
    group_size,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron_deberta.ops.kernel_support import runs_kernels

# Label of a token without a loss
IGNORED_LABEL = -100

# Logits per chunk, by device type. Small chunks are slow: each updates the gradient of the whole
# vocabulary. The kernels ("fused") keep 2 bytes per 16-bit logit instead of 8.
_CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**27, "fused": 2**29}

# Scales gradients of logits for fp16 products: they are near 1 / V, where fp16 has few digits
_FP16_FACTOR = 64.0

# Called with logits [R, C], the tokens that their rows stand for, and the first column's piece;
# returns the maxima of logits plus Gumbel noise [R] and their pieces, int64 [R]
Draw = Callable[[Tensor, slice, int], tuple[Tensor, Tensor]]


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


def vocab_parallel_loss(
    states: Tensor,
    weight_local: Tensor,
    bias_local: Tensor,
    labels: Tensor,
    vocab_start: int,
    vocab_size_unpadded: int,
    group: ProcessGroup | None,
    *,
    fuse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Project hidden states onto the vocabulary and compute the cross-entropy, chunk by chunk.

    Collective over ``group`` in forward (per chunk one all-gather of maxima and one all-reduce),
    local in backward. Forward computes each chunk's gradients while its logits exist, and backward
    multiplies them by the gradient of the loss, so the logits never exist all together and nothing
    is computed twice.

    Source: the gradient in forward is Liger Kernel's (Hsu et al. 2024, arXiv:2410.10989).

    Args:
        states: ``[T, D]`` fp32, bf16, fp16 (or fp64), equal on all ranks.
        weight_local: ``[V/tp, D]``, this rank's rows.
        bias_local: ``[V/tp]``.
        labels: ``[T]`` int64, equal on all ranks; -100: no loss.
        vocab_start: vocabulary index of this rank's first row.
        vocab_size_unpadded: vocabulary size; rows beyond it are padding and are excluded.
        group: the tensor-parallel ranks.
        fuse: use the kernels of ``ops.triton.cross_entropy`` where they are supported. The ranks
            then exchange one all-gather per chunk.

    Returns:
        The sum of the losses in nats (fp32; fp64 for fp64 states; differentiable once) and the
        number of labels that are the argmax (int64; lowest index among equals). Both are equal on
        all ranks; the gradient of ``states`` is this rank's summand.

    Raises:
        ValueError: on CPU, a label is neither -100 nor below ``vocab_size_unpadded``.
    """
    loss, correct, _ = _vocab_parallel_loss(
        states,
        weight_local,
        bias_local,
        labels,
        vocab_start,
        vocab_size_unpadded,
        group,
        None,
        fuse,
    )
    return loss, correct


def vocab_parallel_sampled_loss(
    states: Tensor,
    weight_local: Tensor,
    bias_local: Tensor,
    labels: Tensor,
    draw: Draw,
    vocab_start: int,
    vocab_size_unpadded: int,
    group: ProcessGroup | None,
    *,
    fuse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `vocab_parallel_loss`, and draw a piece from each predicted distribution.

    Gumbel-max on each rank's rows, then a maximum over ranks. If the noise is a function of token
    and piece, no layout changes a sample except by rounding of the logits.

    Args:
        states: as in `vocab_parallel_loss`, like the following.
        weight_local: ``[V/tp, D]``.
        bias_local: ``[V/tp]``.
        labels: ``[T]``.
        draw: maximum of logits plus Gumbel noise over a part of the vocabulary.
        vocab_start: vocabulary index of this rank's first row.
        vocab_size_unpadded: vocabulary size.
        group: the tensor-parallel ranks.
        fuse: as in `vocab_parallel_loss`.

    Returns:
        The loss and the number of correct predictions of `vocab_parallel_loss`, and the drawn
        pieces, int64 ``[T]``, equal on all ranks.
    """
    return _vocab_parallel_loss(
        states,
        weight_local,
        bias_local,
        labels,
        vocab_start,
        vocab_size_unpadded,
        group,
        draw,
        fuse,
    )


def _vocab_parallel_loss(
    states: Tensor,
    weight_local: Tensor,
    bias_local: Tensor,
    labels: Tensor,
    vocab_start: int,
    vocab_size_unpadded: int,
    group: ProcessGroup | None,
    draw: Draw | None,
    fuse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    _check_labels(labels, vocab_size_unpadded)
    vocabulary = _Vocabulary.of_rank(vocab_start, vocab_size_unpadded, weight_local, group, fuse)
    differentiate = torch.is_grad_enabled()
    out = _ProjectedCrossEntropy.apply(
        states, weight_local, bias_local, labels, vocabulary, differentiate, draw
    )
    return cast("tuple[Tensor, Tensor, Tensor]", out)


@torch.no_grad()
def vocab_parallel_token_losses(
    states: Tensor,
    weight_local: Tensor,
    bias_local: Tensor,
    labels: Tensor,
    vocab_start: int,
    vocab_size_unpadded: int,
    group: ProcessGroup | None,
    *,
    fuse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of each token, without gradients. Collective over ``group``.

    Args, errors and number of correct predictions are those of `vocab_parallel_loss`.

    Returns:
        ``[T]`` losses in nats (fp32; fp64 for fp64 states), 0 for label -100, and the number of
        correct predictions. Both are equal on all ranks.
    """
    _check_labels(labels, vocab_size_unpadded)
    vocabulary = _Vocabulary.of_rank(vocab_start, vocab_size_unpadded, weight_local, group, fuse)
    losses = states.new_zeros(len(states), dtype=torch.promote_types(states.dtype, torch.float32))
    correct = labels.new_zeros(())
    chunk = vocabulary.chunk_rows(states, weight_local)
    for first in range(0, len(states), max(1, chunk)):
        rows = slice(first, first + chunk)
        logits = torch.addmm(bias_local, states[rows], weight_local.t())
        losses[rows], hits = _chunk_loss(logits, labels[rows], vocabulary)
        correct += hits
    return losses, correct


def _check_labels(labels: Tensor, vocab_size: int) -> None:
    """Check labels on CPU; on GPU it would wait for the device."""
    if labels.device.type != "cpu":
        return
    wrong = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= vocab_size))
    if bool(wrong.any()):
        raise ValueError(
            f"label {int(labels[wrong][0])} is outside model.vocab_size={vocab_size}; use the "
            "tokenizer with which the shards were made"
        )


class _Vocabulary(NamedTuple):
    """This rank's part of the vocabulary; columns without padding."""

    start: int
    num_columns: int
    group: ProcessGroup | None
    fuse: bool

    @staticmethod
    def of_rank(
        start: int, size: int, weight: Tensor, group: ProcessGroup | None, fuse: bool
    ) -> _Vocabulary:
        """Return the part of a rank that holds the rows ``weight`` from ``start``."""
        columns = min(max(size - start, 0), len(weight))
        return _Vocabulary(start, columns, group, fuse and runs_kernels(weight))

    def chunk_rows(self, states: Tensor, weight: Tensor) -> int:
        """Return the tokens per chunk."""
        fused = self.fuse and states.element_size() == 2
        return chunk_rows(len(states), len(weight), "fused" if fused else states.device.type)


class _ProjectedCrossEntropy(torch.autograd.Function):
    """loss = sum of logsumexp(z) - z_label; d loss / d z = softmax(z) - onehot(label)."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        vocabulary: _Vocabulary,
        differentiate: bool,
        draw: Draw | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = _Gradients(states, weight, bias) if differentiate else None
        wide = torch.promote_types(states.dtype, torch.float32)
        loss, correct = states.new_zeros((), dtype=wide), labels.new_zeros(())
        samples = torch.empty_like(labels) if draw is not None else labels.new_empty(0)
        chunk = vocabulary.chunk_rows(states, weight)
        for first in range(0, len(states), max(1, chunk)):
            rows = slice(first, first + chunk)
            logits = torch.addmm(bias, states[rows], weight.t())
            if draw is not None:
                samples[rows] = _sample(logits, rows, vocabulary, draw)
            part, hits = _chunk_loss(logits, labels[rows], vocabulary, gradients, rows)
            loss += part.sum()
            correct += hits
            del logits
        ctx.gradients = gradients
        ctx.mark_non_differentiable(correct, samples)
        return loss, correct, samples

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place and released: a copy would be as large as the embedding table.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("vocab_parallel_loss: backward was called twice")
        return (*gradients.scaled(grad), None, None, None, None)


class _Gradients:
    """Gradients of states, weight and bias for a loss gradient of 1, in at least fp32.

    They are converted to 16 bits only after multiplication by the loss gradient, because fp16
    needs the loss scale.

    Attributes:
        d_bias: ``[V/tp]``.
        factor: on gradients of logits.
    """

    def __init__(self, states: Tensor, weight: Tensor, bias: Tensor) -> None:
        self._states, self._weight = states, weight
        self.factor = _FP16_FACTOR if states.dtype == torch.float16 else 1.0
        wide = torch.promote_types(states.dtype, torch.float32)
        self._d_states = torch.empty_like(states, dtype=wide)
        self._d_weight = torch.zeros_like(weight, dtype=wide)
        self.d_bias = torch.zeros_like(bias, dtype=wide)

    def add(self, rows: slice, d_logits: Tensor) -> None:
        """Add the gradients of a chunk; ``d_logits`` is ``[R, V/tp]`` in at least fp32."""
        self.d_bias += d_logits.sum(0)
        if self.factor != 1.0:
            d_logits.mul_(self.factor)
        self.add_products(rows, d_logits.to(self._states.dtype))

    def add_products(self, rows: slice, d_logits: Tensor) -> None:
        """As `add` without the bias; ``d_logits`` is in the states' dtype, times ``factor``."""
        self._d_states[rows] = torch.mm(d_logits, self._weight)
        if self._d_weight.dtype == d_logits.dtype:
            self._d_weight.addmm_(d_logits.t(), self._states[rows])
        else:
            self._d_weight += torch.mm(d_logits.t(), self._states[rows])

    def scaled(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All three, multiplied by the loss gradient, in the states' dtype; call it once."""
        dtype, factor = self._states.dtype, grad / self.factor
        return (
            self._d_states.mul_(factor).to(dtype),
            self._d_weight.mul_(factor).to(dtype),
            self.d_bias.mul_(grad).to(dtype),
        )


def chunk_rows(num_rows: int, num_columns: int, device_type: str) -> int:
    """Tokens per chunk: chunks of equal size, as few as ``_CHUNK_ELEMENTS`` allows.

    Args:
        num_rows: tokens to predict.
        num_columns: this rank's vocabulary rows.
        device_type: ``torch.device.type``.
    """
    limit = max(1, _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS["cuda"]) // num_columns)
    parts = max(1, -(-num_rows // limit))
    return -(-num_rows // parts)


def _chunk_loss(
    logits: Tensor,
    labels: Tensor,
    vocabulary: _Vocabulary,
    gradients: _Gradients | None = None,
    rows: slice | None = None,
) -> tuple[Tensor, Tensor]:
    """Return losses ``[R]`` and number of correct predictions; add the gradients of ``rows``.

    Overwrites ``logits``.
    """
    if vocabulary.fuse:
        return _fused_chunk_loss(logits, labels, vocabulary, gradients, rows)
    losses, correct, d_logits = _eager_chunk_loss(logits, labels, vocabulary, gradients is not None)
    if gradients is not None and rows is not None and d_logits is not None:
        gradients.add(rows, d_logits)
    return losses, correct


def _fused_chunk_loss(
    logits: Tensor,
    labels: Tensor,
    vocabulary: _Vocabulary,
    gradients: _Gradients | None,
    rows: slice | None,
) -> tuple[Tensor, Tensor]:
    """Compute `_chunk_loss` in two kernels; its twin is `_eager_chunk_loss`."""
    from megatron_deberta.ops.triton.cross_entropy import row_statistics, write_gradient_

    start, num_columns, group, _ = vocabulary
    own = row_statistics(logits, labels, start, num_columns)
    top, sum_exp, label_logits, hits = own if group is None else _combine(all_gather(own, group))
    counted = labels != IGNORED_LABEL
    losses = torch.where(counted, sum_exp.log() - (label_logits - top), 0)
    correct = (counted & (hits > 0)).sum()
    if gradients is not None and rows is not None:
        write_gradient_(
            logits, labels, top, sum_exp, gradients.d_bias,
            start, num_columns, IGNORED_LABEL, gradients.factor,
        )  # fmt: skip
        gradients.add_products(rows, logits)
    return losses, correct


def _combine(ranks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine ``row_statistics`` of all ranks, ``[tp, 4, R]``."""
    maxima, sums, label_logits, hits = ranks.unbind(1)
    # Lower ranks hold lower indices, and max returns the first of equal values.
    top, winner = maxima.max(dim=0, keepdim=True)
    sum_exp = (sums * (maxima - top).exp()).sum(0)
    return top[0], sum_exp, label_logits.sum(0), hits.gather(0, winner)[0]


def _eager_chunk_loss(
    logits: Tensor, labels: Tensor, vocabulary: _Vocabulary, differentiate: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses ``[R]``, number of correct predictions and gradient; overwrites ``logits``."""
    start, num_columns, group, _ = vocabulary
    maximum, best = _row_maximum(logits[:, :num_columns])
    maxima = maximum.unsqueeze(0) if group is None else all_gather(maximum, group)
    # Lower ranks hold lower indices, and max returns the first of equal values.
    top, winner = maxima.max(dim=0)

    work = logits.to(top.dtype)
    real = work[:, :num_columns]
    columns = labels - start
    owned = (columns >= 0) & (columns < num_columns)
    columns = columns.masked_fill(~owned, 0)
    real.sub_(top.unsqueeze(1))
    label_logits = torch.zeros_like(top)
    if num_columns:
        label_logits = torch.where(owned, real.gather(1, columns.unsqueeze(1)).squeeze(1), 0)
    hit = owned & (winner == group_rank(group)) & (best == columns)
    parts = torch.stack([real.exp_().sum(dim=1), label_logits, hit.to(top.dtype)])
    if group is not None:
        dist.all_reduce(parts, group=group)
    sum_exp, label_logits, hits = parts
    counted = labels != IGNORED_LABEL
    losses = torch.where(counted, sum_exp.log() - label_logits, 0)
    correct = (counted & (hits > 0)).sum()
    if not differentiate:
        return losses, correct, None

    real.mul_(torch.where(counted, sum_exp.reciprocal(), 0).unsqueeze(1))
    if num_columns:
        _subtract_labels(real, columns, owned & counted, scatters=real.device.type == "cpu")
    work[:, num_columns:] = 0
    return losses, correct, work


def _subtract_labels(x: Tensor, columns: Tensor, counted: Tensor, *, scatters: bool) -> None:
    """Subtract 1 at the column ``columns`` ``[R]`` of each counted row of ``x`` ``[R, C]``.

    On CUDA a deterministic scatter sorts, which takes longer than to compare all columns.
    """
    if scatters:
        x.scatter_add_(1, columns.unsqueeze(1), -counted.to(x.dtype).unsqueeze(1))
        return
    chosen = columns.masked_fill(~counted, -1).unsqueeze(1)
    x.add_(torch.arange(x.shape[1], device=x.device) == chosen, alpha=-1)


def _sample(logits: Tensor, rows: slice, vocabulary: _Vocabulary, draw: Draw) -> Tensor:
    """Draw a piece from the distribution of each row of a chunk, int64 ``[R]``."""
    start, num_columns, group, _ = vocabulary
    maximum, piece = draw(logits[:, :num_columns], rows, start)
    if group is None:
        return piece
    # Lower ranks hold lower indices, and max returns the first of equal values.
    winner = all_gather(maximum, group).max(dim=0, keepdim=True).indices
    return all_gather(piece, group).gather(0, winner).squeeze(0)


def _row_maximum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum ``[R]`` in at least fp32 and its first column ``[R]``."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if logits.shape[1] == 0:
        empty = torch.full(logits.shape[:1], -torch.inf, dtype=dtype, device=logits.device)
        return empty, torch.full_like(empty, -1, dtype=torch.int64)
    maximum, column = logits.max(dim=1)
    return maximum.to(dtype), column
