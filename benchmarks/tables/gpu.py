"""Table of a first contact with a GPU."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.first_contact import goals
from benchmarks.tables.common import markdown


def first_contact_tables(record: dict[str, Any]) -> str:
    """Return the stages, then the goals with what was measured."""
    stages = record["stages"]
    rows = [
        (
            stage["stage"],
            stage["state"],
            f"{stage['seconds']:.0f} of {stage['limit_seconds']:.0f} s",
            "; ".join(filter(None, [stage["error"], *stage["wrong"]])),
        )
        for stage in stages
    ]
    first = stages[0]
    where = (
        f"{first['hardware']}, torch {first['torch']}, Triton {first.get('triton')}, "
        f"revision {first['revision'] or 'unknown'}, source {first['source']}."
    )
    tables = (
        markdown(("Stage", "State", "Time", "Errors"), rows),
        markdown(("Measured", "Goal", "Result"), goals(stages)),
    )
    return "\n".join((f"{where}\n", *tables))
