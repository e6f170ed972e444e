"""Compare what ``megatron-deberta plan`` counts with dry runs of real ranks of a 256-rank grid.

    python benchmarks/plan.py tiny --output benchmarks/results/offline/plan_tiny.json
    python benchmarks/plan.py 1.5b --output benchmarks/results/offline/plan.json

Every distinct kind of rank is built and run alone, with torch's fake process group: the first and
the last rank of a layer (the last holds an uneven part of the vocabulary), with and without
sequence parallelism, every recomputation policy and, of the tiny model, DeepSpeed's real engine at
every ZeRO stage. Parameters, FLOPs and collectives must be equal, memory within 10 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.planning.ranks import (  # noqa: E402
    WORLD_SIZE,
    DryRun,
    dry_run,
    engine_step,
    reference_extra,
)
from benchmarks.provenance import provenance  # noqa: E402
from megatron_deberta.config import RunConfig, load_config  # noqa: E402
from megatron_deberta.planning.traffic import (  # noqa: E402
    Traffic,
    data_parallel_traffic,
    tensor_parallel_traffic,
)
from megatron_deberta.planning.work import masked_tokens, rank_flops  # noqa: E402
from megatron_deberta.train.memory import estimate_memory, local_parameters  # noqa: E402

SPLIT = ("parallel.tensor_parallel_size=4",)
SEQUENCE = (*SPLIT, "parallel.sequence_parallel=true")
# Uneven: 1,000 tokens over 4 ranks are 3 x 256 and 232. Wide enough that parts beside the
# activations do not decide the memory.
TINY = (
    "model.vocab_size=1000", "model.conv_kernel_size=3", "model.hidden_size=128",
    "model.ffn_hidden_size=512", "model.num_layers=4", "train.micro_batch_size=8",
    "precision.dtype=bf16",
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
            "model.absolute_positions=input", "model.conv_kernel_size=0",
        ),
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
}  # fmt: skip
ENGINES = {
    f"ZeRO-{stage}, {dtype}, TP {tp_size}": (
        f"precision.zero_stage={stage}", f"precision.dtype={dtype}",
        f"parallel.tensor_parallel_size={tp_size}",
        f"train.global_batch_size={2 * 8 * WORLD_SIZE // tp_size}",
        "precision.initial_loss_scale_power=0",
    )
    for stage, dtype, tp_size in (
        (0, "fp32", 1), (1, "fp32", 1), (1, "fp16", 4), (1, "bf16", 1), (2, "fp16", 4),
        (2, "bf16", 1), (3, "fp16", 1), (3, "bf16", 4),
    )
}  # fmt: skip
"""Two micro batches a step, so that stages which reduce after each are told apart."""


def counted(traffic: Iterable[Traffic]) -> dict[str, dict[str, int]]:
    """The plan's collectives in the form of a dry run's."""
    calls: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for part in traffic:
        key = f"{part.group} {part.kind}"
        calls[key] += part.calls
        num_bytes[key] += part.num_bytes
    return {key: {"calls": calls[key], "bytes": num_bytes[key]} for key in sorted(calls)}


def planned(config: RunConfig) -> dict[str, Any]:
    """What the plan says of a micro batch of any rank."""
    flops, length = rank_flops(config), config.data.sequence_length
    tokens, tp_size = (
        config.train.micro_batch_size * length,
        config.parallel.tensor_parallel_size,
    )
    layers, decoder = reference_extra(config.model, length, masked_tokens(config) / tokens)
    # The reference backend computes more than is needed; the plan does not count that.
    extra = tokens * (layers + decoder) / tp_size
    again = tokens * layers / tp_size if config.parallel.recompute == "full" else 0.0
    memory = estimate_memory(config, WORLD_SIZE // tp_size, attention="chunked")
    return {
        "parameters": local_parameters(config.model, tp_size),
        "flops": flops.training + flops.recomputed + 3 * extra + again,
        "collectives": counted(tensor_parallel_traffic(config, 1, device_type="cuda")),
        "peak_bytes": memory.activations + memory.vocabulary + memory.workspace + memory.kernels,
    }


def found(run: DryRun) -> dict[str, Any]:
    """A dry run in the form of ``planned``."""
    return {
        "parameters": run.parameters,
        "flops": run.flops,
        "collectives": run.collectives,
        "peak_bytes": run.peak_bytes,
    }


def compare_models(name: str) -> list[dict[str, Any]]:
    """One row for every case and kind of rank."""
    rows = []
    for case, overrides in CASES[name].items():
        common = TINY if name == "tiny" else LARGE
        config = load_config(ROOT / "configs/models" / f"{name}.yaml", [*common, *overrides])
        for rank in (0, WORLD_SIZE - 1):
            begin = time.perf_counter()
            # Memory is the same on every rank of a layer, and slow to track.
            run = dry_run(config, rank, memory=rank == WORLD_SIZE - 1)
            rows.append(
                {
                    "case": case,
                    "rank": rank,
                    "vocabulary_rows": run.vocabulary_rows,
                    "planned": planned(config),
                    "found": found(run),
                    "seconds": round(time.perf_counter() - begin, 1),
                }
            )
            _say(rows[-1])
    return rows


def compare_engines() -> list[dict[str, Any]]:
    """One row for every ZeRO stage: DeepSpeed's own step in real memory."""
    rows = []
    for case, overrides in ENGINES.items():
        config = load_config(ROOT / "configs/models/tiny.yaml", [*TINY, *overrides])
        tp_size = config.parallel.tensor_parallel_size
        plan = counted(data_parallel_traffic(config, WORLD_SIZE // tp_size, 2))
        seen = engine_step(config, WORLD_SIZE - 1)
        data = {key: value for key, value in seen.items() if key.startswith("data")}
        rows.append({"case": case, "planned": plan, "found": data})
        _say(rows[-1])
    return rows


def _say(row: dict[str, Any]) -> None:
    print(json.dumps(row), file=sys.stderr, flush=True)


def main() -> int:
    """Compare and write."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=tuple(CASES))
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    result: dict[str, Any] = {"provenance": provenance(), "world_size": WORLD_SIZE}
    result["ranks"] = compare_models(args.model)
    if args.model == "tiny":
        result["engines"] = compare_engines()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
