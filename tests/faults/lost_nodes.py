"""Losses of processes, nodes and replicas; the resumed run must be bit-identical.

  python -m tests.faults.lost_nodes                     all missing cases
  python -m tests.faults.lost_nodes --seconds 600       as many as fit
  python -m tests.faults.lost_nodes node --seed 3       repeat one case

Four gloo ranks are two nodes with folders of their own. Each case appends one JSON line to
--output. Lines about other code do not count.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.campaigns import RESULTS, read_lines
from benchmarks.tables.faults import LOST_NODES_CODE, LOST_NODES_COUNTS
from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.observe.timeline import FILE_NAME as TIMELINE
from tests.faults import campaign
from tests.faults.chaos.training import (
    WORLD_SIZE,
    TrainingCases,
    last_step,
    log_end,
    result,
    wait_until,
)
from tests.support.jobs import Job, prepare

RANKS_PER_NODE, SAVE_EVERY, LOCAL_EVERY = 2, 10, 3
_USED = re.compile(r"the local checkpoint of step (\d+) is complete")


class LostNodes(TrainingCases):
    """Cases on one tiny run: TP2 x DP2, ZeRO-1, dropout on, two nodes.

    The uninterrupted run saves no local checkpoints.
    """

    def _start(self, run_dir: Path, *overrides: str, **options: Any) -> Job:
        overrides = (f"checkpoint.save_every={SAVE_EVERY}", *overrides)
        return super()._start(run_dir, *overrides, ranks_per_node=RANKS_PER_NODE, **options)

    def run(self, case: str, seed: int) -> dict[str, Any]:
        """Lose something at a random time and resume.

        Args:
            case: ``process``: one rank is killed; ``node``: both ranks of a node are killed and its
                folder deleted; ``replicas``: so is one part with its replica.
            seed: chooses victim and time.
        """
        rng, expected, began = random.Random(f"{case} {seed}"), self.expected(), time.monotonic()
        run_dir, local_dir = self._folder / "run", self._folder / "local"
        for path in (run_dir, local_dir):
            shutil.rmtree(path, ignore_errors=True)
        local = (f"checkpoint.local_every={LOCAL_EVERY}", f"checkpoint.local_dir={local_dir}")
        job = self._start(run_dir, *local)
        # With replicas lost, the shared checkpoint is what is left.
        first = SAVE_EVERY + 2 if case == "replicas" else 2 * LOCAL_EVERY
        step, delay = rng.randint(first, self._steps - 5), rng.uniform(0.0, 0.1)
        wait_until(lambda: last_step(run_dir) >= step, job)
        time.sleep(delay)
        victim = rng.randrange(WORLD_SIZE)
        node = victim // RANKS_PER_NODE
        of_node = range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE)
        for rank in [victim] if case == "process" else of_node:
            job.ranks[rank].kill()
        codes = job.wait()
        if case == "node":
            shutil.rmtree(local_dir / f"node{node}")
        if case == "replicas":
            for path in local_dir.glob(f"*/*/*-rank_{victim:05d}"):
                shutil.rmtree(path)
        reached, shared = last_step(run_dir), committed_steps(run_dir)[-1:]
        again = self._start(run_dir, *local)
        resumed = again.wait()
        used = [int(found) for found in _USED.findall(again.output())][:1]
        started = [e["step"] for e in read_lines(run_dir / TIMELINE) if e["event"] == "start"][1:]
        same = resumed == [0] * WORLD_SIZE and result(run_dir, self._steps) == expected
        repeated = reached - started[0] if started else None
        if case == "replicas":
            right_source = not used and len(shared) == 1 and started == shared
        else:
            right_source = started == [max([*used, *shared, 0])] and repeated <= LOCAL_EVERY
        ok = same and 0 not in codes and right_source
        return {
            "ok": ok, "victim": victim, "at": f"{delay:.3f} s after step {step}", "codes": codes,
            "reached": reached, "shared": shared, "local": used, "steps_repeated": repeated,
            "identical": same, "log": log_end(again, ok),
            "duration_seconds": round(time.monotonic() - began, 2),
        }  # fmt: skip


def main() -> int:
    """Run the missing cases; return 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(LOST_NODES_COUNTS))
    parser.add_argument("--seed", type=int, help="run only this seed, even if it is recorded")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this time")
    parser.add_argument("--output", type=Path, default=RESULTS / "lost_nodes.jsonl")
    args = parser.parse_args()
    for case in args.cases:
        if case not in LOST_NODES_COUNTS:
            parser.error(f"unknown case {case!r}; choose from {', '.join(LOST_NODES_COUNTS)}")
    chosen = args.cases or list(LOST_NODES_COUNTS)
    seeds = range(max(LOST_NODES_COUNTS.values())) if args.seed is None else [args.seed]
    # One of each kind first.
    cases = [
        (f"python -m tests.faults.lost_nodes {case} --seed {seed}", {"case": case, "seed": seed})
        for seed in seeds
        for case in chosen
        if args.seed is not None or seed < LOST_NODES_COUNTS[case]
    ]
    folder = Path(tempfile.mkdtemp(prefix="lost_nodes."))
    try:
        (folder / "corpus").mkdir()
        nodes = LostNodes(folder, prepare(folder / "corpus"))
        repeat = args.seed is not None
        return campaign.run_missing(args, LOST_NODES_CODE, cases, nodes.run, repeat=repeat)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
