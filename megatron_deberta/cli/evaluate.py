"""Compute a task's metrics with a fine-tuned model.

MODEL is the run or checkpoint of `finetune`, or an export of it; of a run, the best checkpoint is
used. Several ranks divide the examples under torchrun or srun.

Example:
  megatron-deberta evaluate sst2 --model runs/sst2 --data glue/SST-2 --split dev
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megatron_deberta.cli.finetune import add_task_arguments
from megatron_deberta.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_task_arguments(parser)
    parser.add_argument("--split", default="dev", metavar="NAME", help="labelled split")
    parser.add_argument("--output", default="", metavar="FILE", help="write the metrics as JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate and print the metrics."""
    from megatron_deberta.finetune.predict import open_predictor
    from megatron_deberta.tasks.scoring import score

    with open_predictor(
        args.task, Path(args.model), args.data, tuple(args.overrides), args.tokenizer
    ) as predictor:
        split, outputs, loss = predictor.run(args.split)
        if predictor.groups.rank == 0:
            metrics = score(predictor.task, split.examples, split.encoded, outputs)
            metrics = {"loss": loss, **metrics}
            for name, value in metrics.items():
                print(f"{name:<20} {value:.4f}")
            if args.output:
                Path(args.output).write_text(json.dumps(metrics, indent=2) + "\n")
    return EXIT_DONE
