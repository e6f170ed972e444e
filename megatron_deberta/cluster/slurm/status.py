"""One view of a run's whole chain: what SLURM says, how far it is, how fast, and what went wrong.

Owns the gathering. Refuses to print: ``cli/status.py`` does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_deberta.cluster.bad_nodes import BadNodes
from megatron_deberta.cluster.run_lock import DEAD_SECONDS, newest_lock, read_lock
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.slurm.job import submitted_jobs
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.config.yaml_reader import read_yaml
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics

RECENT_RECORDS = 20
"""Metric records over which the present speed is taken."""


@dataclass(frozen=True, slots=True)
class JobAttemptStatus:
    """One link: one start of a job."""

    name: str
    """The job's number and its restarts."""
    nodes: str
    """Where it ran."""
    first_step: int
    """Newest committed step when it began."""
    last_step: int | None
    """The same when it ended; None while it runs, or if it ended without a word."""
    seconds: float | None
    """How long it took."""
    outcome: str
    """Why it ended, in words."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run's chain."""

    run_dir: str
    state: str
    """``RUNNING``, ``PENDING (reason)`` or another of SLURM's words; ``not queued``."""
    jobs: tuple[str, ...]
    """Jobs that SLURM knows of."""
    holder: str
    """Who trains in the folder; empty: nobody."""
    step: int
    """Last step in the metrics."""
    committed_step: int
    """Newest checkpoint."""
    target_step: int
    """Where the run ends."""
    skipped_updates: int
    """Updates that the numeric guard did not make, fp16's overflows aside."""
    rollbacks: int
    """How often the run went back to a checkpoint."""
    loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    """Until the target, at the speed of the chain as a whole: with queueing, starting, saving."""
    attempts: tuple[JobAttemptStatus, ...]
    over: str
    """Why nothing follows; empty while something does."""
    slow_ranks: tuple[str, ...]
    """Who is slower than the others in the present link, and in what."""
    bad_nodes: tuple[str, ...]
    """Nodes that the run stays away from, since when and why."""


def gather(run_dir: str | os.PathLike[str]) -> RunStatus:
    """Gather all there is to know.

    Args:
        run_dir: folder of the run.

    Raises:
        ConfigError, DataError: a file of the folder is damaged.
    """
    folder = Path(run_dir)
    chain = JobHistory(folder)
    metrics = folder / FILE_NAME
    everything = read_metrics(metrics) if metrics.exists() else []
    records = [record for record in everything if record["kind"] == "train"]
    skipped, rollbacks = guard_events(everything)
    last = records[-1] if records else {}
    state, jobs = queue_state(submitted_jobs(chain))
    step, target = int(last.get("step", 0)), target_step(folder)
    over = chain.is_over() or ("finished" if 0 < target <= step else "")
    return RunStatus(
        run_dir=str(run_dir),
        state=state,
        jobs=jobs,
        holder=present_holder(folder),
        step=step,
        committed_step=chain.committed_step(),
        target_step=target,
        skipped_updates=skipped,
        rollbacks=rollbacks,
        loss=last.get("loss"),
        tokens_per_second=last.get("tokens_per_second"),
        seconds_left=None if over else seconds_left(chain.current(), records, target),
        attempts=attempt_statuses(chain.current()),
        over=over,
        slow_ranks=slow_ranks(chain.current()),
        bad_nodes=tuple(
            f"{mark.node}, since {time.strftime('%Y-%m-%d %H:%M', time.localtime(mark.time))}: "
            f"{mark.reason}"
            for mark in BadNodes(folder, bad_node_hours(folder)).current().values()
        ),
    )


def guard_events(records: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """How many updates were skipped, those of steps that were given up included, and roll-backs."""
    events = [record for record in records if record["kind"] == "guard"]
    backs = [record for record in events if record.get("event") == "rollback"]
    skipped = [record for record in events if record.get("skip", "overflow") != "overflow"]
    return len(skipped) + sum(int(record["skipped"]) for record in backs), len(backs)


def present_holder(folder: Path) -> str:
    """Who trains in a run's folder; empty: nobody, or nobody who has lately shown life."""
    lock = newest_lock(folder / "lock")
    holder = read_lock(lock) if lock is not None else None
    if lock is None or holder is None or holder.released:
        return ""
    # Twice the limit: clocks of machines differ, and nothing is decided here.
    silent = time.time() - lock.stat().st_mtime > 2 * DEAD_SECONDS
    return "" if silent else str(holder)


def queue_state(jobs: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """What SLURM says of the chain's jobs: of one that runs, or else of the first that waits."""
    found = {}
    for job in jobs:
        try:
            line = slurm.call(["squeue", "--noheader", "--jobs", job, "--format=%T %r"]).strip()
        except slurm.SlurmError as error:
            if "Invalid job id" not in str(error):
                return f"unknown ({error})", ()
            continue
        if line:
            state, _, reason = line.partition(" ")
            found[job] = f"{state} ({reason})" if state == "PENDING" else state
    running = [state for state in found.values() if not state.startswith("PENDING")]
    return next(iter([*running, *found.values()]), "not queued"), tuple(found)


def attempt_statuses(records: Sequence[Mapping[str, Any]]) -> tuple[JobAttemptStatus, ...]:
    """The links of a chain, in order."""
    ends = {record["link"]: record for record in records if record["event"] == "end"}
    starts = [record for record in records if record["event"] == "start"]
    links = []
    for number, start in enumerate(starts):
        end = ends.get(start["link"])
        if end is not None:
            outcome = str(end["reason"])
        else:
            newest = number == len(starts) - 1
            outcome = "running" if newest else "lost: its node or its job was killed"
        links.append(
            JobAttemptStatus(
                name=start["link"],
                nodes=start["nodes"],
                first_step=start["step"],
                last_step=None if end is None else end["step"],
                seconds=None if end is None else end["time"] - start["time"],
                outcome=outcome,
            )
        )
    return tuple(links)


def slow_ranks(records: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Who was slow when the last link that began was last compared."""
    links = ["", *(record["link"] for record in records if record["event"] == "start")]
    told = [r["ranks"] for r in records if r["event"] == "slow" and r["link"] == links[-1]]
    return tuple(
        f"rank {item['rank']} on {item['host']}: {item['part']}, {item['factor']:.2f} times the "
        f"median's own time, {item['lost_seconds']:.3f} s a step"
        for item in (told[-1] if told else [])
    )


def bad_node_hours(folder: Path) -> float:
    """How long marks against nodes count in this run."""
    given = _config(folder).get("cluster", {}).get("bad_node_hours")
    return ClusterConfig().bad_node_hours if given is None else float(given)


def target_step(folder: Path) -> int:
    """Where the run ends, from its resolved configuration; 0 before it has one."""
    train = _config(folder).get("train", {})
    return int(train.get("exit_step") or train.get("stop_after") or train.get("steps") or 0)


def _config(folder: Path) -> dict[str, Any]:
    """The resolved configuration; empty before there is one."""
    path = folder / "config.yaml"
    if not path.exists():
        newest = max((folder / "submissions").glob("*/run.yaml"), default=None)
        if newest is None:
            return {}
        path = newest
    return read_yaml(path)


def seconds_left(
    chain: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]], target: int
) -> float | None:
    """Time to the target; None without records.

    A chain of several links goes on at its pace so far, from the first start to the last committed
    end: queueing, starting and lost steps included. A first link goes on at its present speed.
    """
    if not records or target <= 0:
        return None
    left = max(0, target - int(records[-1]["step"]))
    starts = [record for record in chain if record["event"] == "start"]
    if len(starts) > 1 and starts[-1]["step"] > starts[0]["step"]:
        pace = (starts[-1]["time"] - starts[0]["time"]) / (starts[-1]["step"] - starts[0]["step"])
        return float(left * pace)
    recent = [r["seconds_left"] for r in records[-RECENT_RECORDS:] if r.get("seconds_left")]
    return float(recent[-1]) if recent else None
