"""The 1.5B model's training step: DeepSpeed ZeRO-1, loader, clipping, AdamW, dropout 0.1.

Measured with 16,384 and 4,096 tokens per optimizer step, with plain flash attention without
position terms, with fused element-wise kernels, at the largest micro batch by the memory formula,
and with a checkpoint and an export. Every measurement is a new process (``one_step.py``), so that
peak memory is that of one step.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.record import Item, Options, Record
from benchmarks.gpu.train import SMALL_MODEL, finish, start
from benchmarks.lib.provenance import ROOT
from benchmarks.lib.shards import Shards, prepare_shards
from megatron_deberta.config import load_config
from megatron_deberta.planning.memory import largest_micro_batch

RUN = ROOT / "configs" / "runs" / "1.5b_h100.yaml"


@dataclass(frozen=True)
class Measurement:
    """One measurement.

    Attributes:
        tokens: per optimizer step.
        plain: flash attention without position terms instead of disentangled attention.
        settings: in addition to those of all measurements.
    """

    name: str
    tokens: int
    length: int
    plain: bool = False
    settings: tuple[str, ...] = ()


FULL = (
    Measurement("16k tokens, N=512", 16384, 512),
    Measurement("16k tokens, N=512, plain attention", 16384, 512, plain=True),
    Measurement("4k tokens, N=512", 4096, 512),
    Measurement("16k tokens, N=512, unfused", 16384, 512, settings=("parallel.fuse=false",)),
    Measurement("16k tokens, N=2048", 16384, 2048),
    Measurement("16k tokens, N=128", 16384, 128),
)
SMALL = (
    Measurement("256 tokens, N=64", 256, 64),
    Measurement("256 tokens, N=64, plain attention", 256, 64, plain=True),
)
SAVED = "checkpoint, resume, export"
LARGEST = "largest micro batch, N=512"
# Share of GPU memory reserved for the driver and for fragmentation.
RESERVED = 0.08


def run(record: Record) -> None:
    """Run the measurements in order of importance; the checkpoint needs 45 GB of disk."""
    small = record.options.small
    for work in SMALL if small else FULL:
        record.run(work.name, lambda w=work: measure(record, w))
        if work is FULL[2] or work is SMALL[-1]:
            record.run(SAVED, lambda: save_and_resume(record))
    record.run(LARGEST, lambda: largest(record))


def overrides(record: Record, shards: Shards, tokens: int, length: int) -> list[str]:
    """Return the run's settings, without the micro batch size."""
    small = record.options.small
    return [
        *shards.step_overrides(record.options.device, tokens // length),
        f"data.sequence_length={length}",
        f"model.max_position_embeddings={max(512, length)}",
        "train.steps=1000",
        # So high that the loss falls within a few steps.
        f"optimizer.learning_rate={5e-3 if small else 2e-4}",
        f"optimizer.warmup_steps={1 if small else 20}",
        *(SMALL_MODEL.split() if small else ()),
    ]


def shards_of(record: Record) -> Shards:
    """Return shards for the steps; their ids use part of the model's vocabulary of 128,100."""
    small = record.options.small
    return prepare_shards(record.options.work, *((0.6, 500) if small else (8.0, 8192)))


def micro_batches(options: Options, settings: list[str], rows: int) -> list[int]:
    """Return the micro batch sizes to try: those that the memory formula allows, largest first.

    Args:
        options: of the suite.
        settings: of the run.
        rows: of a step.
    """
    sizes = [rows]
    while sizes[-1] > 1:
        sizes.append(sizes[-1] // 2)
    if options.device == "cuda":
        most = rows_that_fit(options.device, settings)
        sizes = [size for size in sizes if size <= most] or sizes[-1:]
    return sizes[:4]


def rows_that_fit(device: str, settings: list[str]) -> int:
    """Return the largest micro batch by the memory formula, on a CPU in 12 MB."""
    on_gpu = device == "cuda"
    memory = torch.cuda.get_device_properties(0).total_memory if on_gpu else 12e6
    attention = "triton" if on_gpu and torch.cuda.get_device_capability() >= (8, 0) else "chunked"
    config = load_config(RUN, settings)
    return largest_micro_batch(config, 1, (1 - RESERVED) * memory, attention=attention)


def measure(record: Record, work: Measurement, extra: Sequence[str] = ()) -> Item:
    """Run a measurement with the largest micro batch that fits.

    Args:
        record: of the part.
        work: what to measure.
        extra: options of ``one_step``.
    """
    options = record.options
    settings = overrides(record, shards_of(record), work.tokens, work.length)
    flags = ["--plain-attention"] * work.plain + ["--small"] * options.small + list(extra)
    settings += work.settings
    too_large = []
    for micro in micro_batches(options, settings, work.tokens // work.length):
        found = one_step(options, settings, micro, flags)
        if found is not None:
            found |= {"did_not_fit": too_large}
            return found | {"wrong": wrong_losses(found)}
        too_large.append(micro)
    raise RuntimeError(f"out of memory with every micro batch: {too_large}")


def one_step(options: Options, settings: list[str], micro: int, flags: list[str]) -> Item | None:
    """Measure in a new process; return None if it ran out of memory.

    Raises:
        RuntimeError: it failed; with the end of its error output.
    """
    result = options.work / "one_step.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.one_step", str(RUN)]
    command += [*settings, f"train.micro_batch_size={micro}", "--result", str(result), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        found: Item = json.loads(result.read_text())
        return found | {"micro_batch_size": micro}
    if "OutOfMemoryError" not in done.stderr:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-1500:]}")
    return None


def largest(record: Record) -> Item:
    """Check that the largest micro batch by the memory formula fits, with an error below 10 %."""
    options, length = record.options, 64 if record.options.small else 512
    on_gpu = options.device == "cuda"
    settings = overrides(record, shards_of(record), length, length)
    rows = rows_that_fit(options.device, settings)
    settings.append(f"train.global_batch_size={rows}")
    found = one_step(options, settings, rows, ["--small"])
    if found is None:
        return {"micro_batch_size": rows, "wrong": [f"{rows} rows do not fit"]}
    error = found["peak_gib"] / found["predicted_gib"] - 1
    # On a CPU the peak is that of the process, most of it libraries.
    wrong = (
        [f"peak differs from the formula by {error:+.0%}"] if on_gpu and abs(error) > 0.1 else []
    )
    return found | {"wrong": wrong}


def wrong_losses(found: Item) -> list[str]:
    """Check that the first loss is that of uniform predictions, and that the loss falls."""
    losses, even = found["losses"], math.log(found["vocabulary"])
    wrong = []
    if not all(map(math.isfinite, losses)):
        wrong.append(f"a loss is not finite: {losses}")
    elif abs(losses[0] - even) > 0.15 * even:
        wrong.append(f"the first loss is {losses[0]:.2f}, far from ln(vocabulary) = {even:.2f}")
    elif not min(losses[-5:]) < losses[0]:
        wrong.append(f"the loss does not fall: {losses[0]:.3f} to {losses[-1]:.3f}")
    return wrong


def save_and_resume(record: Record) -> Item:
    """Train, save, resume in another process, save and export, with the commands."""
    options = record.options
    run_dir, log = options.work / "large", options.work / "large.log"
    target = options.work / "large_exported"
    for old in (run_dir, target):
        shutil.rmtree(old, ignore_errors=True)
    log.unlink(missing_ok=True)
    tokens, length = (256, 64) if options.small else (4096, 512)
    settings = overrides(record, shards_of(record), tokens, length)
    program = [sys.executable, "-m", "megatron_deberta"]
    train = [*program, "pretrain", str(RUN), *settings, f"train.run_dir={run_dir}"]
    train += [f"train.micro_batch_size={tokens // length}", "log.every=1", "checkpoint.keep_last=1"]
    finish(start([*train, "train.exit_step=3"], log), log)
    finish(start([*train, "train.exit_step=5"], log), log)
    convert = ["convert", "--checkpoint", str(run_dir), "--to", "hf", "--output", str(target)]
    finish(start([*program, *convert], log), log)
    wrong = [] if "resuming from" in log.read_text() else ["the second start did not resume"]
    found = {
        "checkpoint_gib": folder_bytes(run_dir / "checkpoints") / 2**30,
        "export_gib": folder_bytes(target) / 2**30,
        "wrong": wrong,
    }
    for old in (run_dir, target):
        shutil.rmtree(old)
    return found


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def table(items: dict[str, Item]) -> list[str]:
    """Return lines for the terminal."""
    lines = []
    for name, item in items.items():
        if "tokens_per_second" in item:
            lines.append(
                f"  {name:38} {item['tokens_per_second']:9.0f} tokens/s  "
                f"{1e3 * item['seconds_per_step']:8.1f} ms  MFU {100 * item['mfu']:5.1f} %  "
                f"peak {item['peak_gib']:6.1f} GiB (formula {item['predicted_gib']:.1f})  "
                f"micro batch {item['micro_batch_size']}"
            )
            plain = items.get(f"{name}, plain attention", {}).get("seconds_per_step")
            if plain:
                cost = 100 * (item["seconds_per_step"] / plain - 1)
                lines.append(f"  {'':38} disentanglement costs {cost:.1f} % of the step")
            shares = ", ".join(f"{k} {100 * v:.0f} %" for k, v in item["breakdown"].items())
            lines.append(f"  {'':38} {shares}")
        elif "checkpoint_gib" in item:
            lines.append(f"  {name}: {item['checkpoint_gib']:.2f} GiB, resumed")
    return lines
