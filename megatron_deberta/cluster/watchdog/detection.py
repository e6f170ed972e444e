"""Detection of hangs and stragglers, and diagnosis of their causes, from all ranks' heartbeats.

Hangs: ranks wait for each other in collectives, so when one stops, soon all stop. The one that the
others wait for has the smallest position (number of section borders passed). Therefore only the
ranks with the smallest position are compared with the time-out of their section.

Stragglers are slower than the median rank. Compared are the times that a rank spends by itself:
waiting for its batches, and its forward passes. Backward and update contain data-parallel
collectives, in which all ranks wait for the slowest. Tensor-parallel ranks wait for each other in
forward, so all of a group appear slow. A rank whose batches are late delays the others' forward
passes as well (the ranks of a batch sum their masks before it), so forward passes are compared only
if no rank's batches are late.
"""

from __future__ import annotations

import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_NEVER_REQUEUE,
    EXIT_REQUEUE,
    EXIT_USAGE,
)
from megatron_deberta.observe.progress import Section
from megatron_deberta.parsing import Number

FIRST_STEPS = 2
"""The first steps of a process compile and allocate; they have the time-out of start-up."""
STOPPED_STATES = ("T", "t", "Z", "X")
"""``/proc/PID/stat``: stopped, traced, dead."""

Kind = Literal["hang", "death"]
_ORDERLY = (
    None, EXIT_DONE, EXIT_USAGE, EXIT_REQUEUE, EXIT_NEVER_REQUEUE, EXIT_INTERRUPTED,
)  # fmt: skip
"""Codes of ranks that run, or that ended as they should."""
MIN_LOST_SHARE = 0.1
"""A straggler loses at least this share of a step."""
WINDOWS = 2
"""Consecutive windows in which a rank must be slow to be reported."""
Times = tuple[int, int, int, int]
"""Steps, and nanoseconds in data, forward and whole steps; sums since the start."""


@dataclass(frozen=True, slots=True)
class RankView:
    """State of one rank."""

    rank: int
    node: int
    host: str
    section: Section
    step: int
    position: int
    age: Number
    """Seconds since its position changed."""
    pid: int = 0
    state: str = ""
    """Of its main thread, as in ``/proc/PID/stat``; empty: unknown."""
    waiting: bool | None = None
    """Whether its stack ends in a collective; None: no stack."""
    detail: str = ""
    code: int | None = None
    ended: Number = 0.0
    """End, in seconds since the epoch."""
    killed: bool = False
    cause: str = ""
    """Cause of its end other than the program or the node; empty: unknown."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Cause of a hang or of the end of a run."""

    kind: Kind
    ranks: tuple[int, ...]
    """The culprit first; several: they cannot be distinguished; none: no rank is behind."""
    hosts: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Time-outs of sections, in seconds, given the durations of the last steps."""

    config: ClusterConfig
    step_times: tuple[float, ...] = ()

    def of(self, section: Section, steps_done: int) -> float:
        """Return the time-out of a section for a rank that has done ``steps_done`` steps."""
        config = self.config
        if section is Section.STARTUP or (section is Section.STEP and steps_done < FIRST_STEPS):
            return config.startup_timeout_seconds
        if section is Section.STEP:
            median = statistics.median(self.step_times) if self.step_times else 0.0
            return max(config.step_timeout_seconds, config.step_timeout_factor * median)
        if section is Section.DATA:
            # The first batches wait for the loader's processes to start.
            slack = config.startup_timeout_seconds if steps_done == 0 else 0.0
            return max(config.data_timeout_seconds, slack)
        if section is Section.EVALUATION:
            return config.evaluation_timeout_seconds
        # Rank 0's files, closed after the last step, are on the disk of checkpoints.
        return config.save_timeout_seconds

    def longest(self) -> float:
        """Return the longest time-out of any section."""
        return max(self.of(section, steps_done=FIRST_STEPS) for section in Section)


def find_hang(views: Sequence[RankView], limits: Mapping[int, float]) -> str:
    """Return what is overdue as text, empty if nothing is.

    Args:
        views: all known ranks of the job.
        limits: time-out in seconds of the section that each rank is in.
    """
    alive = [view for view in views if view.code is None]
    if not alive:
        return ""
    last = min(view.position for view in alive)
    # The most recent of them: a late rank may have delayed the others and be healthy.
    behind = min((view for view in alive if view.position == last), key=lambda view: view.age)
    limit = limits[behind.rank]
    if behind.age <= limit:
        return ""
    return (
        f"no progress in {behind.section.label} at step {behind.step} for {behind.age:.1f} s "
        f"(time-out {limit:.0f} s)"
    )


def diagnose_hang(views: Sequence[RankView], overdue: str, silent: Sequence[str] = ()) -> Diagnosis:
    """Diagnose which rank the others wait for.

    Args:
        views: the ranks of all nodes that answered, with diagnostics.
        overdue: result of ``find_hang``.
        silent: hosts that did not answer. The state of their ranks is unknown, so a rank is named
            only if it does not itself wait in a collective.
    """
    alive = [view for view in views if view.code is None]
    last = min((view.position for view in alive), default=0)
    behind = [view for view in alive if view.position == last]
    by_symptom = [[view for view in behind if symptom(view)] for symptom in _SYMPTOMS]
    # Stopped from outside, a rank does not continue by itself.
    suspects = [view for view in alive if view.state in STOPPED_STATES]
    if not suspects and silent:
        suspects = [view for view in behind if any(view in found for found in by_symptom)]
        if not suspects:
            reason = (
                f"{overdue}; no report from {', '.join(silent)}: node, supervisor or its mount of "
                "the run folder; the ranks there are unknown"
            )
            return Diagnosis("hang", (), (), reason)
    if not suspects and len(behind) > 1:
        rest = [] if len(behind) == len(alive) else behind
        suspects = next(filter(None, by_symptom), rest)
    elif not suspects:
        suspects = behind
    if not suspects:
        reason = f"{overdue}; no rank is behind, all wait for each other: check the network"
        return Diagnosis("hang", (), (), reason)
    first = min(suspects, key=lambda view: (view.position, view.rank))
    others = [view for view in suspects if view is not first]
    ranks = ", ".join(str(view.rank) for view in others)
    equal = f"; equally likely: ranks {ranks}" if others else ""
    detail = f", {first.detail}" if first.detail else ""
    reason = (
        f"rank {first.rank} on {first.host} hangs in {first.section.label} at step {first.step}"
        f"{detail}; {overdue}{equal}"
    )
    hosts = tuple(dict.fromkeys(view.host for view in (first, *others)))
    return Diagnosis("hang", (first.rank, *(view.rank for view in others)), hosts, reason)


def diagnose_missing_node(absent: Sequence[int], num_nodes: int) -> Diagnosis:
    """Return the diagnosis of nodes that never reported; all others wait for them.

    Args:
        absent: numbers of these nodes in the job.
        num_nodes: nodes of the job.
    """
    numbers = ", ".join(str(node) for node in absent)
    reason = (
        f"{len(absent)} of {num_nodes} nodes have sent no report (by number in the job: "
        f"{numbers}); the others wait for them: see their logs, and check that the run folder is "
        "mounted there"
    )
    return Diagnosis("hang", (), (), reason)


_SYMPTOMS: tuple[Callable[[RankView], bool], ...] = (
    lambda view: view.state == "D",  # in the kernel
    lambda view: view.waiting is None,  # did not write its stacks
    lambda view: view.waiting is False,  # outside of collectives
)
"""What distinguishes the culprit among ranks of the same position, strongest first."""


def diagnose_deaths(views: Sequence[RankView]) -> Diagnosis | None:
    """Diagnose which rank failed first; None if none failed by itself."""
    failed = [v for v in views if v.code not in _ORDERLY and not v.killed]
    if not failed:
        return None
    # A rank killed by a signal is the cause; the others then fail with errors.
    first = min(failed, key=lambda view: ((view.code or 0) > 0, view.ended))
    code = first.code or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    guess = "out of memory?" if code == -signal.SIGKILL else ""
    cause = f" ({first.cause or guess})" if first.cause or guess else ""
    reason = (
        f"rank {first.rank} on {first.host} {how}{cause} in {first.section.label} "
        f"at step {first.step}"
    )
    # A node is not excluded for what another one would have suffered as well.
    hosts = () if first.cause else (first.host,)
    return Diagnosis("death", (first.rank,), hosts, reason)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow rank."""

    rank: int
    part: str
    """``data`` or ``forward``, whichever loses more time."""
    factor: float
    """Its own time over the median rank's."""
    lost_seconds: float
    """Per step, against the median rank."""


class StragglerWatch:
    """Compares ranks over windows of steps.

    Args:
        factor: report a rank whose own time exceeds this multiple of the median.
        window: steps per window.
    """

    def __init__(self, factor: float, window: int) -> None:
        self._factor = factor
        self._window = window
        self._begin: dict[int, Times] = {}
        self._slow_windows: dict[int, int] = {}

    def update(self, sums: Mapping[int, Times]) -> tuple[Straggler, ...] | None:
        """Compare the ranks if every one has done the steps of a window.

        Returns:
            The stragglers, slowest first; None before the end of a window.
        """
        if self._begin.keys() != sums.keys():
            self._begin = dict(sums)
            return None
        deltas = {
            rank: tuple(
                now - before for now, before in zip(sums[rank], self._begin[rank], strict=True)
            )
            for rank in sums
        }
        if min(steps for steps, *_ in deltas.values()) < self._window:
            return None
        self._begin = dict(sums)
        means = {
            rank: (data / steps, forward / steps, whole / steps)
            for rank, (steps, data, forward, whole) in deltas.items()
        }
        slow = self._compare(means)
        self._slow_windows = {item.rank: self._slow_windows.get(item.rank, 0) + 1 for item in slow}
        reported = [item for item in slow if self._slow_windows[item.rank] >= WINDOWS]
        return tuple(sorted(reported, key=lambda item: -item.lost_seconds))

    def _compare(self, means: Mapping[int, tuple[float, float, float]]) -> list[Straggler]:
        # The lower median, so that one of two ranks can be slow.
        data, forward, whole = (
            statistics.median_low(mean[part] for mean in means.values()) for part in range(3)
        )
        own = max(data + forward, 1.0)
        for part, name, median in ((0, "data", data), (1, "forward", forward)):
            slow = []
            for rank, mean in means.items():
                lost = mean[part] - median
                if own + lost > self._factor * own and lost > MIN_LOST_SHARE * whole:
                    slow.append(Straggler(rank, name, (own + lost) / own, lost / 1e9))
            if slow:
                return slow
        return []
