"""Judge of pretraining recipes: models after the same processor time on one core.

A recipe is a run file in ``benchmarks/learn/recipes``. The processor time of its steps is measured
first, in turns with the other recipes, and determines its number of steps; what else the machine
does then changes nothing. Each recipe is trained with several seeds on the same text, and judged
by what no recipe changes:

- bits per byte of held-out text, one masked piece in seven, rows of 64 tokens,
- accuracy on BLiMP,
- scores of two tasks after fine-tuning, SST-2 (10,000 phrases) and chunking.

The result file is written after each seed of a recipe; started again, the program continues where
it ended, and several of these programs with different recipes can share it. A recipe whose moving
average is kept (``optimizer.ema_decay``) is judged by the average.

    python -m benchmarks.learn.judge --recipes baseline mask_20 --budget-seconds 1800 --seeds 3 \
        --corpus CORPUS --work runs/judge

``--measure`` only measures the steps, which needs an idle machine; results of another processor do
not belong in the same file.
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import math
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learn.finetune_study import TASKS, Cell, Processes, Study, run_cell
from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import ROOT, provenance
from megatron_deberta.checkpoint.layout import committed_steps, step_dir
from megatron_deberta.config import load_config
from megatron_deberta.config.phases import segments
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import EXIT_DONE

RECIPES = Path(__file__).with_name("recipes")
RESULT = ROOT / "benchmarks" / "results" / "cpu" / "judge.json"
BASELINE = "baseline"
MEASURED_STEPS = 60
POINTS = 4
"""Checkpoints of a curve, evenly spaced."""
HELD_OUT_BYTES = 60_000
BLIMP_PAIRS = 20
VOCABULARY_UNIT = 8192
"""Tokenizers have a multiple of so many trained pieces; a model's vocabulary has a few more."""
JUDGED_TASKS = tuple(task for task in TASKS if task.name in ("sst2", "chunking"))
SCORES = ("bits_per_byte", "blimp", "sst2", "chunking")


@dataclass(frozen=True)
class Judge:
    """Recipes and how they are judged.

    Attributes:
        recipes: names of run files in ``benchmarks/learn/recipes``.
        budget_seconds: processor time of a training run.
        seeds: number of seeds of a recipe.
        corpus: folder of text and labelled data.
        work: folder of shards, runs and encoded examples.
        output: result file.
        rounds: measurements of a recipe's steps, of which the median is taken.
    """

    recipes: Sequence[str]
    budget_seconds: float
    seeds: int
    corpus: Path
    work: Path
    output: Path
    rounds: int = 3

    def file(self, recipe: str) -> Path:
        """Return the run file of a recipe."""
        return RECIPES / f"{recipe}.yaml"

    def run(self, recipe: str, seed: int) -> Path:
        """Return the folder of a training run."""
        return self.work / recipe / str(seed)

    def data(self, recipe: str) -> Path:
        """Return the folder of the tokenizer and the shards for a recipe's vocabulary size."""
        vocab_size = load_config(self.file(recipe)).model.vocab_size
        assert isinstance(vocab_size, int)
        return self.work / "data" / str(vocab_size // VOCABULARY_UNIT * VOCABULARY_UNIT)

    @property
    def held_out(self) -> Path:
        """The held-out text."""
        return self.work / "data" / "held_out.txt"

    def training(self, recipe: str, *overrides: str) -> list[str]:
        """Return the arguments of ``benchmarks.learn.judge_train``."""
        data = self.data(recipe)
        return [
            str(self.file(recipe)), f"data.train={data}/train_text_document",
            f"data.validation={data}/validation_text_document", f"tokenizer.path={data}/tokenizer",
            *overrides,
        ]  # fmt: skip

    def finetuning(self, recipe: str, seed: int, model: Path) -> Study:
        """Return the fine-tuning study of a trained model."""
        work = self.run(recipe, seed) / "tasks"
        return Study(model, self.corpus, work, work / "unused.json", JUDGED_TASKS)


class Commands:
    """Runs commands in processes of their own, until a deadline.

    Args:
        deadline: ``time.monotonic()`` after which commands are stopped at a checkpoint.

    Attributes:
        processes: starts the commands.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        self.processes = Processes(deadline)

    def __call__(self, log: Path, *arguments: str, module: str = "megatron_deberta") -> bool:
        """Run a Python module as a command; return False if it was stopped.

        Raises:
            SystemExit: it failed.
        """
        if self.processes.is_late:
            return False
        return self.processes.run(list(arguments), log, module)[0] == EXIT_DONE


def prepare(judge: Judge) -> None:
    """Write held-out text, and a tokenizer and shards for each size of the vocabulary."""
    command = Commands()
    text, log = judge.work / "data" / "text", judge.work / "data" / "log.txt"
    if not text.exists():
        books = [str(path) for path in sorted(judge.corpus.glob("books-*.jsonl.gz"))]
        command(log, "split", "--input", *books, "--output", str(text))
    if not judge.held_out.exists():
        judge.held_out.write_text(_first_bytes(text / "validation", HELD_OUT_BYTES))
    for folder in dict.fromkeys(map(judge.data, judge.recipes)):
        tokenizer = folder / "tokenizer"
        if not tokenizer.exists():
            command(
                log, "train-tokenizer", "--input", str(text / "train"), "--vocab-size", folder.name,
                "--output", str(tokenizer),
            )  # fmt: skip
        for part in ("train", "validation"):
            if not (folder / f"{part}_text_document.idx").exists():
                command(
                    log, "preprocess", "--input", str(text / part), "--tokenizer", str(tokenizer),
                    "--output", str(folder / part),
                )  # fmt: skip


def _first_bytes(folder: Path, size: int) -> str:
    documents, total = list[str](), 0
    for path in sorted(folder.glob("*.jsonl*")):
        opened = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
        with opened as lines:
            for line in lines:
                # The beginning of each document, so that many books are among them.
                documents.append(str(json.loads(line)["text"])[:2_000])
                total += len(documents[-1].encode())
                if total >= size:
                    return "\n".join(documents)
    raise SystemExit(f"{folder}: {total:,} bytes of text, fewer than {size:,}")


def measure(judge: Judge, record: dict[str, Any]) -> None:
    """Measure the processor time of a step of each recipe that the record lacks.

    The baseline is measured again with them: ``seconds_per_step`` is relative to its first
    measurement, so that recipes measured on another day are comparable.
    """
    missing = [name for name in judge.recipes if name not in record["seconds_per_step"]]
    if not missing:
        return
    command = Commands()
    names = list(dict.fromkeys((BASELINE, *missing)))
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(judge.rounds):
        for name in names:
            folder = judge.work / "measure" / name
            shutil.rmtree(folder, ignore_errors=True)
            output = folder / "seconds.json"
            folder.mkdir(parents=True)
            command(
                folder / "log.txt",
                *judge.training(
                    name, f"train.steps={MEASURED_STEPS}", f"train.run_dir={folder / 'run'}",
                    "checkpoint.save_every=null", "train.eval_every=null",
                ),
                "--measure", str(output), module="benchmarks.learn.judge_train",
            )  # fmt: skip
            found[name].append(json.loads(output.read_text()))
    seconds = {name: statistics.median(values) for name, values in found.items()}
    first = record["seconds_per_step"].setdefault(BASELINE, seconds[BASELINE])
    for name in missing:
        record["seconds_per_step"][name] = first * seconds[name] / seconds[BASELINE]


def train(judge: Judge, command: Commands, recipe: str, seed: int, steps: int) -> Path | None:
    """Train a recipe with one seed; return the model to evaluate, None if the time was up."""
    run = judge.run(recipe, seed)
    arguments = judge.training(
        recipe, f"train.steps={steps}", f"train.seed={seed}", f"train.run_dir={run}",
        f"checkpoint.save_every={math.ceil(steps / POINTS)}", f"checkpoint.keep_last={POINTS + 1}",
        "train.eval_every=null",
    )  # fmt: skip
    log = run / "judge.txt"
    if not command(log, *arguments, module="benchmarks.learn.judge_train"):
        return None
    if load_config(run / "config.yaml").optimizer.ema_decay is None:
        return run
    average = run / "average"
    if not average.exists() and not command(
        log, "convert", "--checkpoint", str(run), "--moving-average", "--to", "hf",
        "--output", str(average),
    ):  # fmt: skip
        return None
    return average


def evaluate(
    judge: Judge, command: Commands, recipe: str, seed: int, model: Path
) -> dict[str, Any] | None:
    """Evaluate a trained model; return its scores and its curve, None if the time was up."""
    run = judge.run(recipe, seed)
    log = run / "judge.txt"
    config = load_config(run / "config.yaml")
    curve = []
    every = config.checkpoint.save_every or 1
    steps = committed_steps(str(run))
    # Without the checkpoints of stopped runs.
    for step in (step for step in steps if step % every == 0 or step == steps[-1]):
        is_last = step == steps[-1]
        path = model if is_last else Path(step_dir(str(run), step))
        bits = _bits_per_byte(judge, command, path, run / f"held_out_{step}.json")
        if bits is None:
            return None
        curve.append({"step": step, "tokens": tokens_until(config, step), "bits_per_byte": bits})
    blimp = run / "blimp.json"
    if not blimp.exists() and not command(
        log, "evaluate", "blimp", "--model", str(model), "--data",
        str(judge.corpus / "tasks" / "blimp"), "--limit", str(BLIMP_PAIRS), "--output", str(blimp),
        "train.device=cpu",
    ):  # fmt: skip
        return None
    scores = {
        "bits_per_byte": curve[-1]["bits_per_byte"],
        "blimp": read_json(blimp, {})["accuracy"],
    }
    study = judge.finetuning(recipe, seed, model)
    for task in JUDGED_TASKS:
        score = _finetuned_score(study, command, Cell(task, "pretrained", seed))
        if score is None:
            return None
        scores[task.name] = score
    return {"recipe": recipe, "seed": seed, "scores": scores, "curve": curve}


def _bits_per_byte(judge: Judge, command: Commands, model: Path, output: Path) -> float | None:
    if not output.exists() and not command(
        output.with_suffix(".log"), "evaluate", "perplexity", "--model", str(model),
        "--data", str(judge.held_out), "--form", "masked", "--output", str(output),
        "data.sequence_length=64", "train.device=cpu",
    ):  # fmt: skip
        return None
    return float(read_json(output, {})["bits_per_byte"])


def _finetuned_score(study: Study, command: Commands, cell: Cell) -> float | None:
    output = study.work / f"{cell.task.name}.json"
    if not output.exists():
        found = run_cell(study, command.processes, cell)
        if found is None:
            return None
        write_json(output, found)
    return float(read_json(output, {})["score"])


def tokens_until(config: RunConfig, step: int) -> int:
    """Return the tokens of a run's first steps, padding included."""
    return sum(
        max(0, min(step - part.first_step, part.steps))
        * part.config.train.global_batch_size
        * part.config.data.sequence_length
        for part in segments(config)
    )


def judge_recipes(judge: Judge, command: Commands) -> dict[str, Any]:
    """Train and evaluate the runs that are missing in the result file; return the result.

    Raises:
        SystemExit: a run failed, such as one whose loss diverges; raised after the others.
    """
    record = read_json(judge.output, {"seconds_per_step": {}, "rows": {}})
    if record.get("budget_seconds", judge.budget_seconds) != judge.budget_seconds:
        raise SystemExit(
            f"{judge.output} has a budget of {record['budget_seconds']} s; give the same "
            "--budget-seconds, or another --output"
        )
    prepare(judge)
    measure(judge, record)
    update(judge, record)
    failures = []
    # The first seed of every recipe, then the next.
    for seed in range(1, judge.seeds + 1):
        for recipe in judge.recipes:
            key = f"{recipe}/{seed}"
            if key in record["rows"]:
                continue
            print(f"{time.strftime('%H:%M:%S')} {key}", flush=True)
            steps = round(judge.budget_seconds / record["seconds_per_step"][recipe])
            try:
                model = train(judge, command, recipe, seed, steps)
                row = model and evaluate(judge, command, recipe, seed, model)
            except SystemExit as failure:
                failures.append(f"{key}: {failure}")
                continue
            if row is None:
                return update(judge, record)
            record["rows"][key] = row
            update(judge, record)
            shutil.rmtree(judge.run(recipe, seed), ignore_errors=True)
    if failures:
        raise SystemExit("\n".join(failures))
    return update(judge, record)


def update(judge: Judge, record: dict[str, Any]) -> dict[str, Any]:
    """Add what other programs have written since to the record; write and return the result."""
    judge.output.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(judge.output.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        written = read_json(judge.output, {})
        for name in ("seconds_per_step", "rows"):
            record[name] = written.get(name, {}) | record[name]
        result = summarize(judge, record)
        write_json(judge.output, result)
    finally:
        os.close(folder)
    return result


def summarize(judge: Judge, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result file: provenance, times, the comparison and the rows."""
    return {
        **provenance(),
        "budget_seconds": judge.budget_seconds,
        "seconds_per_step": dict(record["seconds_per_step"]),
        "comparison": list(compare(record["rows"].values())),
        "rows": dict(record["rows"]),
    }


def compare(rows: Any) -> Iterator[dict[str, Any]]:
    """Yield the scores of each recipe and their differences to the baseline.

    A score is modelled as a value of the recipe, one of the seed, which determines the order of the
    text, and noise that is equally large for all recipes. So recipes with one seed have an
    interval, too. ``half`` is half the 95 % interval of a difference; None: no recipe has a second
    seed.
    """
    found = list(rows)
    recipes = list(dict.fromkeys(row["recipe"] for row in found))
    fits = {
        score: _differences([(row["recipe"], row["seed"], row["scores"][score]) for row in found])
        for score in SCORES
    }
    for recipe in recipes:
        own = [row["scores"] for row in found if row["recipe"] == recipe]
        yield {
            "recipe": recipe,
            "seeds": len(own),
            "scores": {
                score: {"mean": statistics.fmean(scores[score] for scores in own)}
                | fits[score].get(recipe, {})
                for score in SCORES
            },
        }


def _differences(
    cells: Sequence[tuple[str, int, float]],
) -> dict[str, dict[str, float | None]]:
    """Return the difference to the baseline and half its 95 % interval, by recipe.

    Args:
        cells: recipe, seed and score of each run.
    """
    import numpy as np
    from scipy import stats

    recipes = [name for name in dict.fromkeys(name for name, _, _ in cells) if name != BASELINE]
    if not any(name == BASELINE for name, _, _ in cells):
        return {}
    seeds = sorted({seed for _, seed, _ in cells})
    # Columns: the baseline with the first seed, each other recipe, each other seed.
    design = np.array(
        [
            [1.0, *(name == other for other in recipes), *(seed == other for other in seeds[1:])]
            for name, seed, _ in cells
        ]
    )
    scores = np.array([score for _, _, score in cells])
    inverse = np.linalg.pinv(design.T @ design)
    fitted = inverse @ design.T @ scores
    freedom = len(cells) - int(np.linalg.matrix_rank(design))
    halves: list[float | None] = [None] * len(fitted)
    if freedom:
        variance = float(((scores - design @ fitted) ** 2).sum()) / freedom
        width = float(stats.t.ppf(0.975, freedom))
        halves = [width * math.sqrt(variance * entry) for entry in inverse.diagonal()]
    return {
        name: {"difference": float(fitted[place]), "half": halves[place]}
        for place, name in enumerate(recipes, start=1)
    }


def description(recipe: str) -> str:
    """Return the sentence with which a recipe's run file begins."""
    lines = (RECIPES / f"{recipe}.yaml").read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def curves(record: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    """Return minutes of processor time, millions of tokens and bits per byte, by recipe.

    Each point is the mean over the seeds.
    """
    found: dict[str, list[Any]] = {}
    for row in record["rows"].values():
        found.setdefault(row["recipe"], []).append(row["curve"])
    return {
        recipe: [
            [
                round(column[0]["step"] * record["seconds_per_step"][recipe] / 60, 2),
                round(column[0]["tokens"] / 1e6, 3),
                round(statistics.fmean(point["bits_per_byte"] for point in column), 4),
            ]
            for column in zip(*seeds, strict=False)
        ]
        for recipe, seeds in found.items()
    }


def main() -> None:
    """Judge the recipes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    parser.add_argument("--recipes", nargs="+", required=True, choices=names, metavar="NAME",
                        help=f"of {', '.join(names)}")  # fmt: skip
    parser.add_argument("--budget-seconds", type=float, default=1800.0, metavar="S",
                        help="processor time of a training run (default 1800)")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each recipe (default 3)")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of text and tasks")
    parser.add_argument("--work", type=Path, required=True, help="folder of shards and runs")
    parser.add_argument("--output", type=Path, default=RESULT, help="result file")
    parser.add_argument("--hours", type=float, default=math.inf,
                        help="stop after so many hours (default: when all is done)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3,
                        help="measurements of a recipe's steps (default 3)")  # fmt: skip
    parser.add_argument("--measure", action="store_true", help="measure the steps, and end")
    args = parser.parse_args()
    # As Ctrl-C: the running command is stopped, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.nice(19)
    judge = Judge(
        args.recipes, args.budget_seconds, 0 if args.measure else args.seeds,
        args.corpus.resolve(), args.work.resolve(), args.output, args.rounds,
    )  # fmt: skip
    record = judge_recipes(judge, Commands(time.monotonic() + args.hours * 3600))
    json.dump(record["comparison"], sys.stdout, indent=1)
    wanted = {f"{name}/{seed}" for name in judge.recipes for seed in range(1, judge.seeds + 1)}
    if missing := wanted - record["rows"].keys():
        print(f"\n{len(missing)} runs are missing; start the same command again")


if __name__ == "__main__":
    main()
