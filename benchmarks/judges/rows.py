"""Rows of the table in docs/who-says-so.md, one file each."""

from __future__ import annotations

import hashlib
import json
from datetime import date

from benchmarks.lib.provenance import ROOT, provenance

RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "judges"


def write_row(
    judge: str, release: str, compared: str, worst: str, limit: str, cases: int | None = None
) -> None:
    """Write what a judge found.

    Args:
        judge: name of the package or repository.
        release: its version or revision.
        compared: what was compared; with `judge`, the identity of the row.
        worst: the worst difference, or what was found.
        limit: what is allowed.
        cases: number of compared cases.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(f"{judge}\0{compared}".encode()).hexdigest()[:8]
    name = "".join(c if c.isalnum() else "_" for c in judge.lower())
    row = {
        "judge": judge, "release": release, "compared": compared, "worst": worst, "limit": limit,
        "cases": cases, "date": date.today().isoformat(), "provenance": provenance(),
    }  # fmt: skip
    (RESULTS / f"{name}_{key}.json").write_text(json.dumps(row, indent=1) + "\n")
