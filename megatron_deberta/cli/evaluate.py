"""Compute a task's metrics, BLiMP's accuracies, or the perplexity of a text.

Several ranks divide the examples under torchrun or srun.

Examples:
  megatron-deberta evaluate task sst2 --model runs/sst2 --data glue/SST-2
  megatron-deberta evaluate blimp --model runs/base --data blimp
  megatron-deberta evaluate perplexity --model runs/mt --data wiki.valid.tokens
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megatron_deberta.cli.arguments import (
    Subcommand,
    add_shared,
    add_task_arguments,
    columns,
    number,
    prepare_output,
)
from megatron_deberta.errors import ConfigError, refusals
from megatron_deberta.files import write_atomically
from megatron_deberta.text.jobs.progress import ProgressDisplay

if TYPE_CHECKING:
    # These import torch, which --help does not need.
    from megatron_deberta.evaluate.language_models import Perplexity
    from megatron_deberta.evaluate.minimal_pairs import MinimalPairScores
    from megatron_deberta.tasks.class_scores import ClassScores

T = TypeVar("T")
GROUP_PREFIX = "accuracy_"
"""Names of the metrics of an example's ``group``."""
_MOST_GROUPS = 12
_MOST_COLUMNS = 20
"""Classes of a confusion matrix that is printed; ``--output`` has it anyway."""
FORMER_SUBCOMMAND = "task"
"""Subcommand of ``evaluate sst2``, as it was written before."""
_TASK_TEXT = """Compute the metrics of a fine-tuned model on a task.

MODEL is the run or checkpoint of `finetune`, or an export of it; of a run, the best checkpoint is
used. TASK is a task file or the name of a packaged one (`finetune --list-tasks`). Of classes, also
precision, recall and F1 of each and the confusion matrix; of taggers, by type of entity.

Examples:
  megatron-deberta evaluate task sst2 --model runs/sst2 --data glue/SST-2
  megatron-deberta evaluate task task.yaml --model runs/own --data data --split test --output m.json
"""
_BLIMP_TEXT = """Compute BLiMP's accuracies: the share of minimal pairs ordered correctly.

MODEL is a pretrained run, checkpoint, export or release. Pairs of sentences are scored by the
pseudo-log-likelihood, or, of an autoregressive model, by the log-likelihood: a pair is correct if
its acceptable sentence has the higher one.

Examples:
  megatron-deberta evaluate blimp --model runs/base --data blimp
  megatron-deberta evaluate blimp --model runs/base --data blimp --limit 50 --output blimp.json
"""
_PERPLEXITY_TEXT = """Compute the perplexity of a text.

MODEL is a pretrained run, checkpoint, export or release. The text, such as WikiText-103's, is
measured by word, piece and byte; the end of each line counts as a word.

Examples:
  megatron-deberta evaluate perplexity --model runs/mt --data wiki.valid.tokens --stride 112
  megatron-deberta evaluate perplexity --model runs/base --data wiki.valid.tokens --form masked
"""


def _add_task_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``evaluate task``."""
    add_task_arguments(parser)
    add_shared(parser, "--split", default="dev", help="labelled split")
    add_shared(parser, "--output", help="write the metrics as JSON")


def _add_model_arguments(parser: argparse.ArgumentParser, data: str) -> None:
    """Declare the arguments that BLiMP and perplexity share, with the help of ``--data``."""
    add_shared(parser, "--model")
    add_shared(parser, "--data", required=True, help=data)
    add_shared(parser, "--tokenizer", "overrides")
    add_shared(parser, "--output", help="write the result as JSON")


def _add_blimp_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``evaluate blimp``."""
    _add_model_arguments(parser, "folder of BLiMP's .jsonl files")
    parser.add_argument(
        "--limit", type=number(int, 1), metavar="N",
        help="first N pairs of each paradigm (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--metric", choices=("original", "within_word_l2r"), default="original",
        help="mask each token in turn (original), or also the later tokens of its word (Kauf and "
        "Ivanova 2023)",
    )  # fmt: skip


def _add_perplexity_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``evaluate perplexity``."""
    _add_model_arguments(parser, "text file; it may be compressed by gzip")
    add_shared(
        parser, "--form", 
        help="predict pieces from those before them, or masked ones from both sides (default: "
        "autoregressive if the model was trained so)",
    )  # fmt: skip
    parser.add_argument(
        "--stride", type=number(int, 1), metavar="N",
        help="pieces scored per row of data.sequence_length tokens; the others are context "
        "(default: a quarter)",
    )  # fmt: skip
    parser.add_argument(
        "--mask-every", type=number(int, 1), metavar="K",
        help="masked: mask one in K pieces at once (default 7)",
    )  # fmt: skip


def _run_task(args: argparse.Namespace) -> None:
    """Compute and print a task's metrics."""
    if args.task in SUBCOMMANDS:
        raise ConfigError(f"{args.task} is no task; write evaluate {args.task} before the options")
    prepare_output("--output", args.output)
    from megatron_deberta.evaluate.predict import open_predictor
    from megatron_deberta.tasks.class_scores import class_scores
    from megatron_deberta.tasks.scoring import predict, score

    with (
        refusals(),
        open_predictor(
            args.task, Path(args.model), args.data, tuple(args.overrides), args.tokenizer
        ) as predictor,
    ):
        split, outputs, loss = predictor.run(args.split)
        if predictor.groups.rank == 0:
            metrics = score(predictor.task, split.examples, split.encoded, outputs)
            metrics = {"loss": loss, **metrics}
            text, values = describe_metrics(metrics), dict[str, object](metrics)
            predictions = predict(predictor.task, split.examples, split.encoded, outputs)
            if scores := class_scores(predictor.task, split.examples, predictions):
                text += "\n\n" + describe_classes(scores)
                values["class_scores"] = scores.to_dict()
            _show(args, text, values)


def _show(args: argparse.Namespace, text: str, values: Mapping[str, object]) -> None:
    """Print a result, and write it as JSON if ``--output`` is given."""
    print(text)
    if args.output:
        content = json.dumps(values, indent=2) + "\n"
        write_atomically(Path(args.output), content.encode())


def describe_metrics(metrics: dict[str, float]) -> str:
    """Format one metric per line; of the accuracies of many groups, their range."""
    groups = {name: value for name, value in metrics.items() if name.startswith(GROUP_PREFIX)}
    if len(groups) <= _MOST_GROUPS:
        groups = {}
    lines = [f"{name:<20} {value:.4f}" for name, value in metrics.items() if name not in groups]
    if groups:
        low, high = min(groups, key=groups.__getitem__), max(groups, key=groups.__getitem__)
        lines.append(
            f"{len(groups)} groups: from {groups[low]:.4f} ({low.removeprefix(GROUP_PREFIX)}) to "
            f"{groups[high]:.4f} ({high.removeprefix(GROUP_PREFIX)}); --output FILE has all"
        )
    return "\n".join(lines)


def describe_classes(scores: ClassScores) -> str:
    """Format precision, recall and F1 by class, and the confusion matrix of a few classes."""
    names = [each.name for each in scores.classes]
    titles = ("class", f"{scores.unit:>9}", "predicted", "precision", "recall", "F1", "threshold")
    rows: list[tuple[str, ...]] = [titles]
    for each in scores.classes:
        counts = f"{each.labelled:,}", f"{each.predicted:,}"
        shares = (each.precision, each.recall, each.f1, each.threshold or 0.0)
        rows.append((each.name, *counts, *(f"{share:.4f}" for share in shares)))
    if any(each.threshold is None for each in scores.classes):
        rows = [row[:-1] for row in rows]
    lines = columns(rows)
    if scores.confusion and len(names) <= _MOST_COLUMNS:
        lines += ["", "confusion matrix: rows are labels, columns are predictions"]
        cells = [[f"{count:,}" for count in row] for row in scores.confusion]
        # As wide as the first column of the table above.
        named = zip([" " * len("class"), *names], [names, *cells], strict=True)
        lines += columns([[name, *row] for name, row in named])
    return "\n".join(lines)


def _run_minimal_pairs(args: argparse.Namespace) -> None:
    """Compute and print the accuracies."""
    from megatron_deberta.evaluate.language_models import evaluate_minimal_pairs

    scores = _measure(
        args, "blimp", evaluate_minimal_pairs, limit=args.limit or 0, metric=args.metric
    )
    if scores is not None:
        values = {
            "metric": args.metric,
            "num_pairs": scores.num_pairs,
            "accuracy": scores.accuracy,
            "fields": scores.fields,
            "paradigms": [asdict(score) for score in scores.paradigms],
        }
        _show(args, describe(scores), values)


def _run_perplexity(args: argparse.Namespace) -> None:
    """Compute and print the perplexity."""
    from megatron_deberta.evaluate.language_models import evaluate_perplexity

    options = {"stride": args.stride or 0, "mask_every": args.mask_every or 0}
    result = _measure(args, "perplexity", evaluate_perplexity, form=args.form, **options)
    if result is not None:
        values = {
            "perplexity_per_word": result.per_word,
            "perplexity_per_piece": result.per_piece,
            "bits_per_byte": result.bits_per_byte,
            **asdict(result),
        }
        _show(args, describe_perplexity(result), values)


def _measure(
    args: argparse.Namespace, stage: str, measure: Callable[..., tuple[T, bool]], **options: Any
) -> T | None:
    """Measure a pretrained model, with a progress bar on rank 0; None on the other ranks."""
    prepare_output("--output", args.output)
    from megatron_deberta.distributed.environment import read_environment

    shows = read_environment().rank == 0
    with refusals(), ProgressDisplay("evaluate") as display:

        def advance(done: int, total: int) -> None:
            if shows:
                display.advance(stage, total, done, {})

        common = {"tokenizer": args.tokenizer, "overrides": args.overrides, "advance": advance}
        result, is_first = measure(Path(args.model), args.data, **common, **options)
    return result if is_first else None


def describe_perplexity(result: Perplexity) -> str:
    """Format a result with how it was measured."""
    lines = [
        f"{'per word':<14} {result.per_word:>12,.2f}   {result.num_words:,} words",
        f"{'per piece':<14} {result.per_piece:>12,.2f}   {result.num_pieces:,} pieces, "
        f"{result.num_unknown:,} of them [UNK]",
        f"{'bits per byte':<14} {result.bits_per_byte:>12.4f}   {result.num_bytes:,} bytes",
        f"{result.form}, rows of {result.sequence_length:,} tokens, stride {result.stride:,}"
        + (f", one in {result.mask_every} masked" if result.mask_every else ""),
    ]
    return "\n".join(lines)


def describe(scores: MinimalPairScores) -> str:
    """Format a table: a line per paradigm, the mean of each field, and of all paradigms."""
    rows = [("paradigm", "pairs", "accuracy")]
    for field, mean in scores.fields.items():
        own = [score for score in scores.paradigms if score.field == field]
        rows += [
            (f"  {each.paradigm}", str(each.num_pairs), f"{each.accuracy:.1%}") for each in own
        ]
        count = sum(score.num_pairs for score in own)
        rows.append((field.replace("_", " "), str(count), f"{mean:.1%}"))
    rows.append(("all", str(scores.num_pairs), f"{scores.accuracy:.1%}"))
    return "\n".join(columns(rows))


SUBCOMMANDS = {
    "task": Subcommand(_TASK_TEXT, _add_task_arguments, _run_task),
    "blimp": Subcommand(_BLIMP_TEXT, _add_blimp_arguments, _run_minimal_pairs),
    "perplexity": Subcommand(_PERPLEXITY_TEXT, _add_perplexity_arguments, _run_perplexity),
}
