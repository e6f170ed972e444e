"""Supervisors with processes as ranks, without torch.

The ranks' ``barrier`` is in a folder ``torch/distributed``, like the functions that real ranks wait
in.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatron_deberta.cluster.profile import ClusterProfile
from megatron_deberta.cluster.slurm.submit import make_spec
from megatron_deberta.cluster.watchdog.detection import Diagnosis
from megatron_deberta.cluster.watchdog.reports import ReportStore
from tests.support.jobs import ROOT

ATTEMPT = "7.0"
RUN = """
cluster: {{startup_timeout_seconds: {startup},
  data_timeout_seconds: {limit}, step_timeout_seconds: {limit},
  save_timeout_seconds: {limit}, evaluation_timeout_seconds: {limit}, straggler_window_steps: 10}}
"""
STARTUP_EXIT_SECONDS = 1.0
SUPERVISOR = f"""
import sys
from megatron_deberta.cluster.watchdog import supervisor

# The tests would wait for the intervals of real runs most of the time.
supervisor.POLL_SECONDS, supervisor.REPORT_SECONDS = 0.02, 0.1
supervisor.MIN_NEWS_SECONDS = supervisor.DIAGNOSTICS_SECONDS = supervisor.PAUSE_SECONDS = 1.0
supervisor.STARTUP_EXIT_SECONDS = {STARTUP_EXIT_SECONDS}
sys.exit(supervisor.main(sys.argv[1:]))
"""
"""Program of a supervisor."""
BARRIER = """
import os, time

def barrier(folder, name, world, flag=False):
    # One byte per rank.
    file = os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.write(file, b"y" if flag else b"n")
    # Calls no Python function, so that this file is the innermost frame of a stack.
    while os.fstat(file).st_size < world:
        time.sleep(0.005)
    flags = os.pread(file, world, 0)
    os.close(file)
    return b"y" in flags
"""
RANK = """
import json, os, pathlib, signal, sys, time
from megatron_deberta.cluster.watchdog.heartbeat import Heartbeat
from megatron_deberta.observe.progress import Section

folder = os.environ["MEGATRON_DEBERTA_TEST"]
plan = json.loads(pathlib.Path(folder, "plan.json").read_text())
sys.path.insert(0, folder + "/torch/distributed")
from barrier_of_a_test import barrier

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
signals = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
    signal.signal(number, lambda number, frame: signals.append(number))

def fault(place, step):
    if plan.get("rank") != rank or plan["place"] != place or plan["step"] != step:
        return
    pathlib.Path(folder, "fault").write_text(str(time.time()))
    if plan["how"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if plan["how"] == "import":
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        time.sleep(100)
    if plan["how"] == "read":
        os.read(os.open(folder + "/fifo", os.O_RDWR), 1)
    if plan["how"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if isinstance(plan["how"], int):
        print(plan.get("last_words", ""), end="", file=sys.stderr)
        sys.exit(plan["how"])

with Heartbeat.of_this_rank(rank) as heartbeat:
    fault("startup", 0)
    for step in range(plan["steps"]):
        begin = time.perf_counter_ns()
        heartbeat.enter(Section.DATA, step)
        fault("data", step)
        heartbeat.enter(Section.STEP)
        forward = time.perf_counter_ns()
        fault("step", step)
        time.sleep(plan.get("slow_seconds", 0.0) if rank == plan.get("slow") else 0.002)
        heartbeat.add_times(forward=time.perf_counter_ns() - forward)
        ends = barrier(folder, f"step{step}", world, bool(signals))
        heartbeat.add_times(steps=1, whole=time.perf_counter_ns() - begin)
        heartbeat.enter(Section.AFTER, step + 1)
        with heartbeat.section(Section.SAVE):
            fault("save", step)
            barrier(folder, f"save{step}", world)
        if step == 2:
            print("rank", rank, "of", world, "steps", flush=True)
        if ends:
            print("received", *signals, flush=True)
            sys.exit(130 if signal.SIGINT in signals else 75)
"""


class WatchedRanks:
    """Nodes of ranks and their program.

    Args:
        folder: an empty folder.
        nodes: number of supervisors.
        ranks_per_node: ranks of each.
        limit: time-out in seconds of every section except start-up.
        startup: time-out in seconds of the start-up.
        exit_wait: seconds that ranks may run after the first exit.
        plan: ``steps``; and ``rank``, ``place``, ``step``, ``how`` of a fault.
    """

    def __init__(
        self, folder: Path, *, nodes: int = 1, ranks_per_node: int = 2, limit: float = 1.0,
        startup: float = 20.0, exit_wait: int = 1, **plan: Any,
    ) -> None:  # fmt: skip
        self.folder, self.run_dir, self.nodes = folder, folder / "run", nodes
        os.mkfifo(folder / "fifo")
        place = folder / "torch" / "distributed"
        place.mkdir(parents=True)
        (place / "barrier_of_a_test.py").write_text(BARRIER)
        (folder / "plan.json").write_text(json.dumps({"steps": 20, **plan}))
        (folder / "run.yaml").write_text(RUN.format(limit=limit, startup=startup))
        (folder / "rank.py").write_text(RANK)
        python = folder / "python"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/rank.py"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        profile = ClusterProfile(
            ranks_per_node=ranks_per_node, python=str(python), exit_wait_seconds=exit_wait
        )
        spec = make_spec(
            profile, nodes=nodes, run_dir=self.run_dir, job_name="run", submission=folder,
            allow_config_change=False,
        )  # fmt: skip
        (folder / "job.json").write_bytes(spec.to_json())
        self.supervisors: list[subprocess.Popen[str]] = []

    def start(self) -> None:
        """Start one supervisor per node, like srun."""
        command = [sys.executable, "-c", SUPERVISOR]
        for node in range(self.nodes):
            environment = {
                **os.environ, "PYTHONPATH": str(ROOT), "MEGATRON_DEBERTA_TEST": str(self.folder),
                "SLURM_NODEID": str(node), "SLURMD_NODENAME": f"node{node}",
            }  # fmt: skip
            self.supervisors.append(
                subprocess.Popen(
                    [*command, str(self.folder / "job.json"), ATTEMPT],
                    env=environment, stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip

    def end(self) -> list[int]:
        """Return exit codes by node; logs are in ``logs``."""
        self.logs = [process.communicate(timeout=60)[1] for process in self.supervisors]
        self.ended = time.time()
        return [process.returncode for process in self.supervisors]

    def run(self) -> list[int]:
        """Start, and wait for the end."""
        self.start()
        return self.end()

    def diagnosis(self) -> Diagnosis | None:
        """Return the supervisors' diagnosis."""
        return ReportStore(self.run_dir, ATTEMPT).diagnose(self.nodes)

    def seconds_since_fault(self) -> float:
        """Return the seconds from the fault to the end of the supervisors."""
        return self.ended - float((self.folder / "fault").read_text())

    def log(self, rank: int) -> str:
        """Return the output of a rank."""
        return (self.run_dir / "logs" / ATTEMPT / f"rank_{rank}.log").read_text()

    def processes(self) -> list[int]:
        """Return the ranks that are running."""
        script, pids = str(self.folder / "rank.py").encode(), []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if script in path.read_bytes().split(b"\0"):
                    pids.append(int(path.parent.name))
            except OSError:
                continue
        return pids
