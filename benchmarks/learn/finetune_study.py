"""What pretraining is worth: fine-tuning a pretrained run, and the same model from random weights.

Every cell is a ``megatron-deberta finetune`` of one task from one start with one seed. Settings
are equal on both sides, and the score is that of the last step, so that nothing is selected on
the validation examples. Tasks with several seeds are compared by Welch's t-test. BLiMP is
evaluated for some checkpoints of the pretraining run. The result file is written after each cell;
started again, the program continues where it ended.

    python -m benchmarks.learn.finetune_study --run runs/first --corpus CORPUS --work runs/study

``--measure`` runs a few steps of each task instead and prints the estimated time of the study.
"""

from __future__ import annotations

import argparse
import math
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import ROOT, program_environment, provenance
from megatron_deberta.checkpoint.layout import committed_steps, step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.config import load_config
from megatron_deberta.errors import EXIT_DONE, EXIT_REQUEUE
from megatron_deberta.evaluate.compare import welch_p
from megatron_deberta.files import write_atomically
from megatron_deberta.observe.metrics import read_metrics

RESULT = ROOT / "benchmarks" / "results" / "cpu" / "finetune_study.json"
STARTS = ("pretrained", "random")
COMMON = (
    "parallel.engine=plain", "precision.dtype=fp32", "parallel.zero_stage=0",
    "parallel.tensor_parallel_size=1", "parallel.sequence_parallel=false",
    "train.device=cpu", "train.eval_every=null", "finetune.validations_per_epoch=null",
    "finetune.keep_best=false", "checkpoint.save_every=null", "checkpoint.keep_every=null",
    "optimizer.learning_rate=3e-4", "optimizer.warmup_steps=0", "optimizer.warmup_fraction=0.1",
    "model.hidden_dropout=0.1", "model.attention_dropout=0.1", "log.tensorboard=false",
)  # fmt: skip
"""Overrides of every cell: one validation, at the end."""
BLIMP_PAIRS = 50


@dataclass(frozen=True)
class Task:
    """A task of the study.

    Attributes:
        name: packaged task, and name in the result.
        data: folder below the corpus.
        seeds: number of seeds.
        epochs: passes over the training examples.
        batch: examples per step.
        changes: keys of the task file that differ from the packaged one.
    """

    name: str
    data: str
    seeds: int
    epochs: float
    batch: int = 32
    changes: dict[str, Any] = field(default_factory=dict)


def _parts(file: str, train: tuple[float, float], dev: tuple[float, float]) -> dict[str, Any]:
    parts = {"train": train, "dev": dev}
    return {name: {"files": file, "part": list(part)} for name, part in parts.items()}


TASKS = (
    # 10,000 of the 67,349 phrases
    Task("sst2", "tasks/glue/SST-2", 5, 2, changes={
        "splits": {"train": {"files": "train.tsv", "part": [0, 0.1485]}, "dev": "dev.tsv"}}),
    Task("cola", "tasks/glue/CoLA", 5, 1.5),
    Task("wnut17", "tasks/ner", 5, 1.5, 16),
    Task("chunking", "conll2000", 5, 0.6),
    Task("policyqa", "tasks/qa", 5, 0.5, 16, changes={
        "max_length": 256, "stride": 64,
        "splits": {"train": "policyqa.dev.json",
                   "dev": {"files": "policyqa.test.json", "part": [0, 0.25]}}}),
    Task("mrpc", "tasks/glue/MRPC", 1, 2),
    Task("stsb", "tasks/glue/STS-B", 1, 2),
    Task("qnli_dev", "tasks/glue/QNLI", 1, 2),
    Task("quail", "tasks/choice", 1, 1, 16, changes={
        "max_length": 192, "splits": _parts("quail_dev.xml", (0, 0.4), (0.9, 1))}),
    Task("balanced_copa", "tasks/choice", 1, 5, 16),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One fine-tuning run."""

    task: Task
    start: str
    seed: int

    @property
    def key(self) -> str:
        """Name in the result file."""
        return f"{self.task.name}/{self.start}-{self.seed}"


@dataclass(frozen=True)
class Study:
    """All cells of a study.

    Attributes:
        run: folder of the pretraining run.
        corpus: folder of the labelled data.
        work: folder of task files, fine-tuning runs and encoded examples.
        output: result file.
        tasks: tasks to run.
        overrides: further ``section.key=value`` of every cell.
        threads: threads per process.
        blimp_checkpoints: number of checkpoints for BLiMP.
    """

    run: Path
    corpus: Path
    work: Path
    output: Path
    tasks: Sequence[Task] = TASKS
    overrides: tuple[str, ...] = ()
    threads: int = 1
    blimp_checkpoints: int = 8

    def cells(self) -> list[Cell]:
        """Return all cells: both starts of every task with the first seed, then with the next."""
        return [
            Cell(task, start, seed)
            for seed in range(1, max(task.seeds for task in self.tasks) + 1)
            for task in self.tasks
            for start in STARTS
            if seed <= task.seeds
        ]

    def blimp_steps(self) -> list[int]:
        """Return the steps to evaluate: each about a constant factor after the one before."""
        steps = committed_steps(str(self.run))
        count = min(self.blimp_checkpoints, len(steps))
        if count < 2:
            return steps[:count]
        ratio = len(steps) ** (1 / (count - 1))
        places = {min(len(steps), max(n + 1, round(ratio**n))) for n in range(count)}
        return [steps[place - 1] for place in sorted(places | {len(steps)})]

    def task_file(self, task: Task) -> Path:
        """Write the task file of a task; return it."""
        path = self.work / "tasks" / f"{task.name}.yaml"
        content = {"base": f"configs/tasks/{task.name}.yaml", "name": task.name, **task.changes}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, yaml.safe_dump(content).encode())
        return path

    def arguments(self, cell: Cell) -> list[str]:
        """Return the arguments of ``megatron-deberta`` for a cell."""
        task = cell.task
        random_weights = ["checkpoint.load_from=null"] if cell.start == "random" else []
        return [
            "finetune", str(self.task_file(task)), "--model", str(self.run),
            "--data", str(self.corpus / task.data), "--settings", "none", *COMMON,
            f"finetune.epochs={task.epochs}", f"train.global_batch_size={task.batch}",
            f"train.micro_batch_size={task.batch}",
            f"finetune.cache={self.work / 'encoded'}", f"train.seed={cell.seed}",
            f"train.run_dir={self.work / cell.key}", *random_weights, *self.overrides,
        ]  # fmt: skip

    def blimp_arguments(self, step: int, limit: int) -> list[str]:
        """Return the arguments of ``megatron-deberta`` for BLiMP at a step."""
        return [
            "evaluate", "blimp", "--model", str(step_dir(str(self.run), step)),
            "--data", str(self.corpus / "tasks" / "blimp"), "--limit", str(limit),
            "--output", str(self.work / "blimp" / f"{step}-{limit}.json"), "train.device=cpu",
        ]  # fmt: skip


class Processes:
    """Starts commands in processes of their own, and stops them at a deadline.

    Args:
        deadline: ``time.monotonic()`` after which processes are stopped at a checkpoint.
        threads: threads per process.
    """

    def __init__(self, deadline: float = math.inf, threads: int = 1) -> None:
        self._deadline, self._threads = deadline, threads
        self._running: set[subprocess.Popen[bytes]] = set()

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self._deadline

    def stop(self) -> None:
        """Stop the running commands at a checkpoint, and start no more."""
        self._deadline = -math.inf
        for process in list(self._running):
            process.send_signal(signal.SIGTERM)

    def _seconds_left(self) -> float | None:
        left = self._deadline - time.monotonic()
        return max(1.0, left) if math.isfinite(left) else None

    def run(
        self, arguments: list[str], log: Path, module: str = "megatron_deberta"
    ) -> tuple[int, float]:
        """Run a Python module as a command; return its exit code and seconds.

        Raises:
            SystemExit: it failed.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = program_environment(OMP_NUM_THREADS=str(self._threads))
        begin = time.monotonic()
        with log.open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=stream, stderr=stream, env=environment, cwd=ROOT,
            )  # fmt: skip
            self._running.add(process)
            try:
                code = process.wait(self._seconds_left())
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)
                code = process.wait()
            finally:
                self._running.discard(process)
                process.kill()
        is_stopped = self.is_late and code in (EXIT_REQUEUE, -signal.SIGTERM)
        if code != EXIT_DONE and not is_stopped:
            raise SystemExit(f"{log}: ended with exit code {code}")
        return code, time.monotonic() - begin


def run_all(processes: Processes, jobs: int, calls: Iterable[Callable[[], None]]) -> None:
    """Call functions in threads. If one fails, stop the running commands and start no more.

    Args:
        processes: starts the commands.
        jobs: number of threads.
        calls: the functions.
    """
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            for future in futures:
                future.result()
        except BaseException:
            processes.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def run_cell(study: Study, processes: Processes, cell: Cell) -> dict[str, Any] | None:
    """Fine-tune one cell; return its record, or None if the time was up."""
    folder = study.work / cell.key
    code, seconds = processes.run(study.arguments(cell), folder / "log.txt")
    if code != EXIT_DONE:
        return None
    scored = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "validation"]
    last = scored[-1]
    metrics = {k: v for k, v in last.items() if k not in ("step", "kind", "score")}
    # The weights are not needed again, and sixty of them fill a disk.
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return {
        "task": cell.task.name,
        "start": cell.start,
        "seed": cell.seed,
        "score": last["score"],
        "metrics": metrics,
        "steps": last["step"],
        "seconds": round(seconds, 1),
    }


def run_blimp(study: Study, processes: Processes, step: int) -> dict[str, Any] | None:
    """Evaluate BLiMP for a checkpoint; return its record, or None if the time was up."""
    arguments = study.blimp_arguments(step, BLIMP_PAIRS)
    output = Path(arguments[arguments.index("--output") + 1])
    output.parent.mkdir(parents=True, exist_ok=True)
    code, seconds = processes.run(arguments, output.with_suffix(".log"))
    if code != EXIT_DONE:
        return None
    found = read_json(output, {})
    return {"step": step, "seconds": round(seconds, 1), **found}


def execute(study: Study, jobs: int, budget_seconds: float) -> dict[str, Any]:
    """Run all cells that the result file lacks; return the result.

    Args:
        study: the study.
        jobs: processes at a time.
        budget_seconds: after this time, running cells are stopped at a checkpoint.

    Raises:
        SystemExit: a cell failed.
    """
    record = read_json(study.output, {"cells": {}, "blimp": {}})
    processes = Processes(time.monotonic() + budget_seconds, study.threads)
    lock = threading.Lock()

    def work(part: str, key: str, run: Callable[[], dict[str, Any] | None]) -> None:
        if processes.is_late or key in record[part]:
            return
        print(f"{time.strftime('%H:%M:%S')} {key}", flush=True)
        found = run()
        with lock:
            if found is not None:
                record[part][key] = found
            write_json(study.output, summarize(study, record))

    calls: list[Callable[[], None]] = [
        partial(work, "blimp", str(step), partial(run_blimp, study, processes, step))
        for step in study.blimp_steps()
    ]
    calls += [
        partial(work, "cells", cell.key, partial(run_cell, study, processes, cell))
        for cell in study.cells()
    ]
    run_all(processes, jobs, calls)
    write_json(study.output, result := summarize(study, record))
    return result


def summarize(study: Study, record: dict[str, Any]) -> dict[str, Any]:
    """Return the result file: provenance, the cells and the comparison of the starts."""
    steps = committed_steps(str(study.run))
    run = load_config(study.run / "config.yaml")
    model = run.model
    last = CheckpointReader(step_dir(str(study.run), steps[-1])).metadata
    return {
        **provenance(),
        "layers": model.num_layers,
        "width": model.hidden_size,
        "pretraining_steps": last.step,
        "pretraining_tokens": last.consumed_samples * run.data.sequence_length,
        "settings": [*COMMON, *study.overrides],
        "comparison": list(compare(record["cells"].values())),
        "cells": record["cells"],
        "blimp": dict(sorted(record["blimp"].items(), key=lambda item: int(item[0]))),
    }


def compare(cells: Any) -> Iterator[dict[str, Any]]:
    """Yield mean, spread and significance of each task with cells of both starts.

    ``p`` is that of Welch's two-sided t-test over seeds; None: fewer than two seeds.
    """
    cells = list(cells)
    for name in dict.fromkeys(cell["task"] for cell in cells):
        scores = {
            start: [c["score"] for c in cells if (c["task"], c["start"]) == (name, start)]
            for start in STARTS
        }
        if not all(scores.values()):
            continue
        row: dict[str, Any] = {"task": name}
        for start, values in scores.items():
            spread = statistics.stdev(values) if len(values) > 1 else None
            row[start] = {
                "seeds": len(values), "mean": statistics.mean(values), "stdev": spread,
                "min": min(values), "max": max(values),
            }  # fmt: skip
        row["difference"] = row["pretrained"]["mean"] - row["random"]["mean"]
        row["p"] = welch_p(scores["pretrained"], scores["random"])
        yield row


def table(record: dict[str, Any]) -> str:
    """Format the comparison and BLiMP as text."""
    lines = [f"{'task':<15}{'pretrained':>20}{'random':>20}{'difference':>12}{'p':>10}"]
    for row in record["comparison"]:
        values = [
            f"{side['mean']:.3f}" + (f" ± {side['stdev']:.3f}" if side["stdev"] is not None else "")
            for side in (row["pretrained"], row["random"])
        ]
        p = "" if row["p"] is None else f"{row['p']:.2g}"
        lines.append(
            f"{row['task']:<15}{values[0]:>20}{values[1]:>20}{row['difference']:>+12.3f}{p:>10}"
        )
    lines += [f"BLiMP at step {step}: {row['accuracy']:.1%}" for step, row in
              record["blimp"].items()]  # fmt: skip
    return "\n".join(lines)


def measure(study: Study) -> float:
    """Run a few steps of each task and one small BLiMP; return processor hours of the study.

    The times are those of the processor, so that a busy machine matters little.
    """
    processes, total = Processes(threads=study.threads), 0.0
    last = 21
    for task in study.tasks:
        folder = study.work / "measure" / task.name
        shutil.rmtree(folder, ignore_errors=True)
        arguments = study.arguments(Cell(task, "pretrained", 1))
        probe = (f"train.run_dir={folder}", f"train.exit_step={last}", "log.every=10")
        share, wall = _processor_share(processes, [*arguments, *probe], folder / "log")
        record = next(r for r in read_metrics(folder / "metrics.jsonl") if r["step"] == last - 1)
        # One step is left after this record: its predicted time is that of a step.
        per_step = record["seconds_left"] * share
        steps = load_config(folder / "config.yaml").train.steps
        cell = wall * share + (steps - last) * per_step
        count = task.seeds * len(STARTS)
        total += cell * count
        print(f"{task.name:<15}{steps:>6} steps x {per_step:.3f} s, cell {cell:.0f} s x {count}")
    step, seconds = study.blimp_steps()[-1], []
    (study.work / "blimp").mkdir(parents=True, exist_ok=True)
    for limit in (1, 3):
        arguments = study.blimp_arguments(step, limit)
        log = study.work / "blimp" / "measure.log"
        share, wall = _processor_share(processes, arguments, log)
        seconds.append(share * wall)
    blimp = seconds[0] + (seconds[1] - seconds[0]) / 2 * (BLIMP_PAIRS - 1)
    count = len(study.blimp_steps())
    print(f"BLiMP          {blimp:.0f} s x {count}")
    return (total + blimp * count) / 3600


def _processor_share(processes: Processes, arguments: list[str], log: Path) -> tuple[float, float]:
    """Run a command; return its processor time per second, and its seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _, wall = processes.run(arguments, log)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return used / wall, wall


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="folder of the pretraining run")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of the labelled data")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    names = [task.name for task in TASKS]
    parser.add_argument("--task", action="append", choices=names, help="only this task")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads per process (default 1)")
    parser.add_argument("--budget", type=float, default=3.0, help="hours (default 3)")
    parser.add_argument("--measure", action="store_true", help="print the estimated time only")
    parser.add_argument("--blimp-checkpoints", type=int, default=8, help="(default 8)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of every cell")
    return parser.parse_args()


def main() -> None:
    """Run the study, or estimate its time."""
    args = parse_arguments()
    # As Ctrl-C: the running commands are stopped, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tasks = [task for task in TASKS if not args.task or task.name in args.task]
    run, corpus, work = (path.resolve() for path in (args.run, args.corpus, args.work))
    study = Study(
        run, corpus, work, args.output, tasks, tuple(args.set), args.threads,
        args.blimp_checkpoints,
    )  # fmt: skip
    if args.measure:
        hours = measure(study)
        print(f"{hours:.2f} processor hours, {hours / args.jobs:.2f} hours of {args.jobs} jobs")
        return
    print(table(execute(study, args.jobs, args.budget * 3600)))
    done = read_json(args.output, {"cells": {}})["cells"]
    missing = [cell.key for cell in study.cells() if cell.key not in done]
    if missing:
        print(f"{len(missing)} cells are missing; start the same command again")


if __name__ == "__main__":
    main()
