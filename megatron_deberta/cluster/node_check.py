"""Node check: tests a node before its ranks start, with a time limit per test, and reports.

A job attempt's srun starts ``python -m megatron_deberta.cluster.node_check job.json ATTEMPT`` on
every node. The checks run in a process of their own, because a broken device can make the process
that uses it hang; it is started with ``--run CHECK...`` in place of the attempt, and prints one
JSON line per check. A check returns what it measured, or raises with what is wrong.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron_deberta.cluster.installation import (
    check_clock,
    check_free_space,
    check_torch,
    query_gpus,
)
from megatron_deberta.cluster.slurm.submit import JobSpec
from megatron_deberta.cluster.watchdog.ranks import numa_nodes
from megatron_deberta.cluster.watchdog.reports import FOLDER
from megatron_deberta.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    ConfigError,
    DataError,
    MegatronDebertaError,
)
from megatron_deberta.files import write_atomically
from megatron_deberta.observe.console import run_logged
from megatron_deberta.parsing import Seconds, parse_json, read_json, whole_number

logger = logging.getLogger("node_check")

SLOW_DEVICE = 0.85
"""A device below this share of its node's median rate is broken, hot or throttled."""
ACROSS = "all-reduce across nodes"
_REPEATS = 5
_RUN = "--run"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check."""

    check: str
    ok: bool
    text: str
    """What was measured; for a failure also what to do."""
    seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a node; the content of its file."""

    host: str
    findings: tuple[Finding, ...]


def devices(spec: JobSpec) -> str:
    """Check that all GPUs are present."""
    if not spec.gpus_per_node:
        return "none requested"
    names = [row[0] for row in query_gpus("name")]
    if len(names) < spec.gpus_per_node:
        raise ConfigError(f"{len(names)} of {spec.gpus_per_node} GPUs; drain the node")
    return f"{len(names)} x {names[0]}"


def ecc(spec: JobSpec) -> str:
    """Check for uncorrected errors of GPU memory."""
    if not spec.gpus_per_node:
        return "no GPU"
    counts = query_gpus("index,ecc.errors.uncorrected.volatile.total")
    bad = [index for index, errors in counts if errors.isdigit() and int(errors)]
    if bad:
        raise ConfigError(f"uncorrected memory errors on GPU {', '.join(bad)}; reset or drain it")
    return "no uncorrected errors"


def processors(spec: JobSpec) -> str:
    """Check that the job may use the cores it has requested."""
    allowed = os.sched_getaffinity(0)
    requested = spec.cpus_per_rank * spec.ranks_per_node
    if len(allowed) < requested:
        raise ConfigError(f"{len(allowed)} of {requested} cores allowed; check the job's cgroup")
    numa = [f"{node} ({len(cpus & allowed)})" for node, cpus in numa_nodes() if cpus & allowed]
    return f"{len(allowed)} cores, on NUMA nodes {', '.join(numa) or 'unknown'}"


def disk(spec: JobSpec) -> str:
    """Check that the run folder can be written, and the free space."""
    texts = []
    for name, folder in (("run folder", spec.run_dir), ("node", tempfile.gettempdir())):
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            begin = time.monotonic()
            probe.write(os.urandom(1 << 20))
            probe.flush()
            os.fsync(probe.fileno())
            seconds = time.monotonic() - begin
        texts.append(f"{name} {check_free_space(folder)}, 1 MiB flushed in {seconds:.2f} s")
    return "; ".join(texts)


def clock(spec: JobSpec) -> str:
    """Compare this clock with that of the run folder's disk, and so with the other nodes'."""
    return f"{check_clock(spec.run_dir):+.2f} s from the run folder's"


def kernels(spec: JobSpec) -> str:
    """Check that torch is supported and has kernels for the devices."""
    return f"torch {check_torch()}"


def matrix_rate(spec: JobSpec) -> str:
    """Compare the matrix rates of the devices with each other and with the profile."""
    import torch

    from megatron_deberta.observe.throughput import measure_matmul_rate

    if not spec.gpus_per_node:
        rate = measure_matmul_rate(torch.device("cpu"), torch.float32) / 1e12
        return f"{rate:.3f} TFLOP/s in fp32 on the processor"
    rates = [
        measure_matmul_rate(torch.device("cuda", index), torch.float16) / 1e12
        for index in range(spec.gpus_per_node)
    ]
    least = max(SLOW_DEVICE * statistics.median(rates), spec.least_tflops)
    if slow := [f"GPU {i}: {rate:.0f}" for i, rate in enumerate(rates) if rate < least]:
        raise ConfigError(f"{', '.join(slow)} of {least:.0f} TFLOP/s; check heat and power, drain")
    return f"{min(rates):.0f} to {max(rates):.0f} TFLOP/s in fp16"


def all_reduce_on_node(spec: JobSpec) -> str:
    """Measure the all-reduce bandwidth of this node's devices."""
    world = spec.gpus_per_node or min(2, spec.ranks_per_node)
    if world < 2:
        return "one rank"
    with tempfile.TemporaryDirectory() as folder:
        rate = _all_reduce([("file://" + folder + "/store", rank, world) for rank in range(world)])
    return _check_rate(rate, spec.least_node_gb_per_second)


def all_reduce_across(spec: JobSpec) -> str:
    """Measure the all-reduce bandwidth of one device per node."""
    if spec.nodes < 2:
        return "one node"
    # Not the ranks' port, which might still be closing when they start.
    port = int(os.environ["MASTER_PORT"]) + 1
    rendezvous = f"tcp://{os.environ['MASTER_ADDR']}:{port}"
    rate = _all_reduce([(rendezvous, whole_number(os.environ, "SLURM_NODEID", 0), spec.nodes)])
    return _check_rate(rate, spec.least_network_gb_per_second)


def _check_rate(rate: float, least: float) -> str:
    if rate < least:
        raise ConfigError(f"{rate:.1f} of {least:.1f} GB/s; check links and adapters")
    return f"{rate:.1f} GB/s"


def _all_reduce(places: Sequence[tuple[str, int, int]]) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s, that of the slowest rank started here.

    Args:
        places: init method, rank and world size of the ranks to start.
    """
    command = [sys.executable, "-c", _ALL_REDUCE]
    ranks = [
        subprocess.Popen(
            [*command, *map(str, place), str(local)], stdout=subprocess.PIPE, text=True
        )
        for local, place in enumerate(places)
    ]
    try:
        outputs = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise ConfigError("an all-reduce failed; see the log above")
    return min(float(output) for output in outputs)


_ALL_REDUCE = f"""
import datetime, sys, time, torch, torch.distributed as dist
init_method, rank, world, local = sys.argv[1], *map(int, sys.argv[2:])
gpu = torch.cuda.is_available()
device = torch.device("cuda", local) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", init_method=init_method, rank=rank,
                        world_size=world, timeout=datetime.timedelta(seconds=120))
numbers = torch.ones((1 << 26) if gpu else (1 << 20), device=device)
best = float("inf")
for _ in range({_REPEATS}):
    dist.barrier()
    begin = time.perf_counter()
    dist.all_reduce(numbers)
    if gpu:
        torch.cuda.synchronize()
    best = min(best, time.perf_counter() - begin)
assert numbers[0].item() == float(world) ** {_REPEATS}, "wrong sum"
dist.destroy_process_group()
print(2 * (world - 1) / world * numbers.numel() * 4 / best / 1e9)
"""


CHECKS: dict[str, tuple[Callable[[JobSpec], str], float]] = {
    "devices": (devices, 30.0),
    "ecc": (ecc, 30.0),
    "processors": (processors, 10.0),
    "disk": (disk, 60.0),
    "clock": (clock, 30.0),
    "kernels": (kernels, 300.0),
    "matrix rate": (matrix_rate, 120.0),
    "all-reduce on the node": (all_reduce_on_node, 180.0),
    ACROSS: (all_reduce_across, 180.0),
}
"""The checks in order, and their time limits in seconds; ``kernels`` includes torch's import."""


def check_node(job_file: str, checks: Sequence[str]) -> list[Finding]:
    """Run checks one after the other; one that exceeds its time limit has failed.

    Args:
        job_file: path of ``job.json``.
        checks: names from ``CHECKS``.
    """
    findings: list[Finding] = []
    while len(findings) < len(checks):
        # After a check that hung, a new process runs the remaining ones.
        findings.extend(_in_one_process(job_file, checks[len(findings) :]))
    return findings


def _in_one_process(job_file: str, checks: Sequence[str]) -> Iterator[Finding]:
    command = [sys.executable, "-m", "megatron_deberta.cluster.node_check", job_file, _RUN, *checks]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        for check in checks:
            begin = time.monotonic()
            limit = CHECKS[check][1]
            ready, _, _ = select.select([process.stdout], [], [], limit)
            # A line is short and arrives as a whole.
            line = process.stdout.readline() if ready else b""
            seconds = round(time.monotonic() - begin, 2)
            if not line:
                how = "exited silently" if ready else f"no answer in {limit:.0f} s"
                yield Finding(check, False, f"{how}; inspect the node", seconds)
                return
            try:
                found = parse_json(line, Finding, check, "an answer", remedy="see the log")
            except DataError as error:
                yield Finding(check, False, str(error), seconds)
                return
            yield replace(found, seconds=seconds)
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


def _run_checks(job_file: str, checks: Sequence[str]) -> int:
    """Run checks in this process, and print their results."""
    spec = JobSpec.read(job_file)
    for name in checks:
        try:
            found = Finding(name, True, CHECKS[name][0](spec))
        except (MegatronDebertaError, OSError, RuntimeError, ValueError) as error:
            found = Finding(name, False, " ".join(str(error).split()))
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
        sys.stdout.flush()
    return EXIT_DONE


def main(arguments: Sequence[str]) -> int:
    """Check this node, print one line per check, and write the report."""
    job_file, attempt, *checks = arguments
    if attempt == _RUN:
        return _run_checks(job_file, checks)
    return run_logged(lambda: _check_this_node(job_file, attempt), logger)


def _check_this_node(job_file: str, attempt: str) -> int:
    spec = JobSpec.read(job_file)
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    findings = check_node(job_file, list(CHECKS))
    for finding in findings:
        status = "ok   " if finding.ok else "WRONG"
        sys.stdout.write(f"{status} {host} {finding.check}: {finding.text}\n")
    path = report_path(spec.run_dir, attempt, whole_number(os.environ, "SLURM_NODEID", 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(Report(host, tuple(findings)))).encode())
    return EXIT_DONE if all(finding.ok for finding in findings) else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
