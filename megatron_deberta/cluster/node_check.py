"""Node check: tests a node before its ranks start, with a time limit per test, and reports.

A job attempt's srun starts ``python -m megatron_deberta.cluster.node_check job.json ATTEMPT`` on
every node. The tests of ``node_checks.py`` run in a process of their own, because a broken device
can make the process that uses it hang.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_deberta.cluster.node_checks import ACROSS, CHECKS
from megatron_deberta.cluster.slurm.submit import JobSpec
from megatron_deberta.cluster.watchdog.report_store import FOLDER
from megatron_deberta.errors import EXIT_DONE, EXIT_FAILURE, DataError
from megatron_deberta.files import write_atomically
from megatron_deberta.observe.console import run_logged
from megatron_deberta.parsing import Seconds, parse_json, read_json, whole_number

logger = logging.getLogger("node_check")

LIMITS = {name: seconds for name, (_, seconds) in CHECKS.items()}


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check."""

    check: str
    ok: bool
    text: str
    """What was measured; for a failure also what to do."""
    seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the process of the checks prints about each of them."""

    ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a node; the content of its file."""

    host: str
    findings: tuple[Finding, ...]


def check_node(job_file: str, variables: dict[str, str], checks: Sequence[str]) -> list[Finding]:
    """Run checks one after the other; one that exceeds its time limit has failed.

    Args:
        job_file: path of ``job.json``.
        variables: environment of the checks.
        checks: names from ``LIMITS``.
    """
    findings: list[Finding] = []
    while len(findings) < len(checks):
        # After a check that hung, a new process runs the remaining ones.
        findings.extend(_in_one_process(job_file, variables, checks[len(findings) :]))
    return findings


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
                # A line is short and arrives as a whole.
                line = process.stdout.readline() if ready else b""
                seconds = round(time.monotonic() - begin, 2)
                if not line:
                    how = "exited silently" if ready else f"no answer in {LIMITS[check]:.0f} s"
                    yield Finding(check, False, f"{how}; inspect the node", seconds)
                    return
                try:
                    answer = parse_json(line, Answer, check, "an answer", remedy="see the log")
                except DataError as error:
                    yield Finding(check, False, str(error), seconds)
                    return
                yield Finding(check, answer.ok, answer.text, seconds)
    finally:
        process.kill()
        process.wait()


def report_path(run_dir: str, attempt: str, node: int) -> Path:
    """Return the path of the report of a node's checks.

    Args:
        run_dir: the run folder.
        attempt: name of the job attempt.
        node: index of the node in the job.
    """
    return Path(run_dir) / FOLDER / attempt / f"check_{node}.json"


def failures(run_dir: str, attempt: str, num_nodes: int) -> dict[str, str]:
    """Return the failed checks as text, by name of the node.

    Nodes that did not report are left out.

    Args:
        run_dir: the run folder.
        attempt: name of the job attempt.
        num_nodes: number of nodes.
    """
    failed: dict[str, dict[str, str]] = {}
    for node in range(num_nodes):
        try:
            report = read_json(
                report_path(run_dir, attempt, node), Report, "a report", remedy="it is ignored"
            )
        except (OSError, DataError):
            continue
        failed[report.host] = {item.check: item.text for item in report.findings if not item.ok}
    if sum(ACROSS in checks for checks in failed.values()) > 1:
        # One bad node makes this check fail on all; it does not show which.
        for checks in failed.values():
            checks.pop(ACROSS, None)
    return {
        host: "; ".join(f"{check}: {text}" for check, text in checks.items())
        for host, checks in failed.items()
        if checks
    }


def main(arguments: Sequence[str]) -> int:
    """Check this node, print one line per check, and write the report."""
    return run_logged(lambda: _check_this_node(*arguments), logger)


def _check_this_node(job_file: str, attempt: str) -> int:
    spec = JobSpec.read(job_file)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    findings = check_node(job_file, dict(os.environ), list(LIMITS))
    for finding in findings:
        status = "ok   " if finding.ok else "WRONG"
        sys.stdout.write(f"{status} {host} {finding.check}: {finding.text}\n")
    path = report_path(spec.run_dir, attempt, whole_number(os.environ, "SLURM_NODEID", 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(Report(host, tuple(findings)))).encode())
    return EXIT_DONE if all(finding.ok for finding in findings) else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
