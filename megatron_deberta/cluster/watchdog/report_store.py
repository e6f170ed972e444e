"""Reports of a job attempt's nodes: one small JSON file per node in ``supervision/ATTEMPT/``.

They are exchanged through the run folder, so no port is opened. Clocks of nodes need not agree: a
report gives ages, and a reader adds the time since it saw the file change.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron_deberta.cluster.watchdog.hang import Diagnosis, RankView, diagnose_deaths
from megatron_deberta.cluster.watchdog.straggler import Times
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE
from megatron_deberta.files import temporary_name
from megatron_deberta.observe.progress import Section

FOLDER = "supervision"
"""Folder in the run folder with a folder per job attempt."""
_KEYS = {"diagnosis": "verdict", "has_diagnostics": "evidence"}
"""Keys in the file that differ from the field's name."""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Report of a node's supervisor."""

    node: int
    host: str
    serial: int
    views: tuple[RankView, ...]
    limits: tuple[float, ...]
    """Their time-outs in seconds, in the same order, as are their times."""
    times: tuple[Times, ...]
    alarm: str = ""
    """What is overdue according to this node; empty: nothing."""
    has_diagnostics: bool = False
    """Whether the views include the states of processes."""
    diagnosis: Diagnosis | None = None
    code: int | None = None

    def to_json(self) -> bytes:
        """Return the content of its file."""
        data = {_KEYS.get(name, name): value for name, value in asdict(self).items()}
        return json.dumps(data).encode()

    @classmethod
    def from_json(cls, content: bytes) -> NodeReport:
        """Read the content of a report's file.

        Raises:
            ValueError: it is not a report.
        """
        names = {key: name for name, key in _KEYS.items()}
        try:
            data: dict[str, Any] = {
                names.get(key, key): value for key, value in json.loads(content).items()
            }
            data["views"] = tuple(
                RankView(**{**view, "section": Section(view["section"])}) for view in data["views"]
            )
            if data["diagnosis"] is not None:
                found = data["diagnosis"]
                lists = {key: tuple(found[key]) for key in ("ranks", "hosts")}
                data["diagnosis"] = Diagnosis(**{**found, **lists})
            data["times"] = tuple(tuple(item) for item in data["times"])
            data["limits"] = tuple(data["limits"])
            return cls(**data)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a node's report: {error}") from None


class ReportStore:
    """Reports of a job attempt's nodes.

    Args:
        run_dir: folder of the run.
        attempt: name of the attempt.
    """

    def __init__(self, run_dir: str | os.PathLike[str], attempt: str) -> None:
        self.folder = Path(run_dir) / FOLDER / attempt
        self._seen: dict[int, tuple[int, float]] = {}

    def publish(self, report: NodeReport) -> None:
        """Replace this node's report atomically, but not durably.

        Raises:
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(report.node)
        temporary = temporary_name(path)
        temporary.write_bytes(report.to_json())
        os.replace(temporary, path)

    def read(self, nodes: Iterable[int]) -> dict[int, NodeReport]:
        """Return the newest report of each of the nodes that has one, with ages as of now."""
        reports: dict[int, NodeReport] = {}
        for node in nodes:
            try:
                report = NodeReport.from_json(self._path(node).read_bytes())
            except (OSError, ValueError):
                continue
            now = time.monotonic()
            serial, since = self._seen.get(node, (-1, now))
            if serial != report.serial:
                since = now
                self._seen[node] = (report.serial, now)
            aged = tuple(replace(view, age=view.age + now - since) for view in report.views)
            reports[node] = replace(report, views=aged)
        return reports

    def silence(self, node: int) -> float:
        """Return the seconds since a new report of the node was read; infinite if none was."""
        _, since = self._seen.get(node, (-1, -math.inf))
        return time.monotonic() - since

    def diagnose(self, num_nodes: int) -> Diagnosis | None:
        """Return why an attempt failed: a hang, a silent node, or the first rank that died."""
        reports = list(self.read(range(num_nodes)).values())
        hangs = [report.diagnosis for report in reports if report.diagnosis is not None]
        silent = [report for report in reports if report.code is None]
        is_one_silent = len(silent) == 1 and len(reports) > 1
        if hangs and (hangs[0].ranks or not is_one_silent):
            return hangs[0]
        if is_one_silent and all(r.code in (None, EXIT_DONE, EXIT_REQUEUE) for r in reports):
            # The others ended as they should, so it did, too, and could not write.
            return None
        if is_one_silent:
            # The state of its ranks is unknown; it is named, but not excluded: its supervisor may
            # have been unable to write.
            host, step = silent[0].host, max(view.step for view in silent[0].views)
            reason = f"{host} stopped reporting at step {step}"
            return Diagnosis("death", (), (host,), reason)
        return diagnose_deaths([view for report in reports for view in report.views])

    def _path(self, node: int) -> Path:
        return self.folder / f"node_{node}.json"
