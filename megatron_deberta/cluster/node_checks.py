"""The checks of a node, each in words: what was measured, or what is wrong and what to do.

``python -m megatron_deberta.cluster.node_checks job.json CHECK...`` prints a line of JSON a check.
Owns the measuring. Refuses time limits and decisions: ``node_check.py`` has them.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from megatron_deberta.cluster.affinity import numa_nodes
from megatron_deberta.cluster.slurm.submit import JobSpec
from megatron_deberta.errors import ConfigError, MegatronDebertaError

LEAST_FREE_GIB = 1.0
"""On the run folder's disk and on the node's own; ``doctor`` reckons with the checkpoint's size."""
MAX_SKEW_SECONDS = 5.0
SLOW_DEVICE = 0.85
"""A device below this part of its node's median rate is broken, hot or throttled."""
_REPEATS = 5


def devices(spec: JobSpec) -> str:
    """Are all GPUs there?"""
    if not spec.gpus_per_node:
        return "none asked for"
    names = [row[0] for row in _nvidia_smi("name")]
    if len(names) < spec.gpus_per_node:
        raise ConfigError(f"{len(names)} of {spec.gpus_per_node} GPUs; drain the node")
    return f"{len(names)} x {names[0]}"


def ecc(spec: JobSpec) -> str:
    """Has a GPU's memory errors that it could not correct?"""
    if not spec.gpus_per_node:
        return "no GPU"
    counts = _nvidia_smi("index,ecc.errors.uncorrected.volatile.total")
    bad = [index for index, errors in counts if errors.isdigit() and int(errors)]
    if bad:
        raise ConfigError(f"uncorrected memory errors on GPU {', '.join(bad)}; reset or drain it")
    return "no uncorrected errors"


def processors(spec: JobSpec) -> str:
    """Has the job the cores it asked for, and on which NUMA nodes are they?"""
    allowed = os.sched_getaffinity(0)
    wanted = spec.cpus_per_rank * spec.ranks_per_node
    if len(allowed) < wanted:
        raise ConfigError(f"{len(allowed)} of {wanted} cores allowed; look at the job's cgroup")
    numa = [f"{node} ({len(cpus & allowed)})" for node, cpus in numa_nodes() if cpus & allowed]
    return f"{len(allowed)} cores, on NUMA nodes {', '.join(numa) or 'unknown'}"


def disk(spec: JobSpec) -> str:
    """Can the run's folder be written and flushed, and is there room?"""
    texts = []
    for name, folder in (("run folder", spec.run_dir), ("node", tempfile.gettempdir())):
        with tempfile.NamedTemporaryFile(dir=folder) as probe:
            begin = time.monotonic()
            probe.write(os.urandom(1 << 20))
            probe.flush()
            os.fsync(probe.fileno())
            seconds = time.monotonic() - begin
        free = shutil.disk_usage(folder).free / 2**30
        if free < LEAST_FREE_GIB:
            raise ConfigError(f"{folder}: {free:.2f} GiB free; make room")
        texts.append(f"{name} {free:,.0f} GiB free, 1 MiB flushed in {seconds:.2f} s")
    return "; ".join(texts)


def clock(spec: JobSpec) -> str:
    """Does this clock agree with that of the run folder's disk, and so with the other nodes'?"""
    with tempfile.NamedTemporaryFile(dir=spec.run_dir) as probe:
        probe.write(b"x")
        probe.flush()
        os.fsync(probe.fileno())
        skew = time.time() - os.fstat(probe.fileno()).st_mtime
    if abs(skew) > MAX_SKEW_SECONDS:
        raise ConfigError(f"{skew:+.1f} s from the run folder's clock; start NTP on the node")
    return f"{skew:+.2f} s from the run folder's"


def kernels(spec: JobSpec) -> str:
    """Has torch code for the devices?"""
    import torch

    from megatron_deberta.cluster import preflight

    preflight.check_torch_version(torch.__version__)
    if not spec.gpus_per_node:
        return f"torch {torch.__version__}, no GPU"
    architectures = torch.cuda.get_arch_list()
    for index in range(torch.cuda.device_count()):
        preflight.check_architecture(torch.cuda.get_device_capability(index), architectures)
    return f"torch {torch.__version__} with {', '.join(architectures)}"


def matrix_rate(spec: JobSpec) -> str:
    """Does every device multiply as fast as the others, and as the profile expects?"""
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
    """How fast do this node's devices add up?"""
    world = spec.gpus_per_node or min(2, spec.ranks_per_node)
    if world < 2:
        return "one rank"
    with tempfile.TemporaryDirectory() as folder:
        rate = _all_reduce([("file://" + folder + "/store", rank, world) for rank in range(world)])
    return _compared(rate, spec.least_node_gb_per_second)


def all_reduce_across(spec: JobSpec) -> str:
    """How fast do the nodes add up, one device of each?"""
    if spec.nodes < 2:
        return "one node"
    # Not the ranks' own port: that one may still be closing when they start.
    port = int(os.environ["MASTER_PORT"]) + 1
    meeting = f"tcp://{os.environ['MASTER_ADDR']}:{port}"
    rate = _all_reduce([(meeting, int(os.environ["SLURM_NODEID"]), spec.nodes)])
    return _compared(rate, spec.least_network_gb_per_second)


def _compared(rate: float, least: float) -> str:
    if rate < least:
        raise ConfigError(f"{rate:.1f} of {least:.1f} GB/s; look at links and adapters")
    return f"{rate:.1f} GB/s"


def _all_reduce(places: Sequence[tuple[str, int, int]]) -> float:
    """Bus bandwidth of an all-reduce, in GB/s, by the slowest of the ranks started here."""
    command = [sys.executable, "-c", _ALL_REDUCE]
    arguments = [[*map(str, place), str(local)] for local, place in enumerate(places)]
    ranks = [
        subprocess.Popen([*command, *numbers], stdout=subprocess.PIPE, text=True)
        for numbers in arguments
    ]
    try:
        outputs = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise ConfigError("an all-reduce failed; see the log above, then links and adapters")
    return min(float(output) for output in outputs)


_ALL_REDUCE = f"""
import datetime, sys, time, torch, torch.distributed as dist
meeting, rank, world, local = sys.argv[1], *map(int, sys.argv[2:])
gpu = torch.cuda.is_available()
device = torch.device("cuda", local) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo", init_method=meeting, rank=rank,
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


def _nvidia_smi(fields: str) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        raise ConfigError("nvidia-smi is missing; is the driver loaded?")
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"nvidia-smi: {' '.join(done.stderr.split())}; drain the node")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


CHECKS: dict[str, Callable[[JobSpec], str]] = {
    "devices": devices,
    "ecc": ecc,
    "processors": processors,
    "disk": disk,
    "clock": clock,
    "kernels": kernels,
    "matrix rate": matrix_rate,
    "all-reduce on the node": all_reduce_on_node,
    "all-reduce across nodes": all_reduce_across,
}


def main(arguments: Sequence[str]) -> None:
    """Run checks and print what each finds."""
    spec = JobSpec.read(arguments[0])
    for name in arguments[1:]:
        try:
            answer = {"ok": True, "text": CHECKS[name](spec)}
        except (MegatronDebertaError, OSError, RuntimeError, ValueError) as error:
            answer = {"ok": False, "text": " ".join(str(error).split())}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
