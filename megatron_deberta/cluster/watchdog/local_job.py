"""Supervised ranks on one machine, restarted after failures: the local form of ``slurm.job``."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence

from megatron_deberta.cluster.slurm.history import Decision, JobHistory
from megatron_deberta.cluster.slurm.submit import attempt_name, log_folder
from megatron_deberta.cluster.watchdog.ranks import NodePlan
from megatron_deberta.cluster.watchdog.report_store import ReportStore
from megatron_deberta.cluster.watchdog.supervisor import Supervisor
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import EXIT_REQUEUE

logger = logging.getLogger(__name__)

EXIT_WAIT_SECONDS = 30.0
"""Time that ranks may outlive the first that has ended."""


class LocalJob:
    """A run whose ranks are all on this machine.

    Args:
        config: configuration of the run, as the ranks read it.
        arguments: arguments of ``pretrain``.
        ranks: number of ranks.
        restarts: number of restarts after failures.
        environment: environment of the ranks; None: that of this process.
    """

    def __init__(
        self,
        config: RunConfig,
        arguments: Sequence[str],
        ranks: int,
        restarts: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._command = (sys.executable, "-m", "megatron_deberta", "pretrain", *arguments)
        self._ranks = ranks
        self._restarts = restarts
        self._environment = dict(os.environ if environment is None else environment)
        self._run_dir = config.train.run_dir
        self._history = JobHistory(self._run_dir)

    def run(self) -> int:
        """Train until the run has finished, cannot continue, or was told to stop.

        Returns:
            The exit code of the ranks; 93 after three attempts without a new checkpoint.
        """
        # In place of SLURM's job number; that of a later job is larger.
        job = str(int(time.time()))
        host = socket.gethostname()
        self._history.append("submit", links=self._restarts + 1, nodes=1)
        for restart in range(self._restarts + 1):
            attempt = attempt_name(job, restart)
            self._history.start_attempt(attempt, host)
            code = Supervisor(self._plan(attempt, host)).run()
            diagnosis = ReportStore(self._run_dir, attempt).diagnose(1)
            decision = self._history.decide(code, diagnosis.reason if diagnosis else "")
            # 75: a signal to this process asked for the end; its sender starts it again.
            restarts = decision.continues and code != EXIT_REQUEUE and restart < self._restarts
            self._history.end_attempt(
                attempt, Decision(restarts, decision.code, decision.reason), code
            )
            logger.warning("%s: %s%s", attempt, decision.reason, "; starting again" * restarts)
            if not restarts:
                return code if decision.continues else decision.code
        raise AssertionError("the last attempt is never restarted")

    def _plan(self, attempt: str, host: str) -> NodePlan:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return NodePlan(
            run_dir=self._run_dir,
            attempt=attempt,
            node=0,
            num_nodes=1,
            host=host,
            ranks_per_node=self._ranks,
            command=self._command,
            environment=self._environment | rendezvous,
            logs=log_folder(self._run_dir, attempt),
            exit_wait_seconds=EXIT_WAIT_SECONDS,
            config=self._config.cluster,
            rank_zero_inherits_output=True,
        )
