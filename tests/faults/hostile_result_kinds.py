"""Kinds of files about searches and fine-tuned runs that ``tests.faults.hostile_files`` changes.

These are files that later commands read: of searches, kept outputs, predictions, scores by class,
curves, exports, and those from which reports and model cards are written. A card itself is only
written, never read; its figures come from the records of the run.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from markupsafe import Markup

from megatron_deberta.checkpoint.layout import BEST_FILE, COMMITTED_FILE, step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.cli import compare as compare_command
from megatron_deberta.cli import convert as convert_command
from megatron_deberta.cli import search as search_command
from megatron_deberta.cluster.slurm import job
from megatron_deberta.config import config_from_dict, save_config
from megatron_deberta.config.schema import DataConfig, RunConfig, with_task_head
from megatron_deberta.errors import printable
from megatron_deberta.evaluate import outputs
from megatron_deberta.evaluate.compare import holds_predictions
from megatron_deberta.evaluate.models import open_source_model
from megatron_deberta.evaluate.outputs import FinetunedRun, find_runs, finished_validation
from megatron_deberta.evaluate.predict import model_task
from megatron_deberta.evaluate.splits import Split, read_split
from megatron_deberta.evaluate.thresholds import model_thresholds
from megatron_deberta.finetune import checkpoint_curve
from megatron_deberta.finetune.inputs import (
    fingerprint_inputs,
    fingerprint_weights,
    record_inputs,
)
from megatron_deberta.finetune.search import (
    INPUTS_FILE,
    RESULT_FILE,
    RUN_FILE,
    configure_runs,
    load_search,
)
from megatron_deberta.finetune.settings import finetune_config
from megatron_deberta.hf.config import THRESHOLDS_FIELD, SpecialIds
from megatron_deberta.hf.export_model import write_hf_model
from megatron_deberta.hf.loading import TrainedModel, load_model_tokenizer
from megatron_deberta.hf.model_card import model_card
from megatron_deberta.model.flops import is_task_head
from megatron_deberta.observe import metrics, timeline
from megatron_deberta.report import page
from megatron_deberta.report.charts import Chart, DrawnChart
from megatron_deberta.report.training_facts import training_facts
from megatron_deberta.tasks import encode, json_lines, predict, read_examples
from megatron_deberta.tasks.class_scores import FILE_NAME as CLASS_SCORES
from megatron_deberta.tasks.class_scores import class_scores
from megatron_deberta.tasks.scoring import Outputs
from megatron_deberta.tasks.task import TASK_FILE, TaskConfig, load_task, save_task
from tests.faults.hostile_kinds import Kind, Syntax, make_run
from tests.faults.hostile_task_kinds import (
    TASK,
    TASKS,
    predictions_of,
    run_each,
    source_model,
    write_task,
    zero_outputs,
)
from tests.support.checkpoints import FakeEngine, grid_place, logical_states, metadata, specs_of
from tests.support.checkpoints import save_state as save_checkpoint
from tests.support.report_runs import write_lines, write_run
from tests.support.tiny_models import V2, random_weights, tiny_tokenizer
from tests.support.tiny_task import MODEL

_HEAD = "multilabel"
"""Head of the fine-tuned runs: the only one with thresholds."""
_STEP = 2
"""Last step of the runs, with a checkpoint."""


def _command(command: ModuleType, *words: str) -> None:
    """Run a command with its own parser; what it prints must be printable."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with redirect_stdout(io.StringIO()) as output:
        command.run(parser.parse_intermixed_args(words))
    assert printable(output.getvalue()).replace("\n", "").isprintable()


def _predictions_kind(head: str) -> Kind:
    def make(folder: Path) -> Path:
        write_task(folder, head)
        task = load_task(folder / TASK)
        examples = read_examples(task, folder, "dev")
        encoded = encode(task, examples, tiny_tokenizer())
        (folder / "b.jsonl").write_bytes(
            json_lines(task, examples, predictions_of(task, examples, encoded))
        )
        zeros = zero_outputs(task, encoded)
        found = np.random.default_rng(0).normal(size=zeros.shape).astype(np.float32)
        predicted = predict(task, examples, encoded, found, null_threshold=1.0)
        (folder / "a.jsonl").write_bytes(json_lines(task, examples, predicted))
        return folder / "a.jsonl"

    def read(folder: Path) -> None:
        a, b = str(folder / "a.jsonl"), str(folder / "b.jsonl")
        assert holds_predictions(Path(a))
        options = ("--task", str(folder / TASK), "--data", str(folder), "--resamples", "100")
        _command(compare_command, a, b, *options)

    return Kind(f"predictions_{head}", "lines", make, read)


_SEARCH = "search.yaml"
_CELL = "out/cells/learning_rate=0.001"


def _make_search(name: str, folder: Path) -> Path:
    """Write a search of two cells and two seeds, of which the last run has only begun."""
    write_task(folder, "classification")
    values = {
        "task": str(folder / TASK), "model": str(MODEL), "data": str(folder), "seeds": 2,
        "output": str(folder / "out"), "select": "mean", "settings": "none", "ranks": 1,
        "grid": {"optimizer.learning_rate": [1e-3, 3e-3], "train.steps": _STEP,
                 "train.device": "cpu", "optimizer.warmup_steps": 0},
    }  # fmt: skip
    (folder / _SEARCH).write_text(json.dumps(values, indent=1))
    search = load_search(str(folder / _SEARCH))
    task = load_task(search.task)
    inputs = fingerprint_inputs(task, search.data, str(MODEL))
    inputs["model_fingerprint"] = fingerprint_weights(MODEL)
    record_inputs(folder / "out" / INPUTS_FILE, inputs)
    *finished, begun = configure_runs(search, task, source_model())
    begun.write_config()
    for run in finished:
        run.write_config()
        _write_records(run.folder, run.config, task)
        step_dir(run.folder, _STEP).mkdir(parents=True)
        (step_dir(run.folder, _STEP) / COMMITTED_FILE).write_text("0" * 64)
    _command(search_command, str(folder / _SEARCH), "--table")
    return folder / name


def _write_records(folder: Path, config: RunConfig, task: TaskConfig) -> None:
    """Write what a run records beside its checkpoints, as fine-tuning does."""
    save_config(config, folder / outputs.CONFIG_FILE)
    save_task(task, folder)
    names = dict.fromkeys(task.metrics, 0.5)
    records = [{"step": 0, "kind": "baseline", **names}]
    for step in range(1, _STEP + 1):
        speed = {"learning_rate": 1e-4, "tokens_per_second": 1e4}
        records.append({"step": step, "kind": "train", "loss": 2.0, **speed})
        score = {"loss": 1.0 / step, **names, "score": 0.5 + step / 8}
        records.append({"step": step, "kind": "validation", **score})
    write_lines(folder / metrics.FILE_NAME, records)
    starts = [{"event": "start", "time": 1.79e9, "step": 0, "world_size": 2, "device": "CPU"}]
    write_lines(folder / timeline.FILE_NAME, starts)


def _list_search(option: str, folder: Path) -> None:
    _command(search_command, str(folder / _SEARCH), option)


def _make_jobs(folder: Path) -> Path:
    jobs = [str(folder / "job.json")] * 2
    (folder / "jobs_0.json").write_text(json.dumps(jobs))
    return folder / "jobs_0.json"


def _make_finetuned(name: str, folder: Path) -> Path:
    """Write a run of two steps with kept outputs; returns the first file of a name in it."""
    write_task(folder, _HEAD)
    run_dir = folder / "run"
    keys = [
        f"train.run_dir={run_dir}", f"train.steps={_STEP}", "optimizer.warmup_steps=0",
        "train.device=cpu",
    ]  # fmt: skip
    config = finetune_config(str(folder / TASK), source_model(), str(folder), keys)
    # The best thresholds on dev are used only if the task has none.
    task = replace(load_task(folder / TASK), thresholds=())
    run_dir.mkdir()
    _write_records(run_dir, config, task)
    _save_checkpoint(run_dir, config)
    run = _with_scores(run_dir)
    (run_dir / BEST_FILE).write_text(json.dumps({"step": _STEP, "score": 0.75, "examples": "0"}))
    _read_outputs(run)
    return next(run_dir.glob(name))


def _save_checkpoint(run_dir: Path, config: RunConfig) -> None:
    groups = grid_place(0, 1, 1)
    specs = specs_of(groups)
    engine: Any = FakeEngine(specs, logical_states())
    save_checkpoint(run_dir, engine, specs, groups, metadata(_STEP, config))


def _with_scores(run_dir: Path) -> FinetunedRun:
    """Write the scores by class of a run's validations, and return the run."""
    (run,) = find_runs(run_dir)
    examples = read_examples(run.task, run.config.finetune.data or "", "dev")
    encoded = encode(run.task, examples, tiny_tokenizer())
    scores = class_scores(run.task, examples, predictions_of(run.task, examples, encoded))
    assert scores is not None
    lines = [{"step": step, **scores.to_dict()} for step in range(1, _STEP + 1)]
    write_lines(run_dir / CLASS_SCORES, lines)
    return run


def _read_outputs(run: FinetunedRun) -> None:
    """Read the kept outputs of a run; zeros replace missing ones, which a model would compute."""
    config = run.config
    tokenizer = load_model_tokenizer(config.tokenizer.path or "")

    @contextmanager
    def open_predictor(*_: object) -> Iterator[Any]:
        def predict_split(name: str) -> tuple[Split, Outputs, float]:
            split = read_split(config, run.task, name, tokenizer, run.folder)
            return split, zero_outputs(run.task, split.encoded), 0.0

        yield SimpleNamespace(run=predict_split)

    with mock.patch.object(outputs, "open_predictor", open_predictor):
        ensemble = outputs.build_ensemble(run.task, [run], 1)
        split, combined = ensemble.outputs("test")
    predict(ensemble.task, split.examples, split.encoded, combined)


def _read_finetuned(folder: Path) -> None:
    run_dir = folder / "run"

    def read_runs() -> None:
        for run in find_runs(run_dir):
            _read_outputs(run)

    run_each([read_runs, partial(finished_validation, run_dir, "micro_f1")])


def _read_committed(folder: Path) -> None:
    _read_finetuned(folder)
    fingerprint_weights(step_dir(folder / "run", _STEP))


def _renew_hash(folder: Path) -> None:
    """Record the SHA-256 of kept outputs: whoever changes them can also change it."""
    for path in (folder / "run" / outputs.FOLDER).glob("*.npy"):
        record = path.with_suffix(".json")
        kept = json.loads(record.read_text())
        kept["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        record.write_text(json.dumps(kept))


def _read_kept(folder: Path) -> None:
    _renew_hash(folder)
    _read_finetuned(folder)


def _make_curve(name: str, folder: Path) -> Path:
    """Write the output folder of ``finetune-checkpoints``."""
    _save_checkpoint(folder / "run", RunConfig())
    output = folder / "out"
    runs = checkpoint_curve.plan_runs(folder / "run", output, 1, 2)
    for run in runs:
        run.folder.mkdir(parents=True)
        result = {"step": run.step, "samples": run.samples, "seed": run.seed, "score": 0.5}
        (run.folder / RESULT_FILE).write_text(json.dumps({**result, "best_step": 1}))
    _check_curve(folder)
    return next(output.glob(name))


_SETTINGS = {"run": "runs/base", "task": "user", "settings": "", "overrides": ["train.steps=2"]}


def _check_curve(folder: Path) -> None:
    output = folder / "out"
    runs = checkpoint_curve.plan_runs(folder / "run", output, 1, 2)
    checkpoint_curve.check_settings(output, _SETTINGS)
    checkpoint_curve.check_weights(output, runs)
    assert all(run.score is not None for run in runs)


def _read_curve(folder: Path) -> None:
    _check_curve(folder)
    output = folder / "out"
    points = checkpoint_curve.curve_of(output)
    checkpoint_curve.describe_curve(points, "accuracy")
    checkpoint_curve.write_curve(output, points, "user", "accuracy")


def _make_card(objective: str, name: str, folder: Path) -> Path:
    """Write a pretraining run from whose records a card is written."""
    data = DataConfig(train=("shards/books",), validation=("shards/news",))
    run = RunConfig(data=data)
    config = replace(
        run,
        model=replace(run.model, head="rtd" if objective == "rtd" else "mlm"),
        objective=replace(run.objective, name=objective),  # type: ignore[arg-type]
    )
    save_config(config, folder / outputs.CONFIG_FILE)
    losses = {"loss": 2.5, "perplexity": 12.2, "masked_accuracy": 0.5, "num_targets": 100}
    if objective == "rtd":
        losses |= {"discriminator_loss": 0.25, "discriminator_accuracy": 0.9,
                   "discriminator_f1": 0.5, "replaced_fraction": 0.1}  # fmt: skip
    baseline = {"step": 0, "kind": "validation", "unigram_loss": 6.5, "num_targets": 100}
    records = [baseline, {**baseline, "unigram_loss": 6.25}]
    write_lines(
        folder / metrics.FILE_NAME, [*records, {"step": _STEP, "kind": "validation", **losses}]
    )
    write_lines(
        folder / timeline.FILE_NAME, [{"event": "start", "time": 1.79e9, "step": 0, "device": "A"}]
    )
    _save_checkpoint(folder, config)
    return folder / name


def _read_card(run_dir: str, folder: Path) -> None:
    reader = CheckpointReader(step_dir(folder / run_dir, _STEP))
    run = config_from_dict(reader.metadata.config, "the checkpoint")
    trained = TrainedModel(reader, run, tiny_tokenizer())
    models = [run.model]
    if run.model.head == "rtd":
        models = [replace(run.model, head=head) for head in ("discriminator", "mlm")]
    for config in models:
        facts = training_facts(trained, config, averaged="", dtype="fp16")
        model_card("own", config, "deberta-v2", 100, facts)


def _make_revisions(folder: Path) -> Path:
    """Write the list of a run's exports, all of which are there."""
    _save_checkpoint(folder / "run", RunConfig())
    output = folder / "out"
    exported = output / step_dir(folder, _STEP).name
    exported.mkdir(parents=True)
    (exported / "config.json").write_text("{}")
    args = argparse.Namespace(to="hf", dtype="fp32", form=None, encoder=False, moving_average=False)
    entry = convert_command._revision(args, step_dir(folder / "run", _STEP), _STEP)
    (output / convert_command.REVISIONS).write_text(json.dumps([entry, {"revision": "old"}]))
    return output / convert_command.REVISIONS


def _read_revisions(folder: Path) -> None:
    words = ("--checkpoint", str(folder / "run"), "--output", str(folder / "out"), "--every", "1")
    _command(convert_command, *words)


def _make_export(folder: Path) -> Path:
    """Write an export of a model for several labels, with their thresholds."""
    config = with_task_head(V2, "multilabel", ("a", "b", "c"), 0.0)
    weights = random_weights(config)
    write_hf_model(folder, config, "deberta-v2", lambda key: weights[key], SpecialIds())
    tiny_tokenizer().save(str(folder))
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields[THRESHOLDS_FIELD] = {"a": 0.25, "b": 0.5, "c": 0.75}
    path.write_text(json.dumps(fields, indent=1))
    return path


def _read_export(folder: Path) -> None:
    source = open_source_model(folder)
    source.load_tokenizer()
    if is_task_head(source.config):
        model_thresholds(model_task(source.config), source)


def _make_report(name: str, folder: Path) -> Path:
    run_dir = write_run(folder / "run")
    make_run(folder / "other")
    for file in ("bad_nodes.jsonl", "chain.jsonl"):
        (folder / "other" / file).replace(run_dir / file)
    counts = {"labelled": 3, "predicted": 2, "right": 2, "precision": 1.0, "recall": 0.5, "f1": 0.8}
    classes = [{"name": label, **counts, "threshold": 0.5} for label in ("bad", "good")]
    scores = {"unit": "examples", "classes": classes, "confusion": [[2, 1], [0, 2]]}
    write_lines(run_dir / CLASS_SCORES, [{"step": step, **scores} for step in (20, 40)])
    return run_dir / name


def _read_report(folder: Path) -> None:
    """Matplotlib takes most of the time of a report; the charts are made, but not drawn."""

    def draw(chart: Chart, number: int) -> DrawnChart:
        values = [(float(x), float(y)) for each in chart.series for x, y in each.points]
        return DrawnChart(chart, number, Markup(""), {"points": values})

    with mock.patch.object(page, "draw", draw):
        found, problems = page.write_page([folder / "run"])
    found.encode()
    assert printable("".join(problems)).isprintable()


_SEARCHES: Mapping[str, tuple[Syntax, str, Callable[[Path], object]]] = {
    "search": ("yaml", _SEARCH, partial(_list_search, "--dry-run")),
    "search_inputs": ("json", f"out/{INPUTS_FILE}", partial(_list_search, "--dry-run")),
    "search_run": ("yaml", f"{_CELL}/seed_1/{RUN_FILE}", partial(_list_search, "--dry-run")),
    "search_result": ("json", f"{_CELL}/seed_1/{RESULT_FILE}", partial(_list_search, "--table")),
    "search_results": (
        "json", f"out/{outputs.SEARCH_RESULTS}", lambda folder: find_runs(folder / "out"),
    ),
}  # fmt: skip
_FINETUNED: Mapping[str, tuple[Syntax, str, Callable[[Path], object]]] = {
    "outputs": ("binary", f"{outputs.FOLDER}/dev-*.npy", _read_kept),
    "outputs_record": ("json", f"{outputs.FOLDER}/dev-*.json", _read_finetuned),
    "class_scores": ("lines", CLASS_SCORES, _read_finetuned),
    "finetuned_config": ("yaml", outputs.CONFIG_FILE, _read_finetuned),
    "finetuned_task": ("yaml", TASK_FILE, _read_finetuned),
    "finetuned_metrics": ("lines", metrics.FILE_NAME, _read_finetuned),
    "finetuned_committed": ("binary", f"checkpoints/*/{COMMITTED_FILE}", _read_committed),
    "finetuned_best": ("json", BEST_FILE, _read_finetuned),
    "card_task": ("yaml", TASK_FILE, partial(_read_card, "run")),
    "card_task_metrics": ("lines", metrics.FILE_NAME, partial(_read_card, "run")),
}  # fmt: skip
_CURVES: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "curve_result": (f"*-seed_1/{RESULT_FILE}", _read_curve),
    "curve_settings": (checkpoint_curve.SETTINGS_FILE, _check_curve),
    "curve_weights": (checkpoint_curve.WEIGHTS_FILE, _check_curve),
}
_CARDS: Mapping[str, tuple[Syntax, str, str]] = {
    "card_metrics": ("lines", "mlm", metrics.FILE_NAME),
    "card_rtd_metrics": ("lines", "rtd", metrics.FILE_NAME),
    "card_timeline": ("lines", "mlm", timeline.FILE_NAME),
    "card_config": ("yaml", "mlm", outputs.CONFIG_FILE),
}
_REPORT: Mapping[str, Syntax] = {
    "config.yaml": "yaml", "metrics.jsonl": "lines", "timeline.jsonl": "lines",
    "chain.jsonl": "lines", "bad_nodes.jsonl": "lines", "samples.jsonl": "lines",
    CLASS_SCORES: "lines", "finetuned/sst2/curve.json": "json",
}  # fmt: skip

RESULT_KINDS = (
    *map(_predictions_kind, TASKS),
    *(
        Kind(name, syntax, partial(_make_search, file), read)
        for name, (syntax, file, read) in _SEARCHES.items()
    ),
    Kind(
        "job_list", "json", _make_jobs,
        lambda folder: job.job_file(str(folder / "jobs_0.json"), {"SLURM_ARRAY_TASK_ID": "1"}),
    ),
    *(
        Kind(name, syntax, partial(_make_finetuned, file), read)
        for name, (syntax, file, read) in _FINETUNED.items()
    ),
    *(
        Kind(name, "json", partial(_make_curve, file), read)
        for name, (file, read) in _CURVES.items()
    ),
    *(
        Kind(name, syntax, partial(_make_card, objective, file), partial(_read_card, ""))
        for name, (syntax, objective, file) in _CARDS.items()
    ),
    Kind("revisions", "json", _make_revisions, _read_revisions),
    Kind("export_config", "json", _make_export, _read_export),
    *(
        Kind(f"report_{Path(file).stem}", syntax, partial(_make_report, file), _read_report)
        for file, syntax in _REPORT.items()
    ),
)  # fmt: skip
