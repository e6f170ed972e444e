"""Status of a run: queue, progress, speed, and its job attempts."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, committed_steps, step_dir
from megatron_deberta.cluster.bad_nodes import BadNodes
from megatron_deberta.cluster.run_lock import DEAD_SECONDS, newest_lock, read_lock
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.condition import Activity, Word, find_condition
from megatron_deberta.cluster.slurm.history import FINISHED, JobHistory
from megatron_deberta.cluster.slurm.stop_time import StopTime, measured_stop_time
from megatron_deberta.cluster.slurm.submit import LOGS, SUBMISSIONS
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.config.yaml_reader import read_yaml
from megatron_deberta.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REQUEUE, ConfigError
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
from megatron_deberta.parsing import Count, Seconds, conform


class _TrainSection(TypedDict, total=False):
    steps: Count | None
    exit_step: Count | None
    stop_after: Count | None
    """Former name of ``exit_step``."""


class _FinetuneSection(TypedDict, total=False):
    patience: Count | None


class _ClusterSection(TypedDict, total=False):
    bad_node_hours: Seconds | None


class _Config(TypedDict, total=False):
    """What is read from a run's resolved configuration, which an older release may have written."""

    train: _TrainSection
    finetune: _FinetuneSection
    cluster: _ClusterSection


NOT_QUEUED = "not queued"


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
    state, jobs = queue_state(history.submitted_jobs()) if ask_slurm else ("not asked", ())
    step, target = int(last.get("step", 0)), target_step(folder)
    over = history.end_reason() or (FINISHED if is_finished(folder, all_records, target) else "")
    if over == FINISHED and max(step, history.committed_step()) < target and not _patience(folder):
        # Exit code 0 before the last step.
        over = "stopped by the file `stop`"
    holder = present_holder(folder)
    is_alive = bool(holder or jobs)
    has_eta = not over and (is_alive or history.is_running())
    activity = Activity(
        holder=holder,
        is_lost=is_lost(folder),
        ended=how_ended(folder),
        state=state if jobs else "" if state == NOT_QUEUED else None,
        last_progress=_last_progress(folder, events),
        record_seconds=_record_seconds(records, target),
    )
    condition = find_condition(folder, events, over, activity, _cluster_config(folder))
    return RunStatus(
        run_dir=str(run_dir),
        condition=condition.word,
        reason=condition.reason,
        state=state,
        jobs=jobs,
        holder=holder,
        step=step,
        committed_step=history.committed_step(),
        checkpoint_time=checkpoint_time(folder),
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
        bad_nodes=_bad_nodes(folder),
        last_event=last_event(folder, events),
        next_command=next_command(folder, events, over, is_alive=is_alive),
    )


def _last_progress(folder: Path, events: Sequence[Mapping[str, Any]]) -> float:
    """Return when the run last made progress or started, in seconds since the epoch."""
    metrics = folder / FILE_NAME
    starts: list[float] = [event["time"] for event in events if event["event"] == "start"]
    recorded = metrics.stat().st_mtime if metrics.exists() else 0.0
    return max(checkpoint_time(folder) or 0.0, recorded, _locked_since(folder), *starts)


def _bad_nodes(folder: Path) -> tuple[str, ...]:
    return tuple(
        f"{failure.node}, since {_local_time(failure.time)}: {failure.reason}"
        for failure in BadNodes(folder, bad_node_hours(folder)).current().values()
    )


def guard_events(records: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Count skipped updates, including those of steps that were rolled back, and rollbacks."""
    events = [record for record in records if record["kind"] == "guard"]
    rollbacks = [record for record in events if record.get("event") == "rollback"]
    skipped = [record for record in events if record.get("skip", "overflow") != "overflow"]
    return len(skipped) + sum(record.get("skipped", 0) for record in rollbacks), len(rollbacks)


def present_holder(folder: Path) -> str:
    """Return the process that trains in a run's folder, empty if none or if it is silent."""
    lock = newest_lock(folder / "lock")
    holder = read_lock(lock) if lock is not None else None
    if lock is None or holder is None or holder.released:
        return ""
    # Twice the limit: clocks of machines differ, and this is only displayed.
    silent = time.time() - lock.stat().st_mtime > 2 * DEAD_SECONDS
    return "" if silent else str(holder)


def is_lost(folder: Path) -> bool:
    """Return whether the last process to train in a folder ended without releasing the lock."""
    lock = newest_lock(folder / "lock")
    holder = read_lock(lock) if lock is not None else None
    return holder is not None and not holder.released and not present_holder(folder)


def how_ended(folder: Path) -> str:
    """Return what ended the last process to train, see ``Holder.ended``."""
    lock = newest_lock(folder / "lock")
    holder = read_lock(lock) if lock is not None else None
    return "" if holder is None else holder.ended


def _locked_since(folder: Path) -> float:
    """Return when the lock of a folder was last taken, in seconds since the epoch; 0: never."""
    lock = newest_lock(folder / "lock")
    holder = read_lock(lock) if lock is not None else None
    return datetime.fromisoformat(holder.since).timestamp() if holder is not None else 0.0


def checkpoint_time(folder: Path) -> float | None:
    """Return when the newest checkpoint was committed, in seconds since the epoch."""
    steps = committed_steps(folder)
    if not steps:
        return None
    return (step_dir(folder, steps[-1]) / COMMITTED_FILE).stat().st_mtime


def count_faults(events: Sequence[Mapping[str, Any]]) -> int:
    """Count the attempts that failed, or were killed or lost."""
    harmless = (None, EXIT_DONE, EXIT_REQUEUE, EXIT_INTERRUPTED)
    ends = {event["link"]: event.get("code") for event in events if event["event"] == "end"}
    starts = [event["link"] for event in events if event["event"] == "start"]
    lost = [link for link in starts[:-1] if link not in ends]
    return len(lost) + sum(code not in harmless for code in ends.values())


def last_event(folder: Path, events: Sequence[Mapping[str, Any]]) -> str:
    """Describe what happened last to a run, and when; empty if nothing has."""
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
    lock = newest_lock(folder / "lock")
    holder = read_lock(lock) if lock is not None else None
    if lock is not None and holder is not None and not present_holder(folder):
        how = "ended" if holder.released else "was killed or lost"
        how += f": {holder.ended}" if holder.ended else ""
        found.append((lock.stat().st_mtime, f"process {holder.pid} on {holder.host} {how}"))
    if not found:
        return ""
    when, what = max(found)
    return f"{_local_time(when)}: {what}"


def next_command(
    folder: Path, events: Sequence[Mapping[str, Any]], over: str, *, is_alive: bool
) -> str:
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
    if over and logs and ends and ends[-1] not in (EXIT_DONE, EXIT_REQUEUE, EXIT_INTERRUPTED):
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


def queue_state(jobs: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return SLURM's state of the job that runs, or else of the first pending one, and all jobs."""
    found = {}
    for job in jobs:
        try:
            line = slurm.queue_entry(job)
        except slurm.SlurmError as error:
            return f"unknown ({error})", ()
        if line:
            state, _, reason = line.partition(" ")
            found[job] = f"{state} ({reason})" if state == "PENDING" else state
    running = [state for state in found.values() if not state.startswith("PENDING")]
    return next(iter([*running, *found.values()]), NOT_QUEUED), tuple(found)


def attempt_statuses(
    records: Sequence[Mapping[str, Any]], *, is_current: bool = True
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


def slow_ranks(records: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the stragglers that the newest job attempt has reported last."""
    attempts = ["", *(record["link"] for record in records if record["event"] == "start")]
    reports = [r["ranks"] for r in records if r["event"] == "slow" and r["link"] == attempts[-1]]
    return tuple(
        f"rank {item['rank']} on {item['host']}: {item['part']}, {item['factor']:.2f} times the "
        f"median's own time, {item['lost_seconds']:.3f} s per step"
        for item in (reports[-1] if reports else [])
    )


def bad_node_hours(folder: Path) -> float:
    """Return ``cluster.bad_node_hours`` of a run."""
    given = _config(folder).get("cluster", {}).get("bad_node_hours")
    return ClusterConfig().bad_node_hours if given is None else given


def is_finished(folder: Path, records: Sequence[Mapping[str, Any]], target: int) -> bool:
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


def _patience(folder: Path) -> int:
    """Return ``finetune.patience``, with which a run may end before its last step; 0: none."""
    return _config(folder).get("finetune", {}).get("patience") or 0


def target_step(folder: Path) -> int:
    """Return the last step by the run's resolved configuration; 0 without one."""
    train = _config(folder).get("train", {})
    return train.get("exit_step") or train.get("stop_after") or train.get("steps") or 0


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


def _cluster_config(folder: Path) -> ClusterConfig:
    """Return the section ``cluster`` of a run's configuration; defaults if it cannot be read."""
    try:
        return load_config(_config_path(folder)).cluster
    except (ConfigError, OSError):
        return ClusterConfig()


def _record_seconds(records: Sequence[Mapping[str, Any]], target: int) -> float:
    """Return the seconds between the last two records, by the speed of the last one."""
    if len(records) < 2 or not records[-1].get("seconds_left"):
        return 0.0
    last = int(records[-1]["step"])
    steps = last - int(records[-2]["step"])
    return float(records[-1]["seconds_left"]) * steps / max(1, target - last)


def seconds_left(
    events: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], target: int
) -> float | None:
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
