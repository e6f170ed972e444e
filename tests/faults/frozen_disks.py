"""Frozen and full shared disks: no healthy run may be ended, and no node be excluded, for them.

Two supervisors with two gloo ranks each (TP 2 x DP 2, ZeRO-1, dropout) train in one run folder.
After some steps its disk is frozen (``fsfreeze`` of a loop-mounted ext4) or filled, as a whole or
under ``supervision/`` only, or one node's reports fail (EDQUOT) or are delayed (``strace``), or all
that node 0 and rank 0 write, for longer than the time-outs of all sections that the ranks pass.
Then the disk works again, except for the reports in some cases. A case passes if all ranks have
gone on and stop at SIGTERM with a checkpoint (exit code 75), without a diagnosis and without a bad
node.

Each case appends one JSON line to the output; existing cases are skipped, lines about other code do
not count. Root is needed, to mount.

  python -m tests.faults.frozen_disks --cases 30
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.lib.campaigns import RESULTS, read_lines
from benchmarks.tables import faults
from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.cluster.slurm.history import BadNodes
from megatron_deberta.cluster.watchdog.detection import Limits
from megatron_deberta.cluster.watchdog.ranks import NodePlan
from megatron_deberta.cluster.watchdog.reports import FOLDER, ReportStore
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import EXIT_REQUEUE
from megatron_deberta.observe.metrics import FILE_NAME
from tests.faults import campaign
from tests.faults.forked_ranks import ForkingSupervisor
from tests.support.jobs import free_port

OUTPUT = RESULTS / "frozen_disks.jsonl"
NODES, RANKS_PER_NODE = 2, 2
KINDS = (
    "frozen disk", "full disk", "frozen reports", "full reports", "quota of one node",
    "delayed reports of one node", "frozen mount of one node",
)  # fmt: skip
STEPS_BEFORE, STEPS_AFTER = 4, 3
SECONDS = 120.0
"""Maximum time of the start, and of the end."""
MIB = 1 << 20
RUN = (
    "parallel.tensor_parallel_size=2", "parallel.zero_stage=1", "train.micro_batch_size=2",
    "train.eval_every=5", "train.eval_batches=2", "checkpoint.save_every=4", "log.every=1",
    "optimizer.schedule=constant", "train.steps=1000000", "data.sample_log=false",
    "data.num_workers=0", "checkpoint.on_failure=continue", "checkpoint.keep_last=2",
    "cluster.startup_timeout_seconds=30", "cluster.data_timeout_seconds=8",
    "cluster.step_timeout_seconds=8", "cluster.save_timeout_seconds=8",
    "cluster.evaluation_timeout_seconds=8", "cluster.step_timeout_factor=4",
)  # fmt: skip


def plan_case(number: int) -> dict[str, Any]:
    """Choose the fault, the node, the step and the duration."""
    rng = random.Random(f"disk {number}")
    # Every fifth is longer than the time-out of the start-up, too, the longest one.
    seconds = rng.uniform(32, 36) if number % 5 == 4 else rng.uniform(10, 16)
    kind, node = KINDS[number % len(KINDS)], rng.randrange(NODES)
    if kind == "frozen mount of one node":
        # That of rank 0, which writes. The other node cannot know why nothing goes on, so the
        # longest time-out applies.
        seconds, node = rng.uniform(10, 16), 0
    return {
        "kind": kind, "node": node,
        "at_step": STEPS_BEFORE + rng.randrange(8), "delay_seconds": round(rng.random(), 3),
        "fault_seconds": round(seconds, 1),
    }  # fmt: skip


def call(*command: str | os.PathLike[str]) -> None:
    """Run a program.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")


@contextmanager
def ext4(image: Path, place: Path, megabytes: int) -> Iterator[None]:
    """Mount a new ext4 file system, which can be frozen."""
    with image.open("wb") as stream:
        stream.truncate(megabytes * MIB)
    call("mkfs.ext4", "-q", "-F", image)
    place.mkdir(parents=True, exist_ok=True)
    call("mount", "-o", "loop,noatime", image, place)
    try:
        yield
    finally:
        # Not frozen any more, unless the case failed in between.
        with suppress(RuntimeError):
            call("fsfreeze", "--unfreeze", place)
        call("umount", place)
        image.unlink()


def fill(place: Path) -> Path:
    """Fill a file system to the last byte, and return the file that does."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as stream:
        for size in (MIB, 4096, 1):
            with suppress(OSError):
                while True:
                    stream.write(bytes(size))
    return filler


@contextmanager
def strace(pids: list[int], calls: str, injection: str) -> Iterator[None]:
    """Inject faults into system calls of processes."""
    program = subprocess.Popen(
        ["strace", "-f", "-qq", "-o", "/dev/null", *(f"--attach={pid}" for pid in pids),
         "-e", f"trace={calls}", "-e", f"inject={calls}:{injection}"], start_new_session=True,
    )  # fmt: skip
    try:
        time.sleep(0.5)
        if program.poll() is not None:
            raise RuntimeError(f"strace ended with {program.returncode}")
        yield
    finally:
        program.send_signal(signal.SIGINT)
        program.wait()


class Nodes:
    """The supervisors of a run, as processes.

    Args:
        folder: for their logs.
        config: the run.
        arguments: arguments of the ranks.
    """

    def __init__(self, folder: Path, config: RunConfig, arguments: tuple[str, ...]) -> None:
        run_dir = Path(config.train.run_dir)
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self.codes: dict[int, int] = {}
        self.pids = []
        for node in range(NODES):
            plan = NodePlan(
                run_dir=str(run_dir), attempt="case", node=node, num_nodes=NODES,
                host=f"node{node}", ranks_per_node=RANKS_PER_NODE, logs=run_dir / "logs",
                exit_wait_seconds=10, command=arguments, environment={**os.environ, **rendezvous},
                config=config.cluster,
            )  # fmt: skip
            self.pids.append(_fork(lambda plan=plan: ForkingSupervisor(plan, _ignore).run(),
                                   folder / f"node_{node}.log"))  # fmt: skip

    def wait_until(self, is_reached: Callable[[], bool]) -> bool:
        """Wait; return False if a supervisor ended, or nothing happened for ``SECONDS``."""
        deadline = time.monotonic() + SECONDS
        while not is_reached():
            self._reap(os.WNOHANG)
            if self.codes or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def stop(self) -> list[int]:
        """Ask all for a checkpoint and the end; return their exit codes."""
        for node, pid in enumerate(self.pids):
            if node not in self.codes:
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + SECONDS
        while len(self.codes) < NODES and time.monotonic() < deadline:
            self._reap(os.WNOHANG)
            time.sleep(0.05)
        return [self.codes.get(node, -1) for node in range(NODES)]

    def kill(self) -> None:
        """Kill those that still run; their ranks die with them."""
        for node, pid in enumerate(self.pids):
            if node not in self.codes:
                os.kill(pid, signal.SIGKILL)
        self._reap(0)

    def _reap(self, options: int) -> None:
        for node, pid in enumerate(self.pids):
            if node not in self.codes:
                found, status = os.waitpid(pid, options)
                if found:
                    self.codes[node] = os.waitstatus_to_exitcode(status)


def _ignore(pids: list[int], folder: Path) -> None:
    """Add nothing to the fault."""


def _fork(run: Callable[[], int], log: Path) -> int:
    """Run a function in a fork of this process; its result is the exit code."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = run()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def count_records(run_dir: Path) -> int:
    """Return the number of records of steps so far."""
    path = run_dir / FILE_NAME
    return path.read_bytes().count(b'"kind":"train"') if path.exists() else 0


@contextmanager
def fault_of(plan: dict[str, Any], run_dir: Path, nodes: Nodes) -> Iterator[None]:
    """Keep the fault in force; remove it at the end."""
    place = run_dir if plan["kind"] in ("frozen disk", "full disk") else run_dir / FOLDER
    if plan["kind"] in ("frozen disk", "frozen reports"):
        call("fsfreeze", "--freeze", place)
        yield
        call("fsfreeze", "--unfreeze", place)
    elif plan["kind"] in ("full disk", "full reports"):
        filler = fill(place)
        yield
        filler.unlink()
    else:
        pids, calls = [nodes.pids[plan["node"]]], "rename"
        injection = f"delay_enter={int(plan['fault_seconds'] * 1e6)}:when=1"
        if plan["kind"] == "quota of one node":
            injection = "error=EDQUOT"
        if plan["kind"] == "frozen mount of one node":
            children = Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split()
            pids, calls = [*pids, int(children[0])], "rename,write"
        # Reports are published by a rename.
        with strace(pids, calls, injection):
            yield


def run_case(folder: Path, case: int) -> dict[str, Any]:
    """Run one case and return its result."""
    plan = plan_case(case)
    run_dir = folder / "run"
    overrides = (*RUN, f"train.run_dir={run_dir}")
    arguments = ("pretrain", str(folder / "corpus" / "run.yaml"), *overrides)
    config = load_config(folder / "corpus" / "run.yaml", overrides)
    place = run_dir if plan["kind"] in ("frozen disk", "full disk") else run_dir / FOLDER
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
        stack.enter_context(ext4(folder / "image", place, megabytes=48))
        nodes = Nodes(folder, config, arguments)
        stack.callback(nodes.kill)
        went_on = nodes.wait_until(lambda: count_records(run_dir) >= plan["at_step"])
        time.sleep(plan["delay_seconds"])
        before = count_records(run_dir)
        begin = time.monotonic()
        with fault_of(plan, run_dir, nodes):
            went_on &= nodes.wait_until(lambda: time.monotonic() > begin + plan["fault_seconds"])
            during = count_records(run_dir)
        after = during + STEPS_AFTER
        went_on &= nodes.wait_until(lambda: count_records(run_dir) >= after)
        codes = nodes.stop()
        diagnosis = ReportStore(run_dir, "case").diagnose(NODES)
        bad_nodes = BadNodes(run_dir, hours=24)
        if diagnosis is not None:
            bad_nodes.record_failure(diagnosis)
        line = {
            **plan, "went_on": went_on, "codes": codes, "records": [before, during, after],
            "committed": committed_steps(run_dir), "seconds": round(time.monotonic() - begin, 1),
            "timeout_seconds": Limits(config.cluster).longest(),
            "reason": diagnosis.reason if diagnosis else "", "bad_nodes": [*bad_nodes.current()],
        }  # fmt: skip
        line["ok"] = (
            went_on and codes == [EXIT_REQUEUE] * NODES and diagnosis is None
            and not line["bad_nodes"]
        )  # fmt: skip
        if not line["ok"]:
            line["logs"] = last_lines(folder, run_dir)
    return line


def last_lines(folder: Path, run_dir: Path) -> dict[str, list[str]]:
    """Return the last log lines of supervisors and ranks."""
    paths = [*folder.glob("node_*.log"), *(run_dir / "logs").glob("rank_*.log")]
    return {
        path.stem: path.read_text(errors="replace").replace(f"{folder}/", "").splitlines()[-8:]
        for path in sorted(paths)
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the missing cases; return 0 if all passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=30, help="number of cases")
    parser.add_argument("--only", type=int, nargs="+", default=[], metavar="NUMBER")
    campaign.add_options(parser, OUTPUT)
    parser.add_argument("--summary", action="store_true", help="print the table and exit")
    args = parser.parse_args(arguments)
    if args.summary:
        sys.stdout.write(faults.frozen_disks(read_lines(args.output)))
        return 0
    if not os.environ.get("MEGATRON_DEBERTA_TEST_MOUNTS"):
        # Mounts of its own, which end with it.
        os.environ["MEGATRON_DEBERTA_TEST_MOUNTS"] = "private"
        command = [sys.executable, "-m", "tests.faults.frozen_disks", *(arguments or sys.argv[1:])]
        return subprocess.run(["unshare", "--mount", *command]).returncode
    numbers = args.only or range(args.cases)
    program = "python -m tests.faults.frozen_disks --only"
    cases = [(f"{program} {number}", {"case": number}) for number in numbers]
    with campaign.corpus_folder("disks.") as folder:
        run = functools.partial(run_case, folder)
        return campaign.run_missing(args, faults.FROZEN_DISKS_CODE, cases, run)


if __name__ == "__main__":
    sys.exit(main())
