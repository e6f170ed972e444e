"""Fine-tuning on packed rows against padded rows on a CPU: speed of forward and backward passes.

Batches of tasks' real row lengths, of random rows and of rows of similar length; both kinds take
turns, dropout on, and the ratio is that of the medians. Without dropout, the losses must be equal.
STS-B's pairs stand for MNLI's, which have similar lengths.

    python -m benchmarks.step.packed_rows sst2 stsb policyqa wnut17 quail --data tasks \
        --tokenizer tokenizer --output benchmarks/results/cpu/packed_rows.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import provenance
from benchmarks.step.finetune import CASES, Case, prepare
from benchmarks.step.finetune_sides import CPU, Work
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.data.batch import TaskBatch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.evaluate.splits import TaskRows
from megatron_deberta.model import DropoutSeeds
from megatron_deberta.tasks.encoded import EncodedDataset

NUM_BATCHES = 6
ORDERS = {"random rows": False, "rows of similar length": True}
TASKS = CASES | {
    name: Case(name, name, folder, examples, batch_size, {}, {})
    for name, folder, examples, batch_size in (
        ("stsb", "glue/STS-B", 800, 32),
        ("wnut17", "ner", 800, 32),
        ("quail", "choice", 200, 8),
    )
}


def batches(
    model: ModelConfig, encoded: EncodedDataset, size: int, by_length: bool
) -> list[dict[str, TaskBatch]]:
    """Return batches of the same rows, padded and packed."""
    rows = TaskRows(model.head, encoded, (1, 2), 0)
    order = np.random.default_rng(3).permutation(rows.num_samples)
    if by_length:
        order = np.argsort(rows.lengths, kind="stable")
    chosen = order[: len(order) // size * size].reshape(-1, size)
    chosen = chosen[np.linspace(0, len(chosen) - 1, NUM_BATCHES).astype(int)]
    kinds = {"padded": rows, "packed": replace(rows, pack=True)}
    return [{name: kind.batch(one, one) for name, kind in kinds.items()} for one in chosen]


def seconds(module: nn.Module, batch: TaskBatch) -> float:
    """Return the time of a forward and a backward pass."""
    start = time.perf_counter()
    module(batch, DropoutSeeds(1, 2, batch.dropout_keys)).losses["task"].loss.backward()
    return time.perf_counter() - start


def places(batch: TaskBatch) -> int:
    """Return the number of computed places."""
    packing = batch.packing
    return (batch.inputs.input_ids if packing is None else packing.tokens).numel()


def compare(module: nn.Module, pairs: list[dict[str, TaskBatch]], turns: int) -> dict[str, Any]:
    """Measure both kinds in turn."""
    times: dict[str, list[float]] = {"padded": [], "packed": []}
    for turn in range(turns + 1):
        total = dict.fromkeys(times, 0.0)
        for number, pair in enumerate(pairs):
            for kind in sorted(pair, reverse=bool((number + turn) % 2)):
                total[kind] += seconds(module, pair[kind])
        # The first turn warms up.
        for kind in times if turn else ():
            times[kind].append(total[kind])
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    tokens = sum(int(pair["padded"].inputs.is_token.sum()) for pair in pairs)
    return {
        "tokens": tokens,
        "places": {kind: sum(places(pair[kind]) for pair in pairs) for kind in times},
        "seconds": times,
        "speedup": medians["padded"] / medians["packed"],
    }


def largest_difference(work: Work, pairs: list[dict[str, TaskBatch]]) -> float:
    """Return the largest relative difference of the losses without dropout.

    Raises:
        SystemExit: it is above 1e-5.
    """
    plain = replace(work.model, hidden_dropout=0.0, attention_dropout=0.0, head_dropout=0.0)
    module = model_of(replace(work, model=plain))
    found = []
    with torch.no_grad():
        for pair in pairs:
            padded, packed = (module(pair[kind])[0].item() for kind in ("padded", "packed"))
            found.append(abs(packed / padded - 1))
    if max(found) > 1e-5:
        raise SystemExit(f"losses differ by {max(found):.2g}, more than 1e-5")
    return max(found)


def model_of(work: Work) -> nn.Module:
    """Build the model."""
    return build_model(work.run("plain"), single_process_groups(CPU)).module


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tasks", nargs="+", choices=tuple(TASKS))
    parser.add_argument("--data", type=Path, required=True, help="folder of all tasks")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    record: dict[str, Any] = {"layers": args.layers, "tasks": {}, "provenance": provenance()}
    for task in args.tasks:
        work = prepare(TASKS[task], args.data, args.tokenizer, 1, args.layers)
        found = record["tasks"][task] = {"head": work.model.head, "rows": work.batch_size}
        for name, by_length in ORDERS.items():
            pairs = batches(work.model, work.rows, work.batch_size, by_length)
            result = compare(model_of(work).train(), pairs, args.turns)
            found[name] = {**result, "difference": largest_difference(work, pairs)}
            print(task, name, {key: found[name][key] for key in ("places", "speedup")}, flush=True)
    write_json(args.output, record)


if __name__ == "__main__":
    main()
