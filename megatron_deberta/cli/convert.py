"""Export a checkpoint to Hugging Face format and ONNX, or import a published model.

An export is verified: its logits on real text are compared with this package's model. --to onnx
adds onnx/model.onnx, which is also timed, and onnx/report.json. An import writes a checkpoint for
checkpoint.load_from, with tokenizer and run configuration.

Examples:
  megatron-deberta convert --checkpoint runs/base --to hf --output exports/base --dtype bf16
  megatron-deberta convert --checkpoint runs/sst2 --to onnx --output exports/sst2 --dtype int8
  megatron-deberta convert --checkpoint runs/base --average 3 --output exports/mean
  megatron-deberta convert --checkpoint runs/mt --form autoregressive --output exports/ar
  megatron-deberta convert --from hf downloads/deberta-v3-base --new-generator --output imported
  megatron-deberta convert --from microsoft downloads/deberta-base --output imported
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_deberta.cli.arguments import number, refuse_options
from megatron_deberta.config.objective_rules import trained_forms
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.files import write_atomically

if TYPE_CHECKING:
    from megatron_deberta.config.schema import ModelConfig, RunConfig
    from megatron_deberta.hf.loading import TrainedModel
    from megatron_deberta.hf.model_card import TrainingFacts

_EXPORT_OPTIONS = {
    "to": "--to", "dtype": "--dtype", "form": "--form", "encoder": "--encoder",
    "no_timing": "--no-timing", "average": "--average", "ema": "--ema",
    "moving_average": "--moving-average", "data": "--data", "every": "--every",
}  # fmt: skip
_IMPORT_OPTIONS = {
    "generator": "--generator", "new_generator": "--new-generator",
    "generator_sha256": "--generator-sha256", "generator_only": "--generator-only",
    "allow_pickle_weights_only": "--allow-pickle-weights-only", "sha256": "--sha256",
    "seed": "--seed",
}  # fmt: skip
_PRETRAINING_SCORES = ("masked_accuracy", "accuracy", "perplexity")
"""Metrics of validation that the model card of a pretrained model has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to create")
    parser.add_argument(
        "--tokenizer", default="", metavar="DIR", help="tokenizer (default: the model's own)"
    )
    export = parser.add_argument_group("export")
    export.add_argument(
        "--checkpoint", metavar="DIR", help="run folder (newest checkpoint) or checkpoint folder"
    )
    export.add_argument(
        "--to", choices=["hf", "onnx"],
        help="target format; onnx includes hf (default: hf)",
    )  # fmt: skip
    export.add_argument(
        "--dtype", choices=["fp32", "fp16", "bf16", "int8"],
        help="format of the weights (default: fp32): bf16 only for hf, int8 only for the ONNX "
        "graph",
    )  # fmt: skip
    export.add_argument(
        "--form", choices=["masked", "autoregressive"],
        help="of a model with objective.name=mlm+ar (default: masked)",
    )  # fmt: skip
    export.add_argument(
        "--encoder", action="store_true",
        help="onnx: write the graph of the encoder, not of the model's own head",
    )  # fmt: skip
    export.add_argument(
        "--no-timing", action="store_true", help="onnx: do not compare the speed with transformers"
    )
    export.add_argument(
        "--average", type=number(int, 1), metavar="K", help="mean of the run's last K checkpoints"
    )
    export.add_argument(
        "--ema", type=float, metavar="D",
        help="exponential moving average: weigh each checkpoint D times the next one "
        "(of all checkpoints of the run, or of --average K)",
    )  # fmt: skip
    export.add_argument(
        "--moving-average", action="store_true",
        help="the average of the weights over updates that optimizer.ema_decay keeps",
    )  # fmt: skip
    export.add_argument(
        "--data", default="", metavar="DIR",
        help="onnx: the task's files, to measure accuracy on dev (default with int8: the run's)",
    )  # fmt: skip
    export.add_argument(
        "--every", type=number(int, 1), metavar="N",
        help="export every n-th kept checkpoint of a run, and the last one, to folders below "
        "--output that can be pushed as revisions of one repository",
    )  # fmt: skip
    _add_import_arguments(parser.add_argument_group("import"))


def _add_import_arguments(imported: argparse._ArgumentGroup) -> None:
    imported.add_argument(
        "--from", dest="source", nargs=2, metavar=("hf|microsoft", "DIR"),
        help="source format, and folder with config and weights",
    )  # fmt: skip
    imported.add_argument(
        "--generator", default="", metavar="DIR",
        help="folder with config and weights of the generator, to continue replaced-token "
        "detection (DeBERTaV3); may be the model's own",
    )  # fmt: skip
    imported.add_argument(
        "--new-generator", action="store_true",
        help="the same with a new generator from the model's own layers, for models that are "
        "published without one",
    )  # fmt: skip
    imported.add_argument(
        "--generator-sha256", default="", metavar="HEX",
        help="SHA-256 of the generator's weight file; required for pickles",
    )  # fmt: skip
    imported.add_argument(
        "--generator-only", action="store_true",
        help="import the generator that is published beside a discriminator (DeBERTaV3), which "
        "fills masks",
    )  # fmt: skip
    imported.add_argument(
        "--allow-pickle-weights-only", action="store_true",
        help="read a .bin file (pickle): tensors only, in a process without network",
    )  # fmt: skip
    imported.add_argument(
        "--sha256", default="", metavar="HEX",
        help="SHA-256 of the weight file; required for pickles",
    )  # fmt: skip
    imported.add_argument(
        "--seed", type=int, metavar="N",
        help="seed of new parameters, which the file lacks (default: 0)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Convert and print a summary."""
    if bool(args.checkpoint) == bool(args.source):
        raise ConfigError(
            "give either --checkpoint DIR (export) or --from hf|microsoft DIR (import)"
        )
    if args.source:
        refuse_options(args, _EXPORT_OPTIONS, "is for exports (--checkpoint), not for --from")
    else:
        refuse_options(args, _IMPORT_OPTIONS, "is for imports (--from), not for --checkpoint")
    from megatron_deberta.hf.export_model import refuse_existing

    args.to, args.dtype = args.to or "hf", args.dtype or "fp32"
    if args.every:
        return _export_revisions(args)
    # Before the work, which takes minutes.
    refuse_existing(Path(args.output))
    return _export(args) if args.checkpoint else _import(args)


def _export_revisions(args: argparse.Namespace) -> int:
    """Export several checkpoints of a run; folders that exist are complete and are skipped."""
    from megatron_deberta.checkpoint.layout import committed_steps, step_dir

    refuse_options(
        args, {"average": "--average", "ema": "--ema"}, "excludes --every, of single checkpoints"
    )
    run, output = Path(args.checkpoint), Path(args.output)
    steps = committed_steps(run)
    if not steps:
        raise CheckpointError(f"{run} has no committed checkpoint; --every needs the run's folder")
    chosen = sorted({*steps[args.every - 1 :: args.every], steps[-1]})
    revisions = []
    for step in chosen:
        checkpoint = step_dir(run, step)
        folder = output / checkpoint.name
        if folder.exists():
            print(f"{folder}: exported before")
        else:
            one = {"checkpoint": str(checkpoint), "output": str(folder), "every": None}
            _export(argparse.Namespace(**vars(args) | one))
        revisions.append({"revision": folder.name, "step": step, "folder": folder.name})
    content = json.dumps(revisions, indent=2) + "\n"
    write_atomically(output / "revisions.json", content.encode())
    print("Push the revisions, the last one also as main, with:")
    for name in [revision["revision"] for revision in revisions]:
        print(f"  hf upload USER/NAME {output / str(name)} . --revision {name}")
    print(f"  hf upload USER/NAME {output / str(revisions[-1]['folder'])} .")
    return 0


def _export(args: argparse.Namespace) -> int:
    from megatron_deberta.cli.convert_onnx import check_options, onnx_extension
    from megatron_deberta.hf.export_model import GENERATOR_FOLDER, export_model
    from megatron_deberta.hf.loading import open_trained_model
    from megatron_deberta.hf.model_card import loading_lines
    from megatron_deberta.objectives import build_objective

    check_options(args)
    trained = open_trained_model(Path(args.checkpoint), args.tokenizer)
    trained = _averaged(trained, args)
    config, weights = trained.open("discriminator")
    config = _in_form(config, trained.run, args.form)
    if args.to == "onnx":
        from megatron_deberta.hf.onnx.graph import graph_kind

        graph_kind(config)
    dtype = "fp32" if args.dtype == "int8" else args.dtype
    export = export_model(
        config,
        weights,
        trained.tokenizer,
        Path(args.output),
        dtype=dtype,
        facts=_training_facts(trained, config),
        generator=trained.open("generator") if config.head == "discriminator" else None,
        extend=onnx_extension(args, trained) if args.to == "onnx" else None,
        why_untrained=trained.reader.metadata.why_untrained,
    )
    print(f"{args.output}: {trained.reader.path} as {export.model_type}, {dtype}")
    if export.reason:
        print(
            f"No class of transformers implements {export.reason}: load the export with "
            "trust_remote_code=True or through megatron_deberta.hf."
        )
    running = export.check.low_precision_error
    also = f", {running:.1e} when computed in {dtype}" if running else ""
    print(
        f"Verified on real text: largest difference of logits {export.check.max_error:.1e}{also}."
    )
    for what, line in loading_lines(config, export.model_type, args.output).items():
        print(f"In Python, {what}: {line}")
    if why := trained.reader.metadata.why_untrained:
        print(f"It cannot fill masks before it is trained to: {why}")
        return 0
    if config.head == "discriminator":
        generator = Path(args.output) / GENERATOR_FOLDER
        print(
            f'Or fill masks with the generator: megatron-deberta fill-mask {generator} "A [MASK] '
            'text."'
        )
        return 0
    if config.head != "mlm":
        print(f"Or predict here: {build_objective(trained.run).commands(args.output)[0]}")
        return 0
    print(f'Or fill masks here: megatron-deberta fill-mask {args.output} "A [MASK] text."')
    return 0


def _averaged(trained: TrainedModel, args: argparse.Namespace) -> TrainedModel:
    """Return the model with the averaged weights that the options choose, if any.

    Raises:
        ConfigError: they contradict each other.
        CheckpointError: there are too few checkpoints, or no moving average.
    """
    from megatron_deberta.checkpoint.average import MovingAverage, average_checkpoints
    from megatron_deberta.checkpoint.reader import CheckpointReader

    averages_checkpoints = args.average is not None or args.ema is not None
    if args.moving_average:
        if averages_checkpoints:
            raise ConfigError("--moving-average excludes --average and --ema; omit one of them")
        print("moving average of the weights over updates")
        return replace(trained, reader=MovingAverage(CheckpointReader(trained.reader.path)))
    if not averages_checkpoints:
        return trained
    decay = 1.0 if args.ema is None else args.ema
    averaged = average_checkpoints(Path(args.checkpoint), args.average or 0, decay)
    print(f"average of the checkpoints of steps {', '.join(map(str, averaged.steps))}")
    return replace(trained, reader=averaged)


def _in_form(config: ModelConfig, run: RunConfig, form: str | None) -> ModelConfig:
    """Return the architecture with the head of a form; None: the model's own.

    Raises:
        ConfigError: the model was not trained in this form.
    """
    if form and form not in trained_forms(run.objective):
        raise ConfigError(
            f"--form {form}: the model was trained with objective.name={run.objective.name}; omit "
            "--form"
        )
    return replace(config, head="autoregressive") if form == "autoregressive" else config


def _training_facts(trained: TrainedModel, config: ModelConfig) -> TrainingFacts:
    """Collect what the model card says about the training of a model with this head."""
    from megatron_deberta.data.build import parse_prefixes
    from megatron_deberta.hf.model_card import TrainingFacts
    from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
    from megatron_deberta.tasks.task import load_task, run_task_name

    run, step = trained.run, trained.reader.metadata.step
    data: tuple[str, ...] = (run.finetune.task,)
    if not run.finetune.task:
        if not run.data.train:  # imported, not trained here
            return TrainingFacts()
        components, _ = parse_prefixes(run.data.train, "data.train")
        data = tuple(Path(prefix).name for part in components for prefix in part)
    metrics = trained.reader.path.parents[1] / FILE_NAME
    records = read_metrics(metrics) if metrics.is_file() else []
    validations = [
        record
        for record in records
        if record["kind"] == "validation" and record["step"] <= step and record.get("loss")
    ]
    last = validations[-1] if validations else {}
    names: tuple[str, ...] = _PRETRAINING_SCORES
    if run.finetune.task:
        names = load_task(run_task_name(run.finetune.task, metrics.parent)).metrics
    # Metrics of the second form of a model that has both
    form = f"{config.head}_" if config.head != run.model.head else ""
    return TrainingFacts(
        data=data,
        step=step,
        total_steps=run.train.steps,
        validation_loss=last.get(f"{form}loss"),
        scores={name: last[form + name] for name in names if form + name in last},
        batch_size=run.train.global_batch_size,
        learning_rate=run.optimizer.learning_rate,
    )


def _import(args: argparse.Namespace) -> int:
    from megatron_deberta.hf.import_model import import_model
    from megatron_deberta.hf.import_pair import WeightFile, import_pair

    source, directory = args.source
    if source not in ("hf", "microsoft"):
        raise ConfigError(f"--from {source}: must be hf or microsoft")
    if args.generator and args.new_generator:
        raise ConfigError("--generator and --new-generator: give one of them")
    if args.generator_only and (args.generator or args.new_generator):
        raise ConfigError("--generator-only excludes --generator and --new-generator; give one")
    if not args.generator:
        refuse_options(
            args, {"generator_sha256": "--generator-sha256"}, "is for --generator, not given"
        )
    pair = args.generator or args.new_generator
    if pair:
        generator = WeightFile(Path(args.generator), args.generator_sha256)
        imported = import_pair(
            WeightFile(Path(directory), args.sha256),
            None if args.new_generator else generator,
            source,
            Path(args.output),
            tokenizer_path=args.tokenizer,
            allow_pickle=args.allow_pickle_weights_only,
            seed=args.seed or 0,
        )
    else:
        imported = import_model(
            Path(directory),
            source,
            Path(args.output),
            tokenizer_path=args.tokenizer,
            allow_pickle=args.allow_pickle_weights_only,
            sha256=args.sha256,
            seed=args.seed or 0,
            generator=args.generator_only,
        )
    print(f"{imported.checkpoint}: weights of {directory}, for checkpoint.load_from")
    for note in imported.notes:
        print(note)
    if imported.why_no_masks:
        print(f"It cannot fill masks before it is trained to: {imported.why_no_masks}")
    elif not pair:
        print(f'Fill masks with: megatron-deberta fill-mask {args.output} "A [MASK] text."')
    print(f"Continue with: megatron-deberta pretrain {imported.run_file} data.train=[PREFIX] ...")
    return 0
