"""Time, memory and TFLOP/s of the attention operator against other implementations.

Forward and backward of the attention core (without projections) on the same tensors for all
variants, with heads of 64 and log buckets. Each variant is first compared with the float64
reference on the timed launch (its last head; output and five gradients). Then the variants are
timed in turns; the time is the median.

    python -m benchmarks.attention.operator --output benchmarks/results/cpu/attention.json
    python -m benchmarks.attention.operator --device cuda --output attention.json

On CUDA prefer ``benchmarks.gpu.suite``, which continues after a crash of an implementation.

FLOPs are counted as in FlashAttention and DisentangledFlash, including scores recomputed in the
backward pass: with L unpadded tokens in a row, R table slots in reach and D = 64, forward takes
4 L^2 D + 4 L R D FLOPs per row and head, backward 10 L^2 D + 12 L R D.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.variants import (
    CPU_VARIANTS,
    EAGER,
    FLOOR,
    FLOORS,
    GPU_VARIANTS,
    HEAD_SIZE,
    OURS,
    POSITIONS,
    SEED,
    Case,
    Variant,
    make_inputs,
)
from benchmarks.lib.measuring import (
    Stopwatch,
    cuda_peak_bytes,
    in_turns,
    peak_resident_bytes,
    write_json,
)
from benchmarks.lib.provenance import provenance
from benchmarks.lib.tolerances import OPERATOR
from megatron_deberta.ops import disentangled_attention

THREADS = 2
CPU_TARGET = 1.5
CPU_CASES = [
    Case(4, 12, 512, 0.1),
    Case(4, 12, 512),
    Case(4, 12, 512, 0.1, padding=True),
    Case(16, 12, 128, 0.1),
]
PASSES = ("forward", "backward", "both")
TENSORS = ("output", "q", "k", "v", "pos_key", "pos_query")
# Number of scores up to which the ``reference`` backend computes the expected values; larger cases
# use ``chunked`` in float64.
REFERENCE_SCORES = 1 << 28
OUT_OF_MEMORY = "out of memory"
# Error above which another library's result is wrong; eager in 16 bits has an error of 1e-2.
PEER_TOLERANCE = 3e-2


def gpu_cases() -> list[Case]:
    """The lengths, heads and masks of the H200 table, and the stand-in for V100 (fp16)."""
    cases = [
        Case(max(1, 16384 // length), heads, length, dropout, padding, "bf16", "cuda")
        for dropout, padding in ((0.0, False), (0.1, False), (0.1, True), (0.0, True))
        for length in (512, 8192, 128, 1024, 2048, 4096, 24528)
        for heads in (24, 12)
    ]
    stand_in = [Case(32, 12, 512, dropout, dtype="fp16", device="cuda") for dropout in (0.0, 0.1)]
    # Cases with target figures first.
    first = [case for case in cases if case.length in (512, 8192)]
    return first[:4] + stand_in + first[4:] + [case for case in cases if case not in first]


def flops(case: Case) -> tuple[int, int]:
    """Return the FLOPs of forward and of backward; see the module docstring."""
    forward = backward = 0
    for length in case.row_lengths():
        reach = len(POSITIONS.slots(torch.arange(1 - length, length)).unique())
        square, linear = length * length * HEAD_SIZE, length * reach * HEAD_SIZE
        forward += 4 * square + 4 * linear
        backward += 10 * square + 12 * linear
    return forward * case.heads, backward * case.heads


def output_gradient(case: Case, q: Tensor) -> Tensor:
    """Return the gradient of the output: random, and zero at padding."""
    return q.detach() * case.real_keys()[:, None, :, None]


def step(variant: Variant, case: Case, x: list[Tensor]) -> tuple[Tensor, ...]:
    """Run forward and backward; return output and gradients."""
    output = variant(case, *x)
    return (output, *torch.autograd.grad(output, x, output_gradient(case, x[0])))


def expected_tensors(case: Case, last_head: int) -> list[Tensor]:
    """Return output and gradients of one head in float64."""
    x = [t.detach() for t in make_inputs(case, torch.float64)]
    x = [t.narrow(-3, last_head, 1).clone().requires_grad_() for t in x]
    small = case.batch * case.length**2 <= REFERENCE_SCORES
    output = disentangled_attention(
        *x,
        positions=POSITIONS,
        attention_mask=case.real_keys(),
        dropout_p=case.dropout,
        seed=SEED,
        head_offset=last_head,
        backend="reference" if small else "chunked",
    )
    gradient = output_gradient(case, x[0])
    real = case.real_keys()[:, None, :, None]
    return [output.detach() * real, *torch.autograd.grad(output, x, gradient)]


def errors(variant: Variant, case: Case, expected: list[Tensor]) -> dict[str, float]:
    """Return the relative Frobenius errors of the last head's output and gradients."""
    actual = list(step(variant, case, make_inputs(case)))
    actual[0] = actual[0].detach() * case.real_keys()[:, None, :, None]
    relative = {}
    for name, tensor, reference in zip(TENSORS, actual, expected, strict=True):
        last = tensor.narrow(-3, tensor.shape[-3] - 1, 1).double()
        relative[name] = float((last - reference).norm() / reference.norm())
    return relative


def applies_dropout(variant: Variant, case: Case) -> bool:
    """Return whether outputs for values of one scatter around one, as they do with dropout."""
    x = make_inputs(case)
    with torch.no_grad():
        output = variant(case, *x[:2], torch.ones_like(x[2]), *x[3:])[..., 0].float()
    outputs = output[case.real_keys()[:, None].expand(output.shape)]
    deviation = float(outputs.std())
    tolerance = max(0.01, 5 * deviation / math.sqrt(outputs.numel()))
    return abs(float(outputs.mean()) - 1) < tolerance and deviation > 1e-3


def check(name: str, variant: Variant, case: Case, expected: list[Tensor] | None) -> dict[str, Any]:
    """Return the errors of a variant, and a message if they exceed the tolerance.

    Args:
        name: of the variant.
        variant: to check.
        case: the sizes.
        expected: reference tensors; None for plain attention, whose result is not checked.
    """
    if expected is None:
        return {}
    if case.dropout and not variant.exact_dropout:
        is_correct = applies_dropout(variant, case)
        return {} if is_correct else {"wrong": "attention probabilities are not dropped correctly"}
    relative = errors(variant, case, expected)
    bound = OPERATOR[make_inputs(replace(case, batch=1, length=1))[0].dtype]
    bound = bound if name in OURS else max(bound, PEER_TOLERANCE)
    # Also true for NaN.
    large = [f"error of {t}: {e:.1e}" for t, e in relative.items() if not e <= bound]
    message = {"wrong": f"{', '.join(large)}; tolerance {bound:.1e}"} if large else {}
    return {"errors": relative, **message}


def timed_step(variant: Variant, case: Case, x: list[Tensor]) -> list[float]:
    """Return the seconds of forward, of backward and of both."""
    gradient = output_gradient(case, x[0])
    watch = Stopwatch(case.device)
    watch.mark()
    output = variant(case, *x)
    watch.mark()
    torch.autograd.grad(output, x[:3] if is_floor(variant) else x, gradient)
    watch.mark()
    forward, backward = watch.seconds()
    return [forward, backward, forward + backward]


def is_floor(variant: Variant) -> bool:
    """Return whether a variant is plain attention without position tables."""
    return any(variant is CPU_VARIANTS.get(n) or variant is GPU_VARIANTS[n] for n in FLOORS)


class Comparison:
    """All variants on one case.

    Args:
        case: the sizes.
        variants: by name.
        starting: called with a variant's name before it runs, to attribute a crash.
        known_failures: variants to skip, with the reason.
    """

    def __init__(
        self,
        case: Case,
        variants: Mapping[str, Variant],
        *,
        starting: Callable[[str], None] = lambda name: None,
        known_failures: Mapping[str, str] | None = None,
    ) -> None:
        self.case = case
        self.variants = dict(variants)
        self.starting = starting
        self.report: dict[str, dict[str, Any]] = {}
        for name, variant in variants.items():
            reason = (known_failures or {}).get(name) or variant.refusal(case)
            if reason:
                self._drop(name, reason)

    def _drop(self, name: str, reason: str) -> None:
        """Skip a variant; for this project's variants that is an error."""
        del self.variants[name]
        self.report[name] = {"not run": reason}
        if name in OURS and not reason.startswith(OUT_OF_MEMORY):
            self.report[name]["wrong"] = reason

    def _attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """Call a function for a variant; on failure, report and skip the variant."""
        self.starting(name)
        try:
            return work()
        except torch.OutOfMemoryError as full:
            reason = f"{OUT_OF_MEMORY}: {str(full).splitlines()[0][:160]}"
        except Exception as failure:
            # A result for another library, an error for this project's variants.
            if self.case.device == "cuda":
                torch.cuda.synchronize()  # ends the process if the device is lost
            reason = f"{type(failure).__name__}: {(str(failure) or '-').splitlines()[0][:160]}"
        self._drop(name, reason)
        return None

    def check(self) -> None:
        """Compare all variants with the reference."""
        reference = expected_tensors(self.case, self.case.heads - 1)
        for name, variant in list(self.variants.items()):
            expected = None if name in FLOORS else reference
            result = self._attempt(name, partial(check, name, variant, self.case, expected))
            if result is not None:
                self.report[name] = result
        self._compare_with_eager()

    def _compare_with_eager(self) -> None:
        """Require that our 16-bit errors do not exceed the eager form's."""
        eager = self.report.get(EAGER, {}).get("errors")
        if eager is None or self.case.dtype == "fp32":
            return
        for name in OURS:
            for tensor, error in self.report.get(name, {}).get("errors", {}).items():
                if error > eager[tensor]:
                    self.report[name]["wrong"] = (
                        f"error of {tensor}: {error:.1e}, of eager: {eager[tensor]:.1e}"
                    )

    def time(self, *, least: int = 5, most: int = 30, budget: float = 3.0) -> None:
        """Time the variants alternately; a variant that fails is skipped."""
        x = make_inputs(self.case)
        for name, variant in list(self.variants.items()):
            self._attempt(name, partial(timed_step, variant, self.case, x))
        jobs = {n: partial(timed_step, v, self.case, x) for n, v in self.variants.items()}
        if not jobs:
            return
        medians = in_turns(jobs, least=least, most=most, budget=budget)
        work = flops(self.case)
        for name, seconds in medians.items():
            milliseconds = (1e3 * s for s in seconds)
            self.report[name]["milliseconds"] = dict(zip(PASSES, milliseconds, strict=True))
            if name not in FLOORS:
                rates = (f / s / 1e12 for f, s in zip((*work, sum(work)), seconds, strict=True))
                self.report[name]["tflops"] = dict(zip(PASSES, rates, strict=True))
            if FLOOR in medians and name != FLOOR:
                self.report[name]["fraction_of_floor"] = medians[FLOOR][2] / seconds[2]

    def peaks(self) -> None:
        """Measure the peak memory that forward and backward add."""
        for name, variant in list(self.variants.items()):
            if self.case.device == "cuda":
                work = partial(timed_step, variant, self.case, make_inputs(self.case))
                peak = self._attempt(name, partial(cuda_peak_bytes, work))
            else:
                peak = cpu_peak_bytes(name, self.case)
            if peak is not None:
                self.report[name]["peak_mib"] = peak / 2**20

    def gathered(self, *, least: int = 5, most: int = 30) -> dict[str, dict[str, float]]:
        """Return milliseconds of forward and backward for masked queries and for all queries."""
        backend = "native" if self.case.device == "cpu" else "triton"
        if backend not in self.variants or not self.case.dropout:
            return {}
        jobs = gathered_seconds(self.case, backend)
        took = self._attempt(backend, lambda: in_turns(jobs, least=least, most=most, budget=1.0))
        times = {name: 1e3 * seconds[0] for name, seconds in (took or {}).items()}
        return {f"{backend}_gathered_ms": times} if times else {}

    def result(self) -> dict[str, Any]:
        """Return the entry of the report."""
        wrong = [f"{n}: {r['wrong']}" for n, r in self.report.items() if "wrong" in r and n in OURS]
        return {"case": asdict(self.case), "variants": self.report, "wrong": wrong}


def cpu_peak_bytes(name: str, case: Case) -> int:
    """Return the memory that forward and backward add to a new process."""
    command = [sys.executable, "-m", "benchmarks.attention.operator"]
    command += ["--peak", name, "--case", json.dumps(asdict(case))]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(result.stdout)


def measure_cpu_peak(name: str, case: Case) -> int:
    """Return the growth of this process's peak resident size during one step."""
    variant, x = CPU_VARIANTS[name], make_inputs(case)
    small = replace(case, batch=1, length=8)
    timed_step(variant, small, make_inputs(small))
    before = peak_resident_bytes()
    timed_step(variant, case, x)
    return peak_resident_bytes() - before


def gathered_seconds(case: Case, backend: str) -> dict[str, Callable[[], list[float]]]:
    """Return timers of forward and backward for masked queries and for all queries."""
    q, *rest = make_inputs(case)
    masked = masked_positions(case)
    gathered = q.detach().gather(2, masked[:, None, :, None].expand(-1, case.heads, -1, HEAD_SIZE))

    def run(queries: Tensor, positions: Tensor | None, distinct: bool = False) -> list[float]:
        watch = Stopwatch(case.device)
        watch.mark()
        x = [queries, *rest]
        output = disentangled_attention(
            *x, positions=POSITIONS, q_positions=positions, distinct_positions=distinct,
            dropout_p=case.dropout, seed=SEED, backend=backend,
        )  # fmt: skip
        torch.autograd.grad(output, x, queries.detach())
        watch.mark()
        return watch.seconds()

    gathered.requires_grad_()
    jobs = {"gathered": lambda: run(gathered, masked), "all": lambda: run(q, None)}
    if backend == "triton":  # other backends compute both in the same way
        jobs["spread"] = lambda: run(gathered, masked, distinct=True)
    return jobs


def masked_positions(case: Case) -> Tensor:
    """Return 15 % of the positions of each row, ascending: int64 ``[batch, queries]``."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(case.batch, case.length, generator=generator)
    return scores.topk(max(1, round(0.15 * case.length))).indices.sort().values.to(case.device)


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Check one case, and measure its time and memory."""
    comparison = Comparison(case, CPU_VARIANTS if case.device == "cpu" else GPU_VARIANTS)
    comparison.check()
    comparison.time(least=repeats, most=repeats, budget=60.0)
    comparison.peaks()
    gathered = comparison.gathered(least=repeats, most=repeats)
    result = {**comparison.result(), **gathered}
    print("\n".join(table(result)), flush=True)
    return result


def table(result: dict[str, Any]) -> list[str]:
    """Return one line per variant."""
    case = Case(**result["case"])
    lines = [f"{case.name} on {case.device}"]
    for name, found in result["variants"].items():
        if "milliseconds" not in found:
            lines.append(f"  {name:20} {found.get('not run', found.get('wrong', 'not timed'))}")
            continue
        took = found["milliseconds"]
        words = [f"forward {took['forward']:9.3f} ms  both {took['both']:9.3f} ms"]
        if "tflops" in found:
            words.append(f"{found['tflops']['both']:6.1f} TFLOP/s")
        if "peak_mib" in found:
            words.append(f"{found['peak_mib']:6.0f} MiB")
        if "fraction_of_floor" in found:
            words.append(f"{found['fraction_of_floor']:.2f} of the floor")
        if "errors" in found:
            words.append(f"error {max(found['errors'].values()):.1e}")
        if "wrong" in found:
            words.append(f"WRONG: {found['wrong']}")
        lines.append(f"  {name:20} {'  '.join(words)}")
        if took := result.get(f"{name}_gathered_ms"):
            lines.append(
                "    masked queries, ms: " + ", ".join(f"{n} {t:.3f}" for n, t in took.items())
            )
    return lines


def speedup(result: dict[str, Any], ours: str, peer: str) -> float | None:
    """Return the speed-up of forward and backward; None if one was not timed."""
    times = [result["variants"].get(n, {}).get("milliseconds") for n in (ours, peer)]
    if times[0] is None or times[1] is None:
        return None
    return float(times[1]["both"] / times[0]["both"])


def main() -> None:
    """Run the cases and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--peak", choices=list(CPU_VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    if arguments.peak:
        print(measure_cpu_peak(arguments.peak, Case(**arguments.case)))
        return
    cases = CPU_CASES if arguments.device == "cpu" else gpu_cases()
    report: dict[str, Any] = {**provenance(arguments.device), "threads": THREADS, "cases": []}
    for case in cases:
        report["cases"].append(measure(case, arguments.repeats))
        if arguments.output:
            write_json(arguments.output, report)
    wrong = [line for result in report["cases"] for line in result["wrong"]]
    if wrong:
        raise SystemExit("\n".join(["wrong results:", *wrong]))
    if arguments.device == "cpu":
        slow = [s for r in report["cases"][:2] if (s := speedup(r, "native", EAGER) or 0) < 1.5]
        if slow:
            raise SystemExit(f"below target: {min(slow):.2f} < {CPU_TARGET}")


if __name__ == "__main__":
    main()
