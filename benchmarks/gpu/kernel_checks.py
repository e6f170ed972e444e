"""The kernels compared with their twins in float64; equal calls must give the same bits.

On a CPU they run in Triton's interpreter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu.record import Item, Record
from benchmarks.lib.tolerances import OPERATOR
from megatron_deberta.model import fused
from megatron_deberta.ops import RelativePositions, disentangled_attention
from megatron_deberta.ops import cross_entropy as vocab

POSITIONS = RelativePositions(40, 8)
FULL_POSITIONS = RelativePositions(512, 256)
FULL_BATCH, FULL_HEADS = 8, 24
FULL_SIZES, FULL_LENGTHS = (64, 32, 128), (512, 1500)
LENGTH, TARGETS = 197, 23
CPU_LENGTH = 40
REPEATS = 3
# The interpreter, one thread, takes seconds for a call.
CPU_REPEATS = 2
Function = Callable[..., Tensor]


def kernel_case(device: str) -> tuple[torch.dtype, int]:
    """Return the dtype and the head size that are checked first."""
    # The interpreter's bfloat16 arithmetic is wrong in products.
    return (torch.bfloat16, 64) if device == "cuda" else (torch.float16, 32)


def check_kernels(record: Record, dtype: torch.dtype) -> None:
    """Check the kernels outside of attention."""
    device = record.options.device
    record.run(f"layer norm {name_of(dtype)}", lambda: layer_norm(device, dtype))
    record.run(f"bias and GELU {name_of(dtype)}", lambda: bias_gelu(device, dtype))
    record.run(f"cross-entropy {name_of(dtype)}", lambda: cross_entropy(device, dtype))


def check_attention(
    record: Record, dtype: torch.dtype, size: int, gathered: str = "", documents: bool = False
) -> None:
    """Check one variant of the attention operator."""
    name = f"attention {name_of(dtype)} d={size}" + f" {gathered}" * bool(gathered)
    name += " documents" * documents
    device = record.options.device
    record.run(name, lambda: attention(device, dtype, size, gathered, documents))


def check_full_size(record: Record) -> None:
    """Check shapes that fill a GPU, so that several thread blocks run on every multiprocessor."""
    for size, length in itertools.product(FULL_SIZES, FULL_LENGTHS):
        name = f"attention bfloat16 d={size} B8 H24 N={length}"
        record.run(name, lambda s=size, n=length: full_size_attention("cuda", torch.bfloat16, s, n))


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def compare(
    function: Function,
    leaves: Sequence[Tensor],
    device: str,
    dtype: torch.dtype,
    *,
    reference_device: str = "cpu",
    by_head: bool = False,
) -> Item:
    """Compare output and gradients with those in float64.

    Args:
        function: called with the leaves.
        leaves: float64 tensors, exact in ``dtype``.
        device: where ``function`` runs.
        dtype: in which ``function`` runs.
        reference_device: where it runs in float64.
        by_head: compare each head ``[..., heads, rows, features]`` for itself, so that one wrong
            head among many is found.
    """

    def work(call: Function, where: str, of: torch.dtype) -> list[Tensor]:
        own = [x.to(where, of).requires_grad_() for x in leaves]
        output = call(*own)
        upstream = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
        gradients = torch.autograd.grad(output, own, upstream.to(output))
        return [x.detach().to(reference_device, torch.float64) for x in (output, *gradients)]

    expected = work(function, reference_device, torch.float64)
    repeats = REPEATS if device == "cuda" else CPU_REPEATS
    found, *again = (work(function, device, dtype) for _ in range(repeats))
    bound = 2 * OPERATOR[dtype]
    errors = {
        f"result {index}": relative_error(a, b, by_head=by_head)
        for index, (a, b) in enumerate(zip(found, expected, strict=True))
    }
    wrong = [f"error of {key} {error:.1e} > {bound:.1e}" for key, error in errors.items()
             if not error <= bound]  # fmt: skip
    if any(not torch.equal(a, b) for other in again for a, b in zip(found, other, strict=True)):
        wrong.append("the results of equal calls differ")
    return {"off": {"largest": max(errors.values())}, "errors": errors, "wrong": wrong}


def relative_error(found: Tensor, expected: Tensor, *, by_head: bool) -> float:
    """Return the relative Frobenius error: of the whole tensor, or of its worst head."""
    heads = found.dim() - 3 if by_head else None
    dims = tuple(dim for dim in range(found.dim()) if dim != heads)
    size = torch.linalg.vector_norm
    return float((size(found - expected, dim=dims) / size(expected, dim=dims).clamp(1e-9)).max())


def random_tensors(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return standard normal values that are exact in a dtype, in float64."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).to(dtype).double() for shape in shapes]


def layer_norm(device: str, dtype: torch.dtype) -> Item:
    """Dropout + residual + LayerNorm; on a CPU in the interpreter."""
    rows = (2, LENGTH, 768) if device == "cuda" else (2, 3, 100)
    features = rows[-1]
    leaves = random_tensors(dtype, rows, rows, (features,), (features,))

    def normalise(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        seed = torch.arange(2, device=x.device)
        positions = torch.arange(rows[1], device=x.device).expand(rows[:2])
        pending = fused.PendingResidual(x, residual, seed, positions, 0.1)
        return fused.layer_norm(pending, weight, bias, 1e-7)

    # Compiling the twin for float64 would take longer than everything else.
    with (
        torch.compiler.set_stance("force_eager"),
        mock.patch.object(fused, "runs_kernels", uses_kernels(device)),
    ):
        return compare(normalise, leaves, device, dtype)


def bias_gelu(device: str, dtype: torch.dtype) -> Item:
    """Compare bias + GELU with float64; on a CPU in the interpreter."""
    # Programs with several tiles of rows, and rows and columns beyond the last.
    rows, features = (1501, 3000) if device == "cuda" else (3, 100)
    leaves = random_tensors(dtype, (2, rows, features), (features,))
    with (
        torch.compiler.set_stance("force_eager"),
        mock.patch.object(fused, "runs_kernels", uses_kernels(device)),
    ):
        return compare(fused.bias_gelu, leaves, device, dtype)


def cross_entropy(device: str, dtype: torch.dtype) -> Item:
    """The vocabulary's loss over several chunks and columns of padding."""
    columns = 50264 if device == "cuda" else 60
    leaves = random_tensors(dtype, (TARGETS, 64), (columns, 64), (columns,))
    # Smaller logits: with a standard deviation of 8, rounding to bfloat16 alone is an error of 2 %.
    leaves[0] /= 4
    labels = torch.arange(TARGETS) * (columns // TARGETS - 1)
    labels[3] = vocab.IGNORED_LABEL

    def loss_of(states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        own = labels.to(states.device)
        vocabulary = vocab.Vocabulary(columns - 3, fuse=True)
        return vocab.linear_cross_entropy(states, weight, bias, own, vocabulary).loss

    with (
        mock.patch.object(vocab, "runs_kernels", uses_kernels(device)),
        mock.patch.dict(vocab._CHUNK_ELEMENTS, {"fused": 10 * columns, "cuda": 10 * columns}),
    ):
        return compare(loss_of, leaves, device, dtype)


def uses_kernels(device: str) -> Callable[[Tensor], bool]:
    """Return the rule for the kernels: everything but the reference in float64."""
    return lambda x: x.dtype != torch.float64 and x.device.type == device


def attention(
    device: str, dtype: torch.dtype, size: int, gathered: str = "", documents: bool = False
) -> Item:
    """The attention operator with padding, dropout and distances beyond the table.

    Args:
        device: where the kernels run.
        dtype: of the inputs.
        size: features per head.
        gathered: ``"gathered"`` or ``"spread"``: which kernels compute queries at some positions.
        documents: rows are packed.
    """
    heads, length = 2, LENGTH if device == "cuda" else CPU_LENGTH
    queries = 13 if gathered else length  # enough to be spread
    shapes = [(2, heads, queries, size), *[(2, heads, length, size)] * 2]
    leaves = random_tensors(dtype, *shapes, *[(heads, 2 * POSITIONS.span, size)] * 2)
    at = torch.arange(queries).mul(7).remainder(length).expand(2, -1) if gathered else None
    real = torch.arange(length) < torch.tensor([[length], [length - 11]])
    ids = (torch.arange(length) // 17).expand(2, -1) if documents else None

    def attend(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> Tensor:
        where = q.device
        backend = "reference" if q.dtype == torch.float64 else "triton"
        return disentangled_attention(
            q, k, v, *tables, POSITIONS,
            q_positions=None if at is None else at.to(where),
            distinct_positions=gathered == "spread", attention_mask=real.to(where),
            document_ids=None if ids is None else ids.to(where),
            dropout_p=0.1, seed=torch.arange(2, device=where), backend=backend,
        )  # fmt: skip

    return compare(attend, leaves, device, dtype)


def full_size_attention(device: str, dtype: torch.dtype, size: int, length: int) -> Item:
    """The operator at the size of a training step, all heads, against float64 on the same device.

    The small cases are compared with the reference on the CPU, and have too few thread blocks to
    show races between two of them on a multiprocessor.
    """
    rows = (FULL_BATCH, FULL_HEADS, length, size)
    table = (FULL_HEADS, 2 * FULL_POSITIONS.span, size)
    leaves = random_tensors(dtype, rows, rows, rows, table, table)

    def attend(q: Tensor, k: Tensor, v: Tensor, *tables: Tensor) -> Tensor:
        return disentangled_attention(
            q, k, v, *tables, FULL_POSITIONS, dropout_p=0.1, seed=11,
            backend="chunked" if q.dtype == torch.float64 else "triton",
        )  # fmt: skip

    return compare(attend, leaves, device, dtype, reference_device=device, by_head=True)
