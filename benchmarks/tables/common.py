"""Markdown tables, units and placeholders shared by the table generators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

UNMEASURED = "not measured"
# Text of a table whose result file does not exist.
NOTHING = "Not measured yet.\n"
# A committed result file.
Result = Mapping[str, Any]


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    titles = list(header)
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def gib(peak_bytes: int) -> str:
    """Bytes in GiB."""
    return f"{peak_bytes / 2**30:.1f}"


def place(where: Result) -> str:
    """Where something was measured."""
    return f"\n({where['hardware']}, {where['cores']} cores, load {where['load']}.)\n"
