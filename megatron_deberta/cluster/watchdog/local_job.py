"""Supervised ranks on one machine, restarted after failures: the local form of ``slurm.job``."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from types import FrameType

from megatron_deberta.cluster.monitor import Notifier, export_once
from megatron_deberta.cluster.slurm.history import Decision, JobHistory
from megatron_deberta.cluster.slurm.submit import attempt_name, log_folder
from megatron_deberta.cluster.watchdog.ranks import NodePlan, error_in_log, same_error
from megatron_deberta.cluster.watchdog.reports import ReportStore
from megatron_deberta.cluster.watchdog.supervisor import FORWARDED, Supervisor
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import (
    EXIT_INTERRUPTED,
    EXIT_NEVER_REQUEUE,
    EXIT_REQUEUE,
    EXIT_USAGE,
)

logger = logging.getLogger(__name__)


def rank_command(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the command of each rank.

    Args:
        arguments: of ``pretrain``.
    """
    return (sys.executable, "-m", "megatron_deberta", "pretrain", *arguments)


def run_local_job(config: RunConfig, arguments: Sequence[str], ranks: int, restarts: int) -> int:
    """Train on this machine until the run has finished, cannot continue, or was told to stop.

    Args:
        config: configuration of the run, as the ranks read it.
        arguments: arguments of ``pretrain``.
        ranks: number of ranks.
        restarts: number of restarts after failures.

    Returns:
        The exit code of the ranks; 93 after three attempts without progress, or two that failed
        before the first step with the same error; 75, or 130 after SIGINT, if a stop signal came
        while no ranks ran.
    """
    received: set[signal.Signals] = set()

    def remember(number: int, frame: FrameType | None) -> None:
        received.add(signal.Signals(number))

    # A supervisor has its own handlers while its ranks run.
    handlers = {number: signal.signal(number, remember) for number in FORWARDED}
    try:
        return _run_attempts(config, arguments, ranks, restarts, received)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _run_attempts(
    config: RunConfig,
    arguments: Sequence[str],
    ranks: int,
    restarts: int,
    received: set[signal.Signals],
) -> int:
    """Run attempts until none follows; a signal in ``received`` ends the next one at its start."""
    run_dir = config.train.run_dir
    history = JobHistory(run_dir)
    notifier = Notifier(config.cluster, run_dir)
    # In place of SLURM's job number: date and time (UTC). That of a later job is larger.
    job = time.strftime("%Y%m%d%H%M%S", time.gmtime())
    before = history.path.stat().st_size if history.path.exists() else 0
    history.append("submit", links=restarts + 1, nodes=1)
    restart, former_error = 0, ""
    while True:
        attempt = attempt_name(job, restart)
        plan = _node_plan(config, arguments, ranks, attempt)
        history.start_attempt(attempt, plan.host)
        supervisor = Supervisor(plan, received)
        code = supervisor.run()
        if code == EXIT_USAGE and restart == 0:
            # Refused before the first step; a finished run stays one.
            history.forget(before)
            return code
        diagnosis = ReportStore(run_dir, attempt).diagnose(1)
        failed = diagnosis.ranks[0] if diagnosis and diagnosis.ranks else 0
        # After a full disk the log lacks it.
        error = error_in_log(plan.logs / f"rank_{failed}.log") or supervisor.errors.get(failed, "")
        error = error if code else ""
        reason = ": ".join(filter(None, (diagnosis.reason if diagnosis else "", error)))
        decision = history.decide(code, reason)
        startup_error = "" if _has_stepped(run_dir, attempt) else error
        if decision.continues and same_error(startup_error, former_error):
            repeated = f"two starts failed before the first step with the same error: {reason}"
            decision = Decision(False, EXIT_NEVER_REQUEUE, repeated)
        former_error = startup_error
        # A signal to this process asked for the end; its sender starts it again.
        is_stopped = bool(received) or code == EXIT_REQUEUE
        again = decision.continues and not is_stopped and restart < restarts
        decided = Decision(again, decision.code, decision.reason)
        history.end_attempt(attempt, decided, code)
        export_once(config.cluster, run_dir)
        notifier.send_attempt_end(diagnosis, decided)
        logger.warning("attempt %s: %s%s", attempt, decision.reason, "; starting again" * again)
        if not again and decision.continues and received:
            return EXIT_INTERRUPTED if signal.SIGINT in received else EXIT_REQUEUE
        if not again:
            return code if decision.continues else decision.code
        restart += 1


def _has_stepped(run_dir: str, attempt: str) -> bool:
    """Return whether a rank of an attempt did a step, or whether that is unknown."""
    reports = ReportStore(run_dir, attempt).read([0])
    return not reports or any(steps for steps, *_ in reports[0].times)


def _node_plan(config: RunConfig, arguments: Sequence[str], ranks: int, attempt: str) -> NodePlan:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return NodePlan(
        run_dir=config.train.run_dir,
        attempt=attempt,
        node=0,
        num_nodes=1,
        host=socket.gethostname(),
        ranks_per_node=ranks,
        command=rank_command(arguments),
        environment={**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        logs=log_folder(config.train.run_dir, attempt),
        exit_wait_seconds=30.0,
        config=config.cluster,
        shows_rank_zero=True,
    )
