"""Count the device synchronizations of an optimizer step, and the operators of its update.

DeepSpeed ZeRO-1 in bf16, four micro batches, on a CPU. Calls that would wait on a GPU are replaced
by ones that count themselves and the line of this project or of DeepSpeed that made them:
``synchronize`` of DeepSpeed's accelerator, and tensors read by the host (``item``, ``tolist``,
truth value, conversion to a number). Checks that the code makes on a CPU only are left out. Tensors
that are on the host on a GPU, too, are counted, so this is an upper bound.

    python -m benchmarks.step.synchronizations --output synchronizations.json
"""

from __future__ import annotations

import argparse
import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch

from benchmarks.gpu.parity import SMALL, make_batch, run_config
from benchmarks.lib.provenance import provenance
from benchmarks.step.operators import OperatorCount
from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.base import StepOutcome
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.model import ModelInputs
from megatron_deberta.train.step import TrainStep

MICRO_BATCHES = 4
# DeepSpeed's timer synchronizes from the third step on.
WARM_UP, STEPS = 3, 2
# Functions that return before they read anything on a GPU
CPU_ONLY = (
    "ops/arguments.py", "ops/dropout_bits.py, _mix32_", "ops/cross_entropy.py, _check_labels",
)  # fmt: skip
READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy")


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count the waits of the context, by function and calling line."""
    from deepspeed.accelerator import get_accelerator

    counts: Counter[str] = Counter()
    accelerator = type(get_accelerator())
    with ExitStack() as stack:
        for owner, name in [(accelerator, "synchronize"), *((torch.Tensor, x) for x in READS)]:
            stack.enter_context(
                mock.patch.object(owner, name, _counted(getattr(owner, name), name, counts))
            )
        yield counts


def _counted(function: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        for frame in reversed(traceback.extract_stack()[:-1]):
            parts = Path(frame.filename).parts
            package = next((x for x in ("megatron_deberta", "deepspeed") if x in parts), None)
            if package is not None:
                inside = "/".join(parts[len(parts) - parts[::-1].index(package) - 1 :])
                counts[f"{name} in {inside}, {frame.name}"] += 1
                break
        return function(*args, **kwargs)

    return call


class Counts(NamedTuple):
    """Counts of one step.

    Attributes:
        waits: by function and calling line.
        update: operators other than views that clipping and AdamW dispatch. They work on flat
            buffers, so their number does not grow with the model.
    """

    waits: dict[str, float]
    update: Counter[str]


def measure() -> Counts:
    """Count the waits of a step, and the operators of its update."""
    config = run_config(SMALL, "bf16", "chunked", "deepspeed")
    config = replace(config, train=replace(config.train, micro_batch_size=1))
    groups = single_process_groups(torch.device("cpu"))
    built = build_model(config, groups, torch.bfloat16)
    engine = build_engine(config, built.module, built.specs, groups)
    whole = make_batch(SMALL)
    tensors = (whole.masked_positions, whole.labels, whole.sample_index)
    batches = [
        Batch(
            ModelInputs(whole.inputs.input_ids[row], whole.inputs.is_token[row]),
            *(tensor[row] for tensor in tensors),
        )
        for row in (slice(number, number + 1) for number in range(MICRO_BATCHES))
    ]
    try:
        take = TrainStep(engine, config, groups)
        for step in range(WARM_UP):
            take(step, batches)
        with counting() as counts:
            for step in range(WARM_UP, WARM_UP + STEPS):
                take(step, batches)
        operators = OperatorCount()

        def step_counted(*arguments: Any) -> StepOutcome:
            with operators:
                return type(engine).step(engine, *arguments)

        with mock.patch.object(engine, "step", step_counted):
            take(WARM_UP + STEPS, batches)
        waits = {
            place: count / STEPS
            for place, count in counts.most_common()
            if not any(name in place for name in CPU_ONLY)
        }
        update = {n: count for n, count in operators.counts.items() if n.startswith("aten::")}
        return Counts(waits, Counter(update))
    finally:
        engine.destroy()


def main() -> None:
    """Count and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--before", type=Path, help="result of an older revision to add")
    args = parser.parse_args()
    places, update = measure()
    record: dict[str, Any] = {
        "micro_batches": MICRO_BATCHES,
        "per_step": sum(places.values()),
        "places": places,
        "update_operators": dict(update.most_common()),
        "provenance": provenance(),
    }
    if args.before:
        record["before"] = json.loads(args.before.read_text())
    print(json.dumps(record, indent=1))
    if args.output:
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
