"""Table of comparisons with code by other authors."""

from __future__ import annotations

import json

from benchmarks.lib.provenance import ROOT
from benchmarks.tables.common import NOTHING, markdown


def found(device: str) -> str:
    """Return a row per comparison, sorted by package and by what was compared."""
    folder = ROOT / "benchmarks" / "results" / device / "judges"
    rows = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if not rows:
        return NOTHING
    header = ("judge", "version", "compared", "cases", "worst difference", "allowed", "date")
    rows.sort(key=lambda row: (row["judge"].lower(), row["compared"]))
    return markdown(
        header,
        (
            (row["judge"], row["release"], row["compared"], f"{row['cases'] or ''}", row["worst"],
             row["limit"], row["date"])
            for row in rows
        ),
    )  # fmt: skip
