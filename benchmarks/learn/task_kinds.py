"""Whether options of fine-tuning help: variants of a task, each with five seeds, on a small model.

- imbalance: WNUT-17's types of entity, of which most sentences have none, with and without class
  weights and focal loss. The thresholds are those of dev; the scores are of the test set.
- ranking: the four losses of re-ranking on 477 questions of PolicyQA with six passages each,
  scored on 152 questions on other policies.
- embeddings: STS-B's embeddings from a pretrained run, and after 400 more steps of masked
  training or of RetroMAE, each of which starts from the run.

Every cell is a ``megatron-deberta finetune`` of a variant with one seed, and its score that of the
last step, so that nothing is selected on the scored examples. The result file is written after each
cell; started again, the program continues where it ended.

    python -m benchmarks.learn.task_kinds --run runs/first --corpus CORPUS --work runs/kinds

The run of the committed results is ``configs/runs/finetune_study_cpu.yaml`` on the novels with
8,192 pieces, in one process: ``train.steps=1500 parallel.tensor_parallel_size=1
parallel.engine=plain parallel.zero_stage=0 data.num_workers=0``.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from benchmarks.learn.finetune_study import COMMON, Processes, run_all
from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import ROOT, provenance
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import RankingLoss
from megatron_deberta.errors import EXIT_DONE
from megatron_deberta.files import write_atomically

RESULT = ROOT / "benchmarks" / "results" / "cpu" / "task_kinds.json"
SEEDS = 5
MLM = "objective.name=mlm"
SHORT = ("train.steps=400", "train.eval_every=null", "checkpoint.save_every=200")
RANKED = ["policyqa.dev.json", "policyqa.test.json"]


@dataclass(frozen=True)
class Question:
    """Variants of one fine-tuning task.

    Attributes:
        name: name in the result.
        task: packaged task.
        changes: keys of the task file that differ from the packaged one.
        data: folder below the corpus.
        split: split that is scored.
        metrics: metrics that are compared.
        settings: overrides of all variants.
        variants: overrides of each; the others are compared with the first.
        pretraining: overrides of the pretraining between the run and the fine-tuning, by variant;
            a variant that is absent has none.
    """

    name: str
    task: str
    changes: Mapping[str, Any]
    data: str
    split: str
    metrics: tuple[str, ...]
    settings: tuple[str, ...]
    variants: Mapping[str, tuple[str, ...]]
    pretraining: Mapping[str, tuple[str, ...]]


QUESTIONS = (
    Question(
        "imbalance", "wnut17_types", {}, "tasks/ner", "test", ("macro_f1", "micro_f1"),
        ("finetune.epochs=3", "train.global_batch_size=16", "train.micro_batch_size=16"),
        {"plain": (), "class weights": ("finetune.class_weights=balanced",),
         "focal loss": ("finetune.focal_gamma=2",)},
        {},
    ),
    Question(
        "ranking", "policyqa_rerank",
        {"max_length": 128, "max_passages": 6, "random_passages": 3, "splits": {
            "train": {"files": RANKED, "part": [0, 0.2]},
            "dev": {"files": RANKED, "part": [0.9, 1]}}},
        "tasks/qa", "dev", ("ndcg_at_10", "mrr_at_10"),
        ("finetune.epochs=2", "train.global_batch_size=8", "train.micro_batch_size=8",
         "optimizer.learning_rate=5e-4"),
        {loss: (f"finetune.ranking_loss={loss}",) for loss in get_args(RankingLoss)},
        {},
    ),
    Question(
        "embeddings", "stsb_embed", {}, "tasks/glue/STS-B", "dev", ("spearman", "pearson"),
        ("objective.positive_similarity=0.8", "objective.temperature=0.05", "finetune.epochs=4",
         "train.global_batch_size=64", "train.micro_batch_size=64"),
        {"masked training": (), "RetroMAE": (), "neither": ()},
        {"masked training": (*SHORT, MLM), "RetroMAE": SHORT},
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One variant with one seed."""

    question: Question
    variant: str
    seed: int

    @property
    def key(self) -> str:
        """Name in the result file, and folder of the runs."""
        return f"{self.question.name}/{self.variant.replace(' ', '_')}/{self.seed}"


@dataclass(frozen=True)
class Study:
    """All cells of the questions.

    Attributes:
        run: folder of the pretraining run.
        corpus: folder of the labelled data.
        work: folder of the runs and encoded examples.
        output: result file.
        questions: the questions.
    """

    run: Path
    corpus: Path
    work: Path
    output: Path
    questions: tuple[Question, ...] = QUESTIONS

    def cells(self) -> list[Cell]:
        """Return the cells of each question in turn, all its variants with the first seed first."""
        return [
            Cell(question, variant, seed)
            for question in self.questions
            for seed in range(1, SEEDS + 1)
            for variant in question.variants
        ]

    def task_file(self, question: Question) -> str:
        """Return the packaged task, or the path of a task file with the question's changes."""
        if not question.changes:
            return question.task
        path = self.work / "tasks" / f"{question.task}.yaml"
        base = f"configs/tasks/{question.task}.yaml"
        content = {"base": base, "name": question.task, **question.changes}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content).encode())  # JSON is YAML
        return str(path)

    def commands(self, cell: Cell) -> list[list[str]]:
        """Return the arguments of the ``megatron-deberta`` commands of a cell, in their order."""
        question, folder = cell.question, self.work / cell.key
        model, found = self.run, []
        pretraining = question.pretraining.get(cell.variant)
        if pretraining is not None:
            data = load_config(self.run / "config.yaml").data
            model = folder / "pretraining"
            found.append([
                "pretrain", "configs/runs/retromae_cpu.yaml",
                f"data.train=[{','.join(data.train)}]",
                f"data.validation=[{','.join(data.validation)}]",
                f"checkpoint.load_from={self.run}",
                f"train.seed={cell.seed}", f"train.run_dir={model}", *pretraining,
            ])  # fmt: skip
        task = self.task_file(question)
        source, run = self.corpus / question.data, folder / "finetuning"
        found.append([
            "finetune", task, "--model", str(model), "--data", str(source),
            "--settings", "none", *COMMON, *question.settings, *question.variants[cell.variant],
            f"finetune.cache={self.work / 'encoded'}", f"train.seed={cell.seed}",
            f"train.run_dir={run}",
        ])  # fmt: skip
        found.append([
            "evaluate", "task", task, "--model", str(run), "--data", str(source),
            "--split", question.split, "--output", str(folder / "metrics.json"),
        ])  # fmt: skip
        return found


def run_cell(
    study: Study, processes: Processes, cell: Cell, commands: list[list[str]]
) -> dict[str, Any] | None:
    """Run the commands of a cell; return its record, or None if the time was up."""
    folder, seconds = study.work / cell.key, []
    for arguments in commands:
        code, elapsed = processes.run(arguments, folder / "log.txt")
        if code != EXIT_DONE:
            return None
        seconds.append(round(elapsed, 1))
    metrics = read_json(folder / "metrics.json", {})
    # The weights are not needed again.
    for checkpoints in folder.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)
    return {
        "question": cell.question.name,
        "variant": cell.variant,
        "seed": cell.seed,
        "metrics": {name: metrics[name] for name in cell.question.metrics},
        "seconds": seconds,
    }


def execute(study: Study, jobs: int, budget_seconds: float) -> dict[str, Any]:
    """Run all cells that the result file lacks; return the result.

    Args:
        study: the study.
        jobs: processes at a time.
        budget_seconds: after this time, running commands are stopped at a checkpoint.

    Raises:
        SystemExit: a command failed.
    """
    cells: dict[str, Any] = read_json(study.output, {"cells": {}})["cells"]
    processes = Processes(time.monotonic() + budget_seconds)
    lock = threading.Lock()

    def work(cell: Cell, commands: list[list[str]]) -> None:
        if processes.is_late or cell.key in cells:
            return
        print(f"{time.strftime('%H:%M:%S')} {cell.key}", flush=True)
        found = run_cell(study, processes, cell, commands)
        if found is not None:
            with lock:
                cells[cell.key] = found
                write_json(study.output, summarize(study, cells))

    # The commands are built here, in one thread, because this writes the task files.
    run_all(processes, jobs, [partial(work, cell, study.commands(cell)) for cell in study.cells()])
    result = summarize(study, cells)
    write_json(study.output, result)
    return result


def summarize(study: Study, cells: dict[str, Any]) -> dict[str, Any]:
    """Return the result file: provenance, the model, the comparison and the cells."""
    run = load_config(study.run / "config.yaml")
    batch = run.train.global_batch_size * run.data.sequence_length
    return {
        **provenance(),
        "layers": run.model.num_layers,
        "width": run.model.hidden_size,
        "pretraining_tokens": run.train.steps * batch,
        "settings": list(COMMON),
        "comparison": list(compare(cells.values())),
        "cells": cells,
    }


def compare(cells: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the mean and standard deviation of each variant, and its difference from the first.

    The difference has the 95 % interval of Welch's t-test over seeds. It is absent if one of the
    two variants has fewer than two seeds.
    """
    # SciPy takes a third of a second to import.
    from scipy import stats

    cells = list(cells)
    for question in QUESTIONS:
        for metric in question.metrics:
            by_variant = {
                variant: [
                    cell["metrics"][metric]
                    for cell in cells
                    if (cell["question"], cell["variant"]) == (question.name, variant)
                ]
                for variant in question.variants
            }
            first = next(iter(by_variant.values()))
            for variant, scores in by_variant.items():
                if not scores:
                    continue
                row: dict[str, Any] = {
                    "question": question.name, "metric": metric, "variant": variant,
                    "seeds": len(scores), "mean": statistics.fmean(scores),
                    "stdev": statistics.stdev(scores) if len(scores) > 1 else None,
                }  # fmt: skip
                if scores is not first and min(len(scores), len(first)) > 1:
                    test = stats.ttest_ind(scores, first, equal_var=False)
                    low, high = test.confidence_interval(0.95)
                    row |= {
                        "difference": row["mean"] - statistics.fmean(first),
                        "low": float(low), "high": float(high), "p": float(test.pvalue),
                    }  # fmt: skip
                yield row


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the pretraining run")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the labelled data")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    names = [question.name for question in QUESTIONS]
    parser.add_argument("--question", action="append", choices=names, help="only this question")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--budget", type=float, default=math.inf, help="hours (default: no limit)")
    args = parser.parse_args()
    # As Ctrl-C: the running commands are stopped, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    run, corpus, work = (path.resolve() for path in (args.run, args.corpus, args.work))
    questions = tuple(q for q in QUESTIONS if not args.question or q.name in args.question)
    study = Study(run, corpus, work, args.output, questions)
    result = execute(study, args.jobs, args.budget * 3600)
    for row in result["comparison"]:
        interval = (
            f"  {row['difference']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
            if "low" in row
            else ""
        )
        print(
            f"{row['question']:<11}{row['metric']:<11}{row['variant']:<16}{row['mean']:.4f}{interval}"
        )
    missing = [cell.key for cell in study.cells() if cell.key not in result["cells"]]
    if missing:
        print(f"{len(missing)} cells are missing; start the same command again")


if __name__ == "__main__":
    main()
