"""Table of a comparison, laid out as Table 14 of the DeBERTa paper (arXiv:2006.03654)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_deberta.finetune.compare.sides import Comparison
from megatron_deberta.finetune.data import DEV


def format_comparison(names: tuple[str, str], comparisons: Sequence[Comparison]) -> str:
    """Format minimum, maximum and mean of both models in percent, and the p-values.

    Args:
        names: names of the models.
        comparisons: a column each.
    """
    a, b = names
    rows = [
        ["Model", *(f"{c.task} {c.split}" for c in comparisons)],
        ["", *(f"{c.metric} (Min/Max/Avg)" for c in comparisons)],
        [a, *(_range(c.a) for c in comparisons)],
        [b, *(_range(c.b) for c in comparisons)],
        ["p-Value", *("-" if c.seeds_p is None else _p(c.seeds_p) for c in comparisons)],
        ["", *("" for _ in comparisons)],
        ["runs", *(f"{len(c.a)} and {len(c.b)}" for c in comparisons)],
        ["examples", *(f"{c.num_examples:,}" for c in comparisons)],
        ["difference", *(f"{100 * c.examples.difference:+.2f}" for c in comparisons)],
        ["95 % interval", *(_interval(c) for c in comparisons)],
        ["p, paired bootstrap", *(_p(c.examples.bootstrap_p) for c in comparisons)],
        ["p, randomisation", *(_p(c.examples.randomisation_p) for c in comparisons)],
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    notes = [
        "",
        "p-Value: Welch's t-test over the runs, which differ in their seeds; - with fewer than two",
        "runs. The other rows are of the examples: second model minus first, mean over runs.",
    ]
    if any(c.split == DEV for c in comparisons):
        notes.append(f"The split {DEV} selected the checkpoints; this is no test result.")
    return "\n".join([*lines, *notes])


def _range(scores: Sequence[float]) -> str:
    values = min(scores), max(scores), sum(scores) / len(scores)
    return "/".join(f"{100 * value:.1f}" for value in values)


def _interval(comparison: Comparison) -> str:
    tests = comparison.examples
    return f"{100 * tests.low:+.2f} to {100 * tests.high:+.2f}"


def _p(value: float) -> str:
    return f"{value:.2g}"
