"""The attention operator; see ``benchmarks.attention.operator``."""

from __future__ import annotations

from functools import partial

from benchmarks.attention.operator import Comparison, gpu_cases, speedup
from benchmarks.attention.operator import table as case_table
from benchmarks.attention.variants import CPU_VARIANTS, EAGER, GPU_VARIANTS, Case
from benchmarks.gpu.record import Item, Record

SMALL = [Case(2, 2, 96), Case(2, 2, 96, 0.1, padding=True)]
SMALL_GPU = [Case(2, 2, 96, p, pad, "bf16", "cuda") for p, pad in ((0.0, False), (0.1, True))]


def run(record: Record) -> None:
    """Run one item per case."""
    options = record.options
    on_gpu = options.device == "cuda"
    cases = gpu_cases() if on_gpu else SMALL
    if options.small and on_gpu:
        cases = SMALL_GPU
    for case in cases:
        record.run(case.name, partial(compare, record, case))


def compare(record: Record, case: Case) -> Item:
    """Check one case, and measure its time and memory."""
    comparison = Comparison(
        case,
        GPU_VARIANTS if case.device == "cuda" else CPU_VARIANTS,
        starting=lambda variant: record.starting(case.name, variant),
        known_failures=record.crashed.get(case.name),
    )
    comparison.check()
    repeats = {"least": 1, "most": 2} if record.options.small else {}
    comparison.time(**repeats)
    if case.device == "cuda":
        comparison.peaks()
    gathered = comparison.gathered(**repeats)
    result = {**comparison.result(), **gathered}
    print("\n".join(case_table(result)), flush=True)
    return result


def table(items: dict[str, Item]) -> list[str]:
    """Return lines for the terminal: the cases, then the target figures."""
    done = {name: item for name, item in items.items() if "variants" in item}
    lines = [line for item in done.values() for line in case_table(item)]
    return [*lines, *targets(done)]


def targets(items: dict[str, Item]) -> list[str]:
    """Return a line per target figure on an H200 that was measured."""
    lines = []
    for name, item in items.items():
        case = Case(**item["case"])
        target = {512: 2.0, 8192: 5.0}.get(case.length, 1.0)
        for peer in ("DisentangledFlash", "FlashDeBERTa", EAGER):
            measured = speedup(item, "triton", peer)
            if measured is not None:
                goal = target if peer == "DisentangledFlash" else 1.0
                lines.append(_line(f"{name}: speed / {peer}", measured, goal))
        chunked = speedup(item, "chunked", EAGER)
        if case.dtype == "fp16" and chunked is not None:
            memory = _peak(item, "chunked") / _peak(item, EAGER)
            lines.append(_line(f"{name}: chunked, speed / eager", chunked, 1.5))
            lines.append(_line(f"{name}: chunked, share of eager's memory", memory, 0.5, low=True))
        ours = item["variants"].get("triton", {}).get("milliseconds")
        if case.name == "B32 H24 N512 bf16" and ours:
            lines.append(_line(f"{name}: forward, ms", ours["forward"], 0.35, low=True))
            lines.append(_line(f"{name}: both, ms", ours["both"], 1.3, low=True))
    return lines


def _peak(item: Item, variant: str) -> float:
    return float(item["variants"][variant]["peak_mib"])


def _line(title: str, measured: float, target: float, *, low: bool = False) -> str:
    is_met = measured <= target if low else measured >= target
    limit = f"target: at {'most' if low else 'least'} {target}"
    return f"  {title}: {measured:.2f} ({limit}) {'met' if is_met else 'MISSED'}"
