"""Time of pretraining steps against other implementations and models, on a GPU or a CPU.

Three comparisons, each of all sides in one run on one machine, with the same batch, precision and
optimizer:

- ``huggingface``: against transformers' ``DebertaV2ForMaskedLM`` as it comes, and, on a GPU where
  the disentangled-flash package is installed, with its training path switched on;
- ``peers``: DeBERTa-base against ModernBERT-base, RoBERTa-base and BERT-base, each at its best
  (``benchmarks/step/peers.py``);
- ``disentanglement``: the 1.5B model against the same model with plain flash attention.

``profile`` is no comparison: it says by torch's profiler where our real step's time goes, loader,
DeepSpeed and optimizer included (``benchmarks/gpu/one_step.py``), and draws it.

On a CPU the last two take two layers and lengths of 128 and 512 only.

Correctness comes first: without dropout and mask decoder we must have the loss of
``DebertaV2ForMaskedLM``, a peer's masked-only loss must be that of transformers' own forward, and
plain flash attention must give what our operator gives without position terms.
Each finished case is merged into the result file, and ``--resume`` skips what it holds.

    python -m benchmarks.step.compare huggingface --device cpu --output step.json

From Python: ``run("peers", torch.device("cuda"), Path("peers.json"), deadline=time.time() + 400)``
runs the cases that the file lacks, as long as there is time to start one, and returns whether it
holds all of them.
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

from benchmarks.lib.measuring import peak_resident_bytes, write_json
from benchmarks.lib.provenance import ROOT, provenance
from benchmarks.lib.shards import prepare_shards
from benchmarks.lib.stock import copy_from_stock
from benchmarks.step.batch import StepBatch, make_batch
from benchmarks.step.measure import Contender, Result, compete
from benchmarks.step.parts import draw
from benchmarks.step.peers import PEERS, Peer, variants
from benchmarks.step.sides import (
    Ours,
    Setting,
    Side,
    Stock,
    without_mask_decoder,
    without_position_terms,
)
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.observe.throughput import measure_matmul_rate
from megatron_deberta.train.setup import DTYPES

COMPARISONS = ("huggingface", "peers", "disentanglement")
LENGTHS = (512, 128, 2048)
# ModernBERT's, for all.
PEER_VOCABULARY = 50368
CPU_THREADS = 2


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        target: speed-up over the first other side to reach.
    """

    name: str
    comparison: str
    model: ModelConfig
    length: int
    tokens: int
    dtype: str
    target: float | None = None

    def setting(self, device: torch.device) -> Setting:
        """What all sides share."""
        return Setting(self.model, device, DTYPES[self.dtype], compile_peers=device.type == "cuda")


def cases(comparison: str, device: torch.device) -> list[Case]:
    """The cases of a comparison; lengths beyond 512 get as many absolute positions."""
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
    """How to build each side of a case; the first is ours."""
    setting = case.setting(device)
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
    """Sides that the comparison has elsewhere, and why not here."""
    reason = ""
    if device.type == "cpu":
        reason = "its kernels need a GPU"
    elif importlib.util.find_spec("disentangled_flash") is None:
        reason = "no disentangled-flash package"
    return {"disentangled_flash": reason} if case.comparison == "huggingface" and reason else {}


def check(case: Case, device: torch.device) -> dict[str, float]:
    """Relative differences of losses that must be the same, by side, at two layers in fp32.

    Raises:
        SystemExit: they are not.
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
        if isinstance(side, Stock):
            ours = Ours(Setting(without_mask_decoder(size), device, torch.float32))
            copy_from_stock(ours.model, side.model, without_mask_decoder(size))
        else:
            ours = Ours(Setting(without_position_terms(size), device, torch.float32))
        with torch.no_grad():
            theirs = side.loss(batch, 1).item()
            differences[name] = abs(ours.loss(batch, 1).item() - theirs) / theirs
    limit = 1e-5 if device.type == "cpu" else 1e-4
    if any(difference > limit for difference in differences.values()):
        raise SystemExit(f"{case.name}: losses differ by {differences}, more than {limit}")
    return differences


def fastest(
    builds: dict[str, Callable[[], Side]], batch: StepBatch
) -> tuple[Callable[[], Side] | None, dict[str, float | str]]:
    """The fastest of some settings of a side, and the seconds of a step of each.

    A setting that does not run here is noted with its error and left out.
    """
    tried: dict[str, float | str] = {}
    best, chosen = float("inf"), None
    for setting, build in builds.items():
        try:
            contender = Contender(build(), batch)
            contender.step()
            seconds = min(contender.step() for _ in range(2))
        except Exception as error:  # any failure of a kernel is a result
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
    """Put the fastest setting of each peer into ``builds``, and of ours where it can be compiled.

    Returns:
        What was tried.
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
    """One row of results."""
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
    # 20 bytes a weight in training; half of a GPU is left for activations.
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
    """Measure each side's peak memory in a process of its own, which a CPU needs."""
    for name, side in row["sides"].items():
        command = [sys.executable, "-m", "benchmarks.step.compare", case.comparison]
        command += ["--device", "cpu", "--peak", name, "--case", case.name]
        command += ["--variant", side.get("attention", "")]
        output = subprocess.run(
            command, check=True, capture_output=True, text=True, cwd=ROOT
        ).stdout
        side["peak_bytes"] = int(output.strip().splitlines()[-1])


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
    """The rows of a result file, none where there is no file."""
    rows: list[dict[str, Any]] = (
        json.loads(output.read_text())["results"] if output.exists() else []
    )
    return rows


def merge(output: Path, case: Case, row: dict[str, Any], order: list[str], device: str) -> None:
    """Put a row into the result file in place of an older one of its name."""
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
    """Measure the cases of a comparison and merge each into ``output`` as soon as it is done.

    Args:
        comparison: one of `COMPARISONS`.
        device: where to measure.
        output: result file.
        names: only these cases.
        repeats: timed steps a side.
        resume: leave out cases that ``output`` holds.
        deadline: start no case after this ``time.time()``.

    Returns:
        True if ``output`` now holds every case that was asked for.

    Raises:
        SystemExit: the sides do not compute the same.
    """
    every = cases(comparison, device)
    held = {row["name"] for row in read_rows(output)} if resume else set()
    wanted = [case for case in every if names is None or case.name in names]
    for case in wanted:
        if case.name in held:
            continue
        if time.time() > deadline:
            return False
        row = measure(case, device, repeats)
        gc.collect()
        if device.type == "cpu":
            add_peak_of_processes(case, row)
        merge(output, case, row, [known.name for known in every], device.type)
        print("\n".join(_lines(row)), flush=True)
    return True


# What ``profile`` takes steps of: a run, and tokens a step at N=512.
PROFILED = {"cpu": ("base_h100", 2048), "cuda": ("1.5b_h100", 16384)}


def profile(device: torch.device, output: Path, overrides: list[str]) -> None:
    """Profile our real step in a process of its own; write it to ``output`` and draw it beside."""
    name, tokens = PROFILED[device.type]
    shards = prepare_shards(Path(tempfile.gettempdir()) / "megatron_deberta_suite", 8.0, 8192)
    settings = shards.step_overrides(device.type, tokens // 512)
    settings += [f"train.micro_batch_size={tokens // 512}", *overrides]
    command = [sys.executable, "-m", "benchmarks.gpu.one_step"]
    command += [str(ROOT / "configs" / "runs" / f"{name}.yaml"), *settings, "--result", str(output)]
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
    parser.add_argument("comparison", choices=(*COMPARISONS, "profile"))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, help="JSON file, merged by case")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps a side (default 5)")
    parser.add_argument("--case", action="append", help="only the case of this name; repeatable")
    parser.add_argument("--resume", action="store_true", help="skip cases that the file holds")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value",
                        help="profile: another setting of the run; repeatable")  # fmt: skip
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--variant", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(CPU_THREADS)
    if args.comparison == "profile":
        if args.output is None:
            parser.error("--output is needed")
        profile(device, args.output, args.set)
        return
    known = cases(args.comparison, device)
    if unknown := set(args.case or []) - {case.name for case in known}:
        parser.error(f"--case: no {unknown}, but {[case.name for case in known]}")
    if args.peak:
        case = next(case for case in known if case.name in args.case)
        print_peak(case, args.peak, args.variant)
    elif args.output is None:
        parser.error("--output is needed")
    else:
        run(
            args.comparison, device, args.output,
            names=args.case, repeats=args.repeats, resume=args.resume,
        )  # fmt: skip


if __name__ == "__main__":
    main()
