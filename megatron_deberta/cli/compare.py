"""Test whether two models differ on a task: over examples, and over seeds.

A and B are runs, folders of runs, or searches (of which the best cell counts); every task of both
is compared. Or they are files of `predict`, or folders of them, with --task and --data. The table
is that of the paper's Table 14: minimum, maximum and mean over runs, and the p-value of Welch's
t-test; below are paired bootstrap and approximate randomisation over examples.

Examples:
  megatron-deberta compare runs/roberta runs/deberta --output compare.json
  megatron-deberta compare a.jsonl b.jsonl --task sst2 --data glue/SST-2 --split dev
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_deberta.cli.arguments import add_shared, number, prepare_output, refuse_options
from megatron_deberta.errors import ConfigError, refusals
from megatron_deberta.files import write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="run, folder of runs, or predictions")
    add_shared(parser, "--split", default="dev", help="labelled split")
    add_shared(parser, "--data", help="folder of the task's files (default: the runs')")
    add_shared(parser, "--task", help="task of prediction files")
    parser.add_argument(
        "--resamples", type=number(int, 100), default=10_000, metavar="N",
        help="resamples of each test over examples",
    )  # fmt: skip
    add_shared(parser, "--seed", type=number(int, 0), default=0, help="seed of the resamples")
    add_shared(parser, "--output", help="also write JSON")


def run(args: argparse.Namespace) -> None:
    """Compare, and print the table."""
    from megatron_deberta.evaluate import compare

    a, b = Path(args.a), Path(args.b)
    for path in (a, b):
        if not path.exists():
            raise ConfigError(f"{path}: no such file or folder; give runs or prediction files")
    options = {"split": args.split, "resamples": args.resamples, "seed": args.seed}
    are_files = [compare.holds_predictions(path) for path in (a, b)]
    if are_files[0] != are_files[1]:
        raise ConfigError(f"{a} and {b}: give two folders of runs, or prediction files twice")
    if not are_files[0]:
        refuse_options(args, ["task"], "is for prediction files; runs have their own")
    prepare_output("--output", args.output)
    if are_files[0] and (not args.task or not args.data):
        raise ConfigError("prediction files need --task and --data, which have the labels")
    with refusals():
        if are_files[0]:
            sides = compare.sides_of_files(a, b, args.split, args.data, args.task)
        else:
            sides = compare.sides_of_runs(a, b, args.split, args.data)
        found = [compare.compare(*pair, **options) for pair in sides]
    print(compare.format_comparison((args.a, args.b), found))
    if args.output:
        write_atomically(Path(args.output), compare.to_json(found))
