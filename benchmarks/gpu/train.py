"""Pretraining, resumption, export and fill-mask of a small model with the commands.

Shards are made from text files on this machine. A run with DeepSpeed is killed with SIGKILL after
its first checkpoint and started again; its losses must equal those of an uninterrupted run. Then
the model is exported to Hugging Face's format and fills masks.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.record import Item, Record
from benchmarks.lib.provenance import ROOT
from benchmarks.lib.shards import prepare_shards
from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics

TIMEOUT = 240.0
SENTENCES = (
    "If the value is [MASK], the default is used.",
    "Return a new array with the [MASK] shape as the input.",
    "This [MASK] is called when the object is created.",
)

SMALL_MODEL = (
    "model.num_layers=2 model.hidden_size=64 model.num_heads=2 model.ffn_hidden_size=128 "
    "model.vocab_size=640 data.num_workers=0"
)


@dataclass(frozen=True)
class Size:
    """Data, length and settings of the run.

    Attributes:
        overrides: separated by spaces.
        better_than_unigram: nats per masked token by which the last validation loss must be below
            the unigram loss.
    """

    megabytes: float
    vocabulary: int
    steps: int
    overrides: str
    better_than_unigram: float


FULL = Size(
    8.0,
    8192,
    600,
    (
        "model.vocab_size=8200 precision.dtype=bf16 train.global_batch_size=64 "
        "train.micro_batch_size=64 checkpoint.save_every=150 train.eval_every=150 "
        "optimizer.warmup_steps=60"
    ),
    0.5,
)
SMALL = Size(
    0.6,
    500,
    60,
    (
        f"{SMALL_MODEL} data.sequence_length=64 optimizer.learning_rate=5.0e-3 "
        "optimizer.warmup_steps=5 train.global_batch_size=8 train.micro_batch_size=8 "
        "checkpoint.save_every=20 train.eval_every=null train.eval_batches=2"
    ),
    -0.3,  # sixty steps learn little more than frequencies
)


def run(record: Record) -> None:
    """Pretrain, then export the result."""
    size = SMALL if record.options.small else FULL
    work = record.options.work
    record.run("pretrain, killed and resumed", lambda: killed_and_resumed(record, size))
    if not record.options.small:  # covered by the test suite on the CPU
        record.run("the same, undisturbed", lambda: undisturbed(record, size))
    record.run("export and fill masks", lambda: export(work))


def arguments(record: Record, size: Size, run_dir: Path) -> list[str]:
    """Return the command line of the run."""
    shards = prepare_shards(record.options.work, size.megabytes, size.vocabulary)
    return [
        *(sys.executable, "-m", "megatron_deberta", "pretrain", "configs/runs/small.yaml"),
        f"train.run_dir={run_dir}",
        *shards.overrides,
        f"train.steps={size.steps}",
        f"train.device={record.options.device}",
        "log.every=1",
        *size.overrides.split(),
    ]


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a new session, appending its output to ``log``."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True
        )


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a process.

    Raises:
        RuntimeError: it failed; with the end of its log.
    """
    try:
        code = process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        kill(process)
        code = -signal.SIGKILL
    if code != 0:
        tail = log.read_text(errors="replace")[-1500:]
        raise RuntimeError(f"exit code {code}; the end of its log:\n{tail}")


def kill(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to the process and its children."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def killed_and_resumed(record: Record, size: Size) -> Item:
    """Kill the run some steps after its first checkpoint, then start it again."""
    run_dir, log = record.options.work / "train", record.options.work / "train.log"
    shutil.rmtree(run_dir, ignore_errors=True)
    log.unlink(missing_ok=True)
    command = arguments(record, size, run_dir)
    first = start(command, log)
    deadline = time.monotonic() + TIMEOUT
    while not committed_steps(run_dir):
        if first.poll() is not None or time.monotonic() > deadline:
            finish(first, log)
            raise RuntimeError(f"ended before its first checkpoint: see {log}")
        time.sleep(0.05)
    time.sleep(0.5)
    alive = first.poll() is None
    kill(first)
    saved = committed_steps(run_dir)[-1]
    resume_start = time.monotonic()
    finish(start(command, log), log)
    curve = metric_values(run_dir, "train", "loss")
    validation = {
        key: metric_values(run_dir, "validation", key)[-1] for key in ("loss", "unigram_loss")
    }
    margin = validation["unigram_loss"] - validation["loss"]
    wrong = []
    if not alive or saved >= size.steps:
        wrong.append("the run ended before it was killed")
    if f"step_{saved:08d}" not in log.read_text() and "resuming from" not in log.read_text():
        wrong.append("the second start did not resume")
    if len(curve) != size.steps:
        wrong.append(f"{len(curve)} steps in the metrics, expected {size.steps}")
    if not sum(curve[-5:]) < sum(curve[:5]) or margin < size.better_than_unigram:
        wrong.append(f"validation loss only {margin:.2f} nat below the unigram loss")
    return {
        "resumed_from_step": saved,
        "seconds_of_the_second_start": round(time.monotonic() - resume_start, 1),
        "losses": curve,
        "tokens_per_second": metric_values(run_dir, "train", "tokens_per_second")[-1],
        **validation,
        "nats_below_unigram": margin,
        "wrong": wrong,
    }


def undisturbed(record: Record, size: Size) -> Item:
    """Run without interruption; compare the losses with those of the run that was killed."""
    run_dir, log = record.options.work / "twin", record.options.work / "twin.log"
    shutil.rmtree(run_dir, ignore_errors=True)
    finish(start(arguments(record, size, run_dir), log), log)
    resumed = record.items["pretrain, killed and resumed"]["losses"]
    curve = metric_values(run_dir, "train", "loss")
    difference = max(abs(a - b) / b for a, b in zip(resumed, curve, strict=True))
    # Sums on a GPU may be non-deterministic; on a CPU they are not.
    bound = 0.0 if record.options.device == "cpu" else 2e-2
    wrong = [f"losses differ by up to {difference:.1e}"] if difference > bound else []
    return {"bitwise": resumed == curve, "largest_difference": difference, "wrong": wrong}


def export(work: Path) -> Item:
    """Export the trained model and fill masks with it."""
    target, log = work / "exported", work / "export.log"
    shutil.rmtree(target, ignore_errors=True)
    program = [sys.executable, "-m", "megatron_deberta"]
    convert = ["convert", "--checkpoint", str(work / "train"), "--to", "hf"]
    finish(start([*program, *convert, "--output", str(target)], log), log)
    command = [*program, "fill-mask", str(target), *SENTENCES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    wrong = [] if len(lines) > len(SENTENCES) else [f"no answers: {done.stdout!r}"]
    return {"answers": lines, "wrong": wrong}


def metric_values(run_dir: Path, kind: str, key: str) -> list[float]:
    """Return all values of a metric, in order."""
    records = read_metrics(run_dir / FILE_NAME)
    return [float(r[key]) for r in records if r["kind"] == kind and key in r]


def table(items: dict[str, Item]) -> list[str]:
    """Return lines for the terminal."""
    lines = []
    for name, item in items.items():
        if "nats_below_unigram" in item:
            lines.append(
                f"  {name}: from step {item['resumed_from_step']}, validation "
                f"{item['loss']:.3f}, {item['nats_below_unigram']:.2f} nat below the unigram"
            )
        elif "bitwise" in item:
            difference = f"losses differ by {item['largest_difference']:.1e}"
            lines.append(f"  {name}: {'bit-identical' if item['bitwise'] else difference}")
        elif "answers" in item:
            lines += [f"  {line}" for line in item["answers"]]
    return lines
