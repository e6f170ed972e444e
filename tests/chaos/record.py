"""The record of a campaign: one line of JSON a case, appended as cases are done.

A line names the digest of the code it tested. Lines of another digest do not count: they say
nothing about the code as it is. Cases accrue over any number of starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from tests.support.campaign_lines import code_digest
from tests.support.jobs import ROOT

OUTPUT = ROOT / "benchmarks" / "results" / "cpu" / "chaos.jsonl"
TRAINING_CODE = (
    "checkpoint", "data", "engine", "model", "objectives", "ops", "parallel", "sharding", "train",
)  # fmt: skip
CHECKPOINT_CODE = ("checkpoint", "parallel", "sharding")
ALL_POINTS = 0


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of fault.

    Attributes:
        title: for the table.
        count: of the whole campaign; 0 is every system call of a save.
        packages: of megatron_deberta, whose change makes lines void.
    """

    title: str
    count: int
    packages: tuple[str, ...]


CASES = {
    "kill-one": Case("SIGKILL of one rank of four", 200, TRAINING_CODE),
    "kill-all": Case("SIGKILL of all four ranks", 50, TRAINING_CODE),
    "preempt": Case("SIGTERM, SIGUSR1 or SIGUSR2 to one or all ranks", 100, TRAINING_CODE),
    "save-crash": Case("SIGKILL at a system call of a save", ALL_POINTS, CHECKPOINT_CODE),
    "save-failure": Case("ENOSPC, EIO or EDQUOT at a system call", 100, CHECKPOINT_CODE),
    "damage": Case("checkpoint flipped, cut, swapped, deleted, emptied", 1000, CHECKPOINT_CODE),
}


def digest_of_code(packages: Iterable[str]) -> str:
    """Digest of the packages that a case tests, and of the tests' own code beside this file."""
    return code_digest([*(f"megatron_deberta/{package}" for package in packages), "tests/chaos"])


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


def table(record: Record, *, present: bool) -> str:
    """Passed and done by kind of fault, as a Markdown table.

    Args:
        record: the lines.
        present: count lines about the code as it is; otherwise about the code of the newest line
            of a kind, whose revision is shown.
    """
    rows = [
        "| fault | passed / done | of | slowest | revision |",
        "| --- | --- | --- | --- | --- |",
    ]
    newest = {line["case"]: line["code"] for line in record.lines()}
    for name, case in CASES.items():
        code = digest_of_code(case.packages) if present else newest.get(name, "")
        lines = list(record.valid(name, code).values())
        passed = sum(line["ok"] for line in lines)
        slowest = ", ".join(
            f"{key.removesuffix('_seconds')} {max(line[key] for line in lines)} s"
            for key in ("survivors_seconds", "stop_seconds")
            if lines and key in lines[0]
        )
        count = case.count or "every call"
        done = f"{passed} / {len(lines)}" if lines else "not run"
        revision = lines[-1]["revision"] if lines else ""
        rows.append(f"| {case.title} (`{name}`) | {done} | {count} | {slowest} | {revision} |")
    return "\n".join(rows) + "\n"
