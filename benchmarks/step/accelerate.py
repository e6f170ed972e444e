"""Speed and peak memory of ``hf.use_fast_attention`` on a CPU against the stock model.

A sequence classifier of base width with four layers is fine-tuned with transformers' ``Trainer``
(dropout 0.1), and computes logits, on rows of a real task with their padding and on full rows.
Stock and accelerated model are processes of their own, so that peak memory can be measured; they
take turns on the same batches, and speeds are ratios of medians, by wall-clock and by processor
time. First, without dropout, both must have the same logits and the same loss.

    python -m benchmarks.step.accelerate --data tasks --tokenizer tokenizer \
        --output benchmarks/results/cpu/accelerate.json

``Trainer`` needs the package ``accelerate``, which this project does not.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity

from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import provenance, version
from benchmarks.lib.stock import stock_config
from benchmarks.step.finetune import CASES as TASKS
from benchmarks.step.finetune import Contender, describe, prepare
from benchmarks.step.finetune_sides import TurnCallback, Turns, collate
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.hf import use_fast_attention

SIDES = ("accelerated", "stock")
PROFILED = 7
TASK = "policyqa"


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        train: fine-tuning steps; False: forward passes without gradients.
        batch_size: rows per batch.
        length: largest number of tokens per row.
        full: all rows have this length.
        required: speed that is required against the stock model.
        goal: speed that is aimed at.
    """

    name: str
    train: bool
    batch_size: int
    length: int
    full: bool
    required: float
    goal: float


CASES = {
    case.name: case
    for case in (
        Case("train_spread", True, 8, 256, False, 1.45, 1.8),
        Case("train_full", True, 4, 512, True, 1.5, 2.0),
        Case("infer_spread", False, 8, 256, False, 1.3, 1.6),
        Case("infer_full", False, 4, 512, True, 1.3, 1.6),
    )
}


def rows_of(case: Case, steps: int, data: Path, tokenizer: str) -> list[dict[str, Tensor]]:
    """Return the rows of one turn, with arbitrary labels."""
    count = case.batch_size * steps
    generator = np.random.default_rng(7)
    if case.full:
        ids = list(generator.integers(5, 32000, (count, case.length)))
    else:
        encoded = prepare(TASKS[TASK], data, tokenizer, 1).rows
        chosen = generator.permutation(encoded.num_rows)[:count]
        ids = [encoded.input_ids[encoded.row(i)][: case.length] for i in chosen]
    return [
        {"input_ids": torch.from_numpy(row.astype("int64")), "labels": torch.tensor(number % 2)}
        for number, row in enumerate(ids)
    ]


def build(layers: int, dropout: float = 0.1) -> Any:
    """Return the stock classifier with the same random weights in every process."""
    model = ModelConfig(
        num_layers=layers, vocab_size=32128, hidden_dropout=dropout, attention_dropout=dropout
    )
    torch.manual_seed(0)
    return transformers.DebertaV2ForSequenceClassification(stock_config(model))


def check(case: Case, rows: list[dict[str, Tensor]], layers: int) -> dict[str, float]:
    """Return the largest differences of logits and loss without dropout.

    Raises:
        SystemExit: one is too large.
    """
    model, batch = build(layers, 0.0).eval(), collate(rows[: case.batch_size])
    with torch.no_grad():
        stock = model(**batch)
        with use_fast_attention(model):
            ours = model(**batch)
    difference = {
        name: float((ours[name] - stock[name]).abs().max() / stock[name].abs().max())
        for name in ("logits", "loss")
    }
    if max(difference.values()) > 1e-5:
        raise SystemExit(f"{case.name}: results differ: {difference}")
    return difference


def train(model: Any, rows: list[dict[str, Tensor]], batch_size: int, turns: int) -> None:
    """Fine-tune with ``Trainer``, one epoch per turn."""
    clock = Turns()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=batch_size, num_train_epochs=turns,
            learning_rate=2e-5, weight_decay=0.01, logging_strategy="no", save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        transformers.Trainer(
            model,
            arguments,
            train_dataset=rows,  # type: ignore[arg-type]
            data_collator=lambda chosen: collate(chosen, clock),
            callbacks=[TurnCallback(clock)],
        ).train()


def infer(model: Any, rows: list[dict[str, Tensor]], batch_size: int, turns: int) -> None:
    """Compute the logits of all rows, once per turn."""
    clock = Turns()
    model.eval()
    for _ in range(turns):
        clock.wait()
        with torch.no_grad():
            for first in range(0, len(rows), batch_size):
                model(**collate(rows[first : first + batch_size], clock))
        clock.report()


def run_side(case: Case, side: str, rows: list[dict[str, Tensor]], args: Any) -> None:
    """Take part in the comparison as one side, in this process."""
    model = build(args.layers)
    if side == "accelerated":
        use_fast_attention(model)
    (train if case.train else infer)(model, rows, case.batch_size, args.turns)


def profile(case: Case, rows: list[dict[str, Tensor]], layers: int) -> dict[str, Any]:
    """Return the self time of operators in a forward and backward pass, in seconds, by side.

    The ``PROFILED`` longest operators are listed, the others are summed as ``rest``.
    """
    found: dict[str, dict[str, float]] = {}
    batch = collate(rows[: case.batch_size])
    for side in SIDES:
        model = build(layers)
        if side == "accelerated":
            use_fast_attention(model)
        model(**batch).loss.backward()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
            model(**batch).loss.backward()
        seconds = {event.key: event.self_cpu_time_total / 1e6 for event in profiler.key_averages()}
        longest = sorted(seconds, key=lambda name: -seconds[name])[:PROFILED]
        rest = sum(seconds.values()) - sum(seconds[name] for name in longest)
        found[side] = {name: seconds[name] for name in longest} | {"rest": rest}
    return found


def measure(case: Case, arguments: list[str], args: Any) -> dict[str, Any]:
    """Let both sides take turns; return the case's row of results."""
    rows = rows_of(case, args.steps, args.data, args.tokenizer)
    difference = check(case, rows, args.layers)
    sides: dict[str, Contender] = {}
    program = ["-m", "benchmarks.step.accelerate", *arguments, f"--case={case.name}"]
    try:
        for side in SIDES:
            sides[side] = Contender(program, side)
        for _ in range(args.turns):
            for contender in sides.values():
                contender.turn()
    finally:
        for contender in sides.values():
            contender.close()
    results = {name: describe(side.turns, args.steps) for name, side in sides.items()}
    ours, stock = (results[name] for name in SIDES)
    lengths = [len(row["input_ids"]) for row in rows]
    speedup = stock["seconds_per_step"] / ours["seconds_per_step"]
    return {
        **asdict(case),
        "layers": args.layers,
        "threads": torch.get_num_threads(),
        "row_length": {"mean": sum(lengths) / len(lengths), "max": max(lengths)},
        "difference": difference,
        "sides": results,
        "speedup": speedup,
        "profile": profile(case, rows, args.layers) if case.train and speedup < case.goal else {},
        "cpu_speedup": stock["cpu_seconds_per_step"] / ours["cpu_seconds_per_step"],
        "memory": ours["peak_bytes"] / stock["peak_bytes"],
    }


def main() -> None:
    """Measure the cases, or run one side of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--data", type=Path, required=True, help="folder of the tasks' folders")
    parser.add_argument("--tokenizer", required=True, help="of at most 32,128 tokens")
    parser.add_argument("--turns", type=int, default=6, help="the first is not counted")
    parser.add_argument("--steps", type=int, default=3, help="per turn")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--output", type=Path, default=Path("accelerate.json"))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cases = [CASES[name] for name in args.case or CASES]
    if args.side:
        run_side(
            cases[0], args.side, rows_of(cases[0], args.steps, args.data, args.tokenizer), args
        )
        return
    names = ("turns", "steps", "layers", "threads", "tokenizer")
    arguments = [f"--{name}={getattr(args, name)}" for name in names]
    arguments.append(f"--data={args.data.resolve()}")
    kept = {
        row["name"]: row
        for row in (json.loads(args.output.read_text())["results"] if args.output.exists() else [])
    }
    for case in cases:
        row = measure(case, arguments, args)
        kept[case.name] = row | provenance() | {"accelerate": version("accelerate")}
        write_json(args.output, {"results": [kept[name] for name in CASES if name in kept]})
        print(case.name, *(f"{k} {row[k]:.2f}" for k in ("speedup", "cpu_speedup", "memory")))


if __name__ == "__main__":
    main()
