"""Fine-tune the checkpoints of a pretraining run: the score of a task against pretraining steps.

Every kept checkpoint, or every n-th and the last, is fine-tuned as by `finetune`, and its best
score on the task's dev split is taken. Prints a table and writes curve.json and curve.png (the
paper's Figure 1) to the output folder, anew after each run. Start the same command again to
continue: finished runs are skipped, an interrupted one resumes.

Example:
  megatron-deberta finetune-checkpoints runs/base --task mnli --data glue/MNLI --every 5 --seeds 3
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_deberta.cli.arguments import add_shared, number, run_folder
from megatron_deberta.errors import EXIT_DONE, ConfigError, refusals

if TYPE_CHECKING:
    from megatron_deberta.finetune.checkpoint_curve import CurveRun

_MAX_SEEDS = 10_000
_OWN_KEYS = {
    "train.run_dir": "--output",
    "train.seed": "--seeds",
    "checkpoint.load_from": "RUN_DIR",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_shared(parser, "run_dir")
    add_shared(parser, "--task", "--data", required=True)
    add_shared(parser, "--every", default=1)
    parser.add_argument(
        "--seeds",
        type=number(int, 1, _MAX_SEEDS),
        default=1,
        metavar="N",
        help="runs per checkpoint",
    )
    add_shared(
        parser, "--output", metavar="DIR",
        help="folder of runs and results (default: finetuned/TASK in the run folder)",
    )  # fmt: skip
    add_shared(parser, "--settings", help="the task's settings, as in finetune")
    add_shared(parser, "--tokenizer", help="the run's tokenizer")
    add_shared(parser, "--ranks", help="ranks per run, started here")
    add_shared(
        parser, "overrides",
        help="replaces a value of every fine-tuning run, such as finetune.epochs=2",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run what is missing, and write table and picture after each run."""
    from megatron_deberta.distributed.environment import read_environment
    from megatron_deberta.evaluate.models import open_source_model
    from megatron_deberta.finetune.checkpoint_curve import (
        CURVE_FILE,
        PICTURE_FILE,
        check_settings,
        check_weights,
        curve_of,
        describe_curve,
        plan_runs,
        write_curve,
    )
    from megatron_deberta.finetune.inputs import fingerprint_inputs
    from megatron_deberta.tasks.task import DEV, load_task

    if read_environment().world_size > 1:
        raise ConfigError("finetune-checkpoints starts its own ranks; run it alone, with --ranks N")
    for override in args.overrides:
        if option := _OWN_KEYS.get(override.partition("=")[0].strip()):
            raise ConfigError(f"{override}: set by finetune-checkpoints; use {option}")
    task = load_task(args.task)
    output = Path(args.output or run_folder(args.run_dir) / "finetuned" / task.name)
    if DEV not in task.splits:
        raise ConfigError(f"task {task.name} has no split {DEV!r}, whose score is the curve")
    with refusals():
        runs = plan_runs(run_folder(args.run_dir), output, args.every, args.seeds)
        tokenizer = open_source_model(runs[0].checkpoint, args.tokenizer).tokenizer_path
        settings = {
            "run": str(Path(args.run_dir).resolve()),
            "task": task.name,
            "settings": args.settings,
            "overrides": args.overrides,
            **fingerprint_inputs(task, args.data, tokenizer),
        }
        check_settings(output, settings)
        check_weights(output, runs)
    for count, planned in enumerate(runs, start=1):
        if planned.score is not None:
            continue
        title = f"step {planned.step:,}, seed {planned.seed}"
        print(f"fine-tuning {count} of {len(runs)}: {title}", flush=True)
        code = _finetune(args, planned, output)
        if code != EXIT_DONE:
            return code
        if not planned.record_result(task.metrics[0]):
            print(f"{planned.folder}: stopped; start the same command again to continue")
            return EXIT_DONE
        write_curve(output, curve_of(output), task.name, task.metrics[0])
    write_curve(output, curve_of(output), task.name, task.metrics[0])
    print(describe_curve(curve_of(output), task.metrics[0]))
    print(f"{output / CURVE_FILE}, {output / PICTURE_FILE}")
    return EXIT_DONE


def _finetune(args: argparse.Namespace, planned: CurveRun, output: Path) -> int:
    """Fine-tune one checkpoint; return the exit code."""
    from megatron_deberta.cli import finetune

    overrides = [
        f"finetune.cache={output / 'encoded'}",
        *args.overrides,
        f"train.run_dir={planned.folder}",
        f"train.seed={planned.seed}",
    ]
    parser = argparse.ArgumentParser()
    finetune.add_arguments(parser)
    words = [args.task, "--model", str(planned.checkpoint), "--data", args.data, *overrides]
    words += ["--settings", args.settings, "--tokenizer", args.tokenizer]
    words += ["--ranks", str(args.ranks)] if args.ranks else []
    return finetune.run(parser.parse_intermixed_args(words))
