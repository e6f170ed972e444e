"""A real SLURM of several nodes on one machine: munged, slurmctld and one slurmd per node.

Independent of the machine's own SLURM: ports, keys, sockets and spool folders are separate. All
daemons and files are removed at the end.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
SBIN = "/usr/sbin"
START_SECONDS = 60.0

CONFIGURATION = """\
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={folder}/task_prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=5
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout={slurmd_timeout}
KillWait=10
MinJobAge=3600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName=DEFAULT CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 \
RealMemory=8000 State=UNKNOWN
{nodes}
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10
"""

TASK_PROLOG = """\
#!/bin/sh
[ ! -e "{folder}/variables.$SLURMD_NODENAME" ] || cat "{folder}/variables.$SLURMD_NODENAME"
"""


def missing_programs() -> list[str]:
    """Return the SLURM programs that are not installed."""
    path = os.pathsep.join((os.environ.get("PATH", ""), SBIN))
    return [name for name in PROGRAMS if shutil.which(name, path=path) is None]


def free_ports(count: int) -> list[int]:
    """Return unused ports."""
    with ExitStack() as probes:
        ports = []
        for _ in range(count):
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
        return ports


def wait_until(condition: Callable[[], bool], seconds: float, event: str) -> None:
    """Return once the condition holds.

    Raises:
        TimeoutError: the condition does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{event}: not within {seconds:.0f} s")
        time.sleep(0.2)


class VirtualCluster:
    """Context that starts the daemons and finally kills all processes of the cluster.

    Args:
        folder: empty folder for keys, logs and state; its path must be short (socket names).
        num_nodes: nodes ``node1`` to ``nodeN``.
        slurmd_timeout: seconds without a response after which SLURM declares a node down.
    """

    def __init__(self, folder: Path, num_nodes: int = 4, slurmd_timeout: int = 10) -> None:
        self.folder = folder
        self.nodes = [f"node{number}" for number in range(1, num_nodes + 1)]
        controller_port, *self._ports = free_ports(num_nodes + 1)
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = self._environment()
        for name in ("state", "spool"):
            (folder / name).mkdir()
        for node in self.nodes:
            (folder / "spool" / node).mkdir()
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname(),
                controller_port=controller_port,
                user=getpass.getuser(),
                folder=folder,
                slurmd_timeout=slurmd_timeout,
                nodes="\n".join(
                    f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} "
                    "Gres=gpu:4"
                    for node, port in zip(self.nodes, self._ports, strict=True)
                ),
            )
        )
        self._write_devices()
        prolog = folder / "task_prolog"
        prolog.write_text(TASK_PROLOG.format(folder=folder))
        prolog.chmod(0o755)

    def _environment(self) -> dict[str, str]:
        """Return the environment with this cluster's SLURM variables only."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        path = os.pathsep.join((kept.get("PATH", ""), SBIN))
        return {**kept, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def _write_devices(self) -> None:
        """Declare four GPUs per node; SLURM requires device files but does not open them."""
        lines = [
            f"NodeName={node} Name=gpu File=/dev/{device}"
            for node in self.nodes
            for device in ("null", "zero", "full", "urandom")
        ]
        (self.folder / "gres.conf").write_text("\n".join(lines) + "\n")

    def __enter__(self) -> VirtualCluster:
        """Start every daemon and wait until all nodes are idle."""
        try:
            self._start_munge()
            self._spawn("slurmctld", "slurmctld", "-D", "-f", str(self.folder / "slurm.conf"))
            for node in self.nodes:
                self.start_node(node)
            wait_until(lambda: self.states() == dict.fromkeys(self.nodes, "IDLE"), START_SECONDS,
                       f"nodes idle, see {self.folder}")  # fmt: skip
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Kill all daemons, and the processes of jobs that survive their slurmd."""
        for daemon in self._daemons.values():
            daemon.kill()
        for daemon in self._daemons.values():
            daemon.wait()
        while strays := self._strays():
            for stray in strays:
                stray.kill()
            psutil.wait_procs(strays, timeout=5)

    def _strays(self) -> list[psutil.Process]:
        """Return processes with this cluster's configuration, and their slurmstepd parents.

        The environment of slurmstepd itself is empty.
        """
        configuration = f"{self.folder}/slurm.conf"
        strays = set()
        for process in psutil.process_iter():
            try:
                if (
                    process.pid == os.getpid()
                    or process.environ().get("SLURM_CONF") != configuration
                ):
                    continue
                strays.add(process)
                parent = process.parent()
                if parent is not None and parent.name().startswith("slurmstepd"):
                    strays.add(parent)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return sorted(strays, key=lambda process: process.pid)

    def _spawn(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self._spawn(
            "munged", "munged", "-F", "--force", "--num-threads=2", f"--key-file={key}",
            *(f"--{name}-file={self.folder}/munge.{name}" for name in ("log", "pid", "seed")),
            f"--socket={self.folder}/munge.socket",
        )  # fmt: skip
        wait_until((self.folder / "munge.socket").exists, START_SECONDS, "munged")

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        self._spawn(node, "slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"))

    def set_variable(self, node: str, name: str, value: str) -> None:
        """Set an environment variable of all tasks on a node, with SLURM's task prolog."""
        (self.folder / f"variables.{node}").write_text(f"export {name}={value}\n")

    def cut_off_node(self, node: str) -> None:
        """Make a running node unreachable for SLURM: SIGKILL to its slurmd only."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    def kill_node(self, node: str) -> list[int]:
        """Simulate a node failure: SIGKILL to its slurmd and to all processes of its steps.

        Returns:
            The killed processes.
        """
        daemon = psutil.Process(self._daemons[node].pid)
        # Stop all before killing, so that no process reports the end of another.
        daemon.suspend()
        victims = [
            process for process in self._strays() if process != daemon and _runs_on(process, node)
        ]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in (daemon, *victims):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        self._daemons[node].wait()
        return [process.pid for process in victims]

    def run(self, *command: str, check: bool = True) -> str:
        """Run a SLURM command on this cluster and return its output."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """Return the SLURM state of each node; empty while the controller does not respond."""
        lines = self.run("sinfo", "-h", "-N", "-p", "normal", "-o", "%N %T", check=False)
        pairs = (line.split() for line in lines.splitlines())
        return {name: state.upper() for name, state in pairs}

    def job(self, job_id: int) -> dict[str, str]:
        """Return the fields of ``scontrol show job``."""
        text = self.run("scontrol", "-o", "show", "job", str(job_id))
        return dict(item.split("=", 1) for item in text.split() if "=" in item)


def _runs_on(process: psutil.Process, node: str) -> bool:
    """Return whether a process is a step's slurmstepd on a node or one of its children."""
    try:
        family = process.children() if process.name().startswith("slurmstepd") else [process]
        return any(member.environ().get("SLURMD_NODENAME") == node for member in family)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
