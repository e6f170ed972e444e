"""The attention operator on the CPU against the eager form of transformers and SDPA with a bias.

Forward and backward of the attention core (no projections), the same tensors for all, fp32, 12
heads of 64, log buckets, with and without dropout. Correctness first: without dropout, outputs
and all five gradients must agree with the eager form. Then the variants take turns, because the
machine's load changes, and each one's time is the median of its turns. Peak memory is that of a
process of its own, above the process before its first call.

    python benchmarks/attention.py --output benchmarks/results/cpu/attention.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_deberta.ops import RelativePositions, disentangled_attention  # noqa: E402
from megatron_deberta.ops.dropout_bits import keep_mask  # noqa: E402
from megatron_deberta.ops.head_threads import for_heads  # noqa: E402

HEADS, HEAD_SIZE = 12, 64
POSITIONS = RelativePositions(512, 256)
SCALE = 1 / math.sqrt(3 * HEAD_SIZE)
TARGET = 1.5
AGREEMENT = 1e-5


@dataclass(frozen=True)
class Case:
    """Sizes of one comparison."""

    batch: int
    length: int
    dropout: float
    threads: int


CASES = [
    Case(4, 512, 0.1, 2),
    Case(4, 512, 0.0, 2),
    Case(16, 128, 0.1, 2),
    Case(4, 512, 0.1, 1),
    Case(1, 2048, 0.1, 1),
]


def inputs(case: Case) -> list[Tensor]:
    """q, k, v, pos_key, pos_query, with gradients."""
    torch.manual_seed(0)
    shape, table = (case.batch, HEADS, case.length, HEAD_SIZE), (HEADS, 512, HEAD_SIZE)
    return [torch.randn(s, requires_grad=True) for s in (shape, shape, shape, table, table)]


class Eager(torch.nn.Module):
    """What ``DisentangledSelfAttention.forward`` of transformers does after its projections."""

    bias = DisentangledSelfAttention.disentangled_attention_bias

    def __init__(self) -> None:
        super().__init__()
        self.pos_att_type, self.share_att_key = ["c2p", "p2c"], False
        self.position_buckets, self.max_relative_positions = 256, 512
        self.pos_ebd_size, self.num_attention_heads = 256, HEADS
        # Projections have been applied already: these hand the finished tables over.
        self.pos_key_proj: Callable[[Any], Tensor] = lambda _: self._flat(self.pos_key)
        self.pos_query_proj: Callable[[Any], Tensor] = lambda _: self._flat(self.pos_query)

    @staticmethod
    def _flat(table: Tensor) -> Tensor:
        return table.transpose(0, 1).flatten(1)[None]

    transpose_for_scores = DisentangledSelfAttention.transpose_for_scores

    def forward(self, case: Case, *x: Tensor) -> Tensor:
        """Scores, mask, softmax, dropout and output, each a tensor of its own."""
        q, k, v = (t.flatten(0, 1) for t in x[:3])
        self.pos_key, self.pos_query = x[3:]
        scores = torch.bmm(q, k.transpose(-1, -2) * SCALE)
        rows = torch.empty(1, 512, 1)  # only sliced for its rows
        scores = scores + self.bias(q, k, None, rows, 3)
        scores = scores.view(case.batch, HEADS, case.length, case.length)
        mask = torch.ones(case.batch, 1, case.length, case.length, dtype=torch.bool)
        scores = scores.masked_fill(~mask, torch.finfo(q.dtype).min)
        probabilities = F.dropout(scores.softmax(-1), case.dropout)
        return torch.bmm(probabilities.flatten(0, 1), v).view(x[0].shape)


def sdpa(case: Case, *x: Tensor) -> Tensor:
    """SDPA with the position terms gathered into a float bias."""
    q, k, v, pos_key, pos_query = x
    at = torch.arange(case.length)
    slots = POSITIONS.slots(at[:, None] - at).expand(case.batch, HEADS, -1, -1)
    bias = (q @ pos_key.transpose(-1, -2)).gather(-1, slots)
    from_keys = (k @ pos_query.transpose(-1, -2)).gather(-1, slots.transpose(-1, -2))
    bias = (bias + from_keys.transpose(-1, -2)) * SCALE
    return F.scaled_dot_product_attention(q, k, v, bias, dropout_p=case.dropout, scale=SCALE)


def operator(case: Case, *x: Tensor) -> Tensor:
    """Ours."""
    return disentangled_attention(
        *x, positions=POSITIONS, dropout_p=case.dropout, seed=0, backend="chunked"
    )


VARIANTS: dict[str, Callable[..., Tensor]] = {
    "transformers eager": Eager(),
    "SDPA with bias": sdpa,
    "chunked": operator,
}


def step(variant: str, case: Case, x: list[Tensor]) -> tuple[Tensor, ...]:
    """Forward and backward; output and gradients."""
    output = VARIANTS[variant](case, *x)
    return (output, *torch.autograd.grad(output, x, x[0].detach()))


def disagreement(case: Case) -> dict[str, float]:
    """Largest relative Frobenius distance of output and gradients from the eager form's."""
    plain = Case(case.batch, case.length, 0.0, case.threads)
    x = inputs(plain)
    expected = step("transformers eager", plain, x)
    worst = {}
    for variant in list(VARIANTS)[1:]:
        pairs = zip(step(variant, plain, x), expected, strict=True)
        worst[variant] = max(float((a - e).detach().norm() / e.detach().norm()) for a, e in pairs)
        if worst[variant] > AGREEMENT:
            raise SystemExit(f"{variant} is wrong at {plain}: off by {worst[variant]:.1e}")
    return worst


def times(case: Case, repeats: int) -> dict[str, float]:
    """Median seconds of each variant and of the dropout bits alone, taken in turns."""
    x = inputs(case)
    seed, at = torch.arange(case.batch), torch.arange(case.length)

    def bits_of(heads: slice) -> None:
        rows = max(1, (1 << 18) // case.length**2)  # about the operator's blocks
        for head in range(heads.start, heads.stop):
            for some in seed.split(rows):
                keep_mask(some, at, case.length, case.dropout, head_offset=head)

    def bits() -> None:
        for _ in range(2):  # forward and backward
            for_heads(bits_of, HEADS, x[0][..., 0].numel() * case.length, "cpu")

    jobs: dict[str, Callable[[], Any]] = {v: lambda v=v: step(v, case, x) for v in VARIANTS}
    if case.dropout:
        jobs["dropout bits"] = bits
    taken: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def peak_mib(variant: str, case: Case) -> float:
    """Memory that forward and backward add to a fresh process, in MiB."""
    command = [sys.executable, __file__, "--peak", variant, "--case", json.dumps(asdict(case))]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(result.stdout)


def measure_peak(variant: str, case: Case) -> float:
    """In this process: growth of the peak resident size through one step."""
    x = inputs(case)
    step(variant, Case(1, 8, case.dropout, case.threads), inputs(Case(1, 8, 0.0, 1)))
    before = high_water_kib()
    step(variant, case, x)
    return (high_water_kib() - before) / 1024


def high_water_kib() -> int:
    """Peak resident size of this process; ``getrusage`` would count its parent's (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Everything about one case."""
    torch.set_num_threads(case.threads)
    wrong = disagreement(case)
    seconds = times(case, repeats)
    eager, ours = seconds["transformers eager"], seconds["chunked"]
    report = {
        "case": asdict(case),
        "relative_error": wrong,
        "milliseconds": {name: round(1e3 * s, 1) for name, s in seconds.items()},
        "peak_mib": {variant: round(peak_mib(variant, case), 1) for variant in VARIANTS},
        "speedup_over_eager": round(eager / ours, 2),
        "speedup_over_sdpa": round(seconds["SDPA with bias"] / ours, 2),
    }
    print(json.dumps(report))
    return report


def main() -> None:
    """Runs the cases and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peak", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        case = Case(**arguments.case)
        torch.set_num_threads(case.threads)
        print(measure_peak(arguments.peak, case))
        return
    load = os.getloadavg()[0]
    cases = [measure(case, arguments.repeats) for case in CASES]
    report = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_before_and_after": [load, os.getloadavg()[0]],
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "target": f"speedup_over_eager >= {TARGET} at batch 4, length 512, dropout 0.1, 2 threads",
        "cases": cases,
    }
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    if cases[0]["speedup_over_eager"] < TARGET:
        raise SystemExit(f"below target: {cases[0]['speedup_over_eager']} < {TARGET}")


if __name__ == "__main__":
    main()
