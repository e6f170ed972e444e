"""Stages of the first contact with a GPU without a model: machine, numerics, attention.

Each stage is a function that runs its items, the most important first, and each item is recorded
as soon as it is measured, so a stage that is killed keeps what it has.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.autograd import DeviceType

from benchmarks.attention.operator import TENSORS, Comparison, timed_step
from benchmarks.attention.operator import step as attention_step
from benchmarks.attention.variants import (
    CPU_VARIANTS,
    DTYPES,
    EAGER,
    GPU_VARIANTS,
    POSITIONS,
    SLOTS,
    Case,
    make_inputs,
)
from benchmarks.gpu import kernel_checks
from benchmarks.gpu.first_contact import ONE_STAGE
from benchmarks.gpu.record import Item, Record
from benchmarks.lib.measuring import Stopwatch, in_turns
from benchmarks.lib.provenance import version
from benchmarks.lib.tolerances import OPERATOR
from megatron_deberta.ops import disentangled_attention
from megatron_deberta.ops.triton import settings
from megatron_deberta.ops.triton.settings import LaunchSetting

COMPILE_PROCESSES = 12
# Tokens, inputs and outputs of the 1.5B model's matrix products at 16k tokens per step.
PRODUCTS = {
    "8192 x 8192 x 8192": (8192, 8192, 8192),
    "query, key, value": (16384, 1536, 4608),
    "attention output": (16384, 1536, 1536),
    "FFN in": (16384, 1536, 6144),
    "FFN out": (16384, 6144, 1536),
}
ADAM_ELEMENTS = 1_570_000_000
"""The weights of the 1.5B model, as DeepSpeed keeps them: in one tensor."""
ATTENTION_CASES = [
    Case(batch, heads, length, dropout, dtype="bf16", device="cuda")
    for batch, heads, length in ((32, 24, 512), (2, 12, 8192))
    for dropout in (0.1, 0.0)
]
SMALL_CASES = [Case(2, 2, 96, 0.1)]
PEERS = ("DisentangledFlash", "FlashDeBERTa")
# Eager attention at this length takes more memory and time than everything else together.
EAGER_LENGTH = 512
# Warps, pipeline stages and registers to compare, by kernel, for tiles of 64. With 168 registers a
# multiprocessor holds three programs of four warps, with more two.
CANDIDATES = {
    "forward": ((4, 2), (4, 1, 168), (4, 2, 168)),
    "key": ((4, 1), (4, 1, 168)),
    "query_gradient": ((4, 2), (4, 1), (4, 2, 168)),
    "table_gradient": ((4, 2), (4, 1), (4, 2, 168)),
}


def apply_environment() -> None:
    """Apply ``ONE_STAGE`` to this process."""
    if os.environ.get(ONE_STAGE) != "1":
        return
    kernels = {kernel for kernel, _ in settings.LAUNCH}
    kernels |= {"forward", "key_gradient", "query_gradient", "far_key"}
    kernels |= {"output_products", "end_products", "end_gradient"}
    for kernel in kernels:
        for tile in (16, 32, 64):
            default = LaunchSetting(max(tile // 16, 1), 1)
            settings.LAUNCH[kernel, tile] = settings.LAUNCH.get((kernel, tile), default)._replace(
                stages=1
            )


def machine(record: Record) -> None:
    """Versions, rates of copies, matrix products and AdamW, a collective on one rank."""
    device, small = record.options.device, record.options.small
    record.run("versions", lambda: versions(device))
    record.run("rates", lambda: rates(device, small))
    elements = 2**16 if small else ADAM_ELEMENTS
    record.run("fused AdamW", lambda: time_adam(elements, device))
    record.run("collective on one rank", lambda: one_rank_collective(device))


def versions(device: str) -> Item:
    """Return the versions of the software and the settings of the allocator."""
    found: Item = {
        name: version(name)
        for name in ("torch", "triton", "transformers", "deepspeed", "numpy", "nvidia-nccl-cu13")
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        torch.ones(1, device=device)  # the snapshot is empty before the first allocation
        found |= {
            "device": properties.name,
            "memory_gib": properties.total_memory / 2**30,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "allocator": torch.cuda.memory._snapshot()["allocator_settings"],
        }
    return {key: value if isinstance(value, int | float) else str(value) for key, value in
            found.items()}  # fmt: skip


def rates(device: str, small: bool) -> Item:
    """Return the copy bandwidth in bytes per second and the FLOP/s of matrix products."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    source = torch.zeros(2**16 if small else 2**29, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    jobs: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    shapes = {name: (64, 64, 64) if small else shape for name, shape in PRODUCTS.items()}
    generator = torch.Generator(device).manual_seed(0)
    for name, (rows, inner, columns) in shapes.items():
        a, b = (
            torch.randn(shape, generator=generator, device=device).to(dtype)
            for shape in ((rows, inner), (columns, inner))
        )
        jobs[name] = partial(torch.nn.functional.linear, a, b)
    times = in_turns(
        {name: partial(timed, job, device) for name, job in jobs.items()},
        least=3, most=10, budget=2.0, warm_up=2,
    )  # fmt: skip
    seconds = {name: took[0] for name, took in times.items()}
    work = {name: 2 * rows * inner * columns for name, (rows, inner, columns) in shapes.items()}
    return {
        "copy_bytes_per_second": 2 * source.nbytes / seconds["copy"],
        "flops_per_second": {name: flops / seconds[name] for name, flops in work.items()},
    }


def timed(job: Callable[[], object], device: str) -> list[float]:
    """Return the seconds of a call."""
    watch = Stopwatch(device)
    watch.mark()
    job()
    watch.mark()
    return watch.seconds()


def one_rank_collective(device: str) -> Item:
    """Start a process group as DeepSpeed's engine does for one process, and reduce a tensor."""
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        x = torch.arange(4.0, device=device)
        dist.all_reduce(x)
        wrong = [] if x.tolist() == [0.0, 1.0, 2.0, 3.0] else [f"all-reduce gave {x.tolist()}"]
    finally:
        dist.destroy_process_group()
    return {"backend": backend, "wrong": wrong}


def time_adam(elements: int, device: str) -> Item:
    """Return the seconds of an update and its bytes per second (seven fp32 tensors move)."""
    weight = torch.nn.Parameter(torch.zeros(elements, device=device))
    weight.grad = torch.full_like(weight, 1e-3)
    adam = torch.optim.AdamW([weight], lr=1e-4, fused=True)
    seconds = in_turns({"": partial(timed, adam.step, device)}, least=3, most=8, budget=1.0)[""][0]
    return {"elements": elements, "seconds": seconds, "bytes_per_second": 28 * elements / seconds}


def numerics(record: Record) -> None:
    """Compile in parallel; then kernels against float64, all heads, with equal bits thrice."""
    record.run("compile", lambda: compile_kernels(record.options.device))
    dtype, size = kernel_checks.kernel_case(record.options.device)
    kernel_checks.check_attention(record, dtype, size)
    for kernels in ("gathered", "spread"):
        kernel_checks.check_attention(record, dtype, size, kernels)
    if record.options.device == "cuda":
        kernel_checks.check_full_size(record)
        kernel_checks.check_attention(record, dtype, size, documents=True)
    kernel_checks.check_kernels(record, dtype)


def compile_kernels(device: str) -> Item:
    """Fill Triton's cache by running the kernels in many processes."""
    start = time.perf_counter()
    tasks: list[Callable[[], object]]
    if device == "cuda":
        full = Case(2, kernel_checks.FULL_HEADS, 0, 0.1, dtype="bf16", device=device)
        tasks = [
            partial(run_case, replace(full, length=length), size)
            for size in kernel_checks.FULL_SIZES
            for length in kernel_checks.FULL_LENGTHS
        ]
        tasks += [partial(run_case, case, 64) for case in ATTENTION_CASES]
        tasks += [
            partial(kernel_checks.attention, device, torch.bfloat16, 64, kernels)
            for kernels in ("gathered", "spread")
        ]
        tasks += [
            partial(check, device, torch.bfloat16)
            for check in (kernel_checks.layer_norm, kernel_checks.bias_gelu)
        ]
    else:
        tasks = [partial(kernel_checks.attention, device, torch.float16, 32, "gathered")]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(COMPILE_PROCESSES, len(tasks)), context) as pool:
        futures = [pool.submit(_seconds_of, task) for task in tasks]
        seconds, wrong = [], []
        for future in futures:
            try:
                seconds.append(future.result())
            except Exception as failure:  # reported, and the kernel's own item fails as well
                wrong.append(f"{type(failure).__name__}: {str(failure)[-500:]}")
    return {
        "processes": len(tasks),
        "seconds": time.perf_counter() - start,
        "longest": max(seconds, default=0.0),
        "wrong": wrong,
    }


def _seconds_of(task: Callable[[], object]) -> float:
    apply_environment()
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def run_case(case: Case, size: int) -> None:
    """Run forward and backward of the fused kernels once, with heads of some size."""
    rows, table = (case.batch, case.heads, case.length, size), (case.heads, SLOTS, size)
    x = [torch.zeros(shape, dtype=DTYPES[case.dtype], device=case.device, requires_grad=True)
         for shape in (rows, rows, rows, table, table)]  # fmt: skip
    output = disentangled_attention(
        *x, positions=POSITIONS, dropout_p=case.dropout, seed=1, backend="triton"
    )
    torch.autograd.grad(output, x, torch.ones_like(output))


def attention(record: Record) -> None:
    """Our kernels and plain attention on all cases, then the peers."""
    on_gpu = record.options.device == "cuda"
    cases = ATTENTION_CASES if on_gpu else SMALL_CASES
    known = GPU_VARIANTS if on_gpu else CPU_VARIANTS
    own = ("triton", "flash", "cudnn") if on_gpu else ("chunked", "native", "flash")
    if os.environ.get("MEGATRON_DEBERTA_ATTENTION") == "chunked":
        own = (*own, "chunked")
    for case in cases:
        record.run(f"{case.name}: ours", partial(compare, record, case, known, own))
        if on_gpu:
            record.run(f"{case.name}: kernels", partial(kernel_seconds, case))
    for case in cases:
        names = (*own, *PEERS, *((EAGER,) if case.length <= EAGER_LENGTH else ()))
        record.run(case.name, partial(compare, record, case, known, names))


def compare(record: Record, case: Case, known: dict[str, Any], names: tuple[str, ...]) -> Item:
    """Check variants of the operator on one case, then time them in turns."""
    comparison = Comparison(
        case,
        {name: known[name] for name in names if name in known},
        starting=lambda variant: record.starting(f"{case.name}", variant),
        known_failures=record.crashed.get(case.name),
    )
    comparison.check()
    comparison.time(**({"least": 1, "most": 2} if record.options.small else {"budget": 1.0}))
    return {**comparison.result(), **comparison.gathered()}


def kernel_seconds(case: Case) -> Item:
    """Return the seconds of each kernel in a forward and backward pass."""
    x, variant, repeats = make_inputs(case), GPU_VARIANTS["triton"], 5
    timed_step(variant, case, x)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(repeats):
            attention_step(variant, case, x)
        torch.cuda.synchronize()
    seconds: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        if event.device_type == DeviceType.CUDA:
            seconds[event.key] += event.self_device_time_total / 1e6 / repeats
    return {"kernel_seconds": dict(sorted(seconds.items(), key=lambda pair: -pair[1]))}


def launch_settings(record: Record) -> None:
    """Warps and pipeline stages of the kernels that take most of the time."""
    on_gpu = record.options.device == "cuda"
    case = ATTENTION_CASES[0] if on_gpu else replace(SMALL_CASES[0], batch=1, heads=1, dtype="fp16")
    kernels = CANDIDATES if on_gpu else {"forward": ((4, 2), (4, 1, 168))}
    for kernel, candidates in kernels.items():
        for candidate in candidates:
            setting = LaunchSetting(*candidate)
            name = f"{kernel}, {setting.warps} warps, {setting.stages} stages"
            name += f", {setting.registers} registers" if setting.registers else ""
            record.run(name, partial(time_setting, case, kernel, setting))


def time_setting(case: Case, kernel: str, setting: LaunchSetting) -> Item:
    """Time one launch setting, and compare its results with those of the default."""
    variant, x = GPU_VARIANTS["triton"], make_inputs(case)
    expected = attention_step(variant, case, x)
    tile = settings.TILES[x[0].dtype]
    earlier = settings.LAUNCH.get((kernel, tile))
    settings.LAUNCH[kernel, tile] = setting
    try:
        found = attention_step(variant, case, x)
        job = {"": partial(timed_step, variant, case, x)}
        on_gpu = case.device == "cuda"
        took = in_turns(job, least=5 if on_gpu else 1, most=10 if on_gpu else 1, budget=1.0)[""]
    finally:
        if earlier is None:
            del settings.LAUNCH[kernel, tile]
        else:
            settings.LAUNCH[kernel, tile] = earlier
    errors = {
        name: kernel_checks.relative_error(a.double(), b.double(), by_head=False)
        for name, a, b in zip(TENSORS, found, expected, strict=True)
    }
    bound = OPERATOR[x[0].dtype]
    return {
        "default": setting == (earlier or LaunchSetting(max(tile // 16, 1), 2)),
        "milliseconds": dict(zip(("forward", "backward", "both"), (1e3 * t for t in took),
                                 strict=True)),
        "same_bits": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
        "errors": errors,
        "wrong": [f"{name} differs by {e:.1e}" for name, e in errors.items() if not e <= bound],
    }  # fmt: skip
