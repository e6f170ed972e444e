"""The ONNX part of ``convert --to onnx``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megatron_deberta.errors import ConfigError

if TYPE_CHECKING:
    from megatron_deberta.hf.heads import GraphKind
    from megatron_deberta.hf.loading import TrainedModel

MAX_LOSS = 0.005
"""Loss of the task's first metric that is reported as large."""


def check_options(args: argparse.Namespace) -> None:
    """Check the combination of ``--to``, ``--dtype`` and the options of ONNX.

    Raises:
        ConfigError: options contradict each other, or onnx is not installed.
    """
    if args.to == "onnx":
        if args.dtype == "bf16":
            raise ConfigError("--dtype bf16: onnxruntime has no bf16 on CPU; use fp16 or fp32")
        from megatron_deberta.hf.onnx.libraries import require_libraries

        require_libraries()
        return
    given = {"--encoder": args.encoder, "--no-timing": args.no_timing, "--data": args.data}
    if args.dtype == "int8":
        given["--dtype int8"] = True
    for option, is_given in given.items():
        if is_given:
            raise ConfigError(f"{option} is for --to onnx, not for --to {args.to}")


def onnx_extension(args: argparse.Namespace, trained: TrainedModel) -> Callable[[Path], None]:
    """Return the function that adds the graph to an export and prints its figures."""
    from megatron_deberta.hf.onnx.export import OnnxOptions, add_onnx, summary

    config, weights = trained.open("discriminator")
    accuracy = None
    is_task = trained.run.finetune.task and not args.encoder
    if args.data and not is_task:
        raise ConfigError(f"--data {args.data}: this graph has no task to measure accuracy on")
    if is_task and (args.data or args.dtype == "int8"):
        accuracy = _accuracy(args, trained)
    options = OnnxOptions(args.dtype, args.encoder, not args.no_timing, accuracy)

    def extend(folder: Path) -> None:
        report = add_onnx(folder, config, weights, trained.tokenizer, options)
        for line in summary(report):
            print(line)
        found = report.accuracy
        if found and found["torch"] - found["onnx"] > MAX_LOSS:
            print(f"Warning: {args.dtype} loses more than {MAX_LOSS:.1%} of {found['metric']}.")

    return extend


def _accuracy(
    args: argparse.Namespace, trained: TrainedModel
) -> Callable[[Path, GraphKind], dict[str, Any]]:
    """Return the function that scores a graph on the dev split of the run's task.

    Raises:
        ConfigError: the folder of the task's files does not exist.
    """
    from megatron_deberta.finetune.onnx_accuracy import compare_accuracy
    from megatron_deberta.hf.loading import build_task_model

    run = trained.run
    data = args.data or run.finetune.data or ""
    if not Path(data).is_dir():
        raise ConfigError(
            f"--data: {data or 'no folder'} does not exist; --dtype {args.dtype} measures accuracy "
            f"on the dev split of {run.finetune.task}, give the folder of its files"
        )

    def measure(path: Path, kind: GraphKind) -> dict[str, Any]:
        ours = build_task_model(*trained.open())
        with TemporaryDirectory() as cache:
            finetune = replace(run.finetune, data=data, cache=cache)
            # Where the run is now, with its copy of the task.
            train = replace(run.train, run_dir=str(trained.reader.path.parents[1]))
            config = replace(run, finetune=finetune, train=train)
            return compare_accuracy(config, trained.tokenizer, ours, path, kind)

    return measure
