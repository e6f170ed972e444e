"""Pretraining, resumption, export and fill-mask of a small model through the commands.

Shards from what every Python ships; pretraining through DeepSpeed, killed with SIGKILL after its
first checkpoint and started again; the same run undisturbed, whose losses must be the same; export
to Hugging Face's format; masks filled. Checked: the run continued, the loss fell, the two runs
agree, the export answers.
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
from typing import Any

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
    """What is trained, and for how long.

    Attributes:
        overrides: separated by spaces.
        better_than_unigram: nats a masked token that the last validation must be below the
            unigram loss.
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
        "checkpoint.save_every=20 train.eval_every=0 train.eval_steps=2"
    ),
    -0.3,  # sixty steps learn little more than frequencies
)


def run(record: Record) -> None:
    """Pretrain and export; each needs what was before."""
    size = SMALL if record.options.small else FULL
    work = record.options.work
    record.run("pretrain, killed and resumed", lambda: killed_and_resumed(record, size))
    if not record.options.small:  # the test suite has that on the CPU
        record.run("the same, undisturbed", lambda: undisturbed(record, size))
    record.run("export and fill masks", lambda: export(work))


def arguments(record: Record, size: Size, run_dir: Path) -> list[str]:
    """The command line of the run."""
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
    """Start a command in a session of its own, its output appended to ``log``."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True
        )


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a clean end.

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
    """SIGKILL to the process and those it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def killed_and_resumed(record: Record, size: Size) -> Item:
    """The run, killed some steps after its first checkpoint."""
    run_dir, log = record.options.work / "train", record.options.work / "train.log"
    for old in (run_dir, log):
        shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
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
    begun = time.monotonic()
    finish(start(command, log), log)
    curve = losses(run_dir)
    found = validation(run_dir)
    margin = found["unigram_loss"] - found["loss"]
    wrong = []
    if not alive or saved >= size.steps:
        wrong.append("the run was over before it could be killed")
    if f"step_{saved:08d}" not in log.read_text() and "resuming from" not in log.read_text():
        wrong.append("the second start did not continue")
    if len(curve) != size.steps:
        wrong.append(f"{len(curve)} steps in the metrics, expected {size.steps}")
    if not sum(curve[-5:]) < sum(curve[:5]) or margin < size.better_than_unigram:
        wrong.append(f"the loss did not fall enough: {margin:.2f} nat below the unigram's")
    return {
        "resumed_from_step": saved,
        "seconds_of_the_second_start": round(time.monotonic() - begun, 1),
        "losses": curve,
        "tokens_per_second": last(run_dir, "tokens_per_second"),
        **found,
        "nats_below_unigram": margin,
        "wrong": wrong,
    }


def undisturbed(record: Record, size: Size) -> Item:
    """The same run from beginning to end; its losses against those of the run that was killed."""
    run_dir, log = record.options.work / "twin", record.options.work / "twin.log"
    if run_dir.exists():
        shutil.rmtree(run_dir)
    finish(start(arguments(record, size, run_dir), log), log)
    disturbed = record.items["pretrain, killed and resumed"]["losses"]
    curve = losses(run_dir)
    off = max(abs(a - b) / b for a, b in zip(disturbed, curve, strict=True))
    # Whether sums repeat their bits on a GPU is a result; on a CPU it is promised.
    bound = 0.0 if record.options.device == "cpu" else 2e-2
    wrong = [f"losses differ by up to {off:.1e} after the kill"] if off > bound else []
    return {"bitwise": disturbed == curve, "largest_difference": off, "wrong": wrong}


def export(work: Path) -> Item:
    """Convert the trained model and ask it."""
    target, log = work / "exported", work / "export.log"
    if target.exists():
        shutil.rmtree(target)
    program = [sys.executable, "-m", "megatron_deberta"]
    convert = ["convert", "--checkpoint", str(work / "train"), "--to", "hf"]
    finish(start([*program, *convert, "--output", str(target)], log), log)
    answer = subprocess.run(
        [*program, "fill-mask", str(target), *SENTENCES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = [line for line in answer.splitlines() if line.strip()]
    wrong = [] if len(lines) > len(SENTENCES) else [f"no answers: {answer!r}"]
    return {"answers": lines, "wrong": wrong}


def losses(run_dir: Path) -> list[float]:
    """Training loss by step."""
    records = read_metrics(run_dir / FILE_NAME)
    return [float(r["loss"]) for r in records if r["kind"] == "train"]


def validation(run_dir: Path) -> dict[str, float]:
    """The last validation's loss, and the unigram's."""
    records = [r for r in read_metrics(run_dir / FILE_NAME) if r["kind"] == "validation"]
    return {
        key: float([r[key] for r in records if key in r][-1]) for key in ("loss", "unigram_loss")
    }


def last(run_dir: Path, key: str) -> Any:
    """The last value of a training metric."""
    records = read_metrics(run_dir / FILE_NAME)
    return [r[key] for r in records if r["kind"] == "train" and key in r][-1]


def table(items: dict[str, Item]) -> list[str]:
    """What came out."""
    lines = []
    for name, item in items.items():
        if "nats_below_unigram" in item:
            lines.append(
                f"  {name}: from step {item['resumed_from_step']}, validation "
                f"{item['loss']:.3f}, {item['nats_below_unigram']:.2f} nat below the unigram"
            )
        elif "bitwise" in item:
            same = "the same bits" if item["bitwise"] else f"off {item['largest_difference']:.1e}"
            lines.append(f"  {name}: {same}")
        elif "answers" in item:
            lines += [f"  {line}" for line in item["answers"]]
    return lines
