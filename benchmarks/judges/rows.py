"""Rows of the table in docs/who-says-so.md, one file each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from benchmarks.lib.provenance import ROOT, provenance

RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "judges"


def write_row(
    judge: str, release: str, compared: str, worst: str, limit: str, cases: int | None = None
) -> None:
    """Write the result of a comparison with a package or repository by other authors.

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


@dataclass(frozen=True)
class Comparison:
    """Result of one comparison.

    Attributes:
        compared: what was compared.
        worst: the worst difference, or what was found.
        limit: what is allowed.
        cases: number of compared cases.
        holds: the limit holds.
    """

    compared: str
    worst: str
    limit: str
    cases: int
    holds: bool


def of_numbers(compared: str, found: Sequence[tuple[float, float]], limit: float) -> Comparison:
    """Return the comparison of outputs and gradients.

    Args:
        compared: what was compared.
        found: largest differences of outputs and of gradients, per case.
        limit: largest difference allowed.
    """
    outputs, gradients = (max(values) for values in zip(*found, strict=True))
    worst = f"outputs {outputs:.0e}, gradients {gradients:.0e}"
    return Comparison(compared, worst, f"{limit:.0e}", len(found), max(outputs, gradients) < limit)
