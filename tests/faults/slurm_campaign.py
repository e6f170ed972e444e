"""Fault injection on a virtual SLURM cluster: one JSON line per case, determined by its seed.

python -m tests.faults.slurm_campaign node-kill=10 chain=1 double-launch=50

Appends to ``--output`` and skips the seeds that are there, so it can be stopped and started again;
lines about other code do not count. ``--summary`` prints the table of docs/slurm.md. A case that
fails is recorded, ends the campaign, and is repeated by the command in its line; its folder stays.
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
    "train.exit_step=60", "train.eval_every=0", "data.num_workers=0",
)  # fmt: skip
PLAIN = ("precision.engine=plain", "train.eval_every=0", "data.num_workers=0")


class Campaign:
    """The cases and their fixtures: a corpus, a cluster, undisturbed runs.

    Args:
        folder: for everything; removed by the caller.

    Attributes:
        passed: no case has failed; set by the caller.
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
        """Four nodes, started when first wanted."""
        if self._cluster is None:
            folder = Path(tempfile.mkdtemp(prefix="slurm."))
            self._cluster = VirtualCluster(folder).__enter__()
        return self._cluster

    def close(self) -> None:
        """End the cluster."""
        if self._cluster is not None:
            self._cluster.__exit__()
            shutil.rmtree(self._cluster.folder, ignore_errors=True)

    def _reference(self) -> Path:
        """The same run in the same layout, never stopped, outside SLURM."""
        folder = self.folder / "unbroken60"
        if not folder.exists():
            fresh = self.folder / "unbroken60.new"
            shutil.rmtree(fresh, ignore_errors=True)
            run_to_end(self.run_yaml, fresh, 2, *KILL_STEPS)
            fresh.rename(folder)
        return folder

    def node_kill(self, seed: int) -> dict[str, Any]:
        """A random node of a run dies at a random step; the run finishes on the others."""
        draw, cluster = random.Random(seed), self.cluster()
        reference = self._reference()
        run = submit(cluster, self.run_yaml, self.folder / f"kill{seed}", *KILL_STEPS, nodes=2)
        at = draw.randint(8, 45)
        run.wait_for_step(at)
        nodes = cluster.run("scontrol", "show", "hostnames", cluster.job(run.jobs[0])["NodeList"])
        victim = draw.choice(nodes.split())
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
        """SLURM loses the node of a run that goes on there; the new start ends the old one."""
        draw, cluster = random.Random(seed), self.cluster()
        reference = self._reference()
        run = submit(
            cluster, self.run_yaml, self.folder / f"cut{seed}", *KILL_STEPS,
            "train.exit_step=1000000",
        )  # fmt: skip
        at = draw.randint(8, 45)
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
        links = [end["link"] for end in run.events("end")]
        same = losses(run.run_dir)[:STEPS] == losses(reference)[: len(losses(run.run_dir))]
        return {
            "ok": state == "COMPLETED" and links == [f"{run.jobs[0]}.1"] and same,
            "state": state, "victim": victim, "at_step": at, "ends": links, "losses_equal": same,
        }  # fmt: skip

    def chain(self, seed: int) -> dict[str, Any]:
        """Five links, four of them ended by the time limit's signal, beside an unbroken run."""
        cluster = self.cluster()
        endless = (*KILL_STEPS, "train.exit_step=1000000")
        unbroken = submit(cluster, self.run_yaml, self.folder / f"unbroken{seed}", *endless)
        limited = submit(
            cluster, self.run_yaml, self.folder / f"limited{seed}", *endless,
            time_limit_minutes=2, signal_seconds=60,
        )  # fmt: skip
        limited.wait(lambda: len(limited.events("start")) == 5, "five links", 900)
        limited.wait_for_step(limited.events("start")[-1]["step"] + 10)
        (limited.run_dir / "stop").touch()
        state = limited.wait_for_end()
        ours = losses(limited.run_dir)
        unbroken.wait_for_step(len(ours))
        (unbroken.run_dir / "stop").touch()
        unbroken.wait_for_end()
        same = ours == losses(unbroken.run_dir)[: len(ours)]
        codes = [end["code"] for end in limited.events("end")]
        steps = [begin["step"] for begin in limited.events("start")]
        saved = len(codes) >= 5 and set(codes[:-1]) == {75} and codes[-1] == 0
        return {
            "ok": state == "COMPLETED" and same and saved,
            "state": state, "codes": codes, "link_steps": steps, "losses_equal": same,
            "compared_steps": len(ours),
        }  # fmt: skip

    def double_launch(self, seed: int) -> dict[str, Any]:
        """Two starts on one folder; then the winner is killed, and the folder is free."""
        draw = random.Random(seed)
        run_dir = self.folder / f"double{seed}"
        first = start(self.run_yaml, run_dir, 1, *PLAIN)
        time.sleep(draw.choice((0.0, 0.0, 0.05, 0.5, 2.0)))
        began = time.monotonic()
        second = start(self.run_yaml, run_dir, 1, *PLAIN)
        ranks = [first.ranks[0], second.ranks[0]]
        wait_until(lambda: any(rank.poll() is not None for rank in ranks), 60, "a loser")
        seconds = time.monotonic() - began
        loser, winner = sorted(ranks, key=lambda rank: rank.poll() is None)
        named = f"in use by process {winner.pid} on "
        told = named in first.output()
        alone = winner.poll() is None
        winner.kill()
        killed = time.monotonic()
        winner.wait()
        with RunLock(run_dir):
            freed = time.monotonic() - killed
        return {
            "ok": loser.returncode == 2 and told and alone and seconds <= 10 and freed <= 5,
            "loser_code": loser.returncode, "named": told, "one_winner": alone,
            "loser_seconds": round(seconds, 2), "freed_seconds": round(freed, 3),
        }  # fmt: skip


def _nodes_of(run: SubmittedRun) -> str:
    return run.cluster.run("scontrol", "show", "hostnames", run.events("start")[-1]["nodes"])


@contextmanager
def campaign(workspace: Path | None) -> Iterator[Campaign]:
    """A campaign in a folder of its own, or in one that stays, with what was prepared there."""
    folder = workspace or Path(tempfile.mkdtemp(prefix="campaign."))
    folder.mkdir(parents=True, exist_ok=True)
    running = Campaign(folder)
    try:
        yield running
    finally:
        running.close()
        if workspace is None and not running.passed:
            print(f"what is left of the campaign: {folder}", file=sys.stderr)
        elif workspace is None:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run the missing cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE=COUNT")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no case after so long")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--workspace", type=Path, help="folder that the next call finds prepared")
    parser.add_argument("--summary", action="store_true", help="print the table and stop")
    args = parser.parse_args()
    if args.summary:
        sys.stdout.write(faults.slurm(read_lines(args.output)))
        return 0
    # So that no daemon is left behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    end, code = time.monotonic() + args.seconds, code_digest(faults.SLURM_CODE)
    with campaign(args.workspace) as running:
        for item in args.cases:
            case, _, count = item.partition("=")
            function: Callable[[int], dict[str, Any]] = getattr(running, case.replace("-", "_"))
            for seed in range(args.seed, args.seed + int(count)):
                lines = read_lines(args.output)
                if (case, seed, code) in {(x["case"], x["seed"], x["code_digest"]) for x in lines}:
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
