"""Fault injection in training and checkpoints: the resumed run must be bit-identical.

  python -m tests.faults.chaos                     all missing cases
  python -m tests.faults.chaos --seconds 600       as many as fit
  python -m tests.faults.chaos kill-one --seed 17  repeat one case
  python -m tests.faults.chaos --summary           results about the present code

Each case appends one JSON line to --output. Lines about other code do not count.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lib.campaigns import RESULTS, append_line, read_lines
from benchmarks.lib.provenance import provenance
from benchmarks.tables import faults
from benchmarks.tables.faults import CHAOS_CASES
from tests.faults.chaos.saves import SaveCases
from tests.faults.chaos.starts import StartCases
from tests.faults.chaos.training import TrainingCases
from tests.support.jobs import fork_server, prepare


class Campaign:
    """The fixtures that cases share.

    Args:
        folder: working folder.
    """

    def __init__(self, folder: Path) -> None:

        corpus = folder / "corpus"
        corpus.mkdir()
        self._saves = SaveCases(folder, fork_server())
        run_yaml = prepare(corpus)
        self._training = TrainingCases(folder, run_yaml)
        self._functions: dict[str, Callable[[int], dict[str, Any]]] = {
            "kill-one": self._training.kill_one,
            "kill-all": self._training.kill_all,
            "preempt": self._training.preempt,
            "save-crash": self._saves.crash,
            "save-failure": self._saves.failure,
            "damage": self._saves.damage,
            "double-start": StartCases(folder, run_yaml).double,
        }

    def count(self, name: str) -> int:
        """Return the number of cases of a kind."""
        return CHAOS_CASES[name].count or len(self._saves.points())

    def run(self, name: str, seed: int) -> dict[str, Any]:
        """Run one case."""
        began = time.monotonic()
        outcome = self._functions[name](seed)
        return {**outcome, "duration_seconds": round(time.monotonic() - began, 2)}


def run_cases(args: argparse.Namespace, campaign: Campaign) -> int:
    """Run the missing cases, or the case that ``--seed`` selects.

    Returns:
        Number of failed cases of the present code in the output file.
    """
    end, failed = time.monotonic() + args.seconds, 0
    for item in args.cases or CHAOS_CASES:
        name, _, number = item.partition("=")
        code = CHAOS_CASES[name].digest()
        lines = read_lines(args.output)
        done = {line["seed"] for line in lines if (line["case"], line["code"]) == (name, code)}
        seeds = range(int(number) if number else campaign.count(name))
        missing = [seed for seed in seeds if seed not in done]
        failed += sum(not x["ok"] for x in lines if (x["case"], x["code"]) == (name, code))
        for seed in missing if args.seed is None else [args.seed]:
            if time.monotonic() > end:
                return failed
            command = f"python -m tests.faults.chaos {name} --seed {seed}"
            line = {"case": name, "seed": seed, **campaign.run(name, seed), "code": code}
            append_line(args.output, {**line, "command": command, **provenance()})
            failed += not line["ok"]
            result = "passed" if line["ok"] else f"FAILED {json.dumps(line)}"
            print(result, command, flush=True)
    return failed


def main() -> int:
    """Run the missing cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE[=COUNT]", help=", ".join(CHAOS_CASES))
    parser.add_argument("--seed", type=int, help="run only this seed, even if it is recorded")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this time")
    parser.add_argument("--output", type=Path, default=RESULTS / "chaos.jsonl")
    parser.add_argument("--summary", action="store_true", help="print the table and exit")
    args = parser.parse_args()
    for name in (item.partition("=")[0] for item in args.cases):
        if name not in CHAOS_CASES:
            parser.error(f"unknown case {name!r}; choose from {', '.join(CHAOS_CASES)}")
    if args.summary:
        print(faults.chaos(read_lines(args.output)), end="")
        return 0
    folder = Path(tempfile.mkdtemp(prefix="chaos."))
    try:
        return int(run_cases(args, Campaign(folder)) > 0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
