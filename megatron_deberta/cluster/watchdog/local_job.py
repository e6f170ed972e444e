"""All ranks of a run on this one machine, watched, and started again where that can help.

Owns what ``link.py`` is under SLURM: history, restarts, their limit. Refuses to watch:
``supervisor.py`` does.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.slurm.submit import link_name, log_folder
from megatron_deberta.cluster.watchdog.report_store import ReportStore
from megatron_deberta.cluster.watchdog.supervisor import NodePlan, Supervisor
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import EXIT_REQUEUE

logger = logging.getLogger(__name__)

EXIT_WAIT_SECONDS = 30.0
"""How long ranks may outlive the first that has ended."""


class LocalLink:
    """A run of ranks of this machine.

    Args:
        config: the run, as the ranks read it.
        arguments: of ``pretrain``.
        ranks: how many to start.
        restarts: how often to start them again.
        environment: of the ranks.
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
        self._chain = JobHistory(self._run_dir)

    def run(self) -> int:
        """Train until the run is over, cannot go on, or was told to stop.

        Returns:
            The exit code of the ranks; 93 after three starts in a row without a new checkpoint.
        """
        began = str(int(time.time()))
        self._chain.append("submit", links=self._restarts + 1, nodes=1)
        for restart in range(self._restarts + 1):
            # As a job's number: later ones are larger.
            link = link_name(began, restart)
            host = socket.gethostname()
            self._chain.append("start", link=link, step=self._chain.committed_step(), nodes=host)
            logs = log_folder(self._run_dir, began, restart)
            code = Supervisor(self._plan(link, host, logs)).run()
            verdict = ReportStore(self._run_dir, link).verdict(1)
            decision = self._chain.decide(code, verdict.reason if verdict else "")
            # A signal to this process asked for an end; whoever sent it starts it again.
            goes_on = decision.goes_on and code != EXIT_REQUEUE and restart < self._restarts
            self._chain.append(
                "end", link=link, step=self._chain.committed_step(), code=code, goes_on=goes_on,
                reason=decision.reason,
            )  # fmt: skip
            logger.warning("%s: %s%s", link, decision.reason, "; starting again" * goes_on)
            if not goes_on:
                return code if decision.goes_on else decision.code
        raise AssertionError("the last start never goes on")

    def _plan(self, link: str, host: str, logs: Path) -> NodePlan:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return NodePlan(
            run_dir=self._run_dir,
            link=link,
            node=0,
            num_nodes=1,
            host=host,
            ranks_per_node=self._ranks,
            command=self._command,
            environment=self._environment | meeting,
            logs=logs,
            exit_wait_seconds=EXIT_WAIT_SECONDS,
            config=self._config.cluster,
            shows_rank_zero=True,
        )
