"""Time the training steps of a run in one process, in total and by part.

    python -m benchmarks.gpu.one_step RUN.yaml [section.key=value ...] --result FILE

Uses the shards, loader, model, DeepSpeed engine, clipping and AdamW of ``pretrain``. The whole step
is timed, from fetching the batch to the updated weights.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch.autograd import DeviceType

from benchmarks.lib.measuring import peak_resident_bytes, write_json
from benchmarks.step.parts import Labels, profile_steps, time_by_part
from benchmarks.step.sides import use_plain_attention
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.build import build_loaders, tokenizer_path
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.distributed.topology import choose_device, init_process_groups, shutdown
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.model.flops import training_flops_per_token
from megatron_deberta.observe.throughput import measure_matmul_rate
from megatron_deberta.ops.dispatch import choose_backend
from megatron_deberta.planning.memory import estimate_memory
from megatron_deberta.tokenizer import load_tokenizer
from megatron_deberta.train.prefetch import InputQueue
from megatron_deberta.train.setup import DTYPES, build_rank_model, set_determinism
from megatron_deberta.train.step import TrainStep

# The first match counts; kernels without a match are ``elementwise and rest``.
PARTS = (
    ("attention", r"flash|fmha|attention|disentangled"),
    ("matrix products", r"gemm|cutlass|cublas|nvjet|xmma|aten::(mm|bmm|addmm|baddbmm|linear)$"),
    ("optimizer", r"multi_tensor|adam|foreach|lamb"),
    ("normalisation", r"norm"),
    ("loss", r"softmax|nll|cross_entropy"),
    ("copies", r"memcpy|memset|copy|cat"),
    ("lookups", r"embedding|index|gather|scatter"),
)
PLAIN_ATTENTION = ["model.position_terms=none", "model.normalize_position_table=false"]
"""Settings of a run without position terms."""
# Modules whose kernels are named after the part that they belong to.
OTHERS = ("layer_norm", "cross_entropy", "gelu")


class Run:
    """A run of one process, ready to take steps.

    Args:
        config: the run.
        plain: replace the attention operator by flash attention without position terms.
    """

    def __init__(self, config: RunConfig, plain: bool) -> None:
        self.config = config
        environment = read_environment()
        device = choose_device(config)
        set_determinism(device, environment)
        self.groups = init_process_groups(1, device, 10, environment)
        vocabulary = Vocabulary.of(load_tokenizer(tokenizer_path(config)))
        model = build_rank_model(config, self.groups)
        if plain:
            use_plain_attention(model.module)
        self.parameters = sum(p.numel() for p in model.module.parameters())
        self.engine = build_engine(config, model.module, model.specs, self.groups)
        self.train_step = TrainStep(self.engine, config, self.groups)
        self.inputs = InputQueue(build_loaders(config, vocabulary, 0, 1, 0)[0], self.groups.device)
        self.step = 0

    def take(self) -> tuple[float, float]:
        """Take one step; return its loss and its seconds."""
        start = time.perf_counter()
        result = self.train_step(self.step, self.inputs.take(), self.inputs.fetch)
        if self.groups.device.type == "cuda":
            torch.cuda.synchronize()
        self.step += 1
        return float(result.loss), time.perf_counter() - start


def breakdown(run: Run, steps: int, trace: Path | None) -> dict[str, Any]:
    """Profile steps: seconds by part of the model, and shares of each kind of kernel.

    Args:
        run: whose steps are profiled.
        steps: their number.
        trace: file for the profiler's trace, compressed if it ends in ``.gz``; None: none.
    """
    on_gpu = run.groups.device.type == "cuda"
    labels = Labels(run.engine.module, run.engine)
    start = time.perf_counter()
    events, sums = profile_steps(run.take, steps, labels, on_gpu=on_gpu, trace=trace)
    profiled = (time.perf_counter() - start) / steps
    parts = time_by_part(events, steps, on_gpu=on_gpu)
    kinds: dict[str, float] = defaultdict(float)
    for event in sums:
        if on_gpu and event.device_type != DeviceType.CUDA:
            continue  # an operator's time includes that of its kernels
        if event.key.startswith(("part: ", "step")):
            continue
        kinds[part_of(event.key)] += (
            event.self_device_time_total if on_gpu else event.self_cpu_time_total
        )
    busy, total = sum(parts["seconds"].values()), sum(kinds.values())
    return {
        "seconds_of_a_profiled_step": profiled,
        "seconds_by_part": parts["seconds"],
        "operators_by_part": parts["operators"],
        "breakdown": {name: took / busy for name, took in parts["seconds"].items()},
        "kinds": {k: v / total for k, v in sorted(kinds.items(), key=lambda pair: -pair[1])},
    }


def part_of(kernel: str) -> str:
    """Return the part of the step that a kernel belongs to."""
    if kernel in own_kernels():
        return "attention"
    for part, pattern in PARTS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return part
    return "elementwise and rest"


def own_kernels() -> set[str]:
    """Return the names of the attention operator's Triton kernels."""
    return {
        name
        for path, module in list(sys.modules.items())
        if path.startswith("megatron_deberta.ops.triton.") and not path.endswith(OTHERS)
        for name, value in vars(module).items()
        if hasattr(value, "fn") and callable(getattr(value, "run", None))
    }


def predicted_bytes(config: RunConfig, device: torch.device) -> int:
    """Return the run's peak memory on this device by the memory formula."""
    head = config.model.hidden_size // config.model.num_heads
    queries = torch.empty(1, head, device=device, dtype=DTYPES[config.precision.dtype])
    fused = choose_backend(config.parallel.attention_backend, queries) == "triton"
    attention: Literal["triton", "chunked"] = "triton" if fused else "chunked"
    return estimate_memory(config, 1, attention=attention, device_type=device.type).total


def measure(
    config: RunConfig, plain: bool, warm_up: int, steps: int, trace: Path | None = None
) -> dict[str, Any]:
    """Measure speed, memory and losses of the run's steps; ``trace`` as in ``breakdown``."""
    run = Run(config, plain)
    device = run.groups.device.type
    rate = measure_matmul_rate(run.groups.device, DTYPES[config.precision.dtype])
    untimed = [run.take() for _ in range(warm_up)]
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timed = [run.take() for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else peak_resident_bytes()
    seconds = statistics.median(took for _, took in timed)
    length, micro = config.data.sequence_length, config.train.micro_batch_size
    tokens = config.train.global_batch_size * length
    flops = training_flops_per_token(config.model, length, micro, config.objective.mask_probability)
    result = {
        "parameters": run.parameters,
        "vocabulary": config.model.vocab_size,
        "tokens_per_step": tokens,
        "seconds_per_step": seconds,
        "seconds_of_steps": [took for _, took in timed],
        "tokens_per_second": tokens / seconds,
        "gflop_per_token": flops / 1e9,
        "matrix_tflops": rate / 1e12,
        "mfu": tokens / seconds * flops / rate,
        "peak_gib": peak / 2**30,
        "predicted_gib": predicted_bytes(config, run.groups.device) / 2**30,
        "losses": [loss for loss, _ in (*untimed, *timed)],
        **breakdown(run, 1 if trace else min(2, steps), trace),
    }
    run.engine.destroy()
    return result


def main() -> None:
    """Measure one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", metavar="RUN.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--plain-attention", action="store_true")
    parser.add_argument("--small", action="store_true", help="few steps")
    parser.add_argument("--steps", type=int, help="timed steps (default 20, small 5)")
    parser.add_argument("--trace", type=Path, help="write the profiler's trace of one step here")
    parser.add_argument("--threads", type=int, help="of torch, on a CPU")
    args = parser.parse_intermixed_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    overrides = args.overrides
    if args.plain_attention:
        overrides += PLAIN_ATTENTION
    try:
        config = load_config(args.config, overrides)
        steps = args.steps or (5 if args.small else 20)
        result = measure(config, args.plain_attention, min(6, steps), steps, args.trace)
        write_json(args.result, result)
    finally:
        shutdown()


if __name__ == "__main__":
    main()
