"""What the model card of an export says about its training, from the run's records.

A figure is given only if it was computed for exactly the exported weights: by the validation at
the exported step, of the exported part of the model, and not for averaged weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_deberta.checkpoint.layout import checkpoints_dir
from megatron_deberta.config import load_config
from megatron_deberta.config.phases import Segment, segment_at, segments
from megatron_deberta.config.schema import ModelConfig, ObjectiveConfig, RunConfig
from megatron_deberta.data.shards.format import blend_weight
from megatron_deberta.hf.heads import HEADS
from megatron_deberta.hf.loading import TrainedModel
from megatron_deberta.hf.model_card import Evaluation, Figure, TrainingFacts
from megatron_deberta.objectives import build_objective
from megatron_deberta.objectives.language_modelling import perplexity
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
from megatron_deberta.observe.timeline import read_devices
from megatron_deberta.report.run_folder import is_number
from megatron_deberta.tasks.task import DEV, TaskConfig, load_task, run_task_name
from megatron_deberta.train.records import UNIGRAM_METRIC

Record = Mapping[str, Any]

_NOT_EVALUATED = "text of other domains and languages, social biases, speed"


def training_facts(
    trained: TrainedModel, config: ModelConfig, *, averaged: str, dtype: str
) -> TrainingFacts:
    """Collect what the card says about one model.

    Args:
        trained: the checkpoint.
        config: architecture of the exported model: of a run with two models or forms, one of them.
        averaged: what the weights are the average of; empty: they are those of the checkpoint.
        dtype: format of the exported weights.
    """
    run, step = trained.run, trained.reader.metadata.step
    if not run.finetune.task and not run.data.train:
        return TrainingFacts()
    task = None
    if run.finetune.task:
        task = load_task(run_task_name(run.finetune.task, trained.reader.path.parents[1]))
    records = _records(trained)
    validated = _validation(records, step)
    evaluation, why_not = None, ""
    if averaged:
        why_not = f"they are the {averaged}, and the run has validated the weights of single steps"
    elif validated is None:
        steps = [record["step"] for record in records if _is_validation(record)]
        last = f"; its last validation before was at step {max(steps):,}" if steps else ""
        why_not = f"the run has no validation at step {step:,}{last}"
        if any(r["kind"] == "validation" and r["step"] == step and "loss" in r for r in records):
            why_not = f"the loss of the validation at step {step:,} is infinite or not a number"
    elif _validated_on_other_data(trained, len(validated[1])):
        why_not = f"the validation at step {step:,} was on other data than the checkpoint records"
    else:
        found, baselines = validated
        latest = {name: value for record in baselines for name, value in record.items()}
        evaluation = _evaluation(trained, config, task, found, latest, dtype)
    not_evaluated = _NOT_EVALUATED
    if task is None:
        not_evaluated = f"labelled tasks, {_NOT_EVALUATED}"
    elif evaluation is not None:
        not_evaluated = f"data that did not select the checkpoint, {_NOT_EVALUATED}"
    return TrainingFacts(
        trained=_trained(run, config),
        rows=_rows(trained, config, task, averaged),
        evaluation=evaluation,
        why_not_evaluated=why_not,
        not_evaluated=not_evaluated,
    )


def _is_generator(run: RunConfig, config: ModelConfig) -> bool:
    return run.model.head == "rtd" and config.head == "mlm"


def _trained(run: RunConfig, config: ModelConfig) -> str:
    """Return the end of the card's first sentence."""
    if _is_generator(run, config):
        return "pretrained as the generator of replaced-token detection"
    if run.objective.name == "mlm+ar":
        return "pretrained by masked and by autoregressive language modelling"
    if run.objective.name == "retromae" and config.head == "mlm":
        return "pretrained by masked language modelling with RetroMAE"
    return HEADS[config.head].trained


def _objective(run: RunConfig, config: ModelConfig) -> str:
    objective = run.objective
    if _is_generator(run, config):
        return "replaced-token detection, the generator: masked language modelling"
    if objective.name == "mlm+ar":
        form = "masked" if config.head == "mlm" else "autoregressive"
        return (
            "masked language modelling, and autoregressive in "
            f"{objective.autoregressive_fraction:g} of the steps; exported in the {form} form"
        )
    text = HEADS[config.head].objective or f"fine-tuned, head {config.head}"
    if objective.name == "retromae":
        embedding = {"mean": "the mean of its states", "cls": "its state of [CLS]"}
        text += (
            f", and RetroMAE: {embedding[objective.retromae_pooling]} reconstructs the row, "
            f"{objective.retromae_mask_probability:.0%} of its tokens masked, in a decoder of one "
            "layer, which is left out here"
        )
    if run.model.next_sentence_head:
        text += ", and next-sentence prediction"
    if objective.sift_weight:
        text += f", with SiFT of weight {objective.sift_weight:g}"
    return text


def _rows(
    trained: TrainedModel, config: ModelConfig, task: TaskConfig | None, averaged: str
) -> dict[str, str]:
    """Return the table of the training."""
    run, metadata = trained.run, trained.reader.metadata
    step, optimizer, checkpoint = metadata.step, run.optimizer, run.checkpoint
    parts = [part for part in segments(run) if part.first_step < step] or [segments(run)[0]]
    total = segments(run)[-1].end
    source = checkpoint.load_from or checkpoint.continue_from
    rows = {
        "objective": _objective(run, config),
        "data": task.name if task else _each(parts, lambda one: data_names(one.data.train)),
        "optimizer steps": f"{step:,}" + (f" of {total:,}" if total != step else ""),
        "weights": averaged or f"of step {step:,}",
        "initial weights": _model_name(source) if source else "random",
    }
    if rank := run.finetune.lora_rank:
        targets = ", ".join(run.finetune.lora_targets)
        rows["trained weights"] = (
            f"head and low-rank adapters (rank {rank}, alpha {run.finetune.lora_alpha:g}) of "
            f"{targets}, merged"
        )
    if task:
        # The last batch of an epoch is smaller, so the rows seen are not known.
        rows["sequence length"] = f"up to {run.data.sequence_length:,} tokens"
        if task.long_text != "truncate":
            rows["longer texts"] = f"in windows; {task.long_text} of their predictions"
    else:
        rows |= _text_rows(run, parts, step)
    rate = run.rtd.discriminator_learning_rate if config.head == "discriminator" else None
    rows |= {
        "batch size": _each(parts, lambda one: f"{one.train.global_batch_size:,}"),
        "peak learning rate": f"{rate:g}"
        if rate and run.rtd.update == "alternating"
        else _each(parts, lambda one: f"{one.optimizer.learning_rate:g}"),
        "schedule": f"{optimizer.schedule}, {_warmup(run)}",
        "optimizer": f"AdamW, betas {optimizer.beta1:g} and {optimizer.beta2:g}, epsilon "
        f"{optimizer.eps:g}, weight decay {optimizer.weight_decay:g}",
        "number format": run.precision.dtype,
        "seed": str(run.train.seed),
        "tokenizer": f"{trained.tokenizer.num_tokens:,} tokens, fingerprint "
        f"{metadata.tokenizer_fingerprint[:16]}",
        "hardware": _hardware(trained),
    }
    return rows


def _text_rows(run: RunConfig, parts: Sequence[Segment], step: int) -> dict[str, str]:
    """Return the rows of pretraining: tokens, length and masking."""
    tokens = sum(replace(p, steps=min(p.end, step) - p.first_step).tokens for p in parts if step)
    rows = {
        "tokens": f"{tokens:,}, padding included",
        "sequence length": _each(parts, lambda one: f"{one.data.sequence_length:,}"),
        "packing": _each(parts, lambda one: one.data.packing),
    }
    if run.checkpoint.continue_from:
        rows["tokens"] = "not recorded: the first steps are those of the run that it continues"
    if run.objective.name != "autoregressive":
        rows["masking"] = _each(parts, lambda one: _masking(one.objective))
    return rows


def _each(parts: Iterable[Segment], text: Callable[[RunConfig], str]) -> str:
    """Return the values of the phases of a run, each once."""
    return ", then ".join(dict.fromkeys(text(part.config) for part in parts))


def _masking(objective: ObjectiveConfig) -> str:
    mask, random = objective.mask_token_probability, objective.random_token_probability
    spans = objective.max_span_words
    return (
        f"{objective.mask_probability:g} of the tokens, in "
        f"{f'spans of up to {spans} words' if spans > 1 else 'single tokens'}; of these {mask:g} "
        f"become [MASK], {random:g} random tokens, {max(0.0, 1 - mask - random):.3g} unchanged"
    )


def _warmup(run: RunConfig) -> str:
    optimizer = run.optimizer
    if optimizer.warmup_fraction:
        return f"warm-up over {optimizer.warmup_fraction:g} of the steps"
    return f"warm-up over {optimizer.warmup_steps:,} steps"


def _hardware(trained: TrainedModel) -> str:
    """Return ranks and devices, as far as they are recorded."""
    layout = trained.reader.metadata.layout
    tensor, data = layout.get("tp_size", 0), layout.get("dp_size", 0)
    text = "not recorded"
    if tensor and data:
        ranks = tensor * data
        text = (
            f"{ranks} {'rank' if ranks == 1 else 'ranks'} ({tensor} tensor-parallel x {data} "
            "data-parallel)"
        )
    folder = _run_folder(trained)
    devices = read_devices(folder) if folder else []
    return f"{text}, {' and '.join(devices)}" if devices else f"{text}, device not recorded"


def data_names(values: Sequence[str]) -> str:
    """Return the names of shards, without their folders, and the shares of a blend."""
    weights = [blend_weight(value) for value in values[::2]]
    names = [Path(value).name for value in values if blend_weight(value) is None]
    for suffix in (".idx", ".bin", ".manifest.json"):
        names = [name.removesuffix(suffix) for name in names]
    known = [weight for weight in weights if weight is not None]
    if len(known) != len(names) or len(names) < 2:
        return ", ".join(names)
    shares = zip(known, names, strict=True)
    return ", ".join(f"{weight / sum(known):.3g} {name}" for weight, name in shares)


def _model_name(path: str) -> str:
    """Return the name of a model's folder; of a checkpoint, that of its run, and the step."""
    folder = Path(path)
    if folder.parent.name != "checkpoints":
        return folder.name
    return f"{folder.parents[1].name}, {folder.name.replace('_', ' ')}"


def _run_folder(trained: TrainedModel) -> Path | None:
    """Return the folder of the run; None: the checkpoint is a copy elsewhere."""
    checkpoints = trained.reader.path.absolute().parent
    run = checkpoints.parent
    return run if checkpoints.name == checkpoints_dir(run).name else None


def _records(trained: TrainedModel) -> list[dict[str, Any]]:
    """Return the run's metrics up to the exported step, in the order in which they were written."""
    folder = _run_folder(trained)
    if folder is None or not (folder / FILE_NAME).is_file():
        return []
    step = trained.reader.metadata.step
    return [record for record in read_metrics(folder / FILE_NAME) if record["step"] <= step]


def _is_validation(record: Record) -> bool:
    # Baselines are recorded as validations, too; a loss that is not finite is recorded as null.
    return record["kind"] == "validation" and is_number(record.get("loss"))


def _validation(records: Sequence[Record], step: int) -> tuple[Record, list[Record]] | None:
    """Return the last validation at a step, and the baselines that were recorded before it."""
    baselines: list[Record] = []
    found = None
    for record in records:
        if _is_validation(record) and record["step"] == step:
            found = record, list(baselines)
        elif record["kind"] == "baseline" or UNIGRAM_METRIC in record:
            baselines.append(record)
    return found


def _validated_on_other_data(trained: TrainedModel, num_baselines: int) -> bool:
    """Return whether the exported step was validated by a later start, with other validation data.

    Args:
        trained: the checkpoint.
        num_baselines: baselines recorded before the validation; such a start has recorded another.
    """
    folder, step = _run_folder(trained), trained.reader.metadata.step
    config = folder / "config.yaml" if folder else None
    if num_baselines < 2 or config is None or not config.is_file():
        return False
    now, then = (
        segment_at(run, max(step - 1, 0)).phase_config for run in (load_config(config), trained.run)
    )
    return _validation_keys(now) != _validation_keys(then)


def _validation_keys(run: RunConfig) -> tuple[object, ...]:
    data = run.data
    masked = run.objective.mask_probability
    return data.validation, data.sequence_length, masked, run.finetune.data


def _evaluation(
    trained: TrainedModel,
    config: ModelConfig,
    task: TaskConfig | None,
    found: Record,
    baselines: Record,
    dtype: str,
) -> Evaluation:
    """Return the figures of one model in a validation at the exported step."""
    run, step = trained.run, trained.reader.metadata.step
    at = segment_at(run, max(step - 1, 0)).phase_config
    how = f"Measured by the training run at step {step:,}, which computes in {run.precision.dtype}"
    if dtype != "fp32":
        how += f" (the exported weights are rounded to {dtype}, the measured ones were not)"
    if task is not None:
        unit = build_objective(run).loss_unit
        figures = (
            Figure("", f"loss, {unit}", float(found["loss"])),
            *(
                figure
                for name in task.metrics
                for figure in _known(found, name, name.replace("_", " "), baselines.get(name))
            ),
        )
        has_baseline = any(figure.baseline is not None for figure in figures)
        constants = {"regression": "always the mean score", "rerank": "mean of random orders"}
        constant = constants.get(task.head, "always the most frequent label")
        baseline = constant if has_baseline else ""
        text = f"{how}, on the split `{DEV}` of {task.name}."
        if run.finetune.keep_best:
            text += " The same split has selected the checkpoint, so these are no test results."
        return Evaluation(task.name, DEV, text, figures, baseline)
    data = at.data
    names = data_names(data.validation or data.train)
    source = (
        names
        if data.validation
        else f"documents held out of {names} ({data.validation_fraction:g})"
    )
    masked = f", {at.objective.mask_probability:g} of the tokens masked"
    if config.head == "autoregressive":
        masked = ""
    elif config.head == "discriminator":
        masked += " and filled by the generator"
    text = f"{how}, on {source}: rows of {data.sequence_length:,} tokens{masked}."
    share = found.get("replaced_fraction", 0.0)
    if config.head == "discriminator" and share:
        f1 = 2 * share / (1 + share)
        text += f" To say that every token is replaced would have an F1 of {f1:.4f}."
    figures, baseline = _text_figures(run, config, found, baselines)
    return Evaluation(names, "validation", text, figures, baseline)


def _text_figures(
    run: RunConfig, config: ModelConfig, found: Record, baselines: Record
) -> tuple[tuple[Figure, ...], str]:
    """Return the figures of a pretrained model, and what their baseline is."""
    if config.head == "discriminator":
        share = found.get("replaced_fraction")
        none_replaced = None if share is None else 1 - share
        figures = [
            *_known(found, "discriminator_loss", "loss, nats per token", metric=""),
            *_known(found, "replaced_fraction", "share of replaced tokens", metric=""),
            *_known(found, "discriminator_accuracy", "accuracy", none_replaced, metric="accuracy"),
            *_known(found, "discriminator_precision", "precision", metric="precision"),
            *_known(found, "discriminator_recall", "recall", 0.0, metric="recall"),
            *_known(found, "discriminator_f1", "F1 of replaced tokens", 0.0, metric="f1"),
        ]
        return tuple(figures), "no token is replaced"
    # The second form of a model that has both.
    form = "autoregressive_" if config.head != run.model.head and run.model.head != "rtd" else ""
    unigram = None if form else baselines.get(UNIGRAM_METRIC)
    is_masked = config.head == "mlm"
    accuracy = "masked_accuracy" if is_masked else f"{form}accuracy"
    shown = "masked accuracy" if is_masked else "accuracy of next tokens"
    figures = [
        Figure("", f"loss, {HEADS[config.head].loss_unit}", float(found[f"{form}loss"]), unigram),
        *_known(
            found,
            f"{form}perplexity",
            "perplexity",
            None if unigram is None else perplexity(unigram),
            metric="perplexity",
        ),
        *_known(found, accuracy, shown, metric="masked_accuracy" if is_masked else "accuracy"),
        *_known(found, "next_sentence_loss", "next-sentence loss, nats per pair", metric=""),
        *_known(found, "next_sentence_accuracy", "next-sentence accuracy"),
    ]
    count = found.get("num_targets")
    unit = "masked tokens" if is_masked else "predicted tokens"
    if not form and count:
        figures.insert(0, Figure("", unit, int(count)))
    return tuple(figures), "frequencies of the training tokens" if unigram is not None else ""


def _known(
    found: Record, key: str, name: str, baseline: float | None = None, *, metric: str | None = None
) -> list[Figure]:
    """Return a figure if it is recorded."""
    if not is_number(found.get(key)):
        return []
    return [Figure(key if metric is None else metric, name, float(found[key]), baseline)]
