"""One SLURM job attempt, on the first node: history, rendezvous, ``srun`` of the ranks, requeue.

``job.sbatch`` starts ``python -m megatron_deberta.cluster.slurm.job job.json``. The ranks that it
starts each run ``megatron-deberta pretrain``.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import psutil

from megatron_deberta.cluster import node_check
from megatron_deberta.cluster.monitor import Notifier, export_once
from megatron_deberta.cluster.run_lock import raise_if_locked
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.history import BadNodes, Decision, JobHistory
from megatron_deberta.cluster.slurm.submit import (
    JobSpec,
    attempt_name,
    log_folder,
    read_cluster_config,
)
from megatron_deberta.cluster.watchdog.detection import Diagnosis
from megatron_deberta.cluster.watchdog.reports import ReportStore
from megatron_deberta.config import load_config
from megatron_deberta.errors import EXIT_DONE, EXIT_FAILURE, EXIT_NEVER_REQUEUE, ConfigError
from megatron_deberta.files import write_atomically
from megatron_deberta.observe.console import run_logged
from megatron_deberta.parsing import read_json, whole_number

logger = logging.getLogger("job")

ARRAY_TASK = "SLURM_ARRAY_TASK_ID"
"""Environment variable with the index of an array's element."""
PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TMPDIR", "PYTHONPATH")
"""Variables of the node that ranks get, besides SLURM's and those of job.json."""
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_FIRST_PORT, _NUM_PORTS = 12000, 20000


class JobAttempt:
    """One start of a job.

    Args:
        spec: the job.
        variables: environment of the batch script.
    """

    def __init__(self, spec: JobSpec, variables: Mapping[str, str]) -> None:
        self._spec = _for_allocated_nodes(spec, variables)
        self._variables = variables
        self._job = slurm.current_job(variables)
        self._restarts = whole_number(variables, "SLURM_RESTART_COUNT", 0)
        self._history = JobHistory(spec.run_dir)
        self._name = attempt_name(self._job, self._restarts)
        self._node_failure = ""
        # The ranks report a config that cannot be read.
        self._config = read_cluster_config(spec.config)
        self._bad_nodes = BadNodes(spec.run_dir, self._config.bad_node_hours)
        self._notifier = Notifier(self._config, spec.run_dir)

    def run(self) -> int:
        """Train until the ranks end, then requeue the job or end the run.

        Returns:
            The exit code of the batch script.
        """
        if reason := self._history.end_reason():
            logger.info("nothing to do: %s", reason)
            return EXIT_DONE
        if reason := self._history.stall_reason():
            return self._end(Decision(False, EXIT_NEVER_REQUEUE, reason), None)
        try:
            raise_if_locked(self._spec.run_dir)
        except ConfigError as error:
            return self._end(Decision(False, error.exit_code, str(error)), None)
        if (lost := self._history.unfinished_attempt()) is not None:
            self._notifier.send(
                "node_lost",
                f"attempt {lost['link']} on {lost['nodes']} was lost: its node or job was killed",
            )
        self._history.start_attempt(self._name, self._variables.get("SLURM_JOB_NODELIST", ""))
        try:
            code = self._train()
        except OSError as error:
            # Such as a full disk, which may have space when the job starts again.
            code, self._node_failure = EXIT_FAILURE, f"the attempt cannot start: {error}"
        info = slurm.job_info(self._job)
        has_successor = self._history.is_superseded(self._name)
        if whole_number(info, "Restarts", 0) > self._restarts or has_successor:
            # SLURM lost this node and restarted the job elsewhere; that attempt goes on.
            logger.warning("%s: superseded", self._name)
            return EXIT_FAILURE
        if _is_cancelled(info):
            # By scancel; a requeue would undo it.
            return self._end(Decision(False, EXIT_DONE, "cancelled by scancel"), code)
        diagnosis = ReportStore(self._spec.run_dir, self._name).diagnose(self._spec.nodes)
        if diagnosis is not None:
            logger.warning("%s: %s", self._name, diagnosis.reason)
            if node := self._bad_nodes.record_failure(diagnosis):
                self._notifier.send("node_lost", f"{node} is excluded: {diagnosis.reason}")
        reason = diagnosis.reason if diagnosis is not None else self._node_failure
        return self._end(self._history.decide(code, reason), code, diagnosis)

    def _train(self) -> int:
        """Run srun and return its exit code; signals to this process go to the ranks instead."""
        address = self._address()
        port = _FIRST_PORT + zlib.crc32(self._name.encode()) % _NUM_PORTS
        logs = log_folder(self._spec.run_dir, self._name)
        logs.mkdir(parents=True, exist_ok=True)
        write_atomically(logs / "job.json", self._spec.to_json())
        command = self._spec.srun_command(logs, f"{address}:{port}")
        environment = rank_environment(self._spec, self._variables)
        environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        if self._spec.node_check and (failure := self._check_nodes(logs, environment)):
            self._node_failure = failure
            return EXIT_FAILURE
        logger.info("%s: %s", self._name, " ".join(command))
        for number in PREEMPTION_SIGNALS:
            signal.signal(number, self._forward_signal)
        return subprocess.Popen(command, env=environment, start_new_session=True).wait()

    def _check_nodes(self, logs: Path, environment: Mapping[str, str]) -> str:
        """Check every node and record those that fail; return the failures, empty if none."""
        code = subprocess.Popen(self._spec.check_command(logs), env=environment).wait()
        if code == 0:
            return ""
        failures = node_check.failures(self._spec.run_dir, self._name, self._spec.nodes)
        for node, text in failures.items():
            self._bad_nodes.add(node, text, certain=True)
            self._notifier.send("node_lost", f"{node} failed the node check: {text}")
        listed = "; ".join(f"{node}: {text}" for node, text in failures.items())
        return f"the node check failed: {listed or f'see {logs}/check_*.log'}"

    def _forward_signal(self, number: int, frame: FrameType | None) -> None:
        logger.warning("%s: telling the ranks to save", signal.Signals(number).name)
        try:
            slurm.call(["scancel", f"--signal={self._spec.stop_signal}", self._job])
        except slurm.SlurmError as error:
            logger.warning("%s", error)

    def _address(self) -> str:
        """Return this node's address for the rendezvous; rank 0 runs here.

        Raises:
            ConfigError: ``rendezvous_interface`` does not exist or has no IPv4 address.
        """
        interface = self._spec.rendezvous_interface
        if not interface:
            return self._variables.get("SLURMD_NODENAME") or socket.gethostname()
        addresses = psutil.net_if_addrs()
        for entry in addresses.get(interface, []):
            if entry.family == socket.AF_INET:
                return str(entry.address)
        raise ConfigError(
            f"rendezvous_interface={interface} has no IPv4 address on {socket.gethostname()}; "
            f"use one of {', '.join(sorted(addresses))}"
        )

    def _end(self, decision: Decision, code: int | None, diagnosis: Diagnosis | None = None) -> int:
        """Record the end of the attempt, and requeue the job or cancel its successors."""
        self._history.end_attempt(self._name, decision, code)
        export_once(self._config, self._spec.run_dir)
        self._notifier.send_attempt_end(diagnosis, decision)
        logger.info("%s: %s", self._name, decision.reason)
        if not decision.continues:
            self._cancel_pending()
        elif self._spec.requeue:
            try:
                self._requeue()
            except slurm.SlurmError as error:
                # A scheduler that has requeued the job itself, or does not let users do it.
                logger.warning("%s", error)
        return decision.code

    def _requeue(self) -> None:
        """Requeue this job, and keep it away from bad nodes.

        Raises:
            SlurmError: SLURM rejects it.
        """
        excluded = self._excluded()
        for number in PREEMPTION_SIGNALS:
            # Nodes can be excluded for a pending job only, so this process must outlive the
            # requeue.
            signal.signal(number, signal.SIG_IGN if excluded else signal.SIG_DFL)
        slurm.call(["scontrol", "requeue", self._job])
        if excluded:
            nodes = ",".join(excluded)
            slurm.call(["scontrol", "update", f"JobId={self._job}", f"ExcNodeList={nodes}"])
            logger.info("%s: excluded nodes: %s", self._name, nodes)
        else:
            # SLURM ends this process; if it exited first, the job would count as completed.
            time.sleep(60)

    def _excluded(self) -> list[str]:
        """Return the nodes that the next attempt should avoid; empty if no node is bad.

        If there are more bad nodes than spare ones, those recorded last are excluded.
        """
        bad = list(self._bad_nodes.current())[::-1]
        if not bad:
            return []
        from_profile = [self._spec.exclude] if self._spec.exclude else []
        try:
            usable = set(slurm.usable_nodes(slurm.job_info(self._job).get("Partition", "")))
        except slurm.SlurmError as error:
            logger.warning("%s", error)
            return [*from_profile, *bad]
        excluded: list[str] = []
        for node in bad:
            if len(usable - {*excluded, node}) >= self._spec.least_nodes:
                excluded.append(node)
            else:
                logger.warning("%s is bad, but there is no spare node for it", node)
        return [*from_profile, *excluded] if excluded else []

    def _cancel_pending(self) -> None:
        """Cancel the jobs of this submission that are still pending."""
        for job in self._history.submitted_jobs():
            if job == self._job:
                continue
            try:
                slurm.cancel_pending(job)
            except slurm.SlurmError as error:
                logger.warning("%s", error)


def _for_allocated_nodes(spec: JobSpec, variables: Mapping[str, str]) -> JobSpec:
    """Return the job for the nodes that SLURM has allocated, which may be fewer than asked for."""
    allocated = whole_number(variables, "SLURM_JOB_NUM_NODES", spec.nodes)
    if allocated >= spec.nodes:
        return spec
    smaller = spec.for_nodes(load_config(spec.config), allocated)
    logger.warning("%d of %d nodes: running on %d", allocated, spec.nodes, smaller.nodes)
    return smaller


def _is_cancelled(info: Mapping[str, str]) -> bool:
    """Return whether somebody cancelled a job, from the fields of ``scontrol show job``.

    Between scancel and the end of its processes the job's state is COMPLETING, as it is after the
    time limit.
    """
    completing = info.get("JobState") == "COMPLETING" and info.get("Reason") != "TimeLimit"
    return completing or info.get("JobState") == "CANCELLED"


def rank_environment(spec: JobSpec, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the ranks: some of the node's, SLURM's, and that of job.json."""
    kept = {
        name: value
        for name, value in variables.items()
        if name in PASSED_ON or name.startswith(("LC_", "SLURM", "CUDA_VISIBLE"))
    }
    # Set by --export=NONE; srun would pass nothing on.
    kept.pop("SLURM_EXPORT_ENV", None)
    if spec.rendezvous_interface:
        kept["GLOO_SOCKET_IFNAME"] = spec.rendezvous_interface
    return kept | spec.environment


def job_file(argument: str, variables: Mapping[str, str]) -> str:
    """Return the ``job.json`` of a batch script; that of its element in an array.

    Args:
        argument: ``job.json`` or, in an array, ``jobs_N.json``.
        variables: environment of the batch script.
    """
    if not variables.get(ARRAY_TASK):
        return argument
    remedy = "submit the search again"
    files = read_json(Path(argument), list[str], "a list of jobs", remedy=remedy, error=ConfigError)
    index = whole_number(variables, ARRAY_TASK, 0)
    if index >= len(files):
        raise ConfigError(f"{argument}: no job {index}; {remedy}")
    return files[index]


def main(arguments: Sequence[str]) -> int:
    """Run a job attempt; an error becomes one line in the log and an exit code."""

    def run() -> int:
        spec = JobSpec.read(job_file(arguments[0], os.environ))
        return JobAttempt(spec, os.environ).run()

    return run_logged(run, logger)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
