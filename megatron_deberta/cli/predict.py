"""Predict the examples of a task with a fine-tuned model.

MODEL is the run or checkpoint of `finetune`, or an export of it; of a run, the best checkpoint is
used. Writes one JSON object per example: id, value and probabilities. With --leaderboard, it
also writes the files of the task's leaderboard (GLUE, SuperGLUE, SQuAD, CoNLL), or else the same
objects. Several ranks divide the examples under torchrun or srun, and rank 0 writes.

Example:
  megatron-deberta predict sst2 --model runs/sst2 --data glue/SST-2 --split test --output out.jsonl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_deberta.cli.finetune import add_task_arguments
from megatron_deberta.errors import EXIT_DONE, MissingInputError
from megatron_deberta.files import write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_task_arguments(parser)
    parser.add_argument("--split", default="test", metavar="NAME", help="split to predict")
    parser.add_argument(
        "--output", default="", metavar="FILE", help="file to write (default: standard output)"
    )
    parser.add_argument(
        "--leaderboard", default="", metavar="DIR", help="folder for the leaderboard's files"
    )
    parser.add_argument(
        "--null-threshold", type=float, default=0.0, metavar="X",
        help="SQuAD 2.0: predict no answer above this score; evaluate finds it as null_threshold",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Predict and write the predictions."""
    from megatron_deberta.finetune.predict import open_predictor
    from megatron_deberta.tasks import json_lines, predict, write_predictions

    with open_predictor(
        args.task, Path(args.model), args.data, tuple(args.overrides), args.tokenizer
    ) as predictor:
        try:
            split, outputs, _ = predictor.run(args.split)
        except MissingInputError as error:
            splits = ", ".join(predictor.task.splits)
            raise MissingInputError(f"{error}; choose a split with --split: {splits}") from error
        if predictor.groups.rank == 0:
            task, examples = predictor.task, split.examples
            predictions = predict(
                task,
                examples,
                split.encoded,
                outputs,
                null_threshold=args.null_threshold,
                is_multi_label=predictor.is_multi_label,
            )
            lines = json_lines(predictions)
            if args.leaderboard:
                folder = Path(args.leaderboard)
                write_predictions(task, args.split, examples, predictions, folder)
            if args.output:
                write_atomically(Path(args.output), lines)
            else:
                sys.stdout.write(lines.decode())
    return EXIT_DONE
