"""Predict the examples of a task, or texts, with a fine-tuned model.

MODEL is the run or checkpoint of `finetune`, or an export of it; of a run, the best checkpoint is
used. Writes one JSON object per example: id, text, label (of regression the score, of spans the
answer, of tokens one per word, of several labels per text a list), scores by label (of tokens, of
each word's label), of tokens the entities with their characters in the text, and gold, the label of
the file, if it has one. With --leaderboard, it also writes the files of the task's leaderboard
(GLUE, SuperGLUE, SQuAD, CoNLL), or else the same objects. Several ranks divide the examples under
torchrun or srun, and rank 0 writes.

Texts are those of --text, or without TASK and --text the lines of standard input. For taggers,
separate words and punctuation by spaces, as in the training data. The second text of a pair is
--text-pair, as often as --text; of spans, --text is the question and --text-pair the passage.

Examples:
  megatron-deberta predict sst2 --model runs/sst2 --data glue/SST-2 --split test --output out.jsonl
  megatron-deberta predict --model runs/sst2 --text "A film to see twice."
  megatron-deberta predict --model exports/sst2 < reviews.txt
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_deberta.cli.arguments import (
    add_shared,
    add_task_arguments,
    number,
    prepare_output,
)
from megatron_deberta.errors import ConfigError, MissingInputError, refusals
from megatron_deberta.files import write_atomically

if TYPE_CHECKING:
    from megatron_deberta.tasks import Example, Prediction, TaskConfig

_TEST = "test"
"""Split that is predicted if none is named."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_task_arguments(parser, is_required=False)
    parser.add_argument(
        "--text", action="append", default=[], metavar="TEXT",
        help="predict this text in place of a task's files; may be repeated, - for the lines of "
        "standard input",
    )  # fmt: skip
    parser.add_argument(
        "--text-pair", action="append", default=[], metavar="TEXT",
        help="second segment of --text: of spans the passage",
    )  # fmt: skip
    add_shared(parser, "--split", help=f"split to predict (default: {_TEST})")
    add_shared(parser, "--output", help="file to write (default: standard output)")
    add_shared(parser, "--leaderboard")
    parser.add_argument(
        "--null-threshold", type=number(float, -math.inf, math.inf), metavar="X",
        help="SQuAD 2.0: predict no answer above this score, which evaluate finds as "
        "null_threshold (default: 0)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Predict and write the predictions."""
    from megatron_deberta.evaluate.predict import open_predictor

    texts = _texts(args)
    prepare_output("--output", args.output)
    prepare_output("--leaderboard", args.leaderboard, is_folder=True)
    with (
        refusals(),
        open_predictor(
            args.task, Path(args.model), args.data, tuple(args.overrides), args.tokenizer
        ) as predictor,
    ):
        task = predictor.task
        if args.null_threshold is not None and not task.unanswerable:
            raise ConfigError(
                f"--null-threshold {args.null_threshold:g} is for tasks with unanswerable "
                f"questions such as squad2, not for {task.name}; remove it"
            )
        try:
            if texts is None:
                split, outputs, _ = predictor.run(args.split or _TEST)
            else:
                split, outputs = predictor.run_texts(*texts)
        except MissingInputError as error:
            splits = ", ".join(predictor.task.splits)
            raise MissingInputError(f"{error}; choose a split with --split: {splits}") from error
        if predictor.groups.rank == 0:
            from megatron_deberta.tasks import predict

            examples = split.examples
            predictions = predict(
                task,
                examples,
                split.encoded,
                outputs,
                null_threshold=args.null_threshold or 0.0,
                is_multi_label=predictor.is_multi_label,
            )
            _write(args, task, examples, predictions)


def _texts(args: argparse.Namespace) -> tuple[list[str], list[str]] | None:
    """Return the texts to predict and their second segments; None: a task's files.

    Raises:
        ConfigError: the arguments contradict each other, or there is no text.
    """
    # The parser takes the first word for the task, which may be missing or come later.
    if "=" in args.task and not Path(args.task).exists():
        words = [args.task, *args.overrides]
        args.task = next((word for word in words if "=" not in word), "")
        args.overrides = [word for word in words if word != args.task]
    texts, pairs = list(args.text), list(args.text_pair)
    if args.data:
        if texts or pairs:
            raise ConfigError("--text predicts a text, --data a task's files; give one of them")
        if not args.task:
            raise ConfigError(f"--data {args.data} needs TASK, whose files are there")
        return None
    if args.task and not texts:
        raise ConfigError(f"{args.task}: give the folder of its files with --data, or --text TEXT")
    for option, value in (("--split", args.split), ("--leaderboard", args.leaderboard)):
        if value:
            raise ConfigError(f"{option} {value} needs TASK and --data")
    if not texts and not pairs and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigError("give TASK and --data DIR, --text TEXT, or lines on standard input")
    if texts in ([], ["-"]):
        texts = _standard_input()
    if not texts:
        raise ConfigError("standard input has no text; write a text per line, or give --text TEXT")
    if pairs and len(pairs) != len(texts):
        raise ConfigError(
            f"{len(pairs)} --text-pair for {len(texts)} texts; give one for each --text"
        )
    return texts, pairs


def _standard_input() -> list[str]:
    """Return the lines of standard input that are not empty, in UTF-8 whatever the locale is.

    Raises:
        ConfigError: it is not UTF-8.
    """
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 ({error.reason}); convert it") from error
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return [line for line in lines if line.strip()]


def _write(
    args: argparse.Namespace,
    task: TaskConfig,
    examples: Sequence[Example],
    predictions: Sequence[Prediction],
) -> None:
    from megatron_deberta.tasks import json_lines, write_predictions

    if args.leaderboard:
        folder = Path(args.leaderboard)
        files = write_predictions(task, args.split or _TEST, examples, predictions, folder)
        if args.output:
            print(f"Leaderboard: {', '.join(map(str, files))}")
    lines = json_lines(task, examples, predictions)
    if args.output:
        write_atomically(Path(args.output), lines)
        count = f"{len(predictions):,} prediction{'' if len(predictions) == 1 else 's'}"
        print(f"{args.output}: {count} of {task.name}")
    else:
        # JSON is UTF-8 whatever the locale is.
        sys.stdout.flush()
        sys.stdout.buffer.write(lines)
        sys.stdout.flush()
