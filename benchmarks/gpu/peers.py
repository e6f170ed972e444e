"""Training steps compared with other models; see ``benchmarks.step.compare``.

In order of importance: transformers' DeBERTa; ModernBERT, RoBERTa and BERT; this project's model
with plain flash attention. N = 512 of each comes first.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from benchmarks.gpu.record import Item, Record
from benchmarks.step.compare import COMPARISONS, Case, cases, measure
from megatron_deberta.config.schema import ModelConfig

TINY = ModelConfig(num_layers=2, hidden_size=64, num_heads=2, ffn_hidden_size=128, vocab_size=512)


def run(record: Record) -> None:
    """Run one item per case."""
    device = torch.device(record.options.device)
    chosen = [case for comparison in COMPARISONS for case in cases(comparison, device)]
    chosen.sort(key=lambda case: case.length != 512)
    if record.options.small:
        first = {case.comparison: case for case in reversed(chosen)}
        chosen = [replace(c, model=TINY, length=64, tokens=256) for c in first.values()]
    for case in chosen:
        repeats = 1 if record.options.small else 10
        record.run(f"{case.comparison}: {case.name}", partial(compare, case, device, repeats))


def compare(case: Case, device: torch.device, repeats: int) -> Item:
    """Measure one case; different losses of the sides are an error."""
    try:
        return {**measure(case, device, repeats), "tokens": case.tokens, "wrong": []}
    except SystemExit as difference:
        return {"wrong": [str(difference)]}


def table(items: dict[str, Item]) -> list[str]:
    """Return lines for the terminal."""
    lines = []
    for name, item in items.items():
        lines.append(f"  {name}")
        for side, found in item.get("sides", {}).items():
            speedup = item["speedup"].get(side)
            faster = "" if speedup is None else f"  our speed / theirs {speedup:.2f}"
            lines.append(
                f"    {side:20} {found['tokens_per_second']:9.0f} tokens/s  MFU "
                f"{100 * found['mfu']:5.1f} %  {found['peak_bytes'] / 2**30:6.1f} GiB{faster}"
            )
    return lines
