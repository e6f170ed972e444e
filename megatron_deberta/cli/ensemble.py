"""Average the predictions of the best of several fine-tuned runs.

Selects the best --best runs by their score on the split dev, averages their probabilities (scores
in regression), prints the ensemble's score on dev, and writes its predictions for --split if
--output or --leaderboard is given. RUNS are runs, folders of runs, or searches (best cell).

Example:
  megatron-deberta ensemble runs/rte --best 7 --split test --leaderboard submission
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_deberta.cli.arguments import add_shared, number, prepare_output, refuse_options
from megatron_deberta.errors import ConfigError
from megatron_deberta.files import write_atomically

if TYPE_CHECKING:
    from megatron_deberta.evaluate.outputs import Ensemble


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="runs, folders of runs, searches")
    parser.add_argument(
        "--best", type=number(int, 1), default=7, metavar="K", help="number of runs to average"
    )
    add_shared(parser, "--data", help="folder of the task's files (default: the runs')")
    add_shared(parser, "--split", help="split to predict (default: test)")
    add_shared(parser, "--output", help="predictions to write")
    add_shared(parser, "--leaderboard")


def run(args: argparse.Namespace) -> None:
    """Select and average the runs; write the predictions."""
    if not args.output and not args.leaderboard:
        refuse_options(args, ["split"], "needs --output or --leaderboard")
    args.split = args.split or "test"
    prepare_output("--output", args.output)
    prepare_output("--leaderboard", args.leaderboard, is_folder=True)
    from megatron_deberta.evaluate.outputs import build_ensemble, check_same_task, find_runs
    from megatron_deberta.train.start import refusals

    for path in args.runs:
        if not Path(path).is_dir():
            raise ConfigError(f"{path}: no such folder; give runs (train.run_dir)")
    found = {run.folder.resolve(): run for path in args.runs for run in find_runs(Path(path))}
    runs = list(found.values())
    task = check_same_task(runs)
    if (args.output or args.leaderboard) and args.split not in task.splits:
        known = ", ".join(task.splits)
        raise ConfigError(f"--split {args.split}: task {task.name} has {known}")
    with refusals():
        ensemble = build_ensemble(task, runs, args.best, args.data)
        print(_describe(ensemble))
        if args.output or args.leaderboard:
            _predict(ensemble, args)


def _describe(ensemble: Ensemble) -> str:
    """Format the candidates, best first, and the ensemble's score."""
    metric, scores = ensemble.task.metrics[0], [score for score, _ in ensemble.scores]
    size = len(ensemble.members)
    lines = [f"{ensemble.task.name}: {metric} on the split dev, which selected the members"]
    for rank, (score, run) in enumerate(ensemble.scores):
        lines.append(f"  {score:.4f}  {'member' if rank < size else '      '}  {run.folder}")
    lines.append(f"mean of the {len(scores)} runs {sum(scores) / len(scores):.4f}")
    lines.append(f"ensemble of the best {size} {ensemble.metrics[metric]:.4f}")
    return "\n".join(lines)


def _predict(ensemble: Ensemble, args: argparse.Namespace) -> None:
    """Write the predictions for a split; SQuAD 2.0's threshold is the best one on dev."""
    from megatron_deberta.tasks import json_lines, predict, write_predictions

    task = ensemble.task
    split, outputs = ensemble.outputs(args.split)
    threshold = ensemble.metrics.get("null_threshold", 0.0)
    predictions = predict(task, split.examples, split.encoded, outputs, null_threshold=threshold)
    if args.leaderboard:
        write_predictions(task, args.split, split.examples, predictions, Path(args.leaderboard))
    if args.output:
        write_atomically(Path(args.output), json_lines(task, split.examples, predictions))
    print(f"{len(predictions):,} predictions for the split {args.split}")
