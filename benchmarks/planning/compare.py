"""Compare the counts of ``megatron-deberta plan`` with dry runs of ranks of a 256-rank grid.

    python -m benchmarks.planning.compare tiny --output benchmarks/results/offline/plan_tiny.json
    python -m benchmarks.planning.compare 1.5b --output benchmarks/results/offline/plan.json
    python -m benchmarks.planning.compare 1.5b_finetuning \
        --output benchmarks/results/offline/plan_finetuning.json

Each kind of rank is built and run alone, with torch's fake process group: the first and the last
rank of a layer (the last holds an uneven part of the vocabulary), with and without sequence
parallelism, every recomputation policy and, for the tiny model, DeepSpeed's engine at every ZeRO
stage. Parameters, FLOPs and collectives must be equal, memory within 10 %. Cases in an existing
output file are skipped.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import ROOT, provenance, source_digest
from benchmarks.planning.ranks import WORLD_SIZE, dry_run, engine_step, peak_bytes, reference_extra
from megatron_deberta.config import RunConfig, load_config
from megatron_deberta.planning.memory import (
    estimate_memory,
    local_parameters,
    masked_tokens,
    micro_batch_rows,
)
from megatron_deberta.planning.step import (
    Traffic,
    data_parallel_traffic,
    rank_flops,
    tensor_parallel_traffic,
)

SPLIT = ("parallel.tensor_parallel_size=4",)
SEQUENCE = (*SPLIT, "parallel.sequence_parallel=true")
# Uneven: 1,000 tokens over 4 ranks are 3 x 256 and 232. Wide enough that activations dominate the
# memory.
TINY = (
    "model.vocab_size=1000", "model.conv_kernel_size=3", "model.hidden_size=128",
    "model.ffn_hidden_size=512", "model.num_layers=4", "train.micro_batch_size=8",
    "precision.dtype=bf16",
)  # fmt: skip
NO_DECODER = ("model.mask_decoder_passes=0", "model.absolute_positions=none")
CLASSES = (
    *NO_DECODER, "model.head=classification", "model.labels=[no,yes]", "finetune.task=sst2",
    "objective.name=classification",
)  # fmt: skip
SPANS = (*NO_DECODER, "model.head=spans", "objective.name=spans", "finetune.task=squad2")
CHOICES = (
    *NO_DECODER, "model.head=choices", "objective.name=choices", "finetune.task=race",
    "train.micro_batch_size=2",
)  # fmt: skip
# One DGX-2: 64 examples of MNLI, 48 questions of RACE with four choices.
MNLI = (
    *NO_DECODER, "model.head=classification", "model.labels=[no,maybe,yes]", "finetune.task=mnli",
    "objective.name=classification", "data.sequence_length=256", "parallel.recompute=selective",
)  # fmt: skip
RACE = (
    *CHOICES, "train.micro_batch_size=3", "data.sequence_length=320",
    "parallel.recompute=selective",
)  # fmt: skip
LARGE = ("train.micro_batch_size=4", "precision.dtype=fp16")
CASES: dict[str, dict[str, tuple[str, ...]]] = {
    "tiny": {
        "whole layers": (),
        "whole layers, selective": ("parallel.recompute=selective",),
        "whole layers, full": ("parallel.recompute=full",),
        "tensor parallel": SPLIT,
        "tensor parallel, full": (*SPLIT, "parallel.recompute=full"),
        "sequence parallel": SEQUENCE,
        "sequence parallel, selective": (*SEQUENCE, "parallel.recompute=selective"),
        "sequence parallel, full": (*SEQUENCE, "parallel.recompute=full"),
        "no vocabulary left": (*SPLIT, "model.vocab_size=130"),
        "RoBERTa, sequence parallel": (
            *SEQUENCE, "model.position_terms=none", "model.mask_decoder_passes=0",
            "model.absolute_positions=input", "model.conv_kernel_size=null",
        ),
        "classification": CLASSES,
        "classification, tensor parallel": (*CLASSES, *SPLIT),
        "classification, sequence parallel, selective": (
            *CLASSES, *SEQUENCE, "parallel.recompute=selective",
        ),
        "spans, sequence parallel, full": (*SPANS, *SEQUENCE, "parallel.recompute=full"),
        "choices, sequence parallel": (*CHOICES, *SEQUENCE),
    },
    "1.5b": {
        "whole layers, selective": ("parallel.recompute=selective",),
        "tensor parallel": ("parallel.tensor_parallel_size=8",),
        "sequence parallel": (
            "parallel.tensor_parallel_size=8", "parallel.sequence_parallel=true",
        ),
        "sequence parallel, full": (
            "parallel.tensor_parallel_size=8", "parallel.sequence_parallel=true",
            "parallel.recompute=full",
        ),
    },
    "1.5b_finetuning": {
        "MNLI": MNLI,
        "RACE": RACE,
        "RACE, tensor parallel": (*RACE, "parallel.tensor_parallel_size=8"),
    },
}  # fmt: skip
# Two micro batches per step, because some stages reduce gradients after each; small ones, because
# traffic between data-parallel ranks does not depend on their size.
ENGINES = {
    f"ZeRO-{stage}, {dtype}, TP {tp_size}": (
        f"parallel.zero_stage={stage}", f"precision.dtype={dtype}",
        f"parallel.tensor_parallel_size={tp_size}",
        f"train.global_batch_size={2 * WORLD_SIZE // tp_size}", "train.micro_batch_size=1",
        "data.sequence_length=16",
        "precision.initial_loss_scale_power=0",
    )
    for stage, dtype, tp_size in (
        (0, "fp32", 1), (1, "fp32", 1), (1, "fp16", 4), (1, "bf16", 1), (2, "fp16", 4),
        (2, "bf16", 1), (3, "fp16", 1), (3, "bf16", 4),
    )
}  # fmt: skip


def counted(traffic: Iterable[Traffic]) -> dict[str, dict[str, int]]:
    """Return the plan's collectives in the format of a dry run's."""
    calls: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for part in traffic:
        key = f"{part.group} {part.kind}"
        calls[key] += part.calls
        num_bytes[key] += part.num_bytes
    return {key: {"calls": calls[key], "bytes": num_bytes[key]} for key in sorted(calls)}


def planned(config: RunConfig) -> dict[str, Any]:
    """Return the plan's counts for a micro batch of any rank."""
    flops, length = rank_flops(config), config.data.sequence_length
    tokens, tp_size = micro_batch_rows(config) * length, config.parallel.tensor_parallel_size
    layers, decoder = reference_extra(config.model, length, masked_tokens(config) / tokens)
    # FLOPs of the reference backend that are not needed, which the plan does not count.
    extra = tokens * (layers + decoder) / tp_size
    again = tokens * layers / tp_size if config.parallel.recompute == "full" else 0.0
    return {
        "parameters": local_parameters(config),
        "flops": flops.training + flops.recomputed + 3 * extra + again,
        "collectives": counted(tensor_parallel_traffic(config, 1, device_type="cuda")),
    }


def compare_rank(config: RunConfig, rank: int) -> dict[str, Any]:
    """Compare parameters, FLOPs and collectives of one rank."""
    expected, run = planned(config), asdict(dry_run(config, rank))
    found = {key: run[key] for key in expected}
    return {"vocabulary_rows": run["vocabulary_rows"], "planned": expected, "found": found}


def compare_memory(config: RunConfig, rank: int) -> dict[str, Any]:
    """Compare the memory of a micro batch on one rank, without weights and gradients."""
    dp_size = WORLD_SIZE // config.parallel.tensor_parallel_size
    memory = estimate_memory(config, dp_size, attention="chunked")
    needed = memory.activations + memory.vocabulary + memory.workspace + memory.kernels
    return {"planned": needed, "found": peak_bytes(config, rank)}


def compare_engine(config: RunConfig, rank: int) -> dict[str, Any]:
    """Compare the collectives of DeepSpeed's step, with real tensors."""
    dp_size = WORLD_SIZE // config.parallel.tensor_parallel_size
    plan = counted(data_parallel_traffic(config, dp_size, 2))
    calls = engine_step(config, rank)
    data = {key: value for key, value in calls.items() if key.startswith("data")}
    return {"planned": plan, "found": data}


# Part of the result, case, run, rank and comparison function.
Job = tuple[str, str, RunConfig, int, Callable[[RunConfig, int], dict[str, Any]]]


def jobs(name: str) -> Iterator[Job]:
    """Yield all comparisons of a model."""
    file = ROOT / "configs/models" / f"{name.partition('_')[0]}.yaml"
    common, last = TINY if name == "tiny" else LARGE, WORLD_SIZE - 1
    for case, overrides in CASES[name].items():
        config = load_config(file, [*common, *overrides])
        for rank in (0, last):
            yield "ranks", case, config, rank, compare_rank
    for case, overrides in CASES[name].items():
        # Equal on all ranks of a layer.
        yield "memory", case, load_config(file, [*common, *overrides]), last, compare_memory
    for case, overrides in ENGINES.items() if name == "tiny" else ():
        yield "engines", case, load_config(file, [*common, *overrides]), last, compare_engine


def read_result(path: Path) -> dict[str, Any]:
    """Return the results of an earlier call with the same code, or an empty result."""
    sections: dict[str, Any] = {"ranks": [], "memory": [], "engines": []}
    empty = {"provenance": provenance(), "world_size": WORLD_SIZE, **sections}
    result: dict[str, Any] = read_json(path, empty)
    return result if result["provenance"]["source"] == source_digest() else empty


def main() -> int:
    """Run the comparisons that are not in the output file."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=tuple(CASES))
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    result = read_result(args.output)
    for part, case, config, rank, compare in jobs(args.model):
        if any((row["case"], row["rank"]) == (case, rank) for row in result[part]):
            continue
        row = {"case": case, "rank": rank, **compare(config, rank)}
        print(part, json.dumps(row), file=sys.stderr, flush=True)
        result[part].append(row)
        write_json(args.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
