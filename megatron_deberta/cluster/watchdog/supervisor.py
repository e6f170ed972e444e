"""Supervisor of a node's ranks: starts them, watches them and reports why they ended.

``srun`` starts one per node: ``python -m megatron_deberta.cluster.watchdog.supervisor job.json
NAME``. On a single machine ``megatron-deberta launch`` runs it, and again after failures
(``run_local_job``, the local form of ``slurm.job``). It does not import torch.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from types import FrameType

from megatron_deberta.cluster.monitor import Notifier, RunMonitor, export_once
from megatron_deberta.cluster.slurm.history import HARMLESS, Decision, JobHistory
from megatron_deberta.cluster.slurm.submit import JobSpec, attempt_name, log_folder
from megatron_deberta.cluster.watchdog.detection import (
    Diagnosis,
    Limits,
    StragglerWatch,
    diagnose_hang,
    diagnose_missing_node,
)
from megatron_deberta.cluster.watchdog.heartbeat import (
    MEMORY_FOLDER,
    beat_path,
    beats_folder,
    is_memory_full,
    read_beat,
)
from megatron_deberta.cluster.watchdog.ranks import (
    NodePlan,
    ProcessDiagnostics,
    RankOutput,
    RankProcess,
    collect_diagnostics,
    divide_cores,
    error_in_log,
    same_error,
)
from megatron_deberta.cluster.watchdog.reports import (
    NodeReport,
    ReportExchange,
    ReportStore,
    find_overdue,
)
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_NEVER_REQUEUE,
    EXIT_REQUEUE,
    EXIT_USAGE,
)
from megatron_deberta.files import write_atomically
from megatron_deberta.observe.console import run_logged
from megatron_deberta.parsing import whole_number
from megatron_deberta.processes import die_with_parent

logger = logging.getLogger("supervisor")

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
POLL_SECONDS = 0.2
REPORT_SECONDS = 0.5
"""Interval of reports to the other nodes."""
DIAGNOSTICS_SECONDS = 2.5
"""Time to wait for other nodes' diagnostics after this node's own."""
FINAL_REPORT_SECONDS = 10.0
"""Time to wait for the disk at the end."""
OUTPUT_SECONDS = 2.0
"""Time to wait for the rest of a rank's output after its end."""
FROZEN_SECONDS = 5.0
"""If the run folder has not answered for so long, ranks may be waiting for it, too."""
MIN_NEWS_SECONDS = 3.0
"""A node that has sent no report for this time, or half a time-out, is silent."""
STARTUP_EXIT_SECONDS = 5.0
"""Time that the others get to log their errors when a rank failed before the first step: no rank
has anything to save then."""
PAUSE_SECONDS = 2.0
"""After a gap of this length between polls, node and ranks are taken to have been suspended."""


class Supervisor:
    """Runs a node's ranks once.

    Args:
        plan: what to run.
        received: stop signals that came before ``run``; later ones are added.

    Attributes:
        errors: last error, or else last line, of each rank that failed.
    """

    def __init__(self, plan: NodePlan, received: set[signal.Signals] | None = None) -> None:
        self._plan = plan
        self._received = set() if received is None else received
        self._store = ReportStore(plan.run_dir, plan.attempt)
        self._exchange = ReportExchange(self._store, plan.node, plan.num_nodes)
        first = plan.node * plan.ranks_per_node
        self._folder = beats_folder(range(first, first + plan.ranks_per_node))
        self._ranks: list[RankProcess] = []
        self._step_times: deque[float] = deque(maxlen=50)
        self._serial = 0
        self.errors: dict[int, str] = {}
        self._started = self._polled = self._resumed = time.monotonic()
        self._has_warned_of_disk = False
        self._unrecorded = next(iter(self._received), None)
        self._alarm = ""
        self._has_diagnostics = False
        self._diagnosis: Diagnosis | None = None
        self._watch_stragglers = StragglerWatch(
            plan.config.straggler_factor, plan.config.straggler_window_steps
        )
        self._stragglers: tuple[int, ...] = ()

    def run(self) -> int:
        """Run until every rank of this node has ended.

        Returns:
            93 or 2 if a rank exited with it; else 130 after SIGINT, 1 if a rank failed or hung,
            75 if one exited with it, or 0.
        """
        plan = self._plan
        with ExitStack() as at_exit:
            at_exit.callback(shutil.rmtree, self._folder, ignore_errors=True)
            for number in FORWARDED:
                at_exit.callback(signal.signal, number, signal.signal(number, self._forward))
            at_exit.callback(self._kill)
            cores = divide_cores(os.sched_getaffinity(0), plan.ranks_per_node)
            for local_rank in range(plan.ranks_per_node):
                self._ranks.append(self._start(local_rank, len(cores[local_rank])))
                # One that came meanwhile has reached the ranks before this one only.
                for number in self._received:
                    self._ranks[-1].process.send_signal(number)
                if plan.binds_cores:
                    # Before it starts a second thread.
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(self._ranks[-1].process.pid, cores[local_rank])
            with RunMonitor(plan.config, plan.run_dir) if plan.node == 0 else nullcontext():
                code = self._watch()
            self._report(code)
            if not self._exchange.flush(FINAL_REPORT_SECONDS):
                logger.warning("the run folder does not answer: no final report")
            return code

    def _start(self, local_rank: int, num_cores: int) -> RankProcess:
        plan = self._plan
        number = plan.node * plan.ranks_per_node + local_rank
        environment = plan.rank_environment(local_rank, num_cores, self._folder)
        with suppress(OSError):  # a full disk
            plan.logs.mkdir(parents=True, exist_ok=True)
        is_shown = plan.shows_rank_zero and number == 0
        output = RankOutput(plan.logs / f"rank_{number}.log", is_shown=is_shown)
        try:
            return RankProcess(number, self._popen(environment, output.descriptor), output=output)
        finally:
            output.start()

    def _popen(self, environment: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
        """Start a rank's process, which dies with this one."""
        return subprocess.Popen(
            self._plan.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C on a terminal reaches the supervisor only.
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on; a second SIGINT kills."""
        received = self._unrecorded = signal.Signals(number)
        is_second = received == signal.SIGINT and received in self._received
        passed_on = signal.SIGKILL if is_second else received
        self._received.add(received)
        for rank in self._ranks:
            if rank.process.returncode is None:
                with suppress(ProcessLookupError):
                    rank.process.send_signal(passed_on)

    def _watch(self) -> int:
        """Poll ranks and exchange reports until all ranks of this node have ended."""
        next_report = 0.0
        others_ended: float | None = None
        wait = self._plan.exit_wait_seconds
        while True:
            self._poll()
            self._record_stop()
            if all(rank.code is not None for rank in self._ranks):
                return self._code()
            now = time.monotonic()
            ended = [rank.ended for rank in self._ranks if rank.code is not None]
            if ended and now - min(ended) > (limit := self._exit_wait()):
                logger.warning("killing ranks that run %.0f s after another has ended", limit)
                self._kill()
                continue
            if now >= next_report:
                next_report = now + REPORT_SECONDS
                self._report(None)
                reports = self._exchange.others()
                codes = [r.code for r in reports.values() if r.code is not None]
                # An alarm counts also if its node has already ended because of it.
                alarmed = any(report.alarm for report in reports.values())
                if not ended and (alarmed or not codes) and self._detect_hang(reports):
                    self._kill()
                    return EXIT_FAILURE
                final = [code for code in codes if code in (EXIT_USAGE, EXIT_NEVER_REQUEUE)]
                others_ended = others_ended or (now if codes else None)
                if final or (others_ended and now - others_ended > wait):
                    logger.warning("another node has ended with exit codes %s", codes)
                    self._kill()
                    return max([*final, EXIT_FAILURE])
                self._compare(reports)
            time.sleep(POLL_SECONDS)

    def _exit_wait(self) -> float:
        """Return the seconds that ranks may run after another has ended."""
        wait = self._plan.exit_wait_seconds
        codes = {rank.code for rank in self._ranks} - {None, *HARMLESS}
        return min(wait, STARTUP_EXIT_SECONDS) if codes and not self._has_stepped() else wait

    def _poll(self) -> None:
        """Read the heartbeats and exit codes of the ranks."""
        now = time.monotonic()
        is_frozen = self._exchange.blocked_seconds() > FROZEN_SECONDS
        if is_frozen and not self._has_warned_of_disk:
            logger.warning("the run folder does not answer; until it does, nothing counts as hang")
        self._has_warned_of_disk = is_frozen
        if is_frozen or now - self._polled > PAUSE_SECONDS:
            self._resumed = now
        self._polled = now
        for rank in self._ranks:
            before, beat = rank.beat, read_beat(beat_path(self._folder, rank.number))
            if beat is not None:
                rank.beat = beat
                steps = beat.steps_timed - before.steps_timed
                if before.position >= 0 and steps > 0 and rank is self._ranks[0]:
                    seconds = (beat.step_time - before.step_time) / 1e9
                    self._step_times.append(seconds / steps)
            if rank.code is None and (code := rank.process.poll()) is not None:
                rank.code, rank.ended = code, time.monotonic()
                # Before it handles signals, a stop signal ends a rank; that is no failure.
                rank.killed = rank.killed or -code in self._received
                if code == -signal.SIGBUS and is_memory_full():
                    rank.cause = f"{MEMORY_FOLDER} is full"
                self._log_end(rank, code)

    def _log_end(self, rank: RankProcess, code: int) -> None:
        """Log a rank's end, after its last lines."""
        error = ""
        if rank.output is not None:
            is_frozen = self._exchange.blocked_seconds() > FROZEN_SECONDS
            rank.output.finish(0.0 if is_frozen else OUTPUT_SECONDS)
            if code not in HARMLESS and not rank.killed:
                error = rank.output.last_error()
                self.errors[rank.number] = error
            if rank.output.problem:
                logger.warning(
                    "%s is incomplete (%s); its last lines:\n%s",
                    rank.output.log, rank.output.problem, "\n".join(rank.output.last_lines()),
                )  # fmt: skip
        level = logging.INFO if code in (EXIT_DONE, EXIT_REQUEUE) else logging.WARNING
        text = ": ".join(filter(None, (f"rank {rank.number} ended with exit code {code}", error)))
        logger.log(level, "%s", text)

    def _record_stop(self) -> None:
        """Record at which stage a stop signal came: the node may be gone before the ranks end."""
        number, self._unrecorded = self._unrecorded, None
        if number is None or self._plan.node:
            return
        record = {
            "link": self._plan.attempt, "signal": number.name,
            "starting": self._ranks[0].beat.steps_timed == 0,
        }  # fmt: skip
        history = JobHistory(self._plan.run_dir)
        self._exchange.submit(functools.partial(history.append, "signal", **record))

    def _report(self, code: int | None) -> None:
        """Publish this node's report; ``code`` is its exit code, None while it trains."""
        self._serial += 1
        self._exchange.publish(replace(self._own_report(), code=code))

    def _own_report(self) -> NodeReport:
        """Return this node's report as of now, which does not depend on any disk."""
        limits = self._limits()
        views = tuple(rank.view(self._plan, self._resumed) for rank in self._ranks)
        times = tuple(rank.times() for rank in self._ranks)
        return NodeReport(
            node=self._plan.node,
            host=self._plan.host,
            serial=self._serial,
            views=views,
            limits=tuple(
                limits.of(view.section, steps)
                for view, (steps, *_) in zip(views, times, strict=True)
            ),
            times=times,
            alarm=self._alarm,
            has_diagnostics=self._has_diagnostics,
            diagnosis=self._diagnosis,
        )

    def _limits(self) -> Limits:
        return Limits(self._plan.config, tuple(self._step_times))

    def _detect_hang(self, reports: Mapping[int, NodeReport]) -> bool:
        """Detect a hang and diagnose its cause, which takes seconds."""
        overdue = next((report.alarm for report in reports.values() if report.alarm), "")
        overdue = overdue or self._overdue(reports)
        if not overdue:
            return False
        self._alarm = overdue
        self._report(None)
        running = {rank.number: rank.process.pid for rank in self._ranks if rank.code is None}
        for number, found in collect_diagnostics(self._folder, running).items():
            self._ranks[number - self._ranks[0].number].diagnostics = found
            self._log_stacks(number, found)
        self._has_diagnostics = True
        self._report(None)
        self._diagnosis = self._diagnose(self._wait_for_diagnostics(), overdue)
        logger.error("%s", self._diagnosis.reason)
        return True

    def _wait_for_diagnostics(self) -> dict[int, NodeReport]:
        """Return the others' reports once all have diagnostics, or the time for that is over."""
        deadline = time.monotonic() + DIAGNOSTICS_SECONDS
        while True:
            reports = self._exchange.others()
            complete = all(report.has_diagnostics for report in reports.values())
            if complete or time.monotonic() > deadline:
                return reports
            time.sleep(POLL_SECONDS)
            self._report(None)

    def _diagnose(self, reports: Mapping[int, NodeReport], overdue: str) -> Diagnosis:
        # The first node's diagnosis counts, so that all logs name the same rank.
        known = [report.diagnosis for report in reports.values() if report.diagnosis is not None]
        if known:
            return known[0]
        absent = self._absent(reports)
        if absent and not self._has_stepped():
            return diagnose_missing_node(absent, self._plan.num_nodes)
        answered = [
            report
            for report in reports.values()
            if report.has_diagnostics or report.code is not None
        ]
        silent = [report.host for report in reports.values() if report not in answered]
        silent += [f"node {node} of the job" for node in absent]
        views = [view for report in (self._own_report(), *answered) for view in report.views]
        return diagnose_hang(views, overdue, silent)

    def _overdue(self, reports: Mapping[int, NodeReport]) -> str:
        """Return which nodes or ranks are overdue, empty if none are.

        All ranks soon stop if one hangs, so there is no hang while the ranks of this node progress,
        whatever the reports of others say, or do not say.
        """
        own, absent = self._own_report(), self._absent(reports)
        if absent and not self._has_stepped():
            startup = self._plan.config.startup_timeout_seconds
            is_late = time.monotonic() - self._started > startup
            capped = replace(own, limits=tuple(min(limit, startup) for limit in own.limits))
            missing = diagnose_missing_node(absent, self._plan.num_nodes)
            return missing.reason if is_late and find_overdue([capped]) else ""
        if not find_overdue([own]):
            return ""
        if absent or self._exchange.silent(max(MIN_NEWS_SECONDS, min(own.limits) / 2)):
            # A rank there may rightly be in the slowest section.
            longest = self._limits().longest()
            return find_overdue([replace(own, limits=(longest,) * len(own.limits))])
        return find_overdue([own, *reports.values()])

    def _absent(self, reports: Mapping[int, NodeReport]) -> list[int]:
        """Return the other nodes that never reported; this one may be unable to write."""
        others = (node for node in range(self._plan.num_nodes) if node != self._plan.node)
        return [node for node in others if node not in reports]

    def _has_stepped(self) -> bool:
        """Return whether a rank of this node has done a step, which takes the ranks of all."""
        return any(rank.beat.steps_timed for rank in self._ranks)

    def _log_stacks(self, number: int, found: ProcessDiagnostics) -> None:
        logger.error("rank %d: state %s, %s", number, found.state, found.detail or "no stack")
        if found.stacks:
            path = self._store.folder / f"stacks_rank_{number}.txt"
            content = found.stacks.encode(errors="replace")
            self._exchange.submit(functools.partial(write_atomically, path, content, durable=False))

    def _compare(self, reports: Mapping[int, NodeReport]) -> None:
        """Report changes of the set of stragglers, on the first node only."""
        if self._plan.node or self._absent(reports):
            return
        pairs = [
            pair
            for report in (self._own_report(), *reports.values())
            for pair in zip(report.views, report.times, strict=True)
        ]
        views = {view.rank: view for view, _ in pairs}
        slow = self._watch_stragglers.update({view.rank: times for view, times in pairs})
        if slow is None:
            return
        ranks = tuple(sorted(item.rank for item in slow))
        if ranks == self._stragglers:
            return
        self._stragglers = ranks
        records = [
            {
                "rank": item.rank, "host": views[item.rank].host, "part": item.part,
                "factor": round(item.factor, 3), "lost_seconds": round(item.lost_seconds, 4),
                "at_step": views[item.rank].step,
            }
            for item in slow
        ]  # fmt: skip
        for record in records:
            logger.warning(
                "rank %(rank)d on %(host)s is slow: %(part)s takes %(factor).2f times the median, "
                "%(lost_seconds).3f s per step",
                record,
            )
        history = JobHistory(self._plan.run_dir)
        self._exchange.submit(
            functools.partial(history.append, "slow", link=self._plan.attempt, ranks=records)
        )

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.kill()
                rank.killed = True
        for rank in self._ranks:
            rank.process.wait()
        self._poll()

    def _code(self) -> int:
        codes = {rank.code for rank in self._ranks}
        for code in (EXIT_NEVER_REQUEUE, EXIT_USAGE):
            if code in codes:
                return code
        if codes == {EXIT_DONE}:
            return EXIT_DONE
        if signal.SIGINT in self._received or EXIT_INTERRUPTED in codes:
            return EXIT_INTERRUPTED
        is_stopped = codes & {-number for number in self._received}
        if codes - {EXIT_DONE, EXIT_REQUEUE} and not is_stopped:
            return EXIT_FAILURE
        # Told to stop, or a rank asked for another attempt.
        return EXIT_REQUEUE


def node_plan(spec: JobSpec, attempt: str, variables: Mapping[str, str]) -> NodePlan:
    """Return what this node of a SLURM job runs.

    Args:
        spec: the job.
        attempt: name of the job attempt.
        variables: environment of the task that srun has started here.

    Raises:
        ConfigError: the run's configuration cannot be read.
    """
    return NodePlan(
        run_dir=spec.run_dir,
        attempt=attempt,
        node=whole_number(variables, "SLURM_NODEID", 0),
        num_nodes=spec.nodes,
        host=variables.get("SLURMD_NODENAME") or socket.gethostname(),
        ranks_per_node=spec.ranks_per_node,
        command=(spec.python, "-m", *spec.pretrain_arguments()),
        environment=dict(variables),
        logs=log_folder(spec.run_dir, attempt),
        exit_wait_seconds=spec.exit_wait_seconds,
        config=load_config(spec.config).cluster,
        binds_cores=spec.gpus_per_node > 0,
    )


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

    with ExitStack() as at_exit:
        # A supervisor has its own handlers while its ranks run.
        for number in FORWARDED:
            at_exit.callback(signal.signal, number, signal.signal(number, remember))
        return _run_attempts(config, arguments, ranks, restarts, received)


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
        plan = _local_plan(config, arguments, ranks, attempt)
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


def _local_plan(config: RunConfig, arguments: Sequence[str], ranks: int, attempt: str) -> NodePlan:
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


def main(arguments: Sequence[str]) -> int:
    """Supervise a node of a SLURM job."""
    # Until the ranks run there is nothing to save, and a signal must not end this process.
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    job_file, attempt = arguments
    return run_logged(
        lambda: Supervisor(node_plan(JobSpec.read(job_file), attempt, os.environ)).run(), logger
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
