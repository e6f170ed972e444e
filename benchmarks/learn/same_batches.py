"""Learning curves of ours, with and without mask decoder, and of transformers' DeBERTa.

For each seed, three models start from the same weights, as far as they share them, and train on the
same rows, masks, schedule and optimizer settings, without dropout: ours with the mask decoder, ours
without it and without absolute positions, and ``DebertaV2ForMaskedLM`` with torch's AdamW. All are
validated on the same masked rows at the same steps. Ours are ``megatron-deberta pretrain`` runs.

    python -m benchmarks.learn.same_batches --seeds 3 --steps 2000

``--early-seeds`` adds seeds with which our two models are trained for the first EARLY_STEPS only. A
fourth run of as many steps shows what rounding does: ours without mask decoder, with another
implementation of the same attention.
Text is read from ``MEGATRON_DEBERTA_CORPUS``, else from ``../shared/corpus``, or ``--text``; its
tokenizer and shards are made once, in ``--runs``. The config is that of the quickstart with the
overrides SIZE; further arguments are overrides, too, as in ``model.hidden_size=256
model.hidden_dropout=0.1``. Every finished model has a JSON file in ``--runs`` and is not trained
again when the program is restarted.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import DebertaV2ForMaskedLM

from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import ROOT, program_environment, provenance
from benchmarks.lib.stock import copy_to_stock, stock_config
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.data.batch import Batch
from megatron_deberta.data.build import build_loaders, tokenizer_path
from megatron_deberta.data.vocabulary import Vocabulary
from megatron_deberta.engine.schedule import learning_rate
from megatron_deberta.model import parameter_shapes
from megatron_deberta.model.weight_init import fill_initial
from megatron_deberta.observe.metrics import read_metrics
from megatron_deberta.ops.cross_entropy import IGNORED_LABEL
from megatron_deberta.tokenizer import load_tokenizer
from megatron_deberta.train.vocab_size import with_vocab_size

CORPUS = Path(os.environ.get("MEGATRON_DEBERTA_CORPUS") or ROOT.parent / "shared" / "corpus")
CONFIG = ROOT / "configs" / "runs" / "quickstart.yaml"
SIZE = (
    "model.num_layers=3", "model.hidden_size=128", "model.num_heads=2",
    "model.ffn_hidden_size=512", "model.vocab_size=auto", "model.conv_kernel_size=null",
    "train.global_batch_size=12", "train.micro_batch_size=12", "parallel.tensor_parallel_size=1",
)  # fmt: skip
VOCABULARY = 4096
# No skipped updates either: transformers' side has none.
COMMON = (
    "model.hidden_dropout=0", "model.attention_dropout=0", "stability.spike_sigmas=null",
    "precision.dtype=fp32", "parallel.engine=plain", "train.device=cpu", "data.num_workers=0",
    "optimizer.learning_rate=2e-3",
    "train.eval_every=100", "train.eval_batches=25", "checkpoint.save_every=500",
    "checkpoint.keep_last=1", "log.every=1", "log.samples=0", "log.tensorboard=false",
)  # fmt: skip
NO_DECODER = ("model.mask_decoder_passes=0", "model.absolute_positions=none")
WITH, WITHOUT, PEER = "mask decoder", "no mask decoder", "transformers"
ROUNDED = "other rounding"
VARIANTS = {
    WITH: ("model.mask_decoder_passes=2",),
    WITHOUT: NO_DECODER,
    PEER: NO_DECODER,
    ROUNDED: (*NO_DECODER, "parallel.attention_backend=reference"),
}
"""Overrides by model."""
EARLY_STEPS = 300
FIRST_STEPS = (20, 40, 60, 80, 100, 200, 300)
"""For each of these, the largest difference of training losses up to there is recorded."""


class Peer:
    """``DebertaV2ForMaskedLM`` and torch's AdamW with the initial weights and settings of a run.

    Args:
        config: a run without mask decoder.
        dtype: of weights and activations.
    """

    def __init__(self, config: RunConfig, dtype: torch.dtype = torch.float32) -> None:
        self._config = config
        self.model = DebertaV2ForMaskedLM(stock_config(config.model)).to(dtype).train()
        weights = {}
        for name, shape in parameter_shapes(config.model).items():
            weights[name] = torch.empty(shape)
            fill_initial(weights[name], name, shape, config.model, config.train.seed)
        copy_to_stock(weights, self.model, config.model)
        optimizer, groups = config.optimizer, {True: [], False: []}
        for name, parameter in self.model.named_parameters():
            groups[name.endswith(("bias", "LayerNorm.weight"))].append(parameter)
        self._optimizer = torch.optim.AdamW(
            [
                {"params": groups[False], "weight_decay": optimizer.weight_decay},
                {"params": groups[True], "weight_decay": 0.0},
            ],
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        )

    def step(self, step: int, batches: Iterable[Batch]) -> float:
        """Train on the micro batches of a step; return the mean loss over their targets."""
        parts = [self._loss_sum(batch) for batch in batches]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
        loss.backward()
        limit = self._config.optimizer.clip_grad_norm
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(step, self._config.optimizer, self._config.train.steps)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def validate(self, batches: Iterable[Batch]) -> float:
        """Return the mean validation loss, in nats per masked token."""
        self.model.eval()
        with torch.no_grad():
            parts = [self._loss_sum(batch) for batch in batches]
        self.model.train()
        return float(sum(part for part, _ in parts)) / sum(count for _, count in parts)

    def _loss_sum(self, batch: Batch) -> tuple[Any, int]:
        """Return the summed cross-entropy of transformers' own forward, and the targets' number."""
        labels = torch.full_like(batch.inputs.input_ids, IGNORED_LABEL)
        valid = batch.labels != IGNORED_LABEL
        rows = torch.where(valid)[0]
        labels[rows, batch.masked_positions[valid]] = batch.labels[valid]
        count = int(valid.sum())
        mean = self.model(batch.inputs.input_ids, batch.inputs.is_token.long(), labels=labels).loss
        return mean * count, count


@dataclass(frozen=True)
class Job:
    """One model with one seed.

    Attributes:
        variant: of VARIANTS.
        seed: of initial weights, rows and masks.
        folder: of all runs.
        config_file: config of all runs.
        overrides: of all variants.
        last_step: the training ends there, whatever the schedule's length.
    """

    variant: str
    seed: int
    folder: Path
    config_file: Path
    overrides: tuple[str, ...]
    last_step: int

    @property
    def result(self) -> Path:
        """The file that the finished job writes."""
        return self.folder / f"{self.variant.replace(' ', '-')}-{self.seed}.json"

    def arguments(self) -> list[str]:
        """Return all overrides."""
        return [
            f"data.train=[{self.folder / 'books_text_document'}]",
            f"tokenizer.path={self.folder / 'tokenizer'}",
            *SIZE, *COMMON, *self.overrides, *VARIANTS[self.variant],
            f"train.seed={self.seed}", f"train.exit_step={self.last_step}",
            f"train.run_dir={self.result.with_suffix('')}",
        ]  # fmt: skip

    def config(self) -> RunConfig:
        """Return the config."""
        return with_vocab_size(load_config(self.config_file, self.arguments()))


def run(job: Job) -> None:
    """Train one model and write its losses."""
    began = time.monotonic()
    record = _train_peer(job) if job.variant == PEER else _train_ours(job)
    seconds = round(time.monotonic() - began)
    write_json(job.result, {"variant": job.variant, "seed": job.seed, **record, "seconds": seconds})


def _train_ours(job: Job) -> dict[str, Any]:
    """Run or resume ``pretrain``.

    Raises:
        RuntimeError: it failed.
    """
    folder = job.result.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "megatron_deberta", "pretrain", str(job.config_file)]
    environment = program_environment(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    with (folder / "log.txt").open("ab") as log:
        code = subprocess.run(
            [*command, *job.arguments()], stdout=log, stderr=log, cwd=ROOT, env=environment
        ).returncode
    if code:
        raise RuntimeError(f"pretrain ended with exit code {code}; see {folder / 'log.txt'}")
    records = list(read_metrics(folder / "metrics.jsonl"))
    return {
        "unigram_loss": next(r["unigram_loss"] for r in records if "unigram_loss" in r),
        "validation": {
            r["step"]: r["loss"] for r in records if r["kind"] == "validation" and "loss" in r
        },
        "training": [r["loss"] for r in records if r["kind"] == "train"],
    }


def _train_peer(job: Job) -> dict[str, Any]:
    torch.set_num_threads(1)
    config = job.config()
    vocabulary = Vocabulary.of(load_tokenizer(tokenizer_path(config)))
    loader, validation = build_loaders(config, vocabulary, 0, 1, 0)
    assert validation is not None
    peer, losses, validations = Peer(config), [], {}
    for step, batches in zip(range(job.last_step), loader, strict=False):
        losses.append(peer.step(step, batches))
        if (step + 1) % (config.train.eval_every or config.train.steps) == 0:
            validations[step + 1] = peer.validate(validation)
            print(f"{job.result.stem}: step {step + 1} loss {validations[step + 1]}", flush=True)
    return {"validation": validations, "training": losses}


def prepare(texts: Sequence[Path], folder: Path) -> None:
    """Make tokenizer and shards of the text unless they exist."""
    if (folder / "books_text_document.manifest.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, names = str(folder / "tokenizer"), [str(path) for path in texts]
    for command in (
        ["train-tokenizer", "--input", names[0], "--vocab-size", str(VOCABULARY), "--force",
         "--output", tokenizer],
        ["preprocess", "--input", *names, "--tokenizer", tokenizer, "--force",
         "--output", str(folder / "books")],
    ):  # fmt: skip
        subprocess.run([sys.executable, "-m", "megatron_deberta", *command], cwd=ROOT, check=True)


def collect(jobs: Sequence[Job]) -> dict[str, Any]:
    """Return the losses of the finished jobs."""
    config = jobs[0].config()
    found = [read_json(job.result, None) for job in jobs]
    runs = [record for record in found if record is not None]
    every = config.train.eval_every or config.train.steps
    return {
        **provenance(),
        "what": "validation and training loss from the same weights on the same batches and masks",
        "config": str(jobs[0].config_file.relative_to(ROOT)),
        "overrides": [*SIZE, *COMMON, *jobs[0].overrides],
        "vocab": config.model.vocab_size,
        "parameters": sum(torch.Size(s).numel() for s in parameter_shapes(config.model).values()),
        "steps": config.train.steps,
        "tokens_per_step": config.train.global_batch_size * config.data.sequence_length,
        "unigram_loss": statistics.mean(r["unigram_loss"] for r in runs if "unigram_loss" in r),
        "runs": [
            {
                "variant": run["variant"],
                "seed": run["seed"],
                "seconds": run["seconds"],
                "validation": run["validation"],
                "training": {
                    end: statistics.mean(run["training"][end - every : end])
                    for end in range(every, len(run["training"]) + 1, every)
                },
            }
            for run in runs
        ],
        "largest_training_differences": {
            variant: _divergence(runs, variant) for variant in (PEER, ROUNDED)
        },
    }


def _divergence(runs: list[dict[str, Any]], variant: str) -> dict[int, float]:
    """Return the largest difference from ours without decoder in the first steps, of all seeds."""
    by = {(run["variant"], run["seed"]): run["training"] for run in runs}
    pairs = [(losses, by[WITHOUT, seed]) for (name, seed), losses in by.items() if name == variant]
    return {
        steps: max(
            abs(a - b)
            for losses, ours in pairs
            for a, b in zip(losses[:steps], ours[:steps], strict=True)
        )
        for steps in FIRST_STEPS
        if pairs
    }


def common_seeds(record: dict[str, Any], step: int) -> list[int]:
    """Return the seeds with which both of our models were trained to a step."""
    reached: dict[str, set[int]] = {WITH: set(), WITHOUT: set()}
    for run in record["runs"]:
        if run["variant"] in reached and str(step) in run["validation"]:
            reached[run["variant"]].add(run["seed"])
    return sorted(reached[WITH] & reached[WITHOUT])


def mean_curve(record: dict[str, Any], variant: str, losses: str) -> dict[int, float]:
    """Return the mean by step, over the seeds of the whole training.

    Args:
        record: the result.
        variant: one of ours.
        losses: ``validation`` or ``training``.
    """
    seeds = common_seeds(record, record["steps"])
    curves = [
        run[losses] for run in record["runs"] if run["variant"] == variant and run["seed"] in seeds
    ]
    return {int(step): statistics.mean(c[step] for c in curves) for step in curves[0]}


def differences(
    record: dict[str, Any], variant: str, reference: str, losses: str, seeds: Container[int]
) -> dict[int, tuple[float, float]]:
    """Return mean and half the 95 % interval of the difference of two variants by step.

    The interval is that of a t-test of differences paired by seed; infinite for one seed.

    Args:
        record: the result.
        variant: the one from whose losses those of `reference` are subtracted.
        reference: another variant.
        losses: ``validation`` or ``training``.
        seeds: to compare.
    """
    from scipy import stats

    by = {(run["variant"], run["seed"]): run[losses] for run in record["runs"]}
    pairs = [
        (curve, by[reference, seed])
        for (name, seed), curve in by.items()
        if name == variant and seed in seeds and (reference, seed) in by
    ]
    found = {}
    for step in sorted({s for curve, other in pairs for s in curve if s in other}, key=int):
        values = [
            curve[step] - other[step] for curve, other in pairs if step in curve and step in other
        ]
        half = math.inf
        if len(values) > 1:
            spread = statistics.stdev(values) / len(values) ** 0.5
            half = float(stats.t.ppf(0.975, len(values) - 1)) * spread
        found[int(step)] = (statistics.mean(values), half)
    return found


def plot(record: dict[str, Any], path: Path) -> None:
    """Plot our mean curves, and what mask decoder, transformers and rounding change."""
    from matplotlib.figure import Figure

    curves, cost = (figure := Figure(figsize=(11, 4), layout="constrained")).subplots(1, 2)
    for variant in (WITH, WITHOUT):
        points = mean_curve(record, variant, "validation")
        curves.plot(list(points), list(points.values()), label=variant)
    curves.axhline(record["unigram_loss"], linestyle=":", color="grey", label="unigram")
    curves.set(xlabel="step", ylabel="validation loss (nats per masked token)")
    curves.legend()
    seeds = common_seeds(record, record["steps"])
    found = differences(record, WITH, WITHOUT, "validation", seeds)
    means, halves = zip(*found.values(), strict=True)
    cost.errorbar(list(found), means, yerr=halves, marker=".", capsize=3, label=WITH)
    for seed in seeds:
        for variant, color in ((PEER, "tab:green"), (ROUNDED, "tab:orange")):
            points = differences(record, variant, WITHOUT, "validation", [seed])
            label = variant if seed == seeds[0] else None
            losses = [mean for mean, _ in points.values()]
            cost.plot(list(points), losses, color=color, linewidth=1, label=label)
    cost.axhline(0, color="grey", linewidth=0.8)
    cost.set(xlabel="step", ylabel=f"loss minus that with {WITHOUT} (nats)")
    cost.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Train the missing models; write the result when all have finished."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--early-seeds", type=int, default=5, help="(default 5)")
    parser.add_argument("--steps", type=int, default=2000, help="(default 2000)")
    parser.add_argument("--config", type=Path, default=CONFIG, help="(default quickstart.yaml)")
    parser.add_argument("--text", type=Path, nargs="+", help="JSONL (default: books of the corpus)")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "same_batches")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "benchmarks" / "results" / "cpu" / "same_batches",
        help="path without .json and .png",
    )  # fmt: skip
    parser.add_argument("--processes", type=int, default=2, help="at the same time (default 2)")
    parser.add_argument("overrides", nargs="*", help="further overrides of the config")
    args = parser.parse_args()
    folder = args.runs.resolve()
    prepare(args.text or sorted(CORPUS.glob("books-*.jsonl.gz")), folder)
    overrides = (*args.overrides, f"train.steps={args.steps}")
    template = Job(WITH, 1, folder, args.config.resolve(), overrides, args.steps)
    # Ours first: they answer what the mask decoder costs.
    jobs = [
        replace(template, variant=variant, seed=seed, last_step=last_step)
        for variants, first, count, last_step in (
            ((WITH, WITHOUT), 1, args.seeds, args.steps),
            ((ROUNDED,), 1, args.seeds, min(EARLY_STEPS, args.steps)),
            ((WITH, WITHOUT), args.seeds + 1, args.early_seeds, min(EARLY_STEPS, args.steps)),
            ((PEER,), 1, args.seeds, args.steps),
        )
        for seed in range(first, first + count)
        for variant in variants
    ]
    missing = [job for job in jobs if not job.result.exists()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        for future in as_completed({pool.submit(run, job): job for job in missing}):
            future.result()
    record = collect(jobs)
    write_json(args.output.with_suffix(".json"), record)
    plot(record, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
