"""Is this node fit for its ranks? One line a check, before they start.

``python -m megatron_deberta.cluster.node_check job.json LINK``, one a node, by the link's srun.
Owns the order, the time limits and the report. Refuses to measure: ``node_checks.py`` does, in a
process of its own, because a broken device lets whoever touches it hang.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_deberta.cluster.slurm.submit import JobSpec
from megatron_deberta.cluster.watchdog.report_store import FOLDER
from megatron_deberta.errors import EXIT_DONE, EXIT_FAILURE
from megatron_deberta.files import write_atomically

ACROSS = "all-reduce across nodes"
LIMITS = {
    "devices": 30.0, "ecc": 30.0, "processors": 10.0, "disk": 60.0, "clock": 30.0,
    "kernels": 300.0, "matrix rate": 120.0, "all-reduce on the node": 180.0,
    ACROSS: 180.0,
}  # fmt: skip
"""The checks in order, and how long each may take, in seconds; the first of torch imports it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found."""

    check: str
    ok: bool
    text: str
    """What was measured; of a failure also what to do."""
    seconds: float = 0.0


def check_node(job_file: str, variables: dict[str, str], checks: Sequence[str]) -> list[Finding]:
    """Run checks one after the other; one that does not answer in time has failed.

    Args:
        job_file: ``job.json``.
        variables: environment of the checks.
        checks: names from ``LIMITS``.
    """
    found: list[Finding] = []
    while len(found) < len(checks):
        # A process that hung is replaced, and goes on with the next check.
        for finding in _in_one_process(job_file, variables, checks[len(found) :]):
            found.append(finding)
    return found


def _in_one_process(
    job_file: str, variables: dict[str, str], checks: Sequence[str]
) -> Iterator[Finding]:
    command = [sys.executable, "-m", "megatron_deberta.cluster.node_checks", job_file, *checks]
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            for check in checks:
                begin = time.monotonic()
                ready = selector.select(LIMITS[check])
                # A line is short and written at once.
                line = process.stdout.readline() if ready else b""
                seconds = round(time.monotonic() - begin, 2)
                if not line:
                    how = "ended without a word" if ready else f"no answer in {LIMITS[check]:.0f} s"
                    yield Finding(check, False, f"{how}; look at the node", seconds)
                    return
                answer = json.loads(line)
                yield Finding(check, bool(answer["ok"]), str(answer["text"]), seconds)
    finally:
        process.kill()
        process.wait()


def report_path(run_dir: str, link: str, node: int) -> Path:
    """Where a node's report lies."""
    return Path(run_dir) / FOLDER / link / f"check_{node}.json"


def failures(run_dir: str, link: str, num_nodes: int) -> dict[str, str]:
    """What is wrong, by the name of the node; nodes that did not report are not in it."""
    wrong: dict[str, dict[str, str]] = {}
    for node in range(num_nodes):
        try:
            report = json.loads(report_path(run_dir, link, node).read_bytes())
        except (OSError, ValueError):
            continue
        wrong[str(report["host"])] = {
            item["check"]: item["text"] for item in report["findings"] if not item["ok"]
        }
    if sum(ACROSS in found for found in wrong.values()) > 1:
        # One bad node spoils it for all; which it is, this does not tell.
        for found in wrong.values():
            found.pop(ACROSS, None)
    return {
        host: "; ".join(f"{check}: {text}" for check, text in found.items())
        for host, found in wrong.items()
        if found
    }


def main(arguments: Sequence[str]) -> int:
    """Check this node, print a line a check, and leave the report in the run folder."""
    job_file, link = arguments
    spec = JobSpec.read(job_file)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    found = check_node(job_file, dict(os.environ), list(LIMITS))
    for finding in found:
        word = "ok   " if finding.ok else "WRONG"
        sys.stdout.write(f"{word} {host} {finding.check}: {finding.text}\n")
    path = report_path(spec.run_dir, link, int(os.environ["SLURM_NODEID"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"host": host, "findings": [asdict(finding) for finding in found]}
    write_atomically(path, json.dumps(content).encode())
    return EXIT_DONE if all(finding.ok for finding in found) else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
