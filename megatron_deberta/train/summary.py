"""Text that rank 0 shows when a run starts and when it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_deberta.checkpoint.layout import Best, committed_steps, read_best, step_dir
from megatron_deberta.config.phases import last_step
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import MegatronDebertaError
from megatron_deberta.evaluate.selection import SCORE
from megatron_deberta.objectives import build_objective
from megatron_deberta.observe.console import format_duration
from megatron_deberta.observe.metrics import FILE_NAME, read_metrics
from megatron_deberta.tasks.reading import split_to_predict
from megatron_deberta.tasks.task import load_task
from megatron_deberta.train.preemption import STOP_FILE
from megatron_deberta.train.records import UNIGRAM_METRIC
from megatron_deberta.train.start import Start
from megatron_deberta.train.state import Ending

_LABEL_WIDTH = 12


def describe_start(
    config: RunConfig,
    groups: ProcessGroups,
    amount: Iterable[tuple[str, str]],
    start: Start,
    num_parameters: int,
    predicted_bytes: int,
) -> str:
    """Describe a run that starts or resumes.

    Args:
        config: the run.
        groups: the rank grid.
        amount: labels and text about batches and amount of training.
        start: starting point.
        num_parameters: size of the model.
        predicted_bytes: predicted peak memory of a rank; 0: not predicted.
    """
    model, parallel, train = config.model, config.parallel, config.train
    sharding = "" if parallel.engine == "plain" else f", ZeRO stage {parallel.zero_stage}"
    engine = f"{parallel.engine} engine{sharding}"
    origin = "a new run"
    if start.reader is not None:
        origin = f"a new run with the weights of {start.reader.path}"
        if not start.weights_only:
            origin = f"resuming from step {start.state.step:,}"
            if Path(train.run_dir) not in start.reader.path.parents:
                origin = f"a new run that continues {start.reader.path}"
    rows = [
        ("run", f"{train.run_dir}, {origin}"),
        (
            "model",
            f"{num_parameters:,} parameters: {model.num_layers} layers, hidden size "
            f"{model.hidden_size}, {model.num_heads} heads, vocabulary {model.vocab_size:,}",
        ),
        *amount,
        (
            "layout",
            f"{groups.world_size} {'rank' if groups.world_size == 1 else 'ranks'} = "
            f"{groups.tp_size} tensor-parallel x {groups.dp_size} data-parallel, "
            f"{engine}, {config.precision.dtype}",
        ),
        ("device", _device(groups.device)),
    ]
    if predicted_bytes:
        rows.append(("memory", f"{predicted_bytes / 2**30:.3g} GiB per rank, predicted"))
    return _table(rows)


def describe_end(
    config: RunConfig,
    ending: Ending,
    step: int,
    seconds: float,
    received: signal.Signals | None,
) -> str:
    """Describe how training ended, where the results are and what can be done next.

    Args:
        config: the run.
        ending: how it ended.
        step: completed steps.
        seconds: time since the process started.
        received: stop signal of this process.
    """
    run_dir, train = config.train.run_dir, config.train
    finished = "finished" if step >= train.steps else "reached train.exit_step"
    if step < last_step(config):
        finished = f"ended early by finetune.patience={config.finetune.patience}"
    how = {
        Ending.FINISHED: finished,
        Ending.INTERRUPTED: "stopped by Ctrl-C",
        Ending.STOPPED: f"stopped by the file {STOP_FILE}",
    }.get(ending, f"stopped by {received.name if received else 'a signal'}")
    reached = f"{how} at step {step:,} of {train.steps:,} after {format_duration(seconds)}"
    path = Path(run_dir)
    plots = [path / "loss.png"] if (path / "loss.png").exists() else []
    rows = [("run", reached)]
    rows += _losses(config)
    saved = [known for known in committed_steps(run_dir) if known <= step]
    best = _best(config)
    if best is not None and best["step"] in saved[:-1]:
        rows.append(("selected", str(step_dir(run_dir, best["step"]))))
        rows.append(("last", str(step_dir(run_dir, saved[-1]))))
    else:
        rows.append(("checkpoint", str(step_dir(run_dir, saved[-1])) if saved else "none yet"))
    rows.append(("log", ", ".join(map(str, [path / FILE_NAME, *plots]))))
    return _table([*rows, *(("next", text) for text in _next_steps(config, ending, bool(saved)))])


def describe_nothing_left(config: RunConfig) -> str:
    """Describe a run that was started again after its last step."""
    train = config.train
    key, flag = "train.exit_step", ""
    if not train.exit_step or train.exit_step >= train.steps:
        key, flag = "train.steps", " and pass --allow-config-change"
    value = train.exit_step or train.steps
    rows = [("run", f"nothing left to train: {train.run_dir} has reached {key}={value}")]
    rows.append(("next", f"raise {key}{flag} to train on"))
    rows += [("", command) for command in _uses(config)]
    return _table(rows)


def _losses(config: RunConfig) -> list[tuple[str, str]]:
    """Return the last training loss, the last and best validation, and minimal pairs."""
    records = read_metrics(Path(config.train.run_dir) / FILE_NAME)
    objective = build_objective(config)
    # A loss that is not finite is recorded as null.
    scored = [record for record in records if record.get("loss") is not None]
    training = [record for record in scored if record["kind"] == "train"]
    validations = [record for record in scored if record["kind"] == "validation"]
    rows = []
    if training:
        rows.append(("training", f"{objective.step_loss_name} {training[-1]['loss']:.4f}"))
    if validations:
        last, best = validations[-1], min(validations, key=lambda record: record["loss"])
        text = f"{objective.validation_loss_name} {last['loss']:.4f} at step {last['step']:,}"
        if best is not last:
            text += f", best {best['loss']:.4f} at step {best['step']:,}"
        unigram = [record[UNIGRAM_METRIC] for record in records if UNIGRAM_METRIC in record]
        text += f"; unigram baseline {unigram[-1]:.4f}" if unigram else ""
        rows.append(("validation", _selected_score(config, validations) + text))
    pairs = [record for record in records if record["kind"] == "minimal_pairs"]
    if pairs:
        rows.append(("BLiMP", f"{pairs[-1]['accuracy']:.1%} at step {pairs[-1]['step']:,}"))
    return rows


def _best(config: RunConfig) -> Best | None:
    """Return the record of a fine-tuning run's best checkpoint; None: none is known."""
    try:
        return read_best(config.train.run_dir) if config.finetune.task else None
    except (MegatronDebertaError, OSError):
        return None


def _selected_score(config: RunConfig, validations: Sequence[Mapping[str, Any]]) -> str:
    """Return the metric that selects the checkpoint of a fine-tuning run; empty: none is known.

    Args:
        config: the run.
        validations: their records, in order.
    """
    scores = {record["step"]: record[SCORE] for record in validations if SCORE in record}
    scores = {step: score for step, score in scores.items() if score is not None}
    if not scores or not config.finetune.task:
        return ""
    try:
        metric = load_task(config.finetune.task).metrics[0]
    except (MegatronDebertaError, OSError):
        # The run has ended; a task file that was removed meanwhile is not its concern.
        return ""
    best = _best(config)
    last = max(scores)
    texts = [f"{scores[last]:.4f} at step {last:,}"]
    if best is not None and best["step"] in scores:
        step = best["step"]
        selected = f"{scores[step]:.4f} at step {step:,} (selected)"
        texts = [selected, *texts] if step != last else [selected]
    return f"{metric} {', last '.join(texts)}; "


def _next_steps(config: RunConfig, ending: Ending, is_saved: bool) -> list[str]:
    if ending is Ending.FINISHED:
        return _uses(config)
    if ending is Ending.PREEMPTED and os.environ.get("SLURM_JOB_ID"):
        return ["the next attempt of the job" + " resumes from this checkpoint" * is_saved]
    return ["start the same command again" + ": it resumes from this checkpoint" * is_saved]


def _uses(config: RunConfig) -> list[str]:
    """Return the commands that use a trained model."""
    finetune = config.finetune
    split = split_to_predict(finetune.task, finetune.data or "") if finetune.task else ""
    return build_objective(config).commands(config.train.run_dir, split)


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        threads = torch.get_num_threads()
        return f"CPU, {threads} {'thread' if threads == 1 else 'threads'} per rank"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Align rows; a label is shown once."""
    lines, before = [], ""
    for label, text in rows:
        lines.append(f"{label if label != before else '':<{_LABEL_WIDTH}}{text}".rstrip())
        before = label
    return "\n".join(lines)
