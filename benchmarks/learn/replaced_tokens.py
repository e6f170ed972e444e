"""Learning curves of replaced-token detection on a CPU: generator and discriminator.

A ``megatron-deberta pretrain`` of ``configs/runs/learn_rtd_cpu.yaml`` that may be stopped at any
time and resumes when this program is started again. The generator's loss is compared with the
unigram cross-entropy of the same targets, the discriminator's F1 on replaced tokens with that of
calling every token replaced, 2 p / (1 + p) for a share p of replaced tokens.

    megatron-deberta train-tokenizer --input TEXT... --vocab-size 1000 --output tokenizer
    megatron-deberta preprocess --input TEXT... --tokenizer tokenizer --output books
    python -m benchmarks.learn.replaced_tokens --data books_text_document --tokenizer tokenizer \
        --run runs/learn_rtd --output benchmarks/results/cpu/learn_rtd.json
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import ROOT, program_environment, provenance
from megatron_deberta.config import load_config
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE
from megatron_deberta.observe.metrics import read_metrics

CONFIG = ROOT / "configs/runs/learn_rtd_cpu.yaml"
KEPT = ("step", "loss", "masked_accuracy", "discriminator_loss", "discriminator_accuracy",
        "discriminator_precision", "discriminator_recall", "discriminator_f1",
        "replaced_fraction")  # fmt: skip


def train(data: str, tokenizer: str, run: Path, overrides: list[str]) -> None:
    """Train or continue the run.

    Raises:
        SystemExit: it failed.
    """
    command = [
        sys.executable, "-m", "megatron_deberta", "pretrain", str(CONFIG), f"data.train=[{data}]",
        f"tokenizer.path={tokenizer}", "model.vocab_size=auto", f"train.run_dir={run}", *overrides,
    ]  # fmt: skip
    environment = program_environment(OMP_NUM_THREADS="1")
    code = subprocess.run(command, env=environment).returncode
    if code not in (EXIT_DONE, EXIT_REQUEUE):
        raise SystemExit(f"{run}: pretrain ended with exit code {code}")


def collect(run: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the curves of the run so far."""
    records = list(read_metrics(run / "metrics.jsonl"))
    validations = [r for r in records if r["kind"] == "validation" and "discriminator_f1" in r]
    curve = [{key: record[key] for key in KEPT} for record in validations]
    for point in curve:
        share = point["replaced_fraction"]
        point["f1_of_all_replaced"] = 2 * share / (1 + share)
    config = load_config(CONFIG, overrides)
    return {
        **provenance(),
        "config": str(CONFIG.relative_to(ROOT)),
        "overrides": overrides,
        "steps": config.train.steps,
        "tokens_per_step": config.train.global_batch_size * config.data.sequence_length,
        "unigram_loss": next(r["unigram_loss"] for r in records if "unigram_loss" in r),
        "validation": curve,
    }


def plot(record: dict[str, Any], path: Path) -> None:
    """Plot the generator's loss and the discriminator's F1 over steps."""
    from matplotlib.figure import Figure

    losses, scores = (figure := Figure(figsize=(11, 4.5), layout="constrained")).subplots(1, 2)
    curve = record["validation"]
    steps = [point["step"] for point in curve]
    losses.plot(steps, [point["loss"] for point in curve], marker=".", label="generator")
    losses.axhline(record["unigram_loss"], color="gray", label="unigram")
    losses.axhline(record["unigram_loss"] - 1, color="gray", linestyle=":", label="1 nat below")
    losses.set(xlabel="steps", ylabel="validation loss (nats per masked token)")
    for name, label in (
        ("discriminator_f1", "F1"), ("discriminator_precision", "precision"),
        ("discriminator_recall", "recall"), ("f1_of_all_replaced", "F1 of all replaced"),
    ):  # fmt: skip
        scores.plot(steps, [point[name] for point in curve], marker=".", label=label)
    scores.set(xlabel="steps", ylabel="discriminator on replaced tokens")
    for axes in (losses, scores):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train, then write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="shard prefix")
    parser.add_argument("--tokenizer", required=True, help="tokenizer folder")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--output", type=Path, required=True, help="result file (.json)")
    parser.add_argument("--collect", action="store_true", help="write the result so far only")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args()
    if not args.collect:
        train(args.data, args.tokenizer, args.run, args.overrides)
    record = collect(args.run, args.overrides)
    write_json(args.output, record)
    plot(record, args.output.with_suffix(".png"))
    last = record["validation"][-1]
    print(
        f"step {last['step']}: generator {record['unigram_loss'] - last['loss']:.2f} nats below "
        f"the unigram; F1 {last['discriminator_f1']:.3f}, "
        f"{last['discriminator_f1'] / last['f1_of_all_replaced']:.2f} times all replaced"
    )


if __name__ == "__main__":
    main()
