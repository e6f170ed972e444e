"""Faults by the hundred, each with its seed: does a run come out as if nothing had happened?

  python -m tests.chaos                     the whole campaign; may be stopped and started again
  python -m tests.chaos --seconds 600       as much of it as fits
  python -m tests.chaos kill-one --seed 17  one case, as a line of the record names it
  python -m tests.chaos --summary           what passed, of this code

One line of JSON a case is appended to --output. Lines about other code do not count, so a change
to the code begins the counts it concerns anew.
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

from tests.chaos.ranks import fork_server
from tests.chaos.record import CASES, OUTPUT, Record, digest_of_code, table
from tests.chaos.saves import SaveCases
from tests.chaos.training import TrainingCases
from tests.support.jobs import prepare


class Campaign:
    """What cases share.

    Args:
        folder: to work in.
    """

    def __init__(self, folder: Path) -> None:
        context = fork_server()
        corpus = folder / "corpus"
        corpus.mkdir()
        self._saves = SaveCases(folder, context)
        self._training = TrainingCases(folder, prepare(corpus), context)
        self._functions: dict[str, Callable[[int], dict[str, Any]]] = {
            "kill-one": self._training.kill_one,
            "kill-all": self._training.kill_all,
            "preempt": self._training.preempt,
            "save-crash": self._saves.crash,
            "save-failure": self._saves.failure,
            "damage": self._saves.damage,
        }

    def count(self, name: str) -> int:
        """How many cases the whole campaign has."""
        return CASES[name].count or len(self._saves.points())

    def run(self, name: str, seed: int) -> dict[str, Any]:
        """Do one case."""
        began = time.monotonic()
        outcome = self._functions[name](seed)
        return {**outcome, "duration_seconds": round(time.monotonic() - began, 2)}


def main() -> int:
    """Do what is missing; 1 if a case failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE[=COUNT]", help=", ".join(CASES))
    parser.add_argument("--seed", type=int, help="do only this seed, whether recorded or not")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so long")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--summary", action="store_true", help="print the table and stop")
    args = parser.parse_args()
    wanted = [item.partition("=") for item in args.cases] or [(name, "", "") for name in CASES]
    unknown = [name for name, _, _ in wanted if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]}: no such case; there are {', '.join(CASES)}")
    record = Record(args.output)
    if args.summary:
        print(table(record, present=True), end="")
        return 0
    end = time.monotonic() + args.seconds
    folder = Path(tempfile.mkdtemp(prefix="chaos."))
    failed = 0
    try:
        campaign = Campaign(folder)
        for name, _, count in wanted:
            code = digest_of_code(CASES[name].packages)
            seeds = range(int(count) if count else campaign.count(name))
            missing = [seed for seed in seeds if seed not in record.valid(name, code)]
            for seed in missing if args.seed is None else [args.seed]:
                if time.monotonic() > end:
                    return int(failed > 0)
                line = record.append(name, seed, code, campaign.run(name, seed))
                failed += not line["ok"]
                print("passed" if line["ok"] else f"FAILED {json.dumps(line)}", line["command"])
                sys.stdout.flush()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
