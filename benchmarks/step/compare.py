"""Pretraining step time compared with other implementations and models, on a GPU or a CPU.

Four comparisons, each with all sides in one run on one machine, with the same batch, precision
and optimizer:

- ``huggingface``: transformers' ``DebertaV2ForMaskedLM``, and, on a GPU with the
  disentangled-flash package, the same with that package's training path;
- ``peers``: DeBERTa-base, ModernBERT-base, RoBERTa-base and BERT-base, each in its fastest
  settings (``benchmarks/step/peers.py``);
- ``disentanglement``: the 1.5B model with and without position terms (plain flash attention);
- ``encoder``: four layers of base width without a head, against transformers' ``DebertaV2Model``.

On a CPU ``peers`` and ``disentanglement`` use two layers and lengths of 128 and 512 only.
``profile`` measures the parts of a whole training step, including loader, DeepSpeed and optimizer,
with torch's profiler (``benchmarks/gpu/one_step.py``), and plots them.

Losses are compared first: without dropout and mask decoder the loss must equal that of
``DebertaV2ForMaskedLM``, a peer's loss on masked positions that of transformers' own forward, and
the loss with plain flash attention that of the operator without position terms. Each finished case
is merged into the result file; ``--resume`` skips cases in it.

    python -m benchmarks.step.compare huggingface --device cpu --output step.json
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.measuring import peak_resident_bytes, read_json, write_json
from benchmarks.lib.provenance import ROOT, provenance
from benchmarks.lib.shards import prepare_shards
from benchmarks.lib.stock import copy_from_stock
from benchmarks.step.batch import StepBatch, make_batch
from benchmarks.step.measure import Contender, Result, compete
from benchmarks.step.parts import draw
from benchmarks.step.peers import PEERS, Peer, variants
from benchmarks.step.sides import (
    OurEncoder,
    Ours,
    Setting,
    Side,
    Stock,
    StockEncoder,
    without_mask_decoder,
    without_position_terms,
)
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.observe.throughput import measure_matmul_rate
from megatron_deberta.train.setup import DTYPES

COMPARISONS = ("huggingface", "peers", "disentanglement")
"""Those of the GPU suite."""
LENGTHS = (512, 128, 2048)
PEER_VOCABULARY = 50368  # of ModernBERT
CPU_THREADS = 2


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        target: target speed-up over the first other side.
    """

    name: str
    comparison: str
    model: ModelConfig
    length: int
    tokens: int
    dtype: str
    target: float | None = None

    def setting(self, device: torch.device) -> Setting:
        """Return the settings that all sides share."""
        return Setting(self.model, device, DTYPES[self.dtype], compile_peers=device.type == "cuda")


def cases(comparison: str, device: torch.device) -> list[Case]:
    """Return the cases of a comparison."""
    on_gpu = device.type == "cuda"
    tokens, dtype = (16384, "bf16") if on_gpu else (2048, "fp32")
    base = ModelConfig()
    large = ModelConfig(num_layers=48, hidden_size=1536, num_heads=24, ffn_hidden_size=6144,
                        conv_kernel_size=3)  # fmt: skip
    if comparison == "huggingface" and not on_gpu:
        case = partial(Case, comparison=comparison, tokens=tokens)
        small = replace(base, vocab_size=32000)
        return [
            case("12 layers, 128K", model=base, length=512, dtype="fp32", target=1.7),
            case("12 layers, 32K", model=small, length=512, dtype="fp32", target=1.35),
            case("4 layers, 128K", model=replace(base, num_layers=4), length=512, dtype="fp32",
                 target=2.5),
            case("12 layers, 128K, N=128", model=base, length=128, dtype="fp32"),
            case("12 layers, 128K, bf16", model=base, length=512, dtype="bf16"),
        ]  # fmt: skip
    if comparison == "encoder":
        small = replace(base, num_layers=4, vocab_size=8192)
        return [
            Case(f"4 layers, N={length}", comparison, small, length, tokens, dtype, target)
            for length, target in ((512, 2.0), (128, 1.4))
        ]
    lengths = LENGTHS
    if not on_gpu:
        tokens, lengths = 1024, LENGTHS[:2]
    if comparison == "huggingface":
        models = {"1.5B": (large, 3.0), "base": (base, None)}
    elif comparison == "peers":
        base = replace(base, vocab_size=PEER_VOCABULARY)
        models = {"base": (base, 1.0)}
        if not on_gpu:
            models = {"2 layers of base": (replace(base, num_layers=2), None)}
    else:
        models = {"1.5B": (large, 1 / 1.07)}
        if not on_gpu:
            models = {"2 layers of 1.5B": (replace(large, num_layers=2, vocab_size=32000), None)}
    return [
        Case(
            f"{name}, N={length}",
            comparison,
            replace(model, max_position_embeddings=max(length, model.max_position_embeddings)),
            length,
            tokens,
            dtype,
            target if length == 512 else None,
        )
        for name, (model, target) in models.items()
        for length in lengths
    ]


def sides(case: Case, device: torch.device) -> dict[str, Callable[[], Side]]:
    """Return a constructor for each side of a case; the first is this project's model."""
    setting = case.setting(device)
    if case.comparison == "encoder":
        return {"ours": partial(OurEncoder, setting), "huggingface": partial(StockEncoder, setting)}
    builds: dict[str, Callable[[], Side]] = {"ours": partial(Ours, setting)}
    if case.comparison == "disentanglement":
        builds["plain_attention"] = partial(Ours, setting, plain_attention=True)
    elif case.comparison == "huggingface":
        builds["huggingface"] = partial(Stock, setting)
        if not missing_sides(case, device):
            builds["disentangled_flash"] = partial(Stock, setting, disentangled_flash=True)
    else:
        for name in PEERS:
            variant = variants(name, device)[0][0]
            builds[name] = partial(Peer, setting, name, variant, case.length)
    return builds


def missing_sides(case: Case, device: torch.device) -> dict[str, str]:
    """Return sides that cannot run here, with the reason."""
    reason = ""
    if device.type == "cpu":
        reason = "its kernels need a GPU"
    elif importlib.util.find_spec("disentangled_flash") is None:
        reason = "no disentangled-flash package"
    return {"disentangled_flash": reason} if case.comparison == "huggingface" and reason else {}


def check(case: Case, device: torch.device) -> dict[str, float]:
    """Return the relative loss differences by side, for two layers in fp32.

    Raises:
        SystemExit: a difference is too large.
    """
    size = replace(case.model, num_layers=2, hidden_dropout=0.0, attention_dropout=0.0)
    batch = make_batch(size, case.tokens, case.length, device)
    differences: dict[str, float] = {}
    for name, build in sides(replace(case, model=size, dtype="fp32"), device).items():
        if name == "ours":
            continue
        side: Any = build()
        if isinstance(side, Peer):
            differences[name] = side.check(batch)
            continue
        ours: Ours
        if isinstance(side, StockEncoder):
            ours = OurEncoder(Setting(size, device, torch.float32))
            copy_from_stock(ours.model, side.model, without_mask_decoder(size))
        elif isinstance(side, Stock):
            ours = Ours(Setting(without_mask_decoder(size), device, torch.float32))
            copy_from_stock(ours.model, side.model, without_mask_decoder(size))
        else:
            ours = Ours(Setting(without_position_terms(size), device, torch.float32))
        with torch.no_grad():
            expected = side.loss(batch, 1).item()
            differences[name] = abs(ours.loss(batch, 1).item() - expected) / expected
    limit = 1e-5 if device.type == "cpu" else 1e-4
    if any(difference > limit for difference in differences.values()):
        raise SystemExit(f"{case.name}: losses differ by {differences}, more than {limit}")
    return differences


def fastest(
    builds: dict[str, Callable[[], Side]], batch: StepBatch
) -> tuple[Callable[[], Side] | None, dict[str, float | str]]:
    """Return the fastest of several settings of a side, and the step time or error of each."""
    tried: dict[str, float | str] = {}
    best, chosen = float("inf"), None
    for setting, build in builds.items():
        try:
            contender = Contender(build(), batch)
            contender.step()
            seconds = min(contender.step() for _ in range(2))
        except Exception as error:  # a result for another library's kernel
            tried[setting] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        finally:
            contender = None
            gc.collect()
        tried[setting] = seconds
        if seconds < best:
            best, chosen = seconds, build
    return chosen, tried


def choose_variants(
    case: Case, device: torch.device, batch: StepBatch, builds: dict[str, Callable[[], Side]]
) -> dict[str, dict[str, float | str]]:
    """Put the fastest setting of each peer, and of this project if compiled, into ``builds``.

    Returns:
        Step time or error by side and setting.
    """
    setting = case.setting(device)
    tried: dict[str, dict[str, float | str]] = {}
    options: dict[str, dict[str, Callable[[], Side]]] = {}
    if setting.compile_peers:
        options["ours"] = {
            f"parallel.fuse={str(fuse).lower()}": partial(Ours, setting, fuse=fuse)
            for fuse in (False, True)
        }
    for name in PEERS:
        usable, missing = variants(name, device)
        tried[name] = dict(missing)
        if len(usable) > 1 or missing:
            options[name] = {v: partial(Peer, setting, name, v, case.length) for v in usable}
    for name, settings in options.items():
        chosen, seconds = fastest(settings, batch)
        tried[name] = {**tried.get(name, {}), **seconds}
        builds[name] = chosen or builds[name]
    return tried


def measure(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """Measure one case; return its row of results."""
    torch.manual_seed(1)
    row: dict[str, Any] = {
        "name": case.name,
        "layers": case.model.num_layers,
        "width": case.model.hidden_size,
        "vocab": case.model.vocab_size,
        "length": case.length,
        "dtype": case.dtype,
        "target": case.target,
        "loss_difference": check(case, device),
        "missing": missing_sides(case, device),
    }
    batch = make_batch(case.model, case.tokens, case.length, device)
    builds = sides(case, device)
    if case.comparison == "peers":
        row["attention_tried"] = choose_variants(case, device, batch, builds)
    rate = measure_matmul_rate(device, DTYPES[case.dtype])
    row["matmul_tflops_per_second"] = rate / 1e12
    # 20 bytes per weight in training; half of a GPU is left for activations.
    resident = device.type == "cpu" or len(builds) * 20 * 1.1 * _parameters(case.model) < (
        torch.cuda.get_device_properties(device).total_memory / 2
    )
    results = compete(builds, batch, repeats, resident=resident)
    row["sides"] = {name: _describe(case, result, rate) for name, result in results.items()}
    ours = row["sides"]["ours"]["seconds"]
    row["speedup"] = {
        name: side["seconds"] / ours for name, side in row["sides"].items() if name != "ours"
    }
    return row


def _parameters(model: ModelConfig) -> int:
    width = model.hidden_size
    layer = 4 * width * width + 2 * width * model.ffn_hidden_size
    return model.num_layers * layer + width * model.vocab_size


def _describe(case: Case, result: Result, rate: float) -> dict[str, Any]:
    seconds = statistics.median(result.seconds)
    speed = case.tokens / seconds
    return {
        **result.notes,
        "seconds": seconds,
        "tokens_per_second": speed,
        "parameters": result.parameters,
        "gflop_per_token": result.flops_per_token / 1e9,
        "mfu": speed * result.flops_per_token / rate,
        "peak_bytes": result.peak_bytes,
        "micro_batches": result.micro_batches,
        "seconds_by_part": result.parts,
        "all_seconds": result.seconds,
    }


def add_peak_of_processes(case: Case, row: dict[str, Any]) -> None:
    """Add each side's peak memory on the CPU, measured in a new process."""
    for name, side in row["sides"].items():
        command = [sys.executable, "-m", "benchmarks.step.compare", case.comparison]
        command += ["--device", "cpu", "--peak", name, "--case", case.name]
        command += ["--variant", side.get("attention", "")]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        side["peak_bytes"] = int(done.stdout.strip().splitlines()[-1])


def print_peak(case: Case, name: str, variant: str) -> None:
    """Take two steps of one side on the CPU, then print this process's peak resident bytes."""
    device = torch.device("cpu")
    build = sides(case, device)[name]
    if name in PEERS:
        build = partial(Peer, case.setting(device), name, variant, case.length)
    contender = Contender(build(), make_batch(case.model, case.tokens, case.length, device))
    contender.step()
    contender.step()
    print(peak_resident_bytes())


def read_rows(output: Path) -> list[dict[str, Any]]:
    """Return the rows of a result file; none if it does not exist."""
    return list(read_json(output, {"results": []})["results"])


def merge(output: Path, case: Case, row: dict[str, Any], order: list[str], device: str) -> None:
    """Write a row to the result file, replacing the one of the same name."""
    rows = [old for old in read_rows(output) if old["name"] != case.name]
    rows.append({**row, **provenance(device)})
    rows.sort(key=lambda kept: order.index(kept["name"]))
    threads = torch.get_num_threads()
    record = {"tokens": case.tokens, "threads": threads, "results": rows}
    write_json(output, record)


def run(
    comparison: str,
    device: torch.device,
    output: Path,
    *,
    names: list[str] | None = None,
    repeats: int = 10,
    resume: bool = True,
    deadline: float = float("inf"),
) -> bool:
    """Measure the cases of a comparison and merge each result into ``output``.

    Args:
        comparison: one of `COMPARISONS`, or ``encoder``.
        device: where to measure.
        output: result file.
        names: only these cases.
        repeats: timed steps per side.
        resume: skip cases in ``output``.
        deadline: start no case after this ``time.time()``.

    Returns:
        Whether ``output`` now holds all chosen cases.

    Raises:
        SystemExit: the losses of the sides differ.
    """
    known = cases(comparison, device)
    finished = {row["name"] for row in read_rows(output)} if resume else set()
    for case in known:
        if case.name in finished or (names is not None and case.name not in names):
            continue
        if time.time() > deadline:
            return False
        row = measure(case, device, repeats)
        gc.collect()
        if device.type == "cpu":
            add_peak_of_processes(case, row)
        merge(output, case, row, [other.name for other in known], device.type)
        print("\n".join(_lines(row)), flush=True)
    return True


# Run config and tokens per step (N=512) of ``profile``.
PROFILED = {"cpu": ("base_h100", 2048), "cuda": ("1.5b_h100", 16384)}


def profile(device: torch.device, output: Path, overrides: list[str]) -> None:
    """Profile a training step in a new process; write the result and its plot."""
    name, tokens = PROFILED[device.type]
    shards = prepare_shards(Path(tempfile.gettempdir()) / "megatron_deberta_suite", 8.0, 8192)
    settings = shards.step_overrides(device.type, tokens // 512)
    settings += [f"train.micro_batch_size={tokens // 512}", *overrides, "--result", str(output)]
    config = ROOT / "configs" / "runs" / f"{name}.yaml"
    command = [sys.executable, "-m", "benchmarks.gpu.one_step", str(config), *settings]
    if device.type == "cpu":
        command += ["--steps", "1", "--threads", str(CPU_THREADS)]
    subprocess.run(command, check=True, cwd=ROOT)
    title = f"{name}, N=512, {tokens} tokens, {device.type}"
    result = {
        "name": title,
        "overrides": overrides,
        **json.loads(output.read_text()),
        "provenance": provenance(device.type),
    }
    write_json(output, result)
    draw(result, output.with_suffix(".png"))
    for part, share in result["breakdown"].items():
        print(f"  {part:26} {result['seconds_by_part'][part]:8.3f} s {100 * share:5.1f} %")


def _lines(row: dict[str, Any]) -> Iterator[str]:
    yield row["name"]
    for name, side in row["sides"].items():
        yield (
            f"  {name:20} {side['seconds']:8.3f} s {side['tokens_per_second']:9.0f} tokens/s  "
            f"MFU {side['mfu']:.2f}  {side['peak_bytes'] / 2**30:6.1f} GiB  "
            f"{row['speedup'].get(name, 1.0):.2f}x"
        )


def main() -> None:
    """Measure the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparison", choices=(*COMPARISONS, "encoder", "profile"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, help="JSON file, merged by case")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps per side (default 5)")
    parser.add_argument("--case", action="append", help="only the case of this name; repeatable")
    parser.add_argument("--resume", action="store_true", help="skip cases in the file")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value",
                        help="profile: config override; repeatable")  # fmt: skip
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--variant", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(CPU_THREADS)
    if args.output is None and not args.peak:
        parser.error("--output is required")
    if args.comparison == "profile":
        profile(device, args.output, args.set)
        return
    known = {case.name: case for case in cases(args.comparison, device)}
    if unknown := set(args.case or []) - known.keys():
        parser.error(f"--case: unknown {sorted(unknown)}; cases: {list(known)}")
    if args.peak:
        print_peak(known[args.case[0]], args.peak, args.variant)
    else:
        run(
            args.comparison, device, args.output,
            names=args.case, repeats=args.repeats, resume=args.resume,
        )  # fmt: skip


if __name__ == "__main__":
    main()
