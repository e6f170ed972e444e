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
from megatron_deberta.cluster.bad_nodes import BadNodes
from megatron_deberta.cluster.run_lock import refuse_if_held
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.history import MAX_STALLED_LINKS, Decision, JobHistory
from megatron_deberta.cluster.slurm.submit import (
    JobSpec,
    check_command,
    for_nodes,
    link_name,
    log_folder,
    srun_command,
    stop_signal,
)
from megatron_deberta.cluster.watchdog.report_store import ReportStore
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_NEVER_REQUEUE,
    ConfigError,
    MegatronDebertaError,
)
from megatron_deberta.files import write_atomically

logger = logging.getLogger("link")

PASSED_ON = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TMPDIR", "PYTHONPATH")
"""Variables of the node that the ranks see, besides SLURM's and those of job.json."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_FIRST_PORT, _NUM_PORTS = 12000, 20000


class JobAttempt:
    """One start of a job.

    Args:
        spec: the job.
        variables: environment of the batch script.
    """

    def __init__(self, spec: JobSpec, variables: Mapping[str, str]) -> None:
        self._spec = _on_given_nodes(spec, variables)
        self._variables = variables
        self._job = variables["SLURM_JOB_ID"]
        self._restarts = int(variables.get("SLURM_RESTART_COUNT") or 0)
        self._chain = JobHistory(spec.run_dir)
        self._name = link_name(self._job, self._restarts)
        self._problem = ""
        self._bad_nodes = BadNodes(spec.run_dir, _bad_node_hours(spec))

    def run(self) -> int:
        """Train until the ranks end, and see to what follows.

        Returns:
            The exit code of the batch script.
        """
        if over := self._chain.is_over():
            logger.info("nothing to do: %s", over)
            return EXIT_DONE
        if (stalled := self._chain.stalled_links()) >= MAX_STALLED_LINKS:
            reason = f"{stalled} links in a row ended without a word and without progress"
            return self._end(Decision(False, EXIT_NEVER_REQUEUE, reason), None)
        try:
            refuse_if_held(self._spec.run_dir)
        except ConfigError as error:
            return self._end(Decision(False, error.exit_code, str(error)), None)
        self._chain.append(
            "start",
            link=self._name,
            step=self._chain.committed_step(),
            nodes=self._variables.get("SLURM_JOB_NODELIST", ""),
        )
        code = self._train()
        info = slurm.job_info(self._job)
        if int(info.get("Restarts", 0)) > self._restarts:
            # SLURM gave this node up and has started the job elsewhere; all is that link's to say.
            logger.warning("%s: superseded", self._name)
            return EXIT_FAILURE
        if info.get("JobState") == "CANCELLED":
            # Somebody's scancel; requeueing would undo it.
            return self._end(Decision(False, EXIT_DONE, "cancelled by scancel"), code)
        verdict = ReportStore(self._spec.run_dir, self._name).verdict(self._spec.nodes)
        if verdict is not None:
            logger.warning("%s: %s", self._name, verdict.reason)
            self._bad_nodes.record_failure(verdict)
        reason = verdict.reason if verdict is not None else self._problem
        return self._end(self._chain.decide(code, reason), code)

    def _train(self) -> int:
        """Run srun; signals to this process reach every rank, not srun, which they would end."""
        address = self._address()
        port = _FIRST_PORT + zlib.crc32(self._name.encode()) % _NUM_PORTS
        logs = log_folder(self._spec.run_dir, self._job, self._restarts)
        logs.mkdir(parents=True, exist_ok=True)
        write_atomically(logs / "job.json", self._spec.to_json())
        command = srun_command(self._spec, logs, f"{address}:{port}")
        environment = rank_environment(self._spec, self._variables)
        environment |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        if self._spec.node_check and (problem := self._check_nodes(logs, environment)):
            self._problem = problem
            return EXIT_FAILURE
        logger.info("%s: %s", self._name, " ".join(command))
        for number in STOP_SIGNALS:
            signal.signal(number, self._pass_on)
        return subprocess.Popen(command, env=environment, start_new_session=True).wait()

    def _check_nodes(self, logs: Path, environment: Mapping[str, str]) -> str:
        """Look at every node; mark those that fail. Empty if the ranks may start."""
        code = subprocess.Popen(check_command(self._spec, logs), env=environment).wait()
        if code == 0:
            return ""
        wrong = node_check.failures(self._spec.run_dir, self._name, self._spec.nodes)
        for node, text in wrong.items():
            self._bad_nodes.add(node, text, sure=True)
        found = "; ".join(f"{node}: {text}" for node, text in wrong.items())
        return f"the check of the nodes failed: {found or f'see {logs}/check_*.log'}"

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        logger.warning("%s: telling the ranks to save", signal.Signals(number).name)
        try:
            slurm.call(["scancel", f"--signal={stop_signal(self._spec)}", self._job])
        except slurm.SlurmError as error:
            logger.warning("%s", error)

    def _address(self) -> str:
        """Where the ranks meet: this node, which is rank 0's, on the right network.

        Raises:
            ConfigError: the profile's interface is not there or has no IPv4 address.
        """
        interface = self._spec.rendezvous_interface
        if not interface:
            return self._variables.get("SLURMD_NODENAME") or socket.gethostname()
        found = psutil.net_if_addrs()
        for entry in found.get(interface, []):
            if entry.family == socket.AF_INET:
                return str(entry.address)
        raise ConfigError(
            f"rendezvous_interface={interface} has no IPv4 address on {socket.gethostname()}; "
            f"there are {', '.join(sorted(found))}"
        )

    def _end(self, decision: Decision, code: int | None) -> int:
        """Write down what happened, and requeue or end the chain."""
        self._chain.append(
            "end",
            link=self._name,
            step=self._chain.committed_step(),
            code=code,
            goes_on=decision.goes_on,
            reason=decision.reason,
        )
        logger.info("%s: %s", self._name, decision.reason)
        if not decision.goes_on:
            self._cancel_pending()
        elif self._spec.requeue:
            excluded = self._excluded()
            for number in STOP_SIGNALS:
                # Only a job that waits can be told where not to run, so this process has to
                # outlive its requeue a little.
                signal.signal(number, signal.SIG_IGN if excluded else signal.SIG_DFL)
            try:
                slurm.call(["scontrol", "requeue", self._job])
                if excluded:
                    slurm.exclude(self._job, excluded)
                    logger.info("%s: to stay away from %s", self._name, ", ".join(excluded))
                    return decision.code
                # SLURM ends this process; leaving first would look like a completed job.
                time.sleep(60)
            except slurm.SlurmError as error:
                # A scheduler that has requeued it itself, or does not let users do it.
                logger.warning("%s", error)
        return decision.code

    def _excluded(self) -> list[str]:
        """Nodes that the next link shall stay away from; none if nothing is known against any.

        Of more bad nodes than there are spare ones, those marked last are avoided.
        """
        bad = list(self._bad_nodes.current())[::-1]
        if not bad:
            return []
        given = [self._spec.exclude] if self._spec.exclude else []
        try:
            nodes = set(slurm.usable_nodes(slurm.job_info(self._job).get("Partition", "")))
        except slurm.SlurmError as error:
            logger.warning("%s", error)
            return [*given, *bad]
        kept: list[str] = []
        for node in bad:
            if len(nodes - {*kept, node}) >= self._spec.least_nodes:
                kept.append(node)
            else:
                logger.warning("no spare node for %s, which is bad", node)
        return [*given, *kept] if kept else []

    def _cancel_pending(self) -> None:
        """Cancel the links of this chain that still wait."""
        others = [job for job in submitted_jobs(self._chain) if job != self._job]
        for job in others:
            try:
                slurm.cancel_pending(job)
            except slurm.SlurmError as error:
                logger.warning("%s", error)


def _on_given_nodes(spec: JobSpec, variables: Mapping[str, str]) -> JobSpec:
    """The job on the nodes of this link, of which SLURM may have given fewer than it wants."""
    given = int(variables.get("SLURM_JOB_NUM_NODES") or spec.nodes)
    if given >= spec.nodes:
        return spec
    fitting = for_nodes(spec, load_config(spec.config), given)
    logger.warning("%d of %d nodes: goes on with %d", given, spec.nodes, fitting.nodes)
    return fitting


def _bad_node_hours(spec: JobSpec) -> float:
    """``cluster.bad_node_hours``; a configuration that cannot be read is the ranks' to refuse."""
    try:
        return load_config(spec.config).cluster.bad_node_hours
    except (ConfigError, OSError):
        return ClusterConfig().bad_node_hours


def submitted_jobs(chain: JobHistory) -> list[str]:
    """SLURM's numbers of the jobs of the last submission."""
    return [
        str(job)
        for record in chain.current()
        if record["event"] == "jobs"
        for job in record["jobs"]
    ]


def rank_environment(spec: JobSpec, variables: Mapping[str, str]) -> dict[str, str]:
    """What the ranks see: a few of the node's variables, SLURM's, and those of job.json."""
    kept = {
        name: value
        for name, value in variables.items()
        if name in PASSED_ON or name.startswith(("LC_", "SLURM", "CUDA_VISIBLE"))
    }
    # From --export=NONE; srun would pass nothing on.
    kept.pop("SLURM_EXPORT_ENV", None)
    if spec.rendezvous_interface:
        kept["GLOO_SOCKET_IFNAME"] = spec.rendezvous_interface
    return kept | spec.environment


def main(arguments: Sequence[str]) -> int:
    """Run a link; errors become one line in its log and an exit code."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    try:
        return JobAttempt(JobSpec.read(arguments[0]), os.environ).run()
    except MegatronDebertaError as error:
        logger.error("error: %s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
