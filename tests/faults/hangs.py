"""Hang injection: the supervisor must identify the hanging rank within its timeout.

Four gloo ranks (TP 2 x DP 2, ZeRO-1, dropout). A case is determined by its number: a rank is
stopped (SIGSTOP) at a random time or in a given section, or a read of its data blocks, in the rank
or in its loader process. Other cases are runs without a fault, killed ranks and slow ranks. Each
case appends one JSON line to the output; existing cases are skipped. Lines about other code do not
count.

  python -m tests.faults.hangs --cases 70 --deaths 10 --clean 10 --slow 6
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.campaigns import RESULTS, read_lines
from benchmarks.tables import faults
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.watchdog.detection import Limits
from megatron_deberta.cluster.watchdog.heartbeat import Beat, beat_path, read_beat
from megatron_deberta.cluster.watchdog.ranks import NodePlan
from megatron_deberta.cluster.watchdog.reports import ReportStore
from megatron_deberta.config import load_config
from megatron_deberta.observe.progress import Section
from tests.faults import campaign
from tests.faults.forked_ranks import PLAN_VARIABLE, ForkingSupervisor
from tests.support.jobs import free_port

OUTPUT = RESULTS / "hangs.jsonl"
RANKS, STEPS = 4, 50
PHASES = ("any", "step", "save", "evaluation", "data")
ALLOWED_SECONDS = 5.0
"""Tolerance after the time-out."""
SECONDS = 90.0
"""Maximum time of a case."""
RUN = (
    "parallel.tensor_parallel_size=2", "parallel.zero_stage=1", "train.micro_batch_size=2",
    "train.eval_every=5", "train.eval_batches=2", "checkpoint.save_every=4", "log.every=1",
    "optimizer.schedule=constant", "train.steps=1000000", "data.sample_log=false",
    "cluster.startup_timeout_seconds=30", "cluster.data_timeout_seconds=8",
    "cluster.step_timeout_seconds=8", "cluster.save_timeout_seconds=8",
    "cluster.evaluation_timeout_seconds=8",
    # Below the default, so that slow steps of a busy machine do not extend the time-out.
    "cluster.step_timeout_factor=4",
)  # fmt: skip


def plan_case(kind: str, number: int) -> dict[str, Any]:
    """Choose the fault, its rank and its time."""
    rng = random.Random(f"{kind} {number}")
    rank, step = rng.randrange(RANKS), rng.randint(3, 20)
    if kind == "clean":
        return {"how": "nothing"}
    if kind == "slow":
        part = ("forward", "data")[number % 2]
        return {"how": "slow", "rank": rank, "part": part, "seconds": 0.2}
    if kind == "death":
        return {"how": "kill", "rank": rank, "phase": PHASES[number % 5], "at_step": step}
    variant = number % 7
    if variant >= 5:
        return {"how": "read", "rank": rank, "worker": variant == 6, "call": step}
    phase = PHASES[variant]
    plan: dict[str, Any] = {"how": "stop", "rank": rank, "phase": phase}
    if phase == "any":
        return {**plan, "after_seconds": round(rng.uniform(0.1, 12.0), 3)}
    return {**plan, "at_step": step}


class Fault:
    """Stops or kills a rank as planned.

    Attributes:
        time: time of the fault on the monotonic clock; 0: not yet.
        beat: last heartbeat of the rank.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self.time = 0.0
        self.beat: Beat | None = None

    def __call__(self, pids: list[int], folder: Path) -> None:
        """Wait for the planned time, then signal the rank."""
        plan = self._plan
        if plan["how"] not in ("stop", "kill"):
            return
        rank, phase = plan["rank"], plan["phase"]
        pid, path = pids[rank], beat_path(folder, rank)
        if phase == "any" and "after_seconds" in plan:
            time.sleep(plan["after_seconds"])
            self._inject(pid, path)
            return
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            beat = read_beat(path)
            ready = beat is not None and beat.step >= plan["at_step"]
            if not ready or (phase != "any" and beat.section.label != phase):
                time.sleep(0.0002)
                continue
            if plan["how"] == "kill":
                self._inject(pid, path)
                return
            self._inject(pid, path)
            if phase == "any" or (self.beat and self.beat.section.label == phase):
                return
            # The rank left the section before the signal arrived.
            self.time = 0.0
            os.kill(pid, signal.SIGCONT)

    def _inject(self, pid: int, path: Path) -> None:
        number = signal.SIGKILL if self._plan["how"] == "kill" else signal.SIGSTOP
        os.kill(pid, number)
        self.time = time.monotonic()
        deadline = self.time + 1
        while not _state(pid).startswith(("T", "Z", "X")) and time.monotonic() < deadline:
            time.sleep(0.001)
        self.beat = read_beat(path)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def run_case(folder: Path, steps: int, kind: str, case: int) -> dict[str, Any]:
    """Run one case and return its result, with logs if it failed."""
    line = result_of(folder, kind, case, steps)
    return line if line["ok"] else {**line, "logs": last_lines(folder / "run" / "logs")}


def result_of(folder: Path, kind: str, number: int, steps: int) -> dict[str, Any]:
    """Run one case and return its result; ``steps`` is for runs that are not interrupted."""
    plan = plan_case(kind, number)
    run_dir, stamp, fifo = folder / "run", folder / "stamp", folder / "fifo"
    shutil.rmtree(run_dir, ignore_errors=True)
    stamp.unlink(missing_ok=True)
    overrides = [*RUN, f"train.run_dir={run_dir}", f"data.num_workers={int(plan.get('worker', 0))}"]
    if kind in ("clean", "slow"):
        overrides += [f"train.exit_step={steps}", "cluster.straggler_window_steps=8"]
    config = load_config(folder / "corpus" / "run.yaml", overrides)
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if plan["how"] in ("read", "slow"):
        environment[PLAN_VARIABLE] = json.dumps({**plan, "fifo": str(fifo), "stamp": str(stamp)})
    fault = Fault(plan)
    supervisor = ForkingSupervisor(
        NodePlan(
            run_dir=str(run_dir), attempt="case", node=0, num_nodes=1, host="here",
            ranks_per_node=RANKS, logs=run_dir / "logs", exit_wait_seconds=10,
            command=("pretrain", str(folder / "corpus" / "run.yaml"), *overrides),
            environment=environment, config=config.cluster,
        ),
        fault,
    )  # fmt: skip
    begin = time.monotonic()
    code = supervisor.run()
    end = time.monotonic()
    diagnosis = ReportStore(run_dir, "case").diagnose(1)
    line: dict[str, Any] = {
        **plan, "code": code, "seconds": round(end - begin, 2),
        "reason": without_folders(diagnosis.reason) if diagnosis else "",
        "named": list(diagnosis.ranks) if diagnosis else [],
    }  # fmt: skip
    if kind == "clean":
        return {**line, "ok": code == 0 and diagnosis is None}
    if kind == "slow":
        reports = [
            event["ranks"] for event in JobHistory(run_dir).current() if event["event"] == "slow"
        ]
        parts = {report["rank"]: report["part"] for report in reports[0]} if reports else {}
        # Tensor-parallel ranks wait for each other in forward, and are slow together.
        group = {plan["rank"], plan["rank"] ^ (plan["part"] == "forward")}
        correct = parts.get(plan["rank"]) == plan["part"] and parts.keys() <= group
        return {**line, "told": parts, "ok": correct and code == 0 and diagnosis is None}
    fault_time = float(stamp.read_text()) if stamp.exists() else fault.time
    correct = bool(fault_time) and line["named"] == [plan["rank"]] and code == 1
    delay = round(end - fault_time, 2)
    if kind == "death":
        is_in_time = delay <= 10 + ALLOWED_SECONDS
        return {**line, "detected_seconds": delay, "ok": correct and is_in_time}
    beat = fault.beat
    section = beat.section if beat else Section.STARTUP if plan["how"] == "stop" else Section.DATA
    # The start-up time-out applies to the first steps; the median only extends slow steps.
    limits = Limits(replace(config.cluster, step_timeout_factor=1e-9))
    limit = limits.of(section, beat.steps_timed if beat else plan.get("call", 0))
    return {
        **line, "section": section.label, "step": beat.step if beat else None,
        "timeout_seconds": limit, "detected_seconds": delay,
        "ok": correct and delay <= limit + ALLOWED_SECONDS,
    }  # fmt: skip


def without_folders(text: str) -> str:
    """Remove folders from the paths in a text."""
    return re.sub(r"/\S*/", "", text)


def last_lines(logs: Path) -> dict[str, list[str]]:
    """Return the last log lines of each rank."""
    return {
        path.stem: without_folders(path.read_text(errors="replace")).splitlines()[-8:]
        for path in sorted(logs.glob("rank_*.log"))
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the missing cases; return 0 if all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=0, help="number of hangs")
    parser.add_argument("--deaths", type=int, default=0, help="number of killed ranks")
    parser.add_argument("--clean", type=int, default=0, help="number of runs without a fault")
    parser.add_argument("--slow", type=int, default=0, help="number of runs with a slow rank")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="KIND=NUMBER",
        help="only these cases; kinds: hang, death, clean, slow",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=STEPS, help="of clean and slow runs")
    campaign.add_options(parser, OUTPUT)
    parser.add_argument("--summary", action="store_true", help="print the table and exit")
    args = parser.parse_args(arguments)
    if args.summary:
        sys.stdout.write(faults.hangs(read_lines(args.output)))
        return 0
    counts = {"hang": args.cases, "death": args.deaths, "clean": args.clean, "slow": args.slow}
    cases = [(kind, number) for kind, count in counts.items() for number in range(count)]
    for item in args.only:
        kind, _, number = item.partition("=")
        if kind not in counts or not number.isdigit():
            parser.error(f"--only {item}: expected KIND=NUMBER, kinds {', '.join(counts)}")
        cases.append((kind, int(number)))
    program = "python -m tests.faults.hangs --only"
    keyed = [(f"{program} {kind}={case}", {"kind": kind, "case": case}) for kind, case in cases]
    with campaign.corpus_folder("hangs.") as folder:
        os.mkfifo(folder / "fifo")
        run = functools.partial(run_case, folder, args.steps)
        return campaign.run_missing(args, faults.HANGS_CODE, keyed, run)


if __name__ == "__main__":
    sys.exit(main())
