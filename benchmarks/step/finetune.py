"""Fine-tuning speed against transformers' ``Trainer`` on a CPU: same model, rows and batch size.

Rows of a task are trained for some epochs by four sides: this project with the plain engine and
with DeepSpeed, ``Trainer`` with ``group_by_length``, and ``Trainer`` with random rows; all pad to
the longest row of a batch. Each side is a process of its own, so that its peak memory can be
measured; they take turns of one epoch, and speeds are ratios of the median epochs, by wall-clock
and by processor time. Everything of an epoch counts, the loader included; logging, validation and
checkpoints are off.

First, without dropout, both models must have the same loss on every row of the first batch.

    python -m benchmarks.step.finetune sst2 policyqa passages --data tasks --tokenizer tokenizer \
        --output finetune_speed.json

``Trainer`` needs the package ``accelerate``, which this project does not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import ROOT, provenance, version
from benchmarks.lib.stock import copy_from_stock, stock_config
from benchmarks.step.finetune_sides import CPU, STOCK, Rows, Work, collate, train_ours, train_stock
from megatron_deberta.config.schema import ModelConfig, with_task_head
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.evaluate.splits import TaskRows, class_names
from megatron_deberta.tasks.encoding import encode
from megatron_deberta.tasks.examples import Example
from megatron_deberta.tasks.reading import read_examples
from megatron_deberta.tasks.task import load_task
from megatron_deberta.tokenizer import load_tokenizer

SIDES = {
    "ours": partial(train_ours, engine_name="plain"),
    "ours_deepspeed": partial(train_ours, engine_name="deepspeed"),
    "group_by_length": partial(train_stock, strategy="group_by_length"),
    "random": partial(train_stock, strategy="random"),
}
VOCABULARY = 32128
LAYERS = 4


@dataclass(frozen=True)
class Case:
    """One task.

    Attributes:
        folder: of the task's files, in the folder of all tasks.
        examples: number of examples, chosen at random.
        batch_size: rows per optimizer step.
        required: speed that is required against each other side.
        goal: speed that is aimed at.
        passage_words: passages are joined until they have so many words; 0: as they are.
    """

    name: str
    task: str
    folder: str
    examples: int
    batch_size: int
    required: dict[str, float]
    goal: dict[str, float]
    passage_words: int = 0


_SPANS: dict[str, Any] = {
    "task": "policyqa",
    "folder": "qa",
    "batch_size": 8,
    "required": {"group_by_length": 1.35, "random": 1.35},
    "goal": {"group_by_length": 1.6, "random": 1.6},
}
CASES = {
    "sst2": Case(
        name="sst2",
        task="sst2",
        folder="glue/SST-2",
        examples=800,
        batch_size=32,
        required={"group_by_length": 1.0, "random": 1.2},
        goal={"group_by_length": 1.3, "random": 1.6},
    ),
    "policyqa": Case(name="policyqa", examples=200, **_SPANS),
    # Nearly all windows are full, as in tasks with passages of several pages.
    "passages": Case(name="passages", examples=8, passage_words=1200, **_SPANS),
}


def prepare(case: Case, data: Path, tokenizer_path: str, epochs: int, layers: int = LAYERS) -> Work:
    """Encode a random part of a task's training examples.

    Args:
        case: the task.
        data: folder of all tasks.
        tokenizer_path: the tokenizer.
        epochs: number of epochs.
        layers: of the model, which has base width.
    """
    task = load_task(case.task)
    examples = read_examples(task, str(data / case.folder), "train")
    order = np.random.default_rng(7).permutation(len(examples))
    chosen = [examples[i] for i in order[: case.examples]]
    if case.passage_words:
        others = iter([examples[i].text_pair or "" for i in order[case.examples :]])
        chosen = [join_passages(example, others, case.passage_words) for example in chosen]
    encoded = encode(task, chosen, load_tokenizer(tokenizer_path))
    model = ModelConfig(num_layers=layers, vocab_size=VOCABULARY)
    return Work(
        with_task_head(model, task.head, class_names(task), 0.1), encoded, case.batch_size, epochs
    )


def join_passages(example: Example, others: Iterator[str], words: int) -> Example:
    """Return an example whose passage goes on with others until it has so many words."""
    passage = example.text_pair or ""
    while len(passage.split()) < words:
        passage += " " + next(others)
    return replace(example, text_pair=passage)


def check(work: Work) -> float:
    """Return the largest relative difference of the losses of single rows without dropout.

    Raises:
        SystemExit: it is too large.
    """
    model = replace(work.model, hidden_dropout=0.0, attention_dropout=0.0, head_dropout=0.0)
    plain = replace(work, model=model)
    stock = STOCK[model.head](stock_config(model)).eval()
    ours = build_model(plain.run("plain"), single_process_groups(CPU)).module.eval()
    copy_from_stock(ours, stock, model)
    rows, theirs = TaskRows(model.head, work.rows, (1, 2), 0), Rows(work.rows, model.head)
    differences = []
    with torch.no_grad():
        # Single rows: transformers' loss of spans counts padding.
        for row in range(min(work.batch_size, 8)):
            number = np.array([row])
            loss = ours(rows.batch(number, number)).losses["task"].loss.item()
            expected = stock(**collate([theirs[row]])).loss.item()
            differences.append(abs(loss - expected) / expected)
    if max(differences) > 1e-5:
        raise SystemExit(f"losses differ by {max(differences):.2g}, more than 1e-5")
    return max(differences)


class Contender:
    """A side in its own process.

    Args:
        arguments: of Python: the program and its arguments.
        side: its name.
        root: checkout whose code it runs.
    """

    def __init__(self, arguments: list[str], side: str, root: Path = ROOT) -> None:
        command = [sys.executable, *arguments, "--side", side]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(torch.get_num_threads()), "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(root),
        }  # fmt: skip
        self._process = subprocess.Popen(
            command, cwd=root, env=environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self._side = side
        self.turns: list[dict[str, float]] = []

    def turn(self) -> None:
        """Let the side train one epoch."""
        assert self._process.stdin is not None
        self._read(lambda line: line == "ready")
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self.turns.append(json.loads(self._read(lambda line: line.startswith('{"'))))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _read(self, is_wanted: Any) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if is_wanted(line.strip()):
                return line.strip()
        raise SystemExit(f"{self._side}: ended with exit code {self._process.wait()}")


def measure(case: Case, work: Work, arguments: list[str]) -> dict[str, Any]:
    """Measure the sides of a case; return its row of results."""
    difference = check(work)
    contenders: dict[str, Contender] = {}
    try:
        for side in SIDES:
            program = ["-m", "benchmarks.step.finetune", case.name, *arguments]
            contenders[side] = Contender(program, side)
        for _ in range(work.epochs):
            for contender in contenders.values():
                contender.turn()
    finally:
        for contender in contenders.values():
            contender.close()
    sides = {
        name: describe(contender.turns, work.steps_per_epoch)
        for name, contender in contenders.items()
    }
    lengths = work.rows.lengths

    def speedup(key: str) -> dict[str, float]:
        return {name: sides[name][key] / sides["ours"][key] for name in case.required}

    return {
        "name": case.name,
        "layers": work.model.num_layers,
        "width": work.model.hidden_size,
        "vocab": work.model.vocab_size,
        "threads": torch.get_num_threads(),
        "batch_size": work.batch_size,
        "rows": work.rows.num_rows,
        "steps_per_epoch": work.steps_per_epoch,
        "epochs": work.epochs,
        "row_length": {"mean": float(lengths.mean()), "max": int(lengths.max())},
        "loss_difference": difference,
        "sides": sides,
        "speedup": speedup("seconds_per_step"),
        "cpu_speedup": speedup("cpu_seconds_per_step"),
        "required": case.required,
        "goal": case.goal,
    }


def describe(turns: list[dict[str, float]], steps: int) -> dict[str, Any]:
    """Return the results of a side from its epochs; the first is a warm-up."""
    counted = turns[1:] or turns
    last = counted[-1]

    def median(key: str) -> float:
        return statistics.median(turn[key] for turn in counted) / steps

    return {
        "seconds_per_step": median("seconds"),
        "cpu_seconds_per_step": median("cpu_seconds"),
        "tokens_per_batch": last["tokens"] / steps,
        "padding_per_batch": statistics.mean(t["places"] - t["tokens"] for t in counted) / steps,
        "peak_bytes": last["peak_bytes"],
        "all_seconds": [turn["seconds"] for turn in turns],
    }


def main() -> None:
    """Measure the chosen tasks, or run one side of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=CASES, help="tasks to measure")
    parser.add_argument("--data", type=Path, required=True, help="folder of the tasks' folders")
    parser.add_argument("--tokenizer", required=True, help="of at most 32,128 tokens")
    parser.add_argument("--examples", type=int, help="rows of an epoch come from so many examples")
    parser.add_argument("--epochs", type=int, default=4, help="turns; the first is not counted")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model")
    parser.add_argument(
        "--threads", type=int, default=2, help="of torch; 1 on a machine with other work"
    )
    parser.add_argument("--output", type=Path, default=Path("finetune_speed.json"))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.tasks:
        case = replace(CASES[name], examples=args.examples or CASES[name].examples)
        work = prepare(case, args.data, args.tokenizer, args.epochs, args.layers)
        if args.side:
            SIDES[args.side](work)
            return
        arguments = [
            f"--{key}={getattr(args, key)}" for key in ("epochs", "layers", "tokenizer", "threads")
        ]
        arguments += [f"--data={args.data.resolve()}", f"--examples={case.examples}"]
        row = measure(case, work, arguments)
        merge(args.output, row)
        print(json.dumps(row["speedup"]), flush=True)


def merge(output: Path, row: dict[str, Any]) -> None:
    """Write a row to the result file, replacing the one of the same name."""
    rows = [
        old for old in read_json(output, {"results": []})["results"] if old["name"] != row["name"]
    ]
    place = provenance() | {"accelerate": version("accelerate")}
    rows = sorted([*rows, row | place], key=lambda kept: list(CASES).index(kept["name"]))
    write_json(output, {"results": rows})


if __name__ == "__main__":
    main()
