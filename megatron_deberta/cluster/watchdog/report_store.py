"""What the nodes of a job tell each other: one small file a node in the run folder.

Owns ``supervision/LINK/`` there. Refuses ports: whoever may write the run folder may write here,
and nobody else. Clocks of nodes need not agree: a file says how old things were when it was
written, and the reader counts on from when it saw the file change.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_deberta.cluster.watchdog.hang import Diagnosis, RankView, diagnose_deaths
from megatron_deberta.files import temporary_name
from megatron_deberta.observe.progress import Section

FOLDER = "supervision"
"""In the run folder; one folder a link in it."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """What a node's supervisor says."""

    node: int
    host: str
    serial: int
    """Counts up with every report."""
    views: tuple[RankView, ...]
    """The node's ranks."""
    limits: tuple[float, ...]
    """Their time-outs, in the same order."""
    times: tuple[tuple[int, int, int, int], ...]
    """Steps, and nanoseconds in data, forward and steps, in the same order."""
    alarm: str = ""
    """What is overdue, as this node sees it."""
    evidence: bool = False
    """The views hold what its processes do."""
    verdict: Diagnosis | None = None
    """Who hangs, once it is decided."""
    code: int | None = None
    """How the node ended; None while it trains."""

    def to_json(self) -> bytes:
        """The content of its file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> NodeReport:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            data: dict[str, Any] = json.loads(content)
            views = tuple(
                RankView(**{**view, "section": Section(view["section"])}) for view in data["views"]
            )
            verdict = data["verdict"]
            if verdict is not None:
                lists = {key: tuple(verdict[key]) for key in ("ranks", "hosts")}
                verdict = Diagnosis(**{**verdict, **lists})
            times = tuple(tuple(item) for item in data["times"])
            limits = tuple(data["limits"])
            return cls(
                **{**data, "views": views, "verdict": verdict, "times": times, "limits": limits}
            )
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a node's report: {error}") from None


class ReportStore:
    """The reports of a link's nodes.

    Args:
        run_dir: folder of the run.
        link: name of the link.
        clock: seconds, of a clock that never goes back.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        link: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = Path(run_dir) / FOLDER / link
        self._clock = clock
        self._seen: dict[int, tuple[int, float]] = {}

    def publish(self, report: NodeReport) -> None:
        """Replace this node's report; never half of it is seen. What is lost in a crash is old.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(report.node)
        temporary = temporary_name(path)
        temporary.write_bytes(report.to_json())
        os.replace(temporary, path)

    def read(self, num_nodes: int) -> dict[int, NodeReport]:
        """The last report of every node that has one, aged by the time since it came."""
        found: dict[int, NodeReport] = {}
        for node in range(num_nodes):
            try:
                report = NodeReport.from_json(self._path(node).read_bytes())
            except (OSError, ValueError):
                continue
            now = self._clock()
            serial, since = self._seen.get(node, (-1, now))
            if serial != report.serial:
                since = now
                self._seen[node] = (report.serial, now)
            aged = tuple(replace(view, age=view.age + now - since) for view in report.views)
            found[node] = replace(report, views=aged)
        return found

    def verdict(self, num_nodes: int) -> Diagnosis | None:
        """Why a link ended: a hang that some node found, or else the first rank that failed."""
        reports = list(self.read(num_nodes).values())
        hangs = [report.verdict for report in reports if report.verdict is not None]
        if hangs:
            return hangs[0]
        silent = [report for report in reports if report.code is None]
        if len(silent) == 1 and len(reports) > 1:
            # What its ranks do is unknown; those of other nodes only miss them.
            host, step = silent[0].host, max(view.step for view in silent[0].views)
            return Diagnosis("death", (), (host,), f"{host} fell silent at step {step}")
        return diagnose_deaths([view for report in reports for view in report.views])

    def _path(self, node: int) -> Path:
        return self.folder / f"node_{node}.json"
