"""Processes of a node's ranks: their cores and environment, output, state and diagnostics.

GPUs and cores are assumed to be numbered in the same order over the sockets, as on DGX machines, so
that ranks in order are near their GPUs.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_deberta.cluster.watchdog.detection import STOPPED_STATES, RankView, Times
from megatron_deberta.cluster.watchdog.heartbeat import (
    DUMP_SIGNAL,
    FOLDER_VARIABLE,
    Beat,
    beat_path,
    read_beat,
    stacks_path,
)
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.observe.progress import Section

SYSTEM = Path("/sys/devices/system")
_TAIL_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 16
_POLL_MILLISECONDS = 100
_LAST_LINES = 20
_ERROR = re.compile(
    r"(?:\[rank\d+\]: )?(?:[A-Za-z_][\w.]*(?:Error|Exception)\b|megatron-deberta: )"
)
_MAX_CHARACTERS = 300
DUMP_SECONDS = 1.5
"""Time for ranks to write their stacks."""
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.M)
_COLLECTIVES = ("/torch/distributed/", "/deepspeed/")
"""The innermost Python frame of a rank in a collective is in a file of these folders."""


def numa_nodes(system: Path = SYSTEM) -> list[tuple[int, set[int]]]:
    """Return the number and the cores of each NUMA node, in order; empty without NUMA."""
    found = []
    for path in (system / "node").glob("node[0-9]*/cpulist"):
        cpus: set[int] = set()
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            if first:
                cpus |= set(range(int(first), int(last or first) + 1))
        found.append((int(path.parent.name.removeprefix("node")), cpus))
    return sorted(found)


def divide_cores(allowed: Set[int], ranks: int, system: Path = SYSTEM) -> list[set[int]]:
    """Divide cores among ranks in equal parts, in the order of sockets.

    Args:
        allowed: cores that the job may use on this node, including hyperthreads.
        ranks: ranks of the node.
        system: folder in which the kernel describes the machine.

    Returns:
        The cores of each rank; all cores for every rank if there are fewer cores than ranks.
    """
    if len(allowed) < ranks:
        return [set(allowed) for _ in range(ranks)]
    numa = {cpu: node for node, cpus in numa_nodes(system) for cpu in cpus}

    def place(cpu: int) -> tuple[int, int, int]:
        # Makes hyperthreads of a core neighbours.
        core = cpu
        with suppress(OSError, ValueError):
            core = int((system / "cpu" / f"cpu{cpu}" / "topology" / "core_id").read_text())
        return numa.get(cpu, 0), core, cpu

    ordered = sorted(allowed, key=place)
    share = len(ordered) // ranks
    return [set(ordered[rank * share : (rank + 1) * share]) for rank in range(ranks)]


class RankOutput:
    """Copies what a rank writes to its log, in a thread, and keeps its end.

    On a full disk the log is incomplete, and the end that is kept says why the rank failed.

    Args:
        log: the file, which is extended.
        is_shown: copy it to standard output, too.

    Attributes:
        descriptor: where the rank writes; ``start`` closes it in this process.
        problem: why the log is incomplete; empty: it is complete.
    """

    def __init__(self, log: Path, *, is_shown: bool = False) -> None:
        self.log, self.problem = log, ""
        self._is_shown = is_shown
        self._source, self.descriptor = os.pipe()
        self._tail = b""
        self._has_ended = False
        self._thread = threading.Thread(target=self._copy, daemon=True)

    def start(self) -> None:
        """Start to copy; the rank has its own descriptor by now."""
        os.close(self.descriptor)
        self._thread.start()

    def finish(self, seconds: float) -> None:
        """Copy what is left after the end of the rank; processes that it has left do not count.

        Args:
            seconds: time to wait; a disk that does not answer holds the copy up.
        """
        self._has_ended = True
        self._thread.join(seconds)

    def last_error(self) -> str:
        """Return the last line that names an error, or else the last line."""
        lines = self.last_lines()
        return _find_error(self._lines()) or (lines[-1].strip()[:_MAX_CHARACTERS] if lines else "")

    def last_lines(self) -> list[str]:
        """Return the last lines that are not empty."""
        return [line for line in self._lines() if line.strip()][-_LAST_LINES:]

    def _lines(self) -> list[str]:
        return self._tail.decode(errors="replace").splitlines()

    def _copy(self) -> None:
        target = -1
        try:
            target = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self.problem = error.strerror or str(error)
        poll = select.poll()
        poll.register(self._source, select.POLLIN)
        while True:
            if not poll.poll(_POLL_MILLISECONDS):
                if self._has_ended:
                    break
                continue
            block = os.read(self._source, _BLOCK_BYTES)
            if not block:
                break
            self._tail = (self._tail + block)[-_TAIL_BYTES:]
            self._write(target, block)
        os.close(self._source)
        if target >= 0:
            os.close(target)

    def _write(self, target: int, block: bytes) -> None:
        try:
            rest = block if target >= 0 else b""
            while rest:
                rest = rest[os.write(target, rest) :]
        except OSError as error:
            self.problem = error.strerror or str(error)
        if self._is_shown:
            try:
                sys.stdout.buffer.write(block)
                sys.stdout.flush()
            except OSError:
                # Nobody reads it any more.
                self._is_shown = False


def error_in_log(log: Path) -> str:
    """Return the last line of a log that names an error, cut to 300 characters; empty: none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return _find_error(lines)


def _find_error(lines: list[str]) -> str:
    found = next((line for line in reversed(lines) if _ERROR.match(line)), "")
    return found.removeprefix("megatron-deberta: ").strip()[:_MAX_CHARACTERS]


def same_error(first: str, second: str) -> bool:
    """Return whether two errors are the same up to numbers, such as ports and addresses."""
    left, right = (re.sub(r"0x[0-9a-f]+|\d+", "#", error) for error in (first, second))
    return bool(first) and left == right


@dataclass(frozen=True, slots=True)
class ProcessDiagnostics:
    """State of a process."""

    state: str
    """As in ``/proc/PID/stat``."""
    waiting: bool | None
    """Whether the innermost frame is in a collective; None without a stack."""
    detail: str
    stacks: str


def collect_diagnostics(folder: Path, pids: Mapping[int, int]) -> dict[int, ProcessDiagnostics]:
    """Collect diagnostics of this node's ranks, within about two seconds.

    Args:
        folder: folder of their heartbeats and stacks.
        pids: process by rank.
    """
    sizes: dict[int, int] = {}
    for rank, pid in pids.items():
        path = stacks_path(beat_path(folder, rank))
        # The signal would kill a process without a handler, and a stopped one does not get it.
        ready = read_beat(beat_path(folder, rank)) is not None
        if ready and process_state(pid) not in STOPPED_STATES:
            sizes[rank] = path.stat().st_size
            with suppress(ProcessLookupError):
                os.kill(pid, DUMP_SIGNAL)
    deadline = time.monotonic() + DUMP_SECONDS
    dumped: dict[int, str] = {}
    while len(dumped) < len(sizes) and time.monotonic() < deadline:
        time.sleep(0.05)
        for rank, size in sizes.items():
            text = stacks_path(beat_path(folder, rank)).read_bytes()[size:].decode(errors="replace")
            # faulthandler writes the main thread last.
            if text.endswith("\n") and "Current thread" in text:
                dumped[rank] = text
    return {
        rank: _inspect(pid, dumped.get(rank) or _py_spy(pid), rank in dumped)
        for rank, pid in pids.items()
    }


def _inspect(pid: int, stacks: str, is_dump: bool) -> ProcessDiagnostics:
    state = process_state(pid)
    # The thread that wrote, innermost frame first.
    current = stacks.rpartition("Current thread")[2] if is_dump else ""
    frames = [f"{m['file']}:{m['line']} {m['function']}" for m in _FRAME.finditer(current)]
    waiting = any(folder in frames[0] for folder in _COLLECTIVES) if frames else None
    states = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "stuck in the kernel"}
    parts = [states.get(state, ""), _system_call(pid), f"at {frames[0]}" if frames else ""]
    return ProcessDiagnostics(state, waiting, ", ".join(filter(None, parts)), stacks)


def process_state(pid: int) -> str:
    """Return the letter of ``/proc/PID/stat``, ``X`` if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def _system_call(pid: int) -> str:
    """Return what a process does in the kernel, empty where this may not be read."""
    found = []
    with suppress(OSError):
        number, *values = Path(f"/proc/{pid}/syscall").read_text().split()
        # The system call ``read`` on x86-64.
        if number == "0":
            found.append(f"reading {os.readlink(f'/proc/{pid}/fd/{int(values[0], 16)}')}")
    with suppress(OSError):
        channel = Path(f"/proc/{pid}/wchan").read_text().strip("0\n ")
        if channel:
            found.append(f"in {channel}")
    return ", ".join(found)


def _py_spy(pid: int) -> str:
    """Return the stacks of a process that cannot write them, empty without py-spy."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True, text=True, timeout=1.0, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """What a node runs."""

    run_dir: str
    attempt: str
    node: int
    """Number of this node in the job."""
    num_nodes: int
    host: str
    """Name by which the node can be excluded."""
    ranks_per_node: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Environment of every rank, without its rank variables."""
    logs: Path
    exit_wait_seconds: float
    config: ClusterConfig
    binds_cores: bool = False
    """Give each rank its own cores, near its GPU."""
    shows_rank_zero: bool = False
    """Copy what rank 0 writes to the supervisor's standard output."""

    def rank_environment(self, local_rank: int, num_cores: int, folder: Path) -> dict[str, str]:
        """Return the environment of a rank.

        Args:
            local_rank: number of the rank on the node.
            num_cores: cores that it may use.
            folder: folder of heartbeats.
        """
        variables: dict[str, object] = {
            "RANK": self.node * self.ranks_per_node + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.num_nodes * self.ranks_per_node,
            "LOCAL_WORLD_SIZE": self.ranks_per_node,
            FOLDER_VARIABLE: folder,
        }
        if self.binds_cores and "OMP_NUM_THREADS" not in self.environment:
            # Otherwise a rank would divide its own cores among all ranks again.
            variables["OMP_NUM_THREADS"] = num_cores
        return {**self.environment, **{key: str(value) for key, value in variables.items()}}


@dataclass(slots=True)
class RankProcess:
    """A rank's process and its state."""

    number: int
    process: subprocess.Popen[bytes]
    beat: Beat = field(
        default_factory=lambda: Beat(-1, Section.STARTUP, 0, time=time.monotonic_ns(), pid=0)
    )
    """Last heartbeat; before the first, one at the start of the process."""
    code: int | None = None
    ended: float = 0.0
    """Monotonic time in seconds."""
    killed: bool = False
    cause: str = ""
    """As in :class:`RankView`."""
    diagnostics: ProcessDiagnostics = ProcessDiagnostics("", None, "", "")
    output: RankOutput | None = None

    def view(self, plan: NodePlan, resumed: float) -> RankView:
        """Return the rank's state for a report.

        Args:
            plan: of its node.
            resumed: monotonic time at which the node was last resumed; ages count from there.
        """
        now, beat, found = time.monotonic(), self.beat, self.diagnostics
        return RankView(
            rank=self.number,
            node=plan.node,
            host=plan.host,
            section=beat.section,
            step=beat.step,
            position=beat.position,
            age=max(0.0, now - max(beat.time / 1e9, resumed)),
            pid=self.process.pid,
            state=found.state,
            waiting=found.waiting,
            detail=found.detail,
            code=self.code,
            ended=time.time() - now + self.ended if self.ended else 0.0,
            killed=self.killed,
            cause=self.cause,
        )

    def times(self) -> Times:
        """Return steps, and nanoseconds in data, forward and steps, since the start."""
        beat = self.beat
        return beat.steps_timed, beat.data_time, beat.forward_time, beat.step_time
