"""Fine-tune a model on a labelled task, as one rank of a run, alone, or with several ranks here.

MODEL is a run, one of its checkpoints, an export, or a downloaded model in the format of Hugging
Face or Microsoft. TASK is a task file or the name of a packaged one. The task's published settings
for this size of model are used unless --settings names others; a run resumes like `pretrain`. For
your own data (CSV, TSV, JSON Lines, Parquet with columns text and label in DIR/train.csv, dev.csv):
custom_classification, or a task file with `base: configs/tasks/custom_classification.yaml`.

Examples:
  megatron-deberta finetune --list-tasks
  megatron-deberta finetune sst2 --model exports/base --data glue/SST-2 train.run_dir=runs/sst2
  megatron-deberta finetune task.yaml --model runs/base --data data --ranks 8 train.seed=2
  megatron-deberta finetune rte --model runs/mnli --data glue/RTE --save-config rte.yaml
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_deberta.cli.arguments import (
    MAX_RESTARTS,
    add_shared,
    add_task_arguments,
    print_table,
    refuse_options,
)
from megatron_deberta.config import save_config
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.errors import EXIT_DONE, refusals

RUN_FILE = "finetune.yaml"
"""In the run folder: the resolved run, which ranks started by ``--ranks`` read."""


class ListTasks(argparse.Action):
    """Prints the packaged tasks and exits, as ``--help`` does, so that no argument is required."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        """Print a line per task, and exit."""
        from megatron_deberta.tasks.task import load_task, task_names

        rows = []
        for task in map(load_task, task_names()):
            files = dict.fromkeys(file for split in task.splits.values() for file in split.files)
            data = f"{task.reader}: {', '.join(files)}"
            rows.append((task.name, task.head, ", ".join(task.metrics), data, task.description))
        print_table(("task", "kind", "metrics, the first selects", "files", "what"), rows)
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "--list-tasks", action=ListTasks, nargs=0, help="list the packaged tasks, and exit"
    )
    add_task_arguments(parser)
    add_shared(
        parser, "--settings",
        help="the task's settings to use, or none (default: the release's for this size of model, "
        "else the task's default_settings)",
    )  # fmt: skip
    add_shared(parser, "--ranks", help="start and supervise this many ranks here, as launch does")
    add_shared(
        parser, "--max-restarts", default=None,
        help=f"with --ranks: most restarts after failures (default: {MAX_RESTARTS})",
    )  # fmt: skip
    parser.add_argument(
        "--save-config", default="", metavar="RUN.yaml",
        help="write the run for launch, submit and pretrain, and exit",
    )  # fmt: skip
    add_shared(parser, "--dry-run", help="print the run, and exit")
    add_shared(parser, "--allow-config-change")


def run(args: argparse.Namespace) -> int:
    """Fine-tune, start ranks, or describe the run."""
    if args.dry_run or args.save_config:
        option = "--dry-run" if args.dry_run else "--save-config"
        why = f"starts training, which {option} does not"
        refuse_options(args, ["ranks", "allow_config_change"], why)
    if args.dry_run:
        refuse_options(args, ["save_config"], "writes a file, unlike --dry-run")
    if not args.ranks:
        refuse_options(args, ["max_restarts"], "needs --ranks")
    from megatron_deberta.cli.pretrain import describe_run
    from megatron_deberta.evaluate.models import open_source_model
    from megatron_deberta.finetune.settings import (
        describe_settings,
        finetune_config,
        learning_rate_hint,
    )
    from megatron_deberta.model.task_models import parameter_shapes
    from megatron_deberta.rank_process import pretrain
    from megatron_deberta.tasks.task import load_task

    with refusals():
        model = open_source_model(Path(args.model), args.tokenizer)
    ranks = args.ranks or read_environment().world_size
    config = finetune_config(
        args.task, model, args.data, args.overrides, settings=args.settings, world_size=ranks
    )
    settings = describe_settings(load_task(args.task), model.config, args.settings, config)
    hint = learning_rate_hint(config, args.overrides, parameter_shapes(config.model))
    if hint:
        settings = f"{settings}\n{hint}"
    if args.dry_run:
        print(describe_run(config, args.ranks))
        print(settings)
        return EXIT_DONE
    if args.save_config:
        save_config(config, args.save_config)
        print(f"{args.save_config}: start it with megatron-deberta launch, submit or pretrain")
        return EXIT_DONE
    if read_environment().rank == 0:
        print(settings, file=sys.stderr)
    if not args.ranks:
        code = pretrain(config, args.allow_config_change, ends_process=True)
    else:
        code = _launch(config, args)
    if hint and code == EXIT_DONE and read_environment().rank == 0:
        # Again, because the first lines of a run are out of sight at its end.
        print(hint, file=sys.stderr)
    return code


def _launch(config: RunConfig, args: argparse.Namespace) -> int:
    from megatron_deberta.cli.launch import launch

    run_file = Path(config.train.run_dir, RUN_FILE)
    restarts = MAX_RESTARTS if args.max_restarts is None else args.max_restarts
    return launch(config, args, [str(run_file)], restarts, run_file)
