"""Compute a task's metrics with a fine-tuned model, or BLiMP's accuracies with a pretrained one.

MODEL is the run or checkpoint of `finetune`, or an export of it; of a run, the best checkpoint is
used. Several ranks divide the examples under torchrun or srun. The task `blimp` scores minimal
pairs of sentences by the pseudo-log-likelihood of a pretrained run, checkpoint, export or release:
a pair is correct if its acceptable sentence has the higher one.

Examples:
  megatron-deberta evaluate sst2 --model runs/sst2 --data glue/SST-2 --split dev
  megatron-deberta evaluate blimp --model runs/base --data blimp --limit 50 --output blimp.json
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_deberta.cli.arguments import number
from megatron_deberta.cli.finetune import add_task_arguments
from megatron_deberta.errors import EXIT_DONE, ConfigError
from megatron_deberta.files import write_atomically
from megatron_deberta.text.deduplicate.progress import StageDisplay

if TYPE_CHECKING:
    # These import torch, which --help does not need.
    from megatron_deberta.tasks.minimal_pairs import MinimalPairScores
    from megatron_deberta.train.pseudo_likelihood import Metric

MINIMAL_PAIRS = "blimp"
"""Name of the task that needs no fine-tuning."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_task_arguments(parser)
    parser.add_argument("--split", metavar="NAME", help="labelled split (default: dev)")
    parser.add_argument("--output", default="", metavar="FILE", help="write the metrics as JSON")
    parser.add_argument(
        "--limit", type=number(int, 1), metavar="N",
        help="blimp: first N pairs of each paradigm (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--metric", choices=("original", "within_word_l2r"),
        help="blimp: mask each token in turn (original, the default), or also the later tokens "
        "of its word (Kauf and Ivanova 2023)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the metrics."""
    if args.task == MINIMAL_PAIRS:
        return _run_minimal_pairs(args)
    for name in ("limit", "metric"):
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name} is for the task {MINIMAL_PAIRS}, not for {args.task}")
    from megatron_deberta.finetune.predict import open_predictor
    from megatron_deberta.tasks.scoring import score

    with open_predictor(
        args.task, Path(args.model), args.data, tuple(args.overrides), args.tokenizer
    ) as predictor:
        split, outputs, loss = predictor.run(args.split or "dev")
        if predictor.groups.rank == 0:
            metrics = score(predictor.task, split.examples, split.encoded, outputs)
            metrics = {"loss": loss, **metrics}
            for name, value in metrics.items():
                print(f"{name:<20} {value:.4f}")
            if args.output:
                Path(args.output).write_text(json.dumps(metrics, indent=2) + "\n")
    return EXIT_DONE


def _run_minimal_pairs(args: argparse.Namespace) -> int:
    from megatron_deberta.distributed.environment import read_environment
    from megatron_deberta.finetune.minimal_pairs import evaluate_minimal_pairs

    if args.split is not None:
        raise ConfigError(f"--split {args.split}: {MINIMAL_PAIRS} has no splits; remove it")
    metric: Metric = args.metric or "original"
    shows = read_environment().rank == 0
    with StageDisplay(title="evaluate") as display:

        def advance(done: int, total: int) -> None:
            if shows:
                display.advance(MINIMAL_PAIRS, total, done)

        scores, is_first = evaluate_minimal_pairs(
            Path(args.model),
            args.data,
            limit=args.limit or 0,
            metric=metric,
            tokenizer=args.tokenizer,
            overrides=args.overrides,
            advance=advance,
        )
    if is_first:
        print(describe(scores))
        if args.output:
            content = json.dumps(as_json(scores, metric), indent=2) + "\n"
            write_atomically(Path(args.output), content.encode())
    return EXIT_DONE


def describe(scores: MinimalPairScores) -> str:
    """Format a table: a line per paradigm, the mean of each field, and of all paradigms."""
    width = max(len(score.paradigm) for score in scores.paradigms) + 2
    lines = [f"{'paradigm':<{width}}  pairs  accuracy"]
    for field, mean in scores.fields.items():
        own = [score for score in scores.paradigms if score.field == field]
        lines += [
            f"  {score.paradigm:<{width - 2}}  {score.num_pairs:>5}  {score.accuracy:>8.1%}"
            for score in own
        ]
        count = sum(score.num_pairs for score in own)
        lines.append(f"{field.replace('_', ' '):<{width}}  {count:>5}  {mean:>8.1%}")
    lines.append(f"{'all':<{width}}  {scores.num_pairs:>5}  {scores.accuracy:>8.1%}")
    return "\n".join(lines)


def as_json(scores: MinimalPairScores, metric: str) -> dict[str, object]:
    """Return the accuracies as JSON values."""
    return {
        "metric": metric,
        "num_pairs": scores.num_pairs,
        "accuracy": scores.accuracy,
        "fields": scores.fields,
        "paradigms": [asdict(score) for score in scores.paradigms],
    }
