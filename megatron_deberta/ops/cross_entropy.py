"""Vocabulary projection with cross-entropy, chunk by chunk, over a part of the vocabulary.

A part contributes four numbers per token: the maximum of its logits, the sum of the exponentials of
logits minus the maximum over all parts, the label's logit, and whether the label is the first
maximum. Two functions combine the parts, which are identities where one part is the whole
vocabulary, so one device and tensor-parallel ranks run the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_deberta.ops.triton import runs_kernels

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


def _unchanged(x: Tensor) -> Tensor:
    return x


def _only_part(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A part of the vocabulary, and how it is combined with the other parts.

    Attributes:
        size: of the whole vocabulary. Rows of a weight beyond it are padding and are excluded.
        start: vocabulary index of the part's first row.
        fuse: use the kernels of ``ops.triton.cross_entropy`` where they are supported.
        number: of the part, from 0, in ascending order of their rows.
        gather: stacks a tensor of all parts, ``[...] -> [parts, ...]``.
        total: sums a tensor over all parts, in place.
    """

    size: int
    start: int = 0
    fuse: bool = False
    number: int = 0
    gather: Callable[[Tensor], Tensor] = _only_part
    total: Callable[[Tensor], Tensor] = _unchanged

    def largest(self, maximum: Tensor) -> tuple[Tensor, Tensor]:
        """Return the maxima ``[R]`` over all parts, and whether this is the first part with it.

        Args:
            maximum: ``[R]`` of this part.
        """
        # Lower parts hold lower indices, and max returns the first of equal values.
        top, winner = self.gather(maximum).max(dim=0)
        return top, winner == self.number

    def choose(self, maximum: Tensor, piece: Tensor) -> Tensor:
        """Return the pieces ``[R]`` of the maxima over all parts; arguments of this part."""
        winner = self.gather(maximum).max(dim=0, keepdim=True).indices
        return self.gather(piece).gather(0, winner).squeeze(0)

    def num_columns(self, rows: int) -> int:
        """Return how many of the part's rows, from ``start`` on, are no padding."""
        return min(max(self.size - self.start, 0), rows)


class CrossEntropy(NamedTuple):
    """Result of `linear_cross_entropy`, equal on all tensor-parallel ranks.

    Attributes:
        loss: in nats, fp32 (fp64 for fp64 states): the sum, differentiable once, or with
            ``reduction="none"`` ``[T]``, without gradients and 0 for label -100.
        correct: int64 scalar: number of labels that are the argmax (lowest index among equals).
        samples: int64 ``[T]``: pieces drawn; None without ``draw``.
    """

    loss: Tensor
    correct: Tensor
    samples: Tensor | None = None


def linear_cross_entropy(
    states: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    vocabulary: Vocabulary,
    *,
    reduction: Literal["sum", "none"] = "sum",
    draw: Draw | None = None,
) -> CrossEntropy:
    """Project hidden states onto the vocabulary and compute the cross-entropy, chunk by chunk.

    Forward computes each chunk's gradients while its logits exist, and backward multiplies them by
    the gradient of the loss, so the logits never exist all together and nothing is computed twice.

    With ``draw``, a piece is drawn from each predicted distribution: Gumbel-max over each part,
    then a maximum over parts. If the noise is a function of token and piece, no layout changes a
    sample except by rounding of the logits.

    Source: the gradient in forward is Liger Kernel's (Hsu et al. 2024, arXiv:2410.10989).

    Args:
        states: ``[T, D]`` fp32, bf16, fp16 (or fp64), equal on all tensor-parallel ranks.
        weight: ``[V/tp, D]``, this part's rows.
        bias: ``[V/tp]``.
        labels: ``[T]`` int64, equal on all ranks; -100: no loss.
        vocabulary: which part the rows are. Its functions may be collective; they are called in
            forward only, ``gather`` and ``total`` once per chunk, and ``gather`` twice more with
            ``draw``.
        reduction: ``sum``, or ``none`` for the losses of the tokens, without gradients.
        draw: maximum of logits plus Gumbel noise over a part of the vocabulary.

    Returns:
        See `CrossEntropy`. The gradient of ``states`` is this part's summand.

    Raises:
        ValueError: on CPU, a label is neither -100 nor below the size of the vocabulary.
    """
    _check_labels(labels, vocabulary.size)
    if reduction == "none":
        with torch.no_grad():
            return _by_chunk(states, weight, bias, labels, vocabulary, draw)
    differentiate = torch.is_grad_enabled()
    loss, correct, samples = cast(
        "tuple[Tensor, Tensor, Tensor]",
        _LinearCrossEntropy.apply(states, weight, bias, labels, vocabulary, differentiate, draw),
    )
    return CrossEntropy(loss, correct, None if draw is None else samples)


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


class _LinearCrossEntropy(torch.autograd.Function):
    """loss = sum of logsumexp(z) - z_label; d loss / d z = softmax(z) - onehot(label)."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        vocabulary: Vocabulary,
        differentiate: bool,
        draw: Draw | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.gradients = _Gradients(states, weight, bias) if differentiate else None
        out = _by_chunk(states, weight, bias, labels, vocabulary, draw, ctx.gradients)
        samples = labels.new_empty(0) if out.samples is None else out.samples
        ctx.mark_non_differentiable(out.correct, samples)
        return out.loss.sum(), out.correct, samples

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place and released: a copy would be as large as the embedding table.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("linear_cross_entropy: backward was called twice")
        return (*gradients.scaled(grad), None, None, None, None)


def _by_chunk(
    states: Tensor,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    vocabulary: Vocabulary,
    draw: Draw | None,
    gradients: _Gradients | None = None,
) -> CrossEntropy:
    """Compute the losses of the tokens, chunk by chunk; add to ``gradients``."""
    losses = states.new_zeros(len(states), dtype=torch.promote_types(states.dtype, torch.float32))
    correct = labels.new_zeros(())
    samples = None if draw is None else torch.empty_like(labels)
    fused = vocabulary.fuse and runs_kernels(weight)
    kept = "fused" if fused and states.element_size() == 2 else states.device.type
    chunk = chunk_rows(len(states), len(weight), kept)
    for first in range(0, len(states), max(1, chunk)):
        rows = slice(first, first + chunk)
        logits = torch.addmm(bias, states[rows], weight.t())
        if samples is not None and draw is not None:
            columns = vocabulary.num_columns(len(weight))
            samples[rows] = vocabulary.choose(*draw(logits[:, :columns], rows, vocabulary.start))
        compute = _fused_chunk if fused else _chunk
        losses[rows], hits = compute(logits, labels[rows], vocabulary, gradients, rows)
        correct += hits
        del logits
    return CrossEntropy(losses, correct, samples)


def chunk_rows(num_rows: int, num_columns: int, device_type: str) -> int:
    """Tokens per chunk: chunks of equal size, as few as ``_CHUNK_ELEMENTS`` allows.

    Args:
        num_rows: tokens to predict.
        num_columns: this part's vocabulary rows.
        device_type: ``torch.device.type``.
    """
    limit = max(1, _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS["cuda"]) // num_columns)
    parts = max(1, -(-num_rows // limit))
    return -(-num_rows // parts)


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


def _chunk(
    logits: Tensor,
    labels: Tensor,
    vocabulary: Vocabulary,
    gradients: _Gradients | None,
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """Return losses ``[R]`` and number of correct predictions; add the gradients of ``rows``."""
    columns = vocabulary.num_columns(logits.shape[1])
    maximum, best = _row_maximum(logits[:, :columns])
    top, is_first = vocabulary.largest(maximum)
    work = logits.to(top.dtype)
    real = work[:, :columns].sub_(top.unsqueeze(1))
    label = labels - vocabulary.start
    is_here = (label >= 0) & (label < columns)
    label = label.masked_fill(~is_here, 0)
    label_logits = torch.zeros_like(top)
    if columns:
        label_logits = torch.where(is_here, real.gather(1, label.unsqueeze(1)).squeeze(1), 0)
    hits = is_here & is_first & (best == label)
    own = torch.stack([real.exp_().sum(dim=1), label_logits, hits.to(top.dtype)])
    sum_exp, label_logits, hits = vocabulary.total(own)
    is_scored = labels != IGNORED_LABEL
    losses = torch.where(is_scored, sum_exp.log() - label_logits, 0)
    if gradients is not None:
        real.mul_(torch.where(is_scored, sum_exp.reciprocal(), 0).unsqueeze(1))
        if columns:
            on_cpu = real.device.type == "cpu"
            _subtract_labels(real, label, is_here & is_scored, scatters=on_cpu)
        work[:, columns:] = 0
        gradients.add(rows, work)
    return losses, (is_scored & (hits > 0)).sum()


def _fused_chunk(
    logits: Tensor,
    labels: Tensor,
    vocabulary: Vocabulary,
    gradients: _Gradients | None,
    rows: slice,
) -> tuple[Tensor, Tensor]:
    """Compute `_chunk`, which is its twin, in two kernels; overwrites ``logits``."""
    from megatron_deberta.ops.triton.cross_entropy import row_statistics, write_gradient_

    start, columns = vocabulary.start, vocabulary.num_columns(logits.shape[1])
    maximum, sum_exp, label_logits, hits = row_statistics(logits, labels, start, columns)
    top, is_first = vocabulary.largest(maximum)
    own = torch.stack([sum_exp * (maximum - top).exp(), label_logits, hits * is_first])
    sum_exp, label_logits, hits = vocabulary.total(own)
    is_scored = labels != IGNORED_LABEL
    losses = torch.where(is_scored, sum_exp.log() - (label_logits - top), 0)
    if gradients is not None:
        write_gradient_(
            logits, labels, top, sum_exp, gradients.d_bias,
            start, columns, IGNORED_LABEL, gradients.factor,
        )  # fmt: skip
        gradients.add_products(rows, logits)
    return losses, (is_scored & (hits > 0)).sum()


def _subtract_labels(x: Tensor, columns: Tensor, counted: Tensor, *, scatters: bool) -> None:
    """Subtract 1 at the column ``columns`` ``[R]`` of each counted row of ``x`` ``[R, C]``.

    On CUDA a deterministic scatter sorts, which takes longer than to compare all columns.
    """
    if scatters:
        x.scatter_add_(1, columns.unsqueeze(1), -counted.to(x.dtype).unsqueeze(1))
        return
    chosen = columns.masked_fill(~counted, -1).unsqueeze(1)
    x.add_(torch.arange(x.shape[1], device=x.device) == chosen, alpha=-1)


def _row_maximum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum ``[R]`` in at least fp32 and its first column ``[R]``."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if logits.shape[1] == 0:
        empty = torch.full(logits.shape[:1], -torch.inf, dtype=dtype, device=logits.device)
        return empty, torch.full_like(empty, -1, dtype=torch.int64)
    maximum, column = logits.max(dim=1)
    return maximum.to(dtype), column
