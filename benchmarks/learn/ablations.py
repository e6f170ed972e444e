"""Validation loss of DeBERTa's ablations on the same text, masks and steps.

Every run is a ``megatron-deberta pretrain`` that may be killed at any time and resumes when this
program is started again; ``--budget`` stops it at a checkpoint. Losses are read from the runs' own
metrics. Step times are measured separately with ``--time``, the models in turns, because times of
concurrent runs are not comparable.

Data and tokenizer from any text:

    megatron-deberta train-tokenizer --input TEXT... --vocab-size 8200 --output tokenizer
    megatron-deberta preprocess --input TEXT... --tokenizer tokenizer --output books
    python -m benchmarks.learn.ablations --config configs/runs/learn_cpu.yaml \
        --data books_text_document --tokenizer tokenizer --runs runs/learn --output learn
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import ROOT, program_environment, provenance
from benchmarks.step.batch import make_batch
from benchmarks.step.measure import compete
from benchmarks.step.sides import Ours, Setting
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE
from megatron_deberta.observe.metrics import read_metrics
from megatron_deberta.train.setup import DTYPES

NO_DECODER = ("model.mask_decoder_passes=0", "model.absolute_positions=none")
SHARED = ("model.share_position_projections=true", "model.key_bias=true")
# Config overrides by row, in the order in which they run. Convolution is added to shared
# projections, as in the paper's Table 13.
VARIANTS: dict[str, tuple[str, ...]] = {
    "DeBERTa": (),
    "-EMD": NO_DECODER,
    "RoBERTa": (
        "model.mask_decoder_passes=0", "model.absolute_positions=input",
        "model.position_terms=none", "model.key_bias=true", "model.layer_norm_eps=1e-5",
    ),
    "-C2P": ("model.position_terms=p2c",),
    "-P2C": ("model.position_terms=c2p",),
    "-(C2P+P2C)": ("model.position_terms=none",),
    "+shared projections": SHARED,
    "+convolution": (*SHARED, "model.conv_kernel_size=3"),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One variant with one seed."""

    variant: str
    seed: int
    folder: Path

    def validations(self) -> list[dict[str, Any]]:
        """Return step and loss of each validation so far."""
        return [
            {"step": r["step"], "loss": r["loss"]}
            for r in self._metrics()
            if r["kind"] == "validation" and "loss" in r
        ]

    def unigram_loss(self) -> float | None:
        """Return the cross-entropy of the validation targets under token frequencies."""
        return next((r["unigram_loss"] for r in self._metrics() if "unigram_loss" in r), None)

    def _metrics(self) -> Iterable[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []


@dataclass(frozen=True)
class Experiment:
    """All runs of one config on one corpus."""

    config_file: Path
    data: str
    tokenizer: str
    folder: Path
    variants: tuple[str, ...]
    seeds: tuple[int, ...]

    def runs(self) -> list[Run]:
        """Return all runs: every variant with the first seed, then with the next."""
        return [
            Run(variant, seed, self.folder / f"{_slug(variant)}-{seed}")
            for seed in self.seeds
            for variant in self.variants
        ]

    def overrides(self, run: Run) -> list[str]:
        """Return the config overrides of a run."""
        vocabulary = json.loads(Path(f"{self.data}.manifest.json").read_text())["vocab_size"]
        return [
            f"data.train=[{self.data}]",
            f"tokenizer.path={self.tokenizer}",
            f"model.vocab_size={vocabulary}",
            *VARIANTS[run.variant],
            f"train.seed={run.seed}",
            f"train.run_dir={run.folder}",
        ]

    def config(self, run: Run) -> RunConfig:
        """Return the config of a run."""
        return load_config(self.config_file, self.overrides(run))


def _slug(variant: str) -> str:
    """Return a folder name: ``-EMD`` -> ``no-emd``, ``+convolution`` -> ``with-convolution``."""
    spelled = variant.lower().replace("+", "with-", 1) if variant[0] == "+" else variant.lower()
    spelled = f"no-{spelled[1:]}" if variant[0] == "-" else spelled
    return "".join(c if c.isalnum() else "-" for c in spelled).replace("no--", "no-").strip("-")


def train(experiment: Experiment, budget_seconds: float) -> None:
    """Continue the runs, one after the other, until all are done or the time is up.

    Raises:
        SystemExit: a run failed.
    """
    deadline = time.monotonic() + budget_seconds
    for run in experiment.runs():
        last = experiment.config(run).train.steps
        if any(point["step"] == last for point in run.validations()):
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            return
        print(f"{run.folder}: {run.variant}, seed {run.seed}", flush=True)
        code = _pretrain(experiment, run, left)
        if code not in (EXIT_DONE, EXIT_REQUEUE):
            raise SystemExit(f"{run.folder}: pretrain ended with exit code {code}")


def _pretrain(experiment: Experiment, run: Run, seconds: float) -> int:
    """Run ``pretrain``; when the time is up, stop it at a checkpoint with SIGTERM."""
    command = [sys.executable, "-m", "megatron_deberta", "pretrain", str(experiment.config_file)]
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / "log.txt").open("ab") as log:
        process = subprocess.Popen(
            [*command, *experiment.overrides(run)], stdout=log, stderr=log, cwd=ROOT,
            env=program_environment(),
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            return process.wait()
        finally:
            process.kill()


def time_steps(experiment: Experiment, repeats: int) -> dict[str, float]:
    """Return the median seconds of one training step of each variant, measured in turns."""
    first = {run.variant: experiment.config(run) for run in reversed(experiment.runs())}
    config = first["DeBERTa"]
    device = torch.device(config.train.device)
    tokens = config.train.micro_batch_size * config.data.sequence_length
    batch = make_batch(config.model, tokens, config.data.sequence_length, device)
    dtype = DTYPES[config.precision.dtype]
    builds = {name: partial(Ours, Setting(c.model, device, dtype)) for name, c in first.items()}
    results = compete(builds, batch, repeats, resident=True)
    steps = config.train.global_batch_size // config.train.micro_batch_size
    return {name: steps * statistics.median(r.seconds) for name, r in results.items()}


def collect(experiment: Experiment, output: Path) -> dict[str, Any]:
    """Return the curves of all runs so far, with the step times of ``output.json``."""
    record = read_json(output.with_suffix(".json"), {"seconds_per_step": {}})
    runs = experiment.runs()
    config = experiment.config(runs[0])
    unigram = [loss for run in runs if (loss := run.unigram_loss()) is not None]
    return {
        **record,
        **provenance(config.train.device),
        "config": str(experiment.config_file),
        "layers": config.model.num_layers,
        "width": config.model.hidden_size,
        "vocab": config.model.vocab_size,
        "steps": config.train.steps,
        "tokens_per_step": config.train.global_batch_size * config.data.sequence_length,
        "unigram_loss": unigram[0] if unigram else None,
        "runs": [
            {"variant": run.variant, "seed": run.seed, "validation": points}
            for run in runs
            if (points := run.validations())
        ],
    }


def plot(record: dict[str, Any], path: Path) -> None:
    """Plot the mean validation loss of each variant over tokens and over seconds."""
    from matplotlib.figure import Figure

    by_tokens, by_seconds = (figure := Figure(figsize=(12, 5), layout="constrained")).subplots(1, 2)
    for variant, points in mean_curves(record):
        tokens = [step * record["tokens_per_step"] / 1e6 for step, _ in points]
        losses = [loss for _, loss in points]
        by_tokens.plot(tokens, losses, marker=".", label=variant)
        seconds = record["seconds_per_step"].get(variant)
        if seconds is not None:
            by_seconds.plot([step * seconds for step, _ in points], losses, marker=".")
    by_tokens.set(xlabel="million tokens", ylabel="validation loss (nats per masked token)")
    by_seconds.set(xlabel="seconds of training steps on an idle machine")
    if record["runs"]:
        by_tokens.legend()
    for axes in (by_tokens, by_seconds):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def mean_curves(record: dict[str, Any]) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Yield the steps and losses of each variant, averaged over the seeds that reached a step."""
    for variant in VARIANTS:
        losses: dict[int, list[float]] = {}
        for run in record["runs"]:
            if run["variant"] == variant:
                for point in run["validation"]:
                    losses.setdefault(point["step"], []).append(point["loss"])
        if losses:
            yield variant, [(step, statistics.mean(losses[step])) for step in sorted(losses)]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="configs/runs/learn_*.yaml")
    parser.add_argument("--data", required=True, help="shard prefix")
    parser.add_argument("--tokenizer", required=True, help="tokenizer folder")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--output", type=Path, required=True, help="result without .json, .png")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only this one")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="(default 1)")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds of training")
    parser.add_argument("--time", type=int, metavar="N", help="time N steps per variant instead")
    return parser.parse_args()


def main() -> None:
    """Train the missing runs, or time the variants; then write the result."""
    args = parse_arguments()
    experiment = Experiment(
        args.config, args.data, args.tokenizer, args.runs,
        tuple(args.variant or VARIANTS), tuple(args.seeds),
    )  # fmt: skip
    result = args.output.with_suffix(".json")
    if args.time is None:
        train(experiment, args.budget)
        record = collect(experiment, args.output)
    else:
        # Keeps the curves, because the runs may be on another machine.
        record = read_json(result, None) or collect(experiment, args.output)
        record["seconds_per_step"] = time_steps(experiment, args.time)
        record["timed"] = provenance(experiment.config(experiment.runs()[0]).train.device)
    write_json(result, record)
    plot(record, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
