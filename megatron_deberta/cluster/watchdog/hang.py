"""Does a run hang, and who holds it up? Decided from what all nodes know.

Owns the rule and the words, as pure functions. Refuses to look at processes (``evidence.py``) or to
end them (``supervisor.py``).

Ranks wait for each other in collectives, so when one stops, soon all stand still. The one that the
others wait for is behind: it has passed fewer borders. So only the ranks that are furthest behind
are held against the time-out of their section; how long the others wait does not matter.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.observe.progress import Section

FIRST_STEPS = 2
"""So many steps of a process compile and allocate; they have the time that start-up has."""
STOPPED_STATES = ("T", "t", "Z", "X")
"""``/proc/PID/stat``: stopped, traced, dead."""

Kind = Literal["hang", "death"]


@dataclass(frozen=True, slots=True)
class RankView:
    """What is known of one rank."""

    rank: int
    node: int
    """Number of its node in the job."""
    host: str
    section: Section
    step: int
    position: int
    age: float
    """Seconds since it passed a border."""
    pid: int = 0
    state: str = ""
    """Of its main thread, as in ``/proc/PID/stat``; empty: not looked at."""
    waiting: bool | None = None
    """Its stack ends in a collective; None: no stack."""
    detail: str = ""
    """Where it stands, in words."""
    code: int | None = None
    """How it ended; None while it runs."""
    ended: float = 0.0
    """When it ended, seconds since the epoch."""
    killed: bool = False
    """Its supervisor ended it."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a run stands still or has ended."""

    kind: Kind
    ranks: tuple[int, ...]
    """Whom it is about; none: nobody is behind; several: they cannot be told apart."""
    hosts: tuple[str, ...]
    """Their nodes."""
    reason: str
    """In words, for people."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a rank may stay between two borders, in seconds."""

    config: ClusterConfig
    step_times: tuple[float, ...] = ()
    """Durations of the last steps."""

    def of(self, section: Section, steps_done: int) -> float:
        """The time-out of a section.

        Args:
            section: of the rank.
            steps_done: steps that its process has done.
        """
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
        # Rank 0's files, and their closing, lie where checkpoints do.
        return config.save_timeout_seconds


def find_hang(views: Sequence[RankView], limits: Mapping[int, float]) -> str:
    """Say what is overdue; empty if nothing is.

    Args:
        views: every rank of the job that is known; those that have ended do not count.
        limits: time-out by rank, in seconds, of the section that it is in.
    """
    alive = [view for view in views if view.code is None]
    if not alive:
        return ""
    last = min(view.position for view in alive)
    # The youngest: one that came late may have kept the others waiting and be well.
    behind = min((view for view in alive if view.position == last), key=lambda view: view.age)
    limit = limits[behind.rank]
    if behind.age <= limit:
        return ""
    return (
        f"no progress in {behind.section.label} at step {behind.step} for {behind.age:.1f} s "
        f"(time-out {limit:.0f} s)"
    )


def diagnose_hang(views: Sequence[RankView], overdue: str) -> Diagnosis:
    """Name who holds the others up.

    Args:
        views: every rank, with the evidence of all nodes that answered.
        overdue: what ``find_hang`` said.
    """
    alive = [view for view in views if view.code is None]
    # Stopped from outside: whoever waits for it, it will not go on.
    suspects = [view for view in alive if view.state in STOPPED_STATES]
    if not suspects:
        last = min((view.position for view in alive), default=0)
        suspects = [view for view in alive if view.position == last]
        for sign in (_in_kernel, _mute, _elsewhere):
            found = [view for view in suspects if sign(view)]
            if found and len(suspects) > 1:
                suspects = found
                break
        else:
            if len(suspects) > 1 and len(suspects) == len(alive):
                suspects = []
    if not suspects:
        reason = f"{overdue}; no rank is behind, all wait for each other: look at the network"
        return Diagnosis("hang", (), (), reason)
    first = min(suspects, key=lambda view: (view.position, view.rank))
    others = ""
    if len(suspects) > 1:
        others = f"; as likely: ranks {', '.join(str(v.rank) for v in suspects if v is not first)}"
    detail = f", {first.detail}" if first.detail else ""
    reason = (
        f"rank {first.rank} on {first.host} hangs in {first.section.label} at step {first.step}"
        f"{detail}; {overdue}{others}"
    )
    ordered = (first, *(view for view in suspects if view is not first))
    hosts = tuple(dict.fromkeys(view.host for view in ordered))
    return Diagnosis("hang", tuple(view.rank for view in ordered), hosts, reason)


def diagnose_missing_node(absent: Sequence[int], num_nodes: int) -> Diagnosis:
    """Say which nodes never came; those that did only wait for them, wherever they stand.

    Args:
        absent: numbers of nodes that have shown nothing.
        num_nodes: nodes of the job.
    """
    numbers = ", ".join(str(node) for node in absent)
    reason = (
        f"{len(absent)} of {num_nodes} nodes have shown no sign of life (by number in the job: "
        f"{numbers}); the others wait for them: see their logs, and whether the run's folder is "
        "mounted there"
    )
    return Diagnosis("hang", (), (), reason)


def _in_kernel(view: RankView) -> bool:
    return view.state == "D"


def _mute(view: RankView) -> bool:
    """It did not answer the signal that the others answered with their stacks."""
    return view.waiting is None


def _elsewhere(view: RankView) -> bool:
    return view.waiting is False


def diagnose_deaths(views: Sequence[RankView]) -> Diagnosis | None:
    """Name the rank whose end took the others along; None if none failed by itself."""
    failed = [v for v in views if v.code not in (None, 0, 2, 75, 93) and not v.killed]
    if not failed:
        return None
    # One that a signal killed is the cause; those that miss it end with errors.
    first = min(failed, key=lambda view: ((view.code or 0) > 0, view.ended))
    code = first.code or 0
    how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    memory = " (out of memory?)" if code == -9 else ""
    reason = (
        f"rank {first.rank} on {first.host} {how}{memory} in {first.section.label} "
        f"at step {first.step}"
    )
    return Diagnosis("death", (first.rank,), (first.host,), reason)
