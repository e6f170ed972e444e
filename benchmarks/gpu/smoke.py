"""First contact with a GPU, in at most three minutes: every kernel, a DeepSpeed step, save, resume.

Each item is independent; the stack of a failing one is printed and the rest goes on. Kernels are
compared with their twins in float64 on the CPU and must give the same bits three times. On a CPU
they run in Triton's interpreter.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys

import torch

from benchmarks.gpu import parity, train
from benchmarks.gpu.kernel_checks import (
    attention,
    check_attention,
    check_full_size,
    check_kernels,
    kernel_case,
)
from benchmarks.gpu.record import Item, Record
from benchmarks.lib.provenance import ROOT, version
from megatron_deberta.cluster.installation import check_compiler
from megatron_deberta.errors import ConfigError

OPTIONAL = ("triton", "flash_attn", "disentangled_flash", "flashdeberta", "liger_kernel")
RACECHECK_SECONDS = 90
GATHERED_DONE = "gathered kernels: done"


def run(record: Record) -> None:
    """Run the items, the broadest first: a first start compiles for most of the time."""
    device = record.options.device
    on_gpu = device == "cuda"
    record.run("installation", lambda: installation(on_gpu))
    first, size = kernel_case(device)
    check_kernels(record, first)
    for gathered in ("", "gathered", "spread"):
        check_attention(record, first, size, gathered)
    check_attention(record, first, size, documents=True)
    if on_gpu:
        check_full_size(record)
    small = parity.SMALL if record.options.small else parity.MODEL
    record.run("DeepSpeed step", lambda: parity.compare_steps(small, device, "bf16"))
    record.run("save, kill, resume", lambda: train.killed_and_resumed(record, train.SMALL))
    record.run("export and fill masks", lambda: train.export(record.options.work))
    if on_gpu:
        record.run("racecheck of the gathered kernels", racecheck)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if dtype != first:
            check_kernels(record, dtype)
    if on_gpu:
        check_attention(record, torch.float16, 128)
        check_attention(record, torch.float32, 32, gathered="gathered")


def installation(on_gpu: bool) -> Item:
    """Import the optional packages; check compiler and headers, which kernels need."""
    found = {}
    for package in OPTIONAL:
        try:
            importlib.import_module(package)
            found[package] = version(package.replace("_", "-")) or "without a version"
        except ImportError as missing:
            found[package] = str(missing)
    wrong = []
    if on_gpu and version("triton") is None:
        wrong.append("Triton is not installed: nothing below runs in a kernel")
    try:
        found["compiler"] = check_compiler()
    except ConfigError as missing:
        found["compiler"] = str(missing)
        wrong += [str(missing)] if on_gpu else []
    return {"found": found, "wrong": wrong}


_RUN_GATHERED = """
import sys
from benchmarks.gpu.smoke import gathered_kernels
sys.exit(gathered_kernels(sys.argv[1]))
"""


def racecheck(device: str = "cuda") -> Item:
    """Run the gathered kernels under compute-sanitizer, which checks shared memory for races.

    It does not see global memory; there the equal bits of repeated calls must do.

    Args:
        device: on which they run.
    """
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    tool = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:{home}/bin")
    if tool is None:
        return {"skipped": "compute-sanitizer is not installed", "wrong": []}
    command = [tool, "--tool", "racecheck", "--error-exitcode", "9",
               sys.executable, "-c", _RUN_GATHERED, device]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=RACECHECK_SECONDS
    )
    tail = (done.stdout + done.stderr)[-2000:]
    wrong = [] if done.returncode == 0 else [f"exit code {done.returncode}: {tail}"]
    if not wrong and GATHERED_DONE not in done.stdout:
        wrong.append(f"the kernels did not run: {tail}")
    return {"summary": tail.splitlines()[-1:], "wrong": wrong}


def gathered_kernels(device: str) -> int:
    """Run forward and backward of gathered queries, as `racecheck` does; return the exit code."""
    dtype, size = kernel_case(device)
    item = attention(device, dtype, size, gathered="gathered")
    print(GATHERED_DONE, *item["wrong"], sep="\n")
    return int(bool(item["wrong"]))


def table(items: dict[str, Item]) -> list[str]:
    """Return lines for the terminal."""
    lines = []
    for name, item in items.items():
        off = item.get("off", {})
        text = "  ".join(f"{key} error {value:.1e}" for key, value in off.items())
        state = item.get("skipped") or ("wrong" if item.get("wrong") or "error" in item else "ok")
        lines.append(f"  {name:34} {state:6} {text}")
    return lines
