"""The record of a campaign: one line of JSON a case, appended as cases are done.

A line names the digest of the code it tested. Lines of another digest do not count: they say
nothing about the code as it is. Cases accrue over any number of starts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "benchmarks" / "results" / "cpu" / "chaos.jsonl"
TRAINING_CODE = (
    "checkpoint", "data", "engine", "model", "objectives", "ops", "parallel", "sharding", "train",
)  # fmt: skip
CHECKPOINT_CODE = ("checkpoint", "parallel", "sharding")


def code_digest(packages: Iterable[str]) -> str:
    """Digest of the packages that a case tests, and of the tests' own code beside this file."""
    digest = hashlib.sha256()
    folders = [ROOT / "megatron_deberta" / package for package in packages]
    for folder in (*folders, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Record:
    """The file of lines.

    Args:
        path: appended to; need not exist.
    """

    path: Path

    def lines(self) -> list[dict[str, Any]]:
        """Every line, of any code."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def valid(self, case: str, code: str) -> dict[int, dict[str, Any]]:
        """Lines of a case about this code, by seed."""
        return {
            line["seed"]: line
            for line in self.lines()
            if line["case"] == case and line["code"] == code
        }

    def append(self, case: str, seed: int, code: str, outcome: dict[str, Any]) -> dict[str, Any]:
        """Add what came out of a case."""
        line = {
            "case": case, "seed": seed, **outcome, "code": code,
            "command": f"python -m tests.chaos {case} --seed {seed}",
            **provenance(),
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        return line
