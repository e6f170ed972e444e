"""Fault injection on a virtual SLURM cluster: one JSON line per case, determined by its seed.

python -m tests.faults.slurm_campaign node-kill=10 chain=1 double-launch=50

Appends to ``--output`` and skips existing seeds, so it can be interrupted; lines about other code
do not count. ``--summary`` prints the table of docs/slurm.md. A failed case is recorded and ends
the campaign; its folder is kept, and the command in its line repeats it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lib.campaigns import RESULTS, append_line, code_digest, read_lines
from benchmarks.lib.provenance import provenance
from benchmarks.tables import faults
from megatron_deberta.cluster.run_lock import RunLock
from megatron_deberta.data.sample_log import read_sample_log
from tests.slurm.submitted_run import SubmittedRun, submit
from tests.slurm.virtual_cluster import VirtualCluster, wait_until
from tests.support.jobs import losses, prepare, run_to_end, start

OUTPUT = RESULTS / "slurm_campaign.jsonl"
STEPS = 60
KILL_STEPS = (
    "train.steps=1000000", "optimizer.schedule=constant",
    "train.exit_step=60", "train.eval_every=null", "data.num_workers=0",
)  # fmt: skip
PLAIN = ("parallel.engine=plain", "train.eval_every=null", "data.num_workers=0")


class Campaign:
    """The cases and their fixtures: a corpus, a cluster, uninterrupted runs.

    Args:
        folder: of all files; removed by the caller.

    Attributes:
        passed: whether no case has failed; set by the caller.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.passed = False
        self.run_yaml = folder / "corpus" / "run.yaml"
        if not self.run_yaml.exists():
            self.run_yaml.parent.mkdir()
            prepare(self.run_yaml.parent)
        self._cluster: VirtualCluster | None = None

    def cluster(self) -> VirtualCluster:
        """Return the cluster of four nodes, started at the first call."""
        if self._cluster is None:
            folder = Path(tempfile.mkdtemp(prefix="slurm."))
            self._cluster = VirtualCluster(folder).__enter__()
        return self._cluster

    def close(self) -> None:
        """Stop the cluster."""
        if self._cluster is not None:
            self._cluster.__exit__()
            shutil.rmtree(self._cluster.folder, ignore_errors=True)

    def _reference(self) -> Path:
        """Return the same run in the same layout, uninterrupted, outside of SLURM."""
        folder = self.folder / "uninterrupted60"
        if not folder.exists():
            unfinished = self.folder / "uninterrupted60.new"
            shutil.rmtree(unfinished, ignore_errors=True)
            run_to_end(self.run_yaml, unfinished, 2, *KILL_STEPS)
            unfinished.rename(folder)
        return folder

    def node_kill(self, seed: int) -> dict[str, Any]:
        """Kill a random node of a run at a random step; the run finishes on other nodes."""
        rng, cluster = random.Random(seed), self.cluster()
        reference = self._reference()
        run = submit(cluster, self.run_yaml, self.folder / f"kill{seed}", *KILL_STEPS, nodes=2)
        at = rng.randint(8, 45)
        run.wait_for_step(at)
        nodes = cluster.run("scontrol", "show", "hostnames", cluster.job(run.jobs[0])["NodeList"])
        victim = rng.choice(nodes.split())
        began = time.monotonic()
        cluster.kill_node(victim)
        run.wait(lambda: len(run.events("start")) > 1, "requeue", 180)
        requeued = time.monotonic() - began
        cluster.start_node(victim)
        state = run.wait_for_end()
        same = losses(run.run_dir) == losses(reference)
        sample_log = read_sample_log(run.run_dir / "ledger") == read_sample_log(
            reference / "ledger"
        )
        wait_until(lambda: set(cluster.states().values()) == {"IDLE"}, 120, "idle nodes")
        return {
            "ok": state == "COMPLETED" and same and sample_log and victim not in _nodes_of(run),
            "state": state, "victim": victim, "at_step": at, "requeued_seconds": round(requeued, 1),
            "losses_equal": same, "ledger_equal": sample_log,
        }  # fmt: skip

    def cut_off(self, seed: int) -> dict[str, Any]:
        """Cut off the node of a run that continues there; the new attempt stops the old one."""
        rng, cluster = random.Random(seed), self.cluster()
        reference = self._reference()
        run = submit(
            cluster, self.run_yaml, self.folder / f"cut{seed}", *KILL_STEPS,
            "train.exit_step=1000000",
        )  # fmt: skip
        at = rng.randint(8, 45)
        run.wait_for_step(at)
        victim = cluster.job(run.jobs[0])["BatchHost"]
        cluster.cut_off_node(victim)
        run.wait(lambda: len(run.events("start")) > 1, "requeue", 180)
        logs = run.run_dir / "logs" / f"{run.jobs[0]}.0" / "rank_0.log"
        run.wait(lambda: "was taken by" in logs.read_text(), "the end of the former holder", 90)
        resumed = run.events("start")[1]["step"]
        run.wait(lambda: run.holder_restarts() == 1, "a new holder", 90)
        run.wait(lambda: run.steps() > resumed + 10, "steps of the new holder", 120)
        (run.run_dir / "stop").touch()
        state = run.wait_for_end()
        cluster.start_node(victim)
        wait_until(lambda: set(cluster.states().values()) == {"IDLE"}, 120, "idle nodes")
        attempts = [end["link"] for end in run.events("end")]
        same = losses(run.run_dir)[:STEPS] == losses(reference)[: len(losses(run.run_dir))]
        return {
            "ok": state == "COMPLETED" and attempts == [f"{run.jobs[0]}.1"] and same,
            "state": state, "victim": victim, "at_step": at, "ends": attempts,
            "losses_equal": same,
        }  # fmt: skip

    def chain(self, seed: int) -> dict[str, Any]:
        """Compare five attempts, four ended by the time limit, with an uninterrupted run."""
        cluster = self.cluster()
        endless = (*KILL_STEPS, "train.exit_step=1000000")
        reference = submit(cluster, self.run_yaml, self.folder / f"uninterrupted{seed}", *endless)
        limited = submit(
            cluster, self.run_yaml, self.folder / f"limited{seed}", *endless,
            time_limit_minutes=2, signal_seconds=60,
        )  # fmt: skip
        limited.wait(lambda: len(limited.events("start")) == 5, "five attempts", 900)
        limited.wait_for_step(limited.events("start")[-1]["step"] + 10)
        (limited.run_dir / "stop").touch()
        state = limited.wait_for_end()
        actual = losses(limited.run_dir)
        reference.wait_for_step(len(actual))
        (reference.run_dir / "stop").touch()
        reference.wait_for_end()
        same = actual == losses(reference.run_dir)[: len(actual)]
        codes = [end["code"] for end in limited.events("end")]
        steps = [begin["step"] for begin in limited.events("start")]
        saved = len(codes) >= 5 and set(codes[:-1]) == {75} and codes[-1] == 0
        return {
            "ok": state == "COMPLETED" and same and saved,
            "state": state, "codes": codes, "link_steps": steps, "losses_equal": same,
            "compared_steps": len(actual),
        }  # fmt: skip

    def double_launch(self, seed: int) -> dict[str, Any]:
        """Start two runs in one folder, then kill the one that holds the lock."""
        rng = random.Random(seed)
        run_dir = self.folder / f"double{seed}"
        first = start(self.run_yaml, run_dir, 1, *PLAIN)
        time.sleep(rng.choice((0.0, 0.0, 0.05, 0.5, 2.0)))
        began = time.monotonic()
        second = start(self.run_yaml, run_dir, 1, *PLAIN)
        ranks = [first.ranks[0], second.ranks[0]]
        wait_until(lambda: any(rank.poll() is not None for rank in ranks), 60, "a refusal")
        seconds = time.monotonic() - began
        refused, holder = sorted(ranks, key=lambda rank: rank.poll() is None)
        is_named = f"in use by process {holder.pid} on " in first.output()
        is_running = holder.poll() is None
        holder.kill()
        killed = time.monotonic()
        holder.wait()
        with RunLock(run_dir):
            freed = time.monotonic() - killed
        return {
            "ok": refused.returncode == 2 and is_named and is_running and seconds <= 10
                  and freed <= 5,
            "loser_code": refused.returncode, "named": is_named, "one_winner": is_running,
            "loser_seconds": round(seconds, 2), "freed_seconds": round(freed, 3),
        }  # fmt: skip


def _nodes_of(run: SubmittedRun) -> str:
    return run.cluster.run("scontrol", "show", "hostnames", run.events("start")[-1]["nodes"])


@contextmanager
def campaign(workspace: Path | None) -> Iterator[Campaign]:
    """Provide a campaign in a temporary folder, or in an existing one with its files."""
    folder = workspace or Path(tempfile.mkdtemp(prefix="campaign."))
    folder.mkdir(parents=True, exist_ok=True)
    running = Campaign(folder)
    try:
        yield running
    finally:
        running.close()
        if workspace is None and not running.passed:
            print(f"files of the failed campaign: {folder}", file=sys.stderr)
        elif workspace is None:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the missing cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE=COUNT")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after this time")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--workspace", type=Path, help="folder whose files later calls use again")
    parser.add_argument("--summary", action="store_true", help="print the table and stop")
    args = parser.parse_args()
    if args.summary:
        sys.stdout.write(faults.slurm(read_lines(args.output)))
        return 0
    # So that the daemons are stopped.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    end, code = time.monotonic() + args.seconds, code_digest(faults.SLURM_CODE)
    failed = 0
    with campaign(args.workspace) as running:
        for item in args.cases:
            case, _, count = item.partition("=")
            function: Callable[[int], dict[str, Any]] = getattr(running, case.replace("-", "_"))
            for seed in range(args.seed, args.seed + int(count)):
                lines = read_lines(args.output)
                key = (case, seed, code)
                known = [x["ok"] for x in lines if (x["case"], x["seed"], x["code_digest"]) == key]
                failed += False in known
                if known:
                    continue
                if time.monotonic() > end:
                    running.passed = True
                    return 0
                began = time.monotonic()
                outcome = function(seed)
                line = {
                    "case": case, "seed": seed, **outcome,
                    "duration_seconds": round(time.monotonic() - began, 1),
                    "command": f"python -m tests.faults.slurm_campaign {case}=1 --seed {seed}",
                    "code_digest": code, **provenance(),
                }  # fmt: skip
                append_line(args.output, line)
                print(json.dumps(line), flush=True)
                if not outcome["ok"]:
                    return 1
        running.passed = True
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
