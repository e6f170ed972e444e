"""Supervisor of a node's ranks: starts them, watches them and reports why they ended.

``srun`` starts one per node: ``python -m megatron_deberta.cluster.watchdog.supervisor job.json
NAME``; on a single machine ``megatron-deberta launch`` runs it. It does not import torch.
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
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron_deberta.cluster.affinity import divide
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.slurm.submit import JobSpec, log_folder, pretrain_arguments
from megatron_deberta.cluster.watchdog import diagnostics as evidence
from megatron_deberta.cluster.watchdog.hang import (
    Diagnosis,
    Limits,
    RankView,
    diagnose_hang,
    diagnose_missing_node,
    find_hang,
)
from megatron_deberta.cluster.watchdog.heartbeat import FOLDER_VARIABLE, Beat, beat_path, read_beat
from megatron_deberta.cluster.watchdog.report_store import NodeReport, ReportStore
from megatron_deberta.cluster.watchdog.straggler import StragglerWatch
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_NEVER_REQUEUE,
    EXIT_REQUEUE,
    EXIT_USAGE,
    MegatronDebertaError,
)
from megatron_deberta.observe.progress import Section
from megatron_deberta.processes import die_with_parent

logger = logging.getLogger("supervisor")

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
POLL_SECONDS = 0.2
REPORT_SECONDS = 0.5
"""Between two reports to the other nodes."""
EVIDENCE_SECONDS = 2.5
"""How long to wait for other nodes' evidence after one's own."""
PAUSE_SECONDS = 2.0
"""A supervisor that was kept from looking for so long was stopped, and its ranks probably, too."""
RECENT_STEPS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlan:
    """What a node has to run."""

    run_dir: str
    link: str
    """Names the reports."""
    node: int
    num_nodes: int
    host: str
    """The node, by the name under which it can be excluded."""
    ranks_per_node: int
    command: tuple[str, ...]
    """Of every rank."""
    environment: Mapping[str, str]
    """Of every rank, without its numbers."""
    logs: Path
    exit_wait_seconds: float
    config: ClusterConfig
    binds_cores: bool = False
    """Give each rank its own cores, near its GPU."""
    shows_rank_zero: bool = False
    """Rank 0 writes to where this process does, instead of to a file."""


@dataclass(slots=True)
class _Rank:
    """A process and what is known of it."""

    number: int
    process: subprocess.Popen[bytes]
    started: float
    beat: Beat | None = None
    code: int | None = None
    ended: float = 0.0
    killed: bool = False
    evidence: evidence.Evidence | None = None


class Supervisor:
    """Runs a node's ranks once.

    Args:
        plan: what to run.
    """

    def __init__(self, plan: NodePlan) -> None:
        self._plan = plan
        self._board = ReportStore(plan.run_dir, plan.link)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=_memory_folder()))
        self._ranks: list[_Rank] = []
        self._step_times: deque[float] = deque(maxlen=RECENT_STEPS)
        self._serial = 0
        self._looked = self._resumed = time.monotonic()
        self._is_unheard = False
        self._alarm = ""
        self._has_evidence = False
        self._verdict: Diagnosis | None = None
        config = plan.config
        self._stragglers = StragglerWatch(config.straggler_factor, config.straggler_window_steps)
        self._told: tuple[int, ...] = ()

    def run(self) -> int:
        """Run until every rank of this node has ended.

        Returns:
            93 or 2 if a rank ended so; else 1 if one failed or hung, 75 if one wants to go on, 0.
        """
        previous = {number: signal.signal(number, self._forward) for number in FORWARDED}
        cores = divide(os.sched_getaffinity(0), self._plan.ranks_per_node)
        try:
            for local in range(self._plan.ranks_per_node):
                self._ranks.append(self._start(local, len(cores[local])))
                if self._plan.binds_cores:
                    # Before it has started a second thread.
                    with suppress(ProcessLookupError):
                        os.sched_setaffinity(self._ranks[-1].process.pid, cores[local])
            code = self._watch()
            self._report(code)
            return code
        finally:
            self._kill()
            for number, handler in previous.items():
                signal.signal(number, handler)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, local: int, num_cores: int) -> _Rank:
        plan = self._plan
        number = plan.node * plan.ranks_per_node + local
        numbers = {
            "RANK": number,
            "LOCAL_RANK": local,
            "WORLD_SIZE": plan.num_nodes * plan.ranks_per_node,
            "LOCAL_WORLD_SIZE": plan.ranks_per_node,
            FOLDER_VARIABLE: self._folder,
        }
        if plan.binds_cores and "OMP_NUM_THREADS" not in plan.environment:
            # Else a rank would divide its own cores among all ranks once more.
            numbers["OMP_NUM_THREADS"] = num_cores
        environment = {**plan.environment, **{key: str(value) for key, value in numbers.items()}}
        if plan.shows_rank_zero and number == 0:
            return _Rank(number, self._popen(environment, None), time.monotonic())
        plan.logs.mkdir(parents=True, exist_ok=True)
        with (plan.logs / f"rank_{number}.log").open("ab") as log:
            return _Rank(number, self._popen(environment, log.fileno()), time.monotonic())

    def _popen(self, environment: Mapping[str, str], output: int | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._plan.command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C on a terminal is for the supervisor alone.
            start_new_session=True,
            # A supervisor that is killed leaves nobody behind.
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )

    def _forward(self, number: int, frame: FrameType | None) -> None:
        for rank in self._ranks:
            if rank.process.returncode is None:
                with suppress(ProcessLookupError):
                    rank.process.send_signal(number)

    def _watch(self) -> int:
        next_report = 0.0
        others_ended: float | None = None
        while True:
            self._look()
            running = [rank for rank in self._ranks if rank.code is None]
            if not running:
                return self._code()
            now = time.monotonic()
            ended = [rank.ended for rank in self._ranks if rank.code is not None]
            if ended and now - min(ended) > self._plan.exit_wait_seconds:
                logger.warning("ranks outlive one that has ended; they are ended, too")
                self._kill()
                continue
            if now >= next_report:
                next_report = now + REPORT_SECONDS
                self._report(None)
                reports = self._board.read(self._plan.num_nodes)
                codes = [r.code for r in reports.values() if r.code is not None]
                # Also if another node was quicker, and has ended over it.
                told = any(report.alarm for report in reports.values())
                if not ended and (told or not codes) and self._hangs(reports):
                    self._kill()
                    return EXIT_FAILURE
                final = [code for code in codes if code in (EXIT_USAGE, EXIT_NEVER_REQUEUE)]
                others_ended = others_ended or (now if codes else None)
                late = others_ended and now - others_ended > self._plan.exit_wait_seconds
                if final or late:
                    logger.warning("another node has ended with %s", codes)
                    self._kill()
                    return max([*final, EXIT_FAILURE])
                self._compare(reports)
            time.sleep(POLL_SECONDS)

    def _look(self) -> None:
        """See where each rank is, and which have ended."""
        now = time.monotonic()
        if now - self._looked > PAUSE_SECONDS:
            self._resumed = now
        self._looked = now
        for rank in self._ranks:
            before, beat = rank.beat, read_beat(beat_path(self._folder, rank.number))
            if beat is not None:
                rank.beat = beat
                steps = beat.steps_timed - (before.steps_timed if before else 0)
                if before is not None and steps > 0 and rank is self._ranks[0]:
                    seconds = (beat.step_time - before.step_time) / 1e9
                    self._step_times.append(seconds / steps)
            if rank.code is None and (code := rank.process.poll()) is not None:
                rank.code, rank.ended = code, time.monotonic()
                level = logging.INFO if code in (EXIT_DONE, EXIT_REQUEUE) else logging.WARNING
                logger.log(level, "rank %d ended with %d", rank.number, code)

    def _views(self) -> tuple[RankView, ...]:
        now, epoch = time.monotonic(), time.time() - time.monotonic()
        views = []
        for rank in self._ranks:
            beat = rank.beat
            since = rank.started if beat is None else beat.time / 1e9
            # ``scontrol suspend`` stops all; nobody hangs who has just been woken.
            since = max(since, self._resumed)
            found = rank.evidence
            views.append(
                RankView(
                    rank=rank.number,
                    node=self._plan.node,
                    host=self._plan.host,
                    section=Section.STARTUP if beat is None else beat.section,
                    step=0 if beat is None else beat.step,
                    position=-1 if beat is None else beat.position,
                    age=max(0.0, now - since),
                    pid=rank.process.pid,
                    state=found.state if found else "",
                    waiting=found.waiting if found else None,
                    detail=found.detail if found else "",
                    code=rank.code,
                    ended=epoch + rank.ended if rank.ended else 0.0,
                    killed=rank.killed,
                )
            )
        return tuple(views)

    def _report(self, code: int | None) -> None:
        limits = Limits(self._plan.config, tuple(self._step_times))
        views = self._views()
        beats = [rank.beat for rank in self._ranks]
        self._serial += 1
        report = NodeReport(
            node=self._plan.node,
            host=self._plan.host,
            serial=self._serial,
            views=views,
            limits=tuple(
                limits.of(view.section, beat.steps_timed if beat else 0)
                for view, beat in zip(views, beats, strict=True)
            ),
            times=tuple(
                (b.steps_timed, b.data_time, b.forward_time, b.step_time) if b else (0, 0, 0, 0)
                for b in beats
            ),
            alarm=self._alarm,
            evidence=self._has_evidence,
            verdict=self._verdict,
            code=code,
        )
        try:
            self._board.publish(report)
        except OSError as error:
            # A full disk ends no run; the other nodes see this one fall silent.
            if not self._is_unheard:
                logger.warning("%s", error)
            self._is_unheard = True

    def _hangs(self, reports: Mapping[int, NodeReport]) -> bool:
        """Detect a hang and diagnose its cause; takes seconds if there is one."""
        overdue = next((report.alarm for report in reports.values() if report.alarm), "")
        overdue = overdue or self._overdue(reports)
        if not overdue:
            return False
        self._alarm = overdue
        self._report(None)
        running = {rank.number: rank.process.pid for rank in self._ranks if rank.code is None}
        for number, found in evidence.gather(self._folder, running).items():
            self._ranks[number - self._ranks[0].number].evidence = found
            self._keep(number, found)
        self._has_evidence = True
        self._report(None)
        deadline = time.monotonic() + EVIDENCE_SECONDS
        while True:
            found_on = self._board.read(self._plan.num_nodes)
            complete = all(r.evidence for r in found_on.values())
            if complete or time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        views = [view for report in found_on.values() for view in report.views]
        # What one node has said stands, so that all logs name the same rank.
        said = [report.verdict for report in found_on.values() if report.verdict is not None]
        if said:
            self._verdict = said[0]
        elif absent := self._absent(found_on):
            self._verdict = diagnose_missing_node(absent, self._plan.num_nodes)
        else:
            self._verdict = diagnose_hang(views or self._views(), overdue)
        logger.error("%s", self._verdict.reason)
        return True

    def _overdue(self, reports: Mapping[int, NodeReport]) -> str:
        oldest = time.monotonic() - self._ranks[0].started
        absent = self._absent(reports)
        if absent and oldest > self._plan.config.startup_timeout_seconds:
            return diagnose_missing_node(absent, self._plan.num_nodes).reason
        views = [view for report in reports.values() for view in report.views]
        limits = {
            view.rank: limit
            for report in reports.values()
            for view, limit in zip(report.views, report.limits, strict=True)
        }
        return find_hang(views, limits)

    def _absent(self, reports: Mapping[int, NodeReport]) -> list[int]:
        """Nodes that never came; not this one, even where its reports cannot be written."""
        others = (node for node in range(self._plan.num_nodes) if node != self._plan.node)
        return [node for node in others if node not in reports]

    def _keep(self, number: int, found: evidence.Evidence) -> None:
        """Put a rank's stacks beside the reports, and where it stands into the log."""
        logger.error("rank %d: state %s, %s", number, found.state, found.detail or "no stack")
        if found.stacks:
            with suppress(OSError):
                path = self._board.folder / f"stacks_rank_{number}.txt"
                path.write_text(found.stacks)

    def _compare(self, reports: Mapping[int, NodeReport]) -> None:
        """Tell who is slow; on the first node only, and only what is new."""
        if self._plan.node or len(reports) < self._plan.num_nodes:
            return
        views = {view.rank: view for report in reports.values() for view in report.views}
        sums = {
            view.rank: times
            for report in reports.values()
            for view, times in zip(report.views, report.times, strict=True)
        }
        slow = self._stragglers.update(sums)
        if slow is None:
            return
        ranks = tuple(sorted(item.rank for item in slow))
        if ranks == self._told:
            return
        self._told = ranks
        for item in slow:
            logger.warning(
                "rank %d on %s is slow: %s takes %.2f times the median, %.3f s of every step",
                item.rank, views[item.rank].host, item.part, item.factor, item.lost_seconds,
            )  # fmt: skip
        found = [
            {
                "rank": item.rank, "host": views[item.rank].host, "part": item.part,
                "factor": round(item.factor, 3), "lost_seconds": round(item.lost_seconds, 4),
                "at_step": views[item.rank].step,
            }
            for item in slow
        ]  # fmt: skip
        with suppress(OSError):
            JobHistory(self._plan.run_dir).append("slow", link=self._plan.link, ranks=found)

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.process.poll() is None:
                rank.process.kill()
                rank.killed = True
        for rank in self._ranks:
            rank.process.wait()
        self._look()

    def _code(self) -> int:
        codes = [rank.code for rank in self._ranks]
        for code in (EXIT_NEVER_REQUEUE, EXIT_USAGE):
            if code in codes:
                return code
        if any(code not in (EXIT_DONE, EXIT_REQUEUE) for code in codes):
            return EXIT_FAILURE
        return EXIT_REQUEUE if EXIT_REQUEUE in codes else EXIT_DONE


def _memory_folder() -> str | None:
    """A folder in memory, on this node; None leaves the choice to ``TMPDIR``."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def node_plan(spec: JobSpec, link: str, variables: Mapping[str, str]) -> NodePlan:
    """What this node of a SLURM job has to run.

    Args:
        spec: the job.
        link: its name, as ``submission.link_name`` gives it.
        variables: environment of the task that srun has started here.

    Raises:
        ConfigError: the run's configuration cannot be read.
    """
    job, _, restarts = link.partition(".")
    return NodePlan(
        run_dir=spec.run_dir,
        link=link,
        node=int(variables["SLURM_NODEID"]),
        num_nodes=spec.nodes,
        host=variables.get("SLURMD_NODENAME") or socket.gethostname(),
        ranks_per_node=spec.ranks_per_node,
        command=(spec.python, "-m", *pretrain_arguments(spec)),
        environment=dict(variables),
        logs=log_folder(spec.run_dir, job, int(restarts)),
        exit_wait_seconds=spec.exit_wait_seconds,
        config=load_config(spec.config).cluster,
        binds_cores=spec.gpus_per_node > 0,
    )


def main(arguments: Sequence[str]) -> int:
    """Supervise a node of a SLURM job."""
    # Until the ranks run there is nothing to save; a signal must not end this process before.
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    try:
        job_file, link = arguments
        return Supervisor(node_plan(JobSpec.read(job_file), link, os.environ)).run()
    except MegatronDebertaError as error:
        logger.error("error: %s", error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
