"""The attention operator; see ``benchmarks.attention.operator``."""

from __future__ import annotations

from typing import Any

from benchmarks.attention.operator import Comparison, gpu_cases, speedup
from benchmarks.attention.operator import table as case_table
from benchmarks.attention.variants import CPU_VARIANTS, EAGER, GPU_VARIANTS, Case
from benchmarks.gpu.record import Item, Record

SMALL = [Case(2, 2, 96), Case(2, 2, 96, 0.1, padding=True)]
SMALL_GPU = [Case(2, 2, 96, p, pad, "bf16", "cuda") for p, pad in ((0.0, False), (0.1, True))]


def run(record: Record) -> None:
    """One item a case."""
    options = record.options
    on_gpu = options.device == "cuda"
    cases = gpu_cases() if on_gpu else SMALL
    if options.small and on_gpu:
        cases = SMALL_GPU
    for case in cases:
        record.run(case.name, lambda c=case: compare(record, c))


def compare(record: Record, case: Case) -> Item:
    """Check, time and weigh one case."""
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
    """The cases, then the figures aimed at."""
    done = {name: item for name, item in items.items() if "variants" in item}
    lines = [line for item in done.values() for line in case_table(item)]
    return [*lines, *targets(done)]


def targets(items: dict[str, Item]) -> list[str]:
    """The figures that are aimed at on an H200, where they were measured."""
    lines = []
    for name, item in items.items():
        case = Case(**item["case"])
        wanted = {512: 2.0, 8192: 5.0}.get(case.length, 1.0)
        for peer in ("DisentangledFlash", "FlashDeBERTa", EAGER):
            reached = speedup(item, "triton", peer)
            goal = wanted if peer == "DisentangledFlash" else 1.0
            if reached is not None:
                lines.append(_line(f"{name}: times as fast as {peer}", reached, goal))
        stand_in = speedup(item, "chunked", EAGER)
        if case.dtype == "fp16" and stand_in is not None:
            memory = _peak(item, "chunked") / _peak(item, EAGER)
            lines.append(_line(f"{name}: chunked, times as fast as eager", stand_in, 1.5))
            lines.append(_line(f"{name}: chunked, share of eager's memory", memory, 0.5, low=True))
        ours = item["variants"].get("triton", {}).get("milliseconds")
        if case.name == "B32 H24 N512 bf16" and ours:
            lines.append(_line(f"{name}: forward, ms", ours["forward"], 0.35, low=True))
            lines.append(_line(f"{name}: both, ms", ours["both"], 1.3, low=True))
    return lines


def _peak(item: Item, variant: str) -> float:
    return float(item["variants"][variant]["peak_mib"])


def _line(what: str, reached: float, goal: float, *, low: bool = False) -> str:
    met = reached <= goal if low else reached >= goal
    verdict: Any = "met" if met else "MISSED"
    return f"  {what}: {reached:.2f} (aim {'at most' if low else 'at least'} {goal}) {verdict}"
