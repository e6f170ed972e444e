"""Status of a run: condition, queue, progress, speed, and its job attempts."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from typing_extensions import TypedDict

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, committed_steps, step_dir
from megatron_deberta.cluster.run_lock import DEAD_SECONDS, Holder, newest_lock, read_lock
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.history import (
    FINISHED,
    HARMLESS,
    BadNodes,
    JobHistory,
    StopTime,
    measured_stop_time,
)
from megatron_deberta.cluster.slurm.submit import LOGS, SUBMISSIONS, read_cluster_config
from megatron_deberta.cluster.watchdog.detection import Limits
from megatron_deberta.cluster.watchdog.reports import (
    FOLDER,
    NodeReport,
    ReportStore,
    aged,
    find_overdue,
)
from megatron_deberta.config.yaml_reader import read_yaml
from megatron_deberta.errors import ConfigError
from megatron_deberta.observe.console import format_duration
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
from megatron_deberta.parsing import Count, conform


class _TrainSection(TypedDict, total=False):
    steps: Count | None
    exit_step: Count | None
    stop_after: Count | None
    """Former name of ``exit_step``."""


class _FinetuneSection(TypedDict, total=False):
    patience: Count | None


class _Config(TypedDict, total=False):
    """What is read from a run's resolved configuration, which an older release may have written."""

    train: _TrainSection
    finetune: _FinetuneSection


Word = Literal["finished", "failed", "stalled", "running", "queued", "stopped"]
WORDS: tuple[Word, ...] = get_args(Word)
FRESH_SECONDS = 60.0
"""A node's report that is not older shows that its supervisor runs."""

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LastHolder:
    """The last process that trained in a run's folder."""

    holder: Holder | None = None
    """None: there was none."""
    beat: float = 0.0
    """Its last heartbeat or its end, in seconds since the epoch."""

    @classmethod
    def of(cls, folder: Path) -> LastHolder:
        """Read the lock of a run's folder."""
        lock = newest_lock(folder / "lock")
        holder = read_lock(lock) if lock is not None else None
        return cls() if lock is None or holder is None else cls(holder, lock.stat().st_mtime)

    def present(self) -> str:
        """Return the process as text; empty if there is none or if it is silent."""
        # Twice the limit: clocks of machines differ, and this is only displayed.
        is_silent = time.time() - self.beat > 2 * DEAD_SECONDS
        is_gone = self.holder is None or self.holder.released or is_silent
        return "" if is_gone else str(self.holder)

    def since(self) -> float:
        """Return when it took the lock, in seconds since the epoch."""
        return 0.0 if self.holder is None else datetime.fromisoformat(self.holder.since).timestamp()


@dataclass(frozen=True, slots=True)
class JobAttemptStatus:
    """One job attempt."""

    name: str
    """The job's number and the number of its restarts."""
    nodes: str
    first_step: int
    """Newest committed step at its start."""
    last_step: int | None
    """Newest committed step at its end; None while it runs, or if it exited silently."""
    seconds: float | None
    outcome: str
    """Why it ended, or ``running``."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """Status of a run."""

    run_dir: str
    condition: Word
    """``finished``, ``failed``, ``stalled``, ``running``, ``queued`` or ``stopped``."""
    reason: str
    """Why, unless it is finished or running."""
    state: str
    """SLURM's state, such as ``RUNNING`` or ``PENDING (reason)``; or ``not queued``."""
    jobs: tuple[str, ...]
    holder: str
    """The process that trains in the folder; empty: none."""
    step: int
    """Last step in the metrics."""
    committed_step: int
    checkpoint_time: float | None
    """When that checkpoint was committed, in seconds since the epoch."""
    record_time: float | None
    """When the metrics were last written, in seconds since the epoch; None: there are none."""
    target_step: int
    skipped_updates: int
    """Updates that the guard has skipped, without overflows of fp16."""
    rollbacks: int
    loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    """Until ``target_step``; None: unknown, or the run does not go on by itself."""
    stop_time: StopTime | None
    """Longest time from a stop signal to the end of an attempt; None: nothing is measured yet."""
    attempts: tuple[JobAttemptStatus, ...]
    """Those of the last submission."""
    earlier_attempts: tuple[JobAttemptStatus, ...]
    """Those of earlier submissions, oldest first."""
    faults: int
    """Attempts that failed, or were killed or lost."""
    over: str
    """Why the run has ended; empty: it has not."""
    slow_ranks: tuple[str, ...]
    bad_nodes: tuple[str, ...]
    """Excluded nodes, since when and why."""
    last_event: str
    """What happened last, and when; empty: nothing has."""
    next_command: str
    """What to do next; empty: wait."""


def gather(run_dir: str | os.PathLike[str], *, ask_slurm: bool = True) -> RunStatus:
    """Read the status of a run from its folder and SLURM.

    Args:
        run_dir: folder of the run.
        ask_slurm: whether to ask for the state of its jobs.

    Raises:
        ConfigError, DataError: a file of the folder is damaged.
    """
    folder = Path(run_dir)
    history = JobHistory(folder)
    *earlier, events = history.submissions()
    metrics = folder / FILE_NAME
    all_records = read_metrics(metrics) if metrics.exists() else []
    records = [record for record in all_records if record["kind"] == "train"]
    skipped, rollbacks = guard_events(all_records)
    last = records[-1] if records else {}
    state, jobs = slurm.queue_state(history.submitted_jobs()) if ask_slurm else ("not asked", ())
    config, cluster = _config(folder), read_cluster_config(_config_path(folder))
    step, train = int(last.get("step", 0)), config.get("train", {})
    target = train.get("exit_step") or train.get("stop_after") or train.get("steps") or 0
    over = history.end_reason() or (FINISHED if is_finished(folder, all_records, target) else "")
    has_patience = config.get("finetune", {}).get("patience")
    if over == FINISHED and max(step, history.committed_step()) < target and not has_patience:
        # Exit code 0 before the last step.
        over = "stopped by the file `stop`"
    process = LastHolder.of(folder)
    is_alive = bool(process.present() or jobs)
    has_eta = not over and (is_alive or history.unfinished_attempt())
    saved = checkpoint_time(folder)
    starts: list[float] = [event["time"] for event in events if event["event"] == "start"]
    recorded = metrics.stat().st_mtime if metrics.exists() else None
    condition, reason = find_condition(
        folder,
        events,
        over,
        process,
        state=state if jobs else "" if state == slurm.NOT_QUEUED else None,
        quiet=time.time() - max(saved or 0.0, recorded or 0.0, process.since(), *starts),
        longest=Limits(cluster).longest() + 2 * _record_seconds(records, target),
    )
    bad_nodes = BadNodes(folder, cluster.bad_node_hours).current().values()
    return RunStatus(
        run_dir=str(run_dir),
        condition=condition,
        reason=reason,
        state=state,
        jobs=jobs,
        holder=process.present(),
        step=step,
        committed_step=history.committed_step(),
        checkpoint_time=saved,
        record_time=recorded,
        target_step=target,
        skipped_updates=skipped,
        rollbacks=rollbacks,
        loss=last.get("loss"),
        tokens_per_second=last.get("tokens_per_second"),
        seconds_left=seconds_left(events, records, target) if has_eta else None,
        stop_time=measured_stop_time(events),
        attempts=attempt_statuses(events),
        earlier_attempts=tuple(
            attempt for events in earlier for attempt in attempt_statuses(events, is_current=False)
        ),
        faults=count_faults(events),
        over=over,
        slow_ranks=slow_ranks(events),
        bad_nodes=tuple(
            f"{failure.node}, since {_local_time(failure.time)}: {failure.reason}"
            for failure in bad_nodes
        ),
        last_event=last_event(folder, events, process),
        next_command=next_command(folder, events, over, is_alive=is_alive),
    )


def find_condition(
    folder: Path,
    events: Sequence[Event],
    over: str,
    process: LastHolder,
    *,
    state: str | None,
    quiet: float,
    longest: float,
) -> tuple[Word, str]:
    """Return the condition of a run in one word, and the reason if it does not run.

    Args:
        folder: folder of the run.
        events: job history of the last submission.
        over: why the run has ended; empty: it has not.
        process: the last process to train.
        state: state of its SLURM job; empty: there is none; None: unknown.
        quiet: seconds since its last record, checkpoint or start.
        longest: seconds after which a record is missing, whatever the run does.
    """
    if over == FINISHED:
        return "finished", ""
    # A process may have been started after the end of a submission.
    is_present = bool(process.present())
    if over and not is_present:
        codes = [event.get("code") for event in events if event["event"] == "end"]
        is_stopped = over.startswith("cancelled") or (codes and codes[-1] in HARMLESS)
        return "stopped" if is_stopped else "failed", over
    attempts = [event for event in events if event["event"] in ("start", "end")]
    last = attempts[-1] if attempts else {}
    attempt = last["link"] if last.get("event") == "start" else ""
    age, reports = _read_reports(folder, attempt) if attempt else (float("inf"), [])
    if is_present:
        late = _overdue(age, reports, quiet, longest)
        return ("stalled", late) if late else ("running", "")
    if state and state.startswith("PENDING"):
        return "queued", state
    # An attempt without a lock may be about to take it.
    if state or (attempt and min(age, quiet) < FRESH_SECONDS):
        return "running", ""
    if attempt:
        return "stalled", f"attempt {attempt} was killed or lost; nothing continues it"
    if last.get("goes_on"):
        if state is None or time.time() - last["time"] < FRESH_SECONDS:
            return "queued", "between two attempts"
        return "stalled", f"nothing continues it after attempt {last['link']}"
    holder = process.holder
    if holder is not None and not holder.released:
        return "failed", "its process was killed or lost"
    if holder is not None and holder.ended in signal.Signals.__members__:
        return "stopped", f"stopped by {holder.ended}"
    return ("failed", holder.ended) if holder is not None and holder.ended else ("stopped", "")


def _read_reports(folder: Path, attempt: str) -> tuple[float, list[NodeReport]]:
    """Return the age of the newest report of an attempt's nodes in seconds, and all of them."""
    paths = (folder / FOLDER / attempt).glob("node_*.json")
    times = {int(path.stem.removeprefix("node_")): path.stat().st_mtime for path in paths}
    ages = {node: max(0.0, time.time() - changed) for node, changed in times.items()}
    reports = ReportStore(folder, attempt).read(ages)
    aged_reports = [aged(report, ages[node]) for node, report in reports.items()]
    return min(ages.values(), default=float("inf")), aged_reports


def _overdue(age: float, reports: Sequence[NodeReport], quiet: float, longest: float) -> str:
    """Return what is overdue in a run that is alive, empty if nothing is."""
    limits = [limit for report in reports for limit in report.limits]
    overdue = find_overdue(reports)
    if overdue and quiet > max(limits):
        return overdue
    # Without fresh reports nothing tells the section; ``longest`` holds for the slowest one.
    is_late = age >= FRESH_SECONDS and quiet > longest
    return f"no new record for {format_duration(quiet)}" if is_late else ""


def guard_events(records: Sequence[Event]) -> tuple[int, int]:
    """Count skipped updates, including those of steps that were rolled back, and rollbacks."""
    events = [record for record in records if record["kind"] == "guard"]
    rollbacks = [record for record in events if record.get("event") == "rollback"]
    skipped = [record for record in events if record.get("skip", "overflow") != "overflow"]
    return len(skipped) + sum(record.get("skipped", 0) for record in rollbacks), len(rollbacks)


def present_holder(folder: Path) -> str:
    """Return the process that trains in a run's folder, empty if none or if it is silent."""
    return LastHolder.of(folder).present()


def checkpoint_time(folder: Path) -> float | None:
    """Return when the newest checkpoint was committed, in seconds since the epoch."""
    steps = committed_steps(folder)
    if not steps:
        return None
    return (step_dir(folder, steps[-1]) / COMMITTED_FILE).stat().st_mtime


def count_faults(events: Sequence[Event]) -> int:
    """Count the attempts that failed, or were killed or lost."""
    ends = {event["link"]: event.get("code") for event in events if event["event"] == "end"}
    starts = [event["link"] for event in events if event["event"] == "start"]
    lost = [link for link in starts[:-1] if link not in ends]
    return len(lost) + sum(code not in (None, *HARMLESS) for code in ends.values())


def last_event(folder: Path, events: Sequence[Event], process: LastHolder) -> str:
    """Describe what happened last to a run, and when; empty if nothing has.

    Args:
        folder: folder of the run.
        events: job history of the last submission.
        process: the last process to train.
    """
    found = []
    for number, event in enumerate(events):
        has_started = any(earlier["event"] == "start" for earlier in events[:number])
        texts = {
            "submit": "submitted",
            "start": f"{'re' * has_started}started at step {event.get('step', 0):,}",
            "end": f"ended: {event.get('reason')}",
            "cancel": "cancelled",
        }
        if event["event"] in texts:
            found.append((event["time"], texts[event["event"]]))
    if (saved := checkpoint_time(folder)) is not None:
        found.append((saved, f"saved the checkpoint of step {committed_steps(folder)[-1]:,}"))
    holder = process.holder
    if holder is not None and not process.present():
        how = "ended" if holder.released else "was killed or lost"
        how += f": {holder.ended}" if holder.ended else ""
        found.append((process.beat, f"process {holder.pid} on {holder.host} {how}"))
    if not found:
        return ""
    when, what = max(found)
    return f"{_local_time(when)}: {what}"


def next_command(folder: Path, events: Sequence[Event], over: str, *, is_alive: bool) -> str:
    """Return the command that one would usually give next; empty: wait.

    Args:
        folder: folder of the run.
        events: job history of the last submission.
        over: why the run has ended; empty: it has not.
        is_alive: whether it is running or queued.
    """
    run_dir, config = shlex.quote(str(folder)), shlex.quote(str(_config_path(folder)))
    logs = sorted(folder.glob(f"{LOGS}/*.*/rank_*.log"), key=lambda log: log.stat().st_mtime)
    ends = [event.get("code") for event in events if event["event"] == "end"]
    if is_alive:
        return f"megatron-deberta logs -f {run_dir}" if logs else ""
    if over == FINISHED:
        export = shlex.quote(str(folder / "hf"))
        return f"megatron-deberta convert --checkpoint {run_dir} --to hf --output {export}"
    if over and logs and ends and ends[-1] not in HARMLESS:
        named = re.search(r"rank ([1-9]\d*) on ", over)
        return f"megatron-deberta logs {run_dir}" + (f" --rank {named[1]}" if named else "")
    if (folder / SUBMISSIONS).exists():
        return f"megatron-deberta submit {config} --cluster PROFILE"
    if logs:
        ranks = len(list(logs[-1].parent.glob("rank_*.log")))
        return f"megatron-deberta launch {config} --ranks {ranks}"
    return f"megatron-deberta pretrain {config}"


def _local_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def attempt_statuses(
    records: Sequence[Event], *, is_current: bool = True
) -> tuple[JobAttemptStatus, ...]:
    """Return the job attempts of a submission in order.

    Args:
        records: its events.
        is_current: it is the last one, so its last attempt may be running.
    """
    ends = {record.get("link"): record for record in records if record["event"] == "end"}
    starts = [record for record in records if record["event"] == "start"]
    attempts = []
    for start in starts:
        is_last = is_current and start is starts[-1]
        unknown = "running" if is_last else "lost: the node or the job was killed"
        end = ends.get(start["link"], {"step": None, "time": None, "reason": unknown})
        seconds = None if end["time"] is None else end["time"] - start["time"]
        attempts.append(
            JobAttemptStatus(
                start["link"],
                str(start["nodes"]),
                start["step"],
                end.get("step"),
                seconds,
                str(end.get("reason")),
            )
        )
    return tuple(attempts)


def slow_ranks(records: Sequence[Event]) -> tuple[str, ...]:
    """Return the stragglers that the newest job attempt has reported last."""
    attempts = ["", *(record["link"] for record in records if record["event"] == "start")]
    reports = [r["ranks"] for r in records if r["event"] == "slow" and r["link"] == attempts[-1]]
    return tuple(
        f"rank {item['rank']} on {item['host']}: {item['part']}, {item['factor']:.2f} times the "
        f"median's own time, {item['lost_seconds']:.3f} s per step"
        for item in (reports[-1] if reports else [])
    )


def is_finished(folder: Path, records: Sequence[Event], target: int) -> bool:
    """Return whether the last step is saved and, in a run that validates, its validation recorded.

    A process may be killed between the two, or before both; the next start makes up for it.

    Args:
        folder: folder of the run.
        records: those of ``metrics.jsonl``.
        target: the run's last step; 0: unknown.
    """
    if not 0 < target <= max(committed_steps(folder), default=0):
        return False
    validated = {r["step"] for r in records if r["kind"] in ("validation", "baseline")}
    return not validated or max(validated) >= target


def _config_path(folder: Path) -> Path:
    """Return the file of the resolved configuration; before the start, the last submission's."""
    path = folder / "config.yaml"
    return path if path.exists() else max(folder.glob(f"{SUBMISSIONS}/*/run.yaml"), default=path)


def _config(folder: Path) -> _Config:
    """Return the resolved configuration, empty if there is none."""
    path = _config_path(folder)
    if not path.exists():
        return {}
    return conform(
        read_yaml(path), _Config, path, "the config of a run", error=ConfigError,
        remedy="restore it; the next start of the run writes it anew", ignore_unknown=True,
    )  # fmt: skip


def _record_seconds(records: Sequence[Event], target: int) -> float:
    """Return the seconds between the last two records, by the speed of the last one."""
    if len(records) < 2 or not records[-1].get("seconds_left"):
        return 0.0
    last = int(records[-1]["step"])
    steps = last - int(records[-2]["step"])
    return float(records[-1]["seconds_left"]) * steps / max(1, target - last)


def seconds_left(events: Sequence[Event], records: Sequence[Event], target: int) -> float | None:
    """Estimate the seconds to the last step; None without records.

    After a restart the average speed of all attempts counts, with queueing, starting and lost
    steps; before it, the present speed.

    Args:
        events: of the job history.
        records: training records of ``metrics.jsonl``.
        target: number of the last step; 0: unknown.
    """
    if not records or target <= 0:
        return None
    left = max(0, target - int(records[-1]["step"]))
    starts = [record for record in events if record["event"] == "start"]
    if len(starts) > 1 and starts[-1]["step"] > starts[0]["step"]:
        pace = (starts[-1]["time"] - starts[0]["time"]) / (starts[-1]["step"] - starts[0]["step"])
        return float(left * pace)
    recent = [r["seconds_left"] for r in records[-20:] if r.get("seconds_left")]
    return float(recent[-1]) if recent else None
