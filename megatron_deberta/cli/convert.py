"""Export a checkpoint to Hugging Face format and ONNX, or import or export a published model.

An export is verified: its logits on real text are compared with this package's model. --to onnx
adds onnx/model.onnx, which is also timed, and onnx/report.json. Low-rank adapters are merged into
the weights; --to peft writes them and the head as an adapter of peft. An import writes a checkpoint
for checkpoint.load_from, with tokenizer and run configuration. --from hf with --to onnx writes the
graphs of a published DeBERTa with any head, compared with transformers' own class.

Examples:
  megatron-deberta convert --checkpoint runs/base --to hf --output exports/base --dtype bf16
  megatron-deberta convert --checkpoint runs/sst2 --to onnx --output exports/sst2 --dtype int8
  megatron-deberta convert --checkpoint runs/base --average 3 --output exports/mean
  megatron-deberta convert --checkpoint runs/mt --form autoregressive --output exports/ar
  megatron-deberta convert --checkpoint runs/lora --to peft --output exports/adapter
  megatron-deberta convert --from hf downloads/nli --to onnx --dtype int8 --output nli_onnx
  megatron-deberta convert --from hf downloads/deberta-v3-base --new-generator --output imported
  megatron-deberta convert --from microsoft downloads/deberta-base --output imported
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megatron_deberta.cli.arguments import add_shared, number, prepare_output, refuse_options
from megatron_deberta.config.rules import trained_forms
from megatron_deberta.errors import ConfigError, DataError, MissingModelError, refusals
from megatron_deberta.files import FileLock, write_atomically

if TYPE_CHECKING:
    from megatron_deberta.config.schema import ModelConfig, RunConfig
    from megatron_deberta.hf.heads import GraphKind
    from megatron_deberta.hf.loading import TrainedModel
    from megatron_deberta.hf.onnx.graph import OnnxDtype

_EXPORT_OPTIONS = (
    "to", "dtype", "form", "encoder", "no_timing", "average", "ema", "moving_average", "data",
    "every",
)  # fmt: skip
_IMPORT_OPTIONS = (
    "generator", "new_generator", "generator_sha256", "generator_only",
    "allow_pickle_weights_only", "sha256", "seed",
)  # fmt: skip
_PUBLISHED_ONNX_OPTIONS = ("to", "dtype", "encoder", "no_timing", "texts")
_ONNX_DTYPES: tuple[OnnxDtype, ...] = ("fp32", "fp16", "int8")
_MAX_LOSS = 0.005
"""Loss of the task's first metric by an ONNX graph that is reported as large."""
_OPTIMUM_CLASSES: dict[GraphKind, str] = {
    "encoder": "ORTModelForFeatureExtraction",
    "masked-lm": "ORTModelForMaskedLM",
    "rows": "ORTModelForSequenceClassification",
    "tokens": "ORTModelForTokenClassification",
    "spans": "ORTModelForQuestionAnswering",
    "choices": "ORTModelForMultipleChoice",
}
"""Class of optimum that opens a graph; it has none for ``fill-mask``."""
REVISIONS = "revisions.json"
"""In the output of ``--every``: the exported checkpoints."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments."""
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to create")
    add_shared(parser, "--tokenizer")
    export = parser.add_argument_group("export")
    export.add_argument(
        "--checkpoint", metavar="DIR", help="run folder (newest checkpoint) or checkpoint folder"
    )
    export.add_argument(
        "--to", choices=["hf", "onnx", "peft"],
        help="target format; onnx includes hf; peft: adapters and head of a run with "
        "finetune.lora_rank (default: hf)",
    )  # fmt: skip
    export.add_argument(
        "--dtype", choices=["fp32", "fp16", "bf16", "int8", "all"],
        help="format of the weights (default: fp32): bf16 only for hf, int8 only for the ONNX "
        "graph; all: the three graphs of a published model",
    )  # fmt: skip
    add_shared(export, "--form", help="of a model with objective.name=mlm+ar (default: masked)")
    export.add_argument(
        "--encoder", action="store_true",
        help="onnx: write the graph of the encoder, not of the model's own head",
    )  # fmt: skip
    export.add_argument(
        "--no-timing", action="store_true", help="onnx: do not compare the speed with transformers"
    )
    export.add_argument(
        "--texts", metavar="FILE",
        help="onnx of a published model: a text per line, on which decisions are compared with "
        "those of the fp32 graph; int8 keeps at least 99 %% of them",
    )  # fmt: skip
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
    add_shared(
        export, "--data",
        help="onnx: the task's files, to measure accuracy on dev (default with int8: the run's)",
    )  # fmt: skip
    add_shared(
        export, "--every",
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
    add_shared(imported, "--seed", help="seed of new parameters, which the file lacks (default: 0)")


def run(args: argparse.Namespace) -> None:
    """Convert and print a summary."""
    if bool(args.checkpoint) == bool(args.source):
        raise ConfigError(
            "give either --checkpoint DIR (export) or --from hf|microsoft DIR (import)"
        )
    if args.to == "onnx" and args.dtype == "bf16":
        raise ConfigError("--dtype bf16: onnxruntime has no bf16 on CPU; use fp16 or fp32")
    if published := _published_folder(args):
        return _export_published(args, published)
    if args.source:
        refuse_options(args, _EXPORT_OPTIONS, "is for exports (--checkpoint), not for --from")
    else:
        refuse_options(args, _IMPORT_OPTIONS, "is for imports (--from), not for --checkpoint")
    refuse_options(args, ["texts"], "is for --to onnx of a published model")
    if args.dtype == "all":
        raise ConfigError("--dtype all is for --to onnx of a published model; name one format")
    from megatron_deberta.hf.export_model import refuse_existing

    args.to, args.dtype = args.to or "hf", args.dtype or "fp32"
    if args.to == "peft":
        unfit = ["every", "average", "ema", "moving_average", "form"]
        refuse_options(args, unfit, "is for whole models, not for --to peft")
    if args.every:
        return _export_revisions(args)
    # Before the work, which takes minutes.
    refuse_existing(Path(args.output))
    if args.checkpoint:
        return _export(args)

    with refusals():
        return _import(args)


def _published_folder(args: argparse.Namespace) -> Path | None:
    """Return the folder of a published model that is exported to ONNX; None: another task."""
    if args.to != "onnx":
        return None
    if args.source:
        return Path(args.source[1])
    folder = Path(args.checkpoint)
    return folder if (folder / "config.json").is_file() else None


def _export_published(args: argparse.Namespace, folder: Path) -> None:
    """Write the ONNX graphs of a published model."""
    from megatron_deberta.hf.onnx.export import FOLDER, summary
    from megatron_deberta.hf.onnx.published import GRAPH_FILES, export_published

    if args.source and args.source[0] != "hf":
        raise ConfigError(
            f"--from {args.source[0]} --to onnx: only models in Hugging Face's format; import it "
            "without --to first"
        )
    foreign = set(_EXPORT_OPTIONS) - set(_PUBLISHED_ONNX_OPTIONS)
    imports = set(_IMPORT_OPTIONS) - {"allow_pickle_weights_only", "sha256"}
    refuse_options(args, sorted(foreign | imports), "is not for --to onnx of a published model")
    one: OnnxDtype = args.dtype or "fp32"
    dtypes = _ONNX_DTYPES if args.dtype == "all" else (one,)
    with refusals():
        done = export_published(
            folder,
            Path(args.output),
            dtypes=dtypes,
            encoder=args.encoder,
            timing=not args.no_timing,
            texts=_read_texts(args.texts) if args.texts else (),
            tokenizer_path=args.tokenizer,
            allow_pickle=args.allow_pickle_weights_only,
            sha256=args.sha256,
        )
    print(f"{args.output}: {folder}, compared with {done.judge}")
    for dtype, report in done.reports.items():
        print(f"{FOLDER}/{GRAPH_FILES[dtype]}")
        for line in summary(report):
            print(f"  {line}")
    if "int8" in done.reports and not args.texts:
        print("Decisions of int8 were not compared with fp32; give --texts FILE, a text per line.")
    for line in _graph_usage(args.output, done.kind, [GRAPH_FILES[each] for each in done.reports]):
        print(line)


def _graph_usage(output: str, kind: GraphKind, files: Sequence[str]) -> list[str]:
    """Return the lines that say how the graphs of a published model are loaded.

    Args:
        output: folder of the export.
        kind: what the graphs compute.
        files: names of the graphs.
    """
    from megatron_deberta.hf.onnx.export import FOLDER

    lines = [
        "In Python, onnxruntime: import onnxruntime; session = onnxruntime.InferenceSession("
        f'"{output}/{FOLDER}/{file}")'
        for file in files
    ]
    name = _OPTIMUM_CLASSES.get(kind)
    if name and list(files) == ["model.onnx"]:
        lines.append(
            f"In Python, optimum: from optimum.onnxruntime import {name}; "
            f'model = {name}.from_pretrained("{output}")'
        )
    return lines


def _read_texts(path: str) -> list[str]:
    """Return the lines of a file that are not empty.

    Raises:
        DataError: it is no text, or empty.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        # The text of an OSError names the file again.
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"--texts {path} cannot be read: {reason}") from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise DataError(f"--texts {path} has no text; give a file with one text per line")
    return texts


def _export_revisions(args: argparse.Namespace) -> None:
    """Export several checkpoints of a run; those that are exported already are skipped."""
    from megatron_deberta.checkpoint.layout import committed_steps, step_dir
    from megatron_deberta.hf.export_model import refuse_existing

    refuse_options(args, ["average", "ema"], "excludes --every, of single checkpoints")
    run, output = Path(args.checkpoint), Path(args.output)
    steps = committed_steps(run)
    if not steps:
        raise MissingModelError(
            f"{run} has no committed checkpoint; --every needs the run's folder"
        )
    chosen = sorted({*steps[args.every - 1 :: args.every], steps[-1]})
    folders = {step: output / step_dir(run, step).name for step in chosen}
    with _revisions_lock(output):
        known = _read_revisions(output)
        entries = {step: _revision(args, step_dir(run, step), step) for step in chosen}
        pending = [
            step
            for step, folder in folders.items()
            if not _is_exported(folder, known.get(folder.name), entries[step])
        ]
        for step in pending:
            refuse_existing(folders[step])
        known = {name: entry for name, entry in known.items() if (output / name).exists()}
        for step, folder in folders.items():
            if step not in pending:
                print(f"{folder}: exported before")
                continue
            # Before the export: what a killed command has exported is known to the next one.
            known[folder.name] = entries[step]
            content = json.dumps(list(known.values()), indent=2) + "\n"
            write_atomically(output / REVISIONS, content.encode())
            one = {"checkpoint": str(step_dir(run, step)), "output": str(folder), "every": None}
            _export(argparse.Namespace(**vars(args) | one))
    print("Push the revisions, the last one also as main, with:")
    for folder in folders.values():
        print(f"  hf upload USER/NAME {folder} . --revision {folder.name}")
    print(f"  hf upload USER/NAME {folders[steps[-1]]} .")


@contextmanager
def _revisions_lock(output: Path) -> Iterator[None]:
    """Exclude other commands that write the same list of revisions."""
    prepare_output("--output", str(output), is_folder=True)
    lock = FileLock(output / ".lock")
    if not lock.acquire():
        raise ConfigError(
            f"{output} is being written by another --every; wait for it, or choose another --output"
        )
    try:
        yield
    finally:
        (output / ".lock").unlink(missing_ok=True)
        # Without an export, the folder is empty.
        with suppress(OSError):
            output.rmdir()
        lock.release()


def _revision(args: argparse.Namespace, checkpoint: Path, step: int) -> dict[str, object]:
    """Return the entry of ``revisions.json`` for a checkpoint: what is exported, and how."""
    from megatron_deberta.checkpoint.layout import read_mark

    return {
        "revision": checkpoint.name,
        "step": step,
        "folder": checkpoint.name,
        "checkpoint": read_mark(checkpoint),
        **{name: getattr(args, name) for name in ("to", "dtype", "form", "encoder")},
        "moving_average": args.moving_average,
    }


def _read_revisions(output: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of ``revisions.json`` by revision; none if the file is missing.

    Raises:
        DataError: it is damaged.
    """
    from megatron_deberta.parsing import read_json

    path = output / REVISIONS
    if not path.is_file():
        return {}
    what, remedy = "a list of exported revisions", "move the folder away and export again"
    entries = read_json(path, list[dict[str, Any]], what, remedy=remedy)
    return {str(entry.get("revision")): entry for entry in entries}


def _is_exported(folder: Path, before: dict[str, Any] | None, entry: dict[str, object]) -> bool:
    """Return whether a folder has the export of a checkpoint; one that is empty has not.

    Raises:
        ConfigError: it has that of another checkpoint, or with other options, or an unlisted one.
    """
    if not (folder / "config.json").is_file():
        return False
    if before is None:
        raise ConfigError(
            f"{folder} is not listed in {folder.parent / REVISIONS}, so it may be the export of "
            "another checkpoint; remove it or choose another --output"
        )
    # Earlier releases have listed step and folder only.
    changed = [key for key in entry if before and key in before and before[key] != entry[key]]
    if changed:
        raise ConfigError(
            f"{folder} was exported with another {changed[0].replace('_', ' ')}; remove it or "
            "choose another --output"
        )
    return True


def _export(args: argparse.Namespace) -> None:
    from megatron_deberta.hf.export_model import GENERATOR_FOLDER, export_model
    from megatron_deberta.hf.loading import open_trained_model
    from megatron_deberta.hf.model_card import loading_lines
    from megatron_deberta.objectives import build_objective
    from megatron_deberta.report.training_facts import training_facts
    from megatron_deberta.tasks.reading import split_to_predict

    _check_target(args)
    with refusals():
        trained = open_trained_model(Path(args.checkpoint), args.tokenizer)
        trained, averaged = _averaged(trained, args)
    if args.to == "peft":
        return _export_adapters(args, trained)
    config, weights = trained.open("discriminator")
    config = _in_form(config, trained.run, args.form)
    if args.to == "onnx":
        from megatron_deberta.hf.onnx.graph import graph_kind

        graph_kind(config)
    dtype = "fp32" if args.dtype == "int8" else args.dtype
    generator = trained.open("generator") if config.head == "discriminator" else None
    facts = [
        training_facts(trained, each, averaged=averaged, dtype=dtype)
        for each in (config, *([generator[0]] if generator else []))
    ]
    export = export_model(
        config,
        weights,
        trained.tokenizer,
        Path(args.output),
        dtype=dtype,
        facts=facts[0],
        generator=generator,
        generator_facts=facts[-1],
        extend=_onnx_extension(args, trained) if args.to == "onnx" else None,
        why_untrained=trained.reader.metadata.why_untrained,
        ranking_loss=trained.run.finetune.ranking_loss,
        thresholds=_thresholds(trained, averaged),
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
    if config.head == "tokens":
        print("Of the pipeline's results, take text[start:end]: words may lack the spaces between.")
    if why := trained.reader.metadata.why_untrained:
        print(f"It cannot fill masks before it is trained to: {why}")
    elif config.head == "discriminator":
        fills = Path(args.output) / GENERATOR_FOLDER
        print(
            f'Or fill masks with the generator: megatron-deberta fill-mask {fills} "A [MASK] text."'
        )
    elif config.head != "mlm":
        finetune = trained.run.finetune
        split = split_to_predict(finetune.task, finetune.data or "") if finetune.task else ""
        weights_not_graph = " with the weights, in torch" * (args.to == "onnx")
        command = build_objective(trained.run).commands(args.output, split)[0]
        print(f"Or predict here{weights_not_graph}: {command}")
    else:
        print(f'Or fill masks here: megatron-deberta fill-mask {args.output} "A [MASK] text."')


def _export_adapters(args: argparse.Namespace, trained: TrainedModel) -> None:
    from megatron_deberta.hf.adapters import export_adapters

    export_adapters(trained.run, trained.reader, Path(args.output), args.dtype)
    print(f"{args.output}: adapters and head of {trained.reader.path}, {args.dtype}")
    print(
        "In Python, with transformers' model that the run started from and the same head as base: "
        f'peft.PeftModel.from_pretrained(base, "{args.output}")'
    )


def _thresholds(trained: TrainedModel, averaged: str) -> dict[str, float]:
    """Return the thresholds of a model for several labels per text, by name; empty for others.

    Those that a validation has found are of the checkpoint's own weights, not of averaged ones.
    """
    from megatron_deberta.evaluate.thresholds import checkpoint_thresholds, thresholds_by_name
    from megatron_deberta.tasks.task import load_task, run_task_name

    if trained.run.model.head != "multilabel":
        return {}
    checkpoint = trained.reader.path
    task = load_task(run_task_name(trained.run.finetune.task or "", checkpoint.parents[1]))
    if averaged and not task.thresholds:
        print(
            "Averaged weights have no thresholds of their own: labels are predicted from a "
            "probability of 0.5; the task's thresholds would set others"
        )
        return {}
    return thresholds_by_name(checkpoint_thresholds(task, checkpoint))


def _check_target(args: argparse.Namespace) -> None:
    """Check the combination of ``--to``, ``--dtype`` and the options of ONNX.

    Raises:
        ConfigError: options contradict each other, or onnx is not installed.
    """
    if args.to == "onnx":
        from megatron_deberta.hf.onnx.libraries import require_libraries

        require_libraries()
        return
    why = f"is for --to onnx, not for --to {args.to}"
    if args.dtype == "int8":
        raise ConfigError(f"--dtype int8 {why}")
    refuse_options(args, ["encoder", "no_timing", "data"], why)


def _onnx_extension(args: argparse.Namespace, trained: TrainedModel) -> Callable[[Path], None]:
    """Return the function that adds the graph to an export and prints its figures."""
    from megatron_deberta.hf.onnx.export import add_onnx, summary

    config, weights = trained.open("discriminator")
    accuracy = None
    is_task = trained.run.finetune.task and not args.encoder
    if args.data and not is_task:
        raise ConfigError(f"--data {args.data}: this graph has no task to measure accuracy on")
    if is_task and (args.data or args.dtype == "int8"):
        accuracy = _graph_accuracy(args, trained)

    def extend(folder: Path) -> None:
        report = add_onnx(
            folder, config, weights, trained.tokenizer,
            dtype=args.dtype, encoder=args.encoder, timing=not args.no_timing, accuracy=accuracy,
        )  # fmt: skip
        for line in summary(report):
            print(line)
        found = report.accuracy
        if found and found["torch"] - found["onnx"] > _MAX_LOSS:
            print(f"Warning: {args.dtype} loses more than {_MAX_LOSS:.1%} of {found['metric']}.")

    return extend


def _graph_accuracy(
    args: argparse.Namespace, trained: TrainedModel
) -> Callable[[Path, GraphKind], dict[str, Any]]:
    """Return the function that scores a graph on the dev split of the run's task.

    Raises:
        ConfigError: the folder of the task's files does not exist.
    """
    from megatron_deberta.evaluate.predict import compare_accuracy
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
        with TemporaryDirectory(dir=path.parent) as cache:
            finetune = replace(run.finetune, data=data, cache=cache)
            # Where the run is now, with its copy of the task.
            train = replace(run.train, run_dir=str(trained.reader.path.parents[1]))
            config = replace(run, finetune=finetune, train=train)
            return compare_accuracy(config, trained.tokenizer, ours, path, kind)

    return measure


def _averaged(trained: TrainedModel, args: argparse.Namespace) -> tuple[TrainedModel, str]:
    """Return the model with the averaged weights that the options choose, and what they are.

    The text is empty if nothing is averaged.

    Raises:
        ConfigError: they contradict each other, there are too few checkpoints, or no moving
            average.
        CheckpointError: a checkpoint is damaged.
    """
    from megatron_deberta.checkpoint.reader import CheckpointReader
    from megatron_deberta.checkpoint.views import MovingAverage, average_checkpoints

    averages_checkpoints = args.average is not None or args.ema is not None
    if args.moving_average:
        if averages_checkpoints:
            raise ConfigError("--moving-average excludes --average and --ema; omit one of them")
        moving = MovingAverage(CheckpointReader(trained.reader.path))
        text = (
            f"moving average of the weights over updates (decay {trained.run.optimizer.ema_decay:g}"
            f") at step {moving.metadata.step:,}"
        )
        print(text)
        return replace(trained, reader=moving), text
    if not averages_checkpoints:
        return trained, ""
    decay = 1.0 if args.ema is None else args.ema
    averaged = average_checkpoints(Path(args.checkpoint), args.average or 0, decay)
    steps = ", ".join(f"{step:,}" for step in averaged.steps)
    kind = "mean" if decay == 1 else f"exponential moving average (decay {decay:g})"
    text = f"{kind} of the checkpoints of steps {steps}"
    print(text)
    # The mean of one checkpoint is that checkpoint.
    return replace(trained, reader=averaged), text if len(averaged.steps) > 1 else ""


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


def _import(args: argparse.Namespace) -> None:
    from megatron_deberta.hf.import_model import WeightFile, import_model, import_pair

    source, directory = args.source
    if source not in ("hf", "microsoft"):
        raise ConfigError(f"--from {source}: must be hf or microsoft")
    if args.generator and args.new_generator:
        raise ConfigError("--generator and --new-generator: give one of them")
    if args.generator_only and (args.generator or args.new_generator):
        raise ConfigError("--generator-only excludes --generator and --new-generator; give one")
    if not args.generator:
        refuse_options(args, ["generator_sha256"], "is for --generator, not given")
    pair = args.generator or args.new_generator
    output = Path(args.output)
    options: dict[str, Any] = {
        "tokenizer_path": args.tokenizer,
        "allow_pickle": args.allow_pickle_weights_only,
        "seed": args.seed or 0,
    }
    if pair:
        model = WeightFile(Path(directory), args.sha256)
        generator = WeightFile(Path(args.generator), args.generator_sha256)
        given = None if args.new_generator else generator
        imported = import_pair(model, given, source, output, **options)
    else:
        only = args.generator_only
        imported = import_model(
            Path(directory), source, output, sha256=args.sha256, generator=only, **options
        )
    print(f"{imported.checkpoint}: weights of {directory}, for checkpoint.load_from")
    for note in imported.notes:
        print(note)
    if imported.why_no_masks:
        print(f"It cannot fill masks before it is trained to: {imported.why_no_masks}")
    elif not pair:
        print(f'Fill masks with: megatron-deberta fill-mask {args.output} "A [MASK] text."')
    print(f"Continue with: megatron-deberta pretrain {imported.run_file} data.train=[PREFIX] ...")
