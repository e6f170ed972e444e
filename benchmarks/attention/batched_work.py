"""Count the work of the ``chunked`` attention backend on a GPU: FLOPs, bytes and operators.

Per layer, forward and backward, on the meta device, which computes nothing: all heads at once with
16-bit operands, one head at a time in float32, as on the CPU, and the backend ``efficient``. An
operator reads each operand and writes its result once. Times are bytes and FLOPs at the V100's peak
rates: lower bounds, not measurements.

    python -m benchmarks.attention.batched_work \
        --output benchmarks/results/offline/batched_attention.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.lib.provenance import provenance
from megatron_deberta.ops import (
    RelativePositions,
    batched,
    chunked,
    disentangled_attention,
    dispatch,
    efficient,
    relative_positions,
)
from megatron_deberta.planning.machine import DEVICES

HEAD_SIZE, DROPOUT = 64, 0.1
POSITIONS = RelativePositions(512, 256)
V100 = next(device for device in DEVICES if device.name.startswith("V100"))
RATES = {"float16": V100.flops_per_second("fp16"), "float32": V100.flops_per_second("fp32")}
"""FLOPs per second by dtype of the operands."""
KEY_BLOCK = 64
"""Keys per block in the backward pass of torch's kernel."""
_PRODUCTS = ("aten::bmm", "aten::baddbmm", "aten::addmm")
_NO_WORK = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::detach")


class Case(NamedTuple):
    """Sizes of one call."""

    name: str
    rows: int
    heads: int
    length: int
    targets: int = 0
    """Gathered queries per row; 0: all tokens."""


CASES = (
    Case("base, N=512", 16, 12, 512),
    Case("base, N=512, 77 gathered queries", 16, 12, 512, 77),
    Case("1.5B, N=512", 8, 24, 512),
    Case("1.5B, N=2048", 2, 24, 2048),
)


class Work(TorchDispatchMode):
    """Sums the work of dispatched operators other than views.

    Attributes:
        counts: ``operators``, ``bytes``, and FLOPs by the dtype of the operands.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Add an operator and run it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.name().split(".")[0].rstrip("_")
        if func.is_view or name in _NO_WORK:
            return result
        reads = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if name in _PRODUCTS:
            a, b = reads[-2:]
            self._add_product(a, b)
            reads = reads if kwargs.get("beta", 1) else [a, b]
        written = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        self._add_traffic([*reads, *written])
        return result

    def product_(
        self, out: Tensor, a: Tensor, b: Tensor, *, beta: float = 0.0, alpha: float = 1.0
    ) -> Tensor:
        """Add a product; stands for ``batched.product_``."""
        self._add_product(a, b)
        self._add_traffic([a, b, out, *([out] if beta else [])])
        return out

    def add_kernel(self, tensors: list[Tensor], flops: int) -> None:
        """Add a kernel of 16-bit products that moves these tensors."""
        self.counts["float16"] += flops
        self._add_traffic(tensors)

    def _add_product(self, a: Tensor, b: Tensor) -> None:
        self.counts[str(a.dtype).removeprefix("torch.")] += 2 * a.numel() * b.shape[-1]

    def _add_traffic(self, tensors: list[Tensor]) -> None:
        self.counts["operators"] += 1
        for x in tensors:
            # Elements of overlapping views are read from memory once.
            size = min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
            self.counts["bytes"] += size


class Attention(torch.autograd.Function):
    """Stands for torch's memory-efficient kernel: adds its work."""

    @staticmethod
    def forward(ctx: Any, work: Work, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Two products; the log-sum-exp is float32."""
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.work, ctx.lse = work, lse
        ctx.save_for_backward(q, k, v, bias, out)
        work.add_kernel([q, k, v, bias, out, lse], 2 * q.numel() * k.shape[2] * 2)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Five products; float32 sums of dQ are read and written for each block of keys."""
        q, k, v, bias, out = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (q, k, v, bias)]
        sums = [torch.empty_like(q, dtype=torch.float32)] * (2 * -(-k.shape[2] // KEY_BLOCK))
        moved = [q, k, v, bias, out, ctx.lse, d_out, *grads, *sums]
        ctx.work.add_kernel(moved, 2 * q.numel() * k.shape[2] * 5)
        return None, *grads


def count_efficient(case: Case, dropout: float) -> dict[str, Any]:
    """Return the work of the backend ``efficient``, as ``count`` does."""
    work = Work()

    def kernel(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor, **_: Any) -> Tensor:
        out: Tensor = Attention.apply(work, q, k, v, attn_mask)
        return out

    with (
        mock.patch.dict(dispatch._LIMITS, {"efficient": lambda q: None}),
        mock.patch.object(efficient, "scaled_dot_product_attention", kernel),
        mock.patch.object(efficient, "_seeded", return_value=nullcontext()),
    ):
        return count(case, dropout, "efficient", work)


@contextmanager
def per_head() -> Iterator[None]:
    """Compute one head at a time in float32 on any device."""
    with (
        mock.patch.object(chunked, "is_batched", return_value=False),
        mock.patch.object(chunked, "_BLOCK_ELEMENTS", batched.BLOCK_ELEMENTS),
        mock.patch.object(chunked, "for_heads", lambda work, heads, _: work(slice(0, heads))),
    ):
        yield


def count(
    case: Case, dropout: float, backend: str = "chunked", work: Work | None = None
) -> dict[str, Any]:
    """Return the work of forward and backward of one call."""
    work = Work() if work is None else work

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float16, device="meta", requires_grad=True)

    queries = case.targets or case.length
    q = empty(case.rows, case.heads, queries, HEAD_SIZE)
    k, v = (empty(case.rows, case.heads, case.length, HEAD_SIZE) for _ in range(2))
    tables = [empty(case.heads, 2 * POSITIONS.span, HEAD_SIZE) for _ in range(2)]
    at = torch.empty(case.rows, queries, dtype=torch.int64, device="meta")
    seed = torch.empty(case.rows, dtype=torch.int64, device="meta")
    found = {}
    with work, mock.patch.object(batched, "product_", work.product_):
        out = disentangled_attention(
            q, k, v, *tables, POSITIONS, q_positions=at if case.targets else None,
            dropout_p=dropout, seed=seed, backend=backend,
        )  # fmt: skip
        found["forward"], work.counts = dict(work.counts), Counter()
        out.backward(torch.empty_like(out))
        found["backward"] = dict(work.counts)
    return {name: {**counts, **milliseconds(counts)} for name, counts in found.items()}


def milliseconds(counts: dict[str, int]) -> dict[str, float]:
    """Return the time of the products and of the traffic at the peak rates."""
    flops = sum(counts.get(dtype, 0) / rate for dtype, rate in RATES.items())
    times = {"products_ms": flops, "memory_ms": counts["bytes"] / V100.memory_gb_per_second / 1e9}
    return {name: float(f"{1e3 * value:.4g}") for name, value in times.items()}


def measure() -> list[dict[str, Any]]:
    """Return the work of all cases, with dropout and without."""
    # The table of a process's first call is counted, also if others have called before.
    relative_positions._slot_table.cache_clear()
    results = []
    for case in CASES:
        for dropout in (0.0, DROPOUT):
            now = count(case, dropout)
            with per_head():
                before = count(case, dropout)
            result = {"case": case._asdict(), "dropout": dropout}
            results.append({**result, "per_head": before, "batched": now})
            if not case.targets:  # gathered queries are computed by ``chunked``
                results[-1]["efficient"] = count_efficient(case, dropout)
    return results


def main() -> None:
    """Count and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    text = json.dumps({"results": measure(), "provenance": provenance()}, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
