"""One CPU pretraining step against Hugging Face's DebertaV2ForMaskedLM, same work, same run.

Both sides get the same architecture, weights, batch and masks, fp32, dropout 0.1, torch's fused
AdamW, two threads and 2,048 tokens a step. Correctness first: without dropout and without the
mask decoder both must give the same loss. Then steps alternate between the two (the machine's
load changes), and the ratio is that of the medians. Peak memory is measured in processes of
their own.

    python benchmarks/cpu_step.py --output benchmarks/results/cpu/step.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import DebertaV2ForMaskedLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.provenance import provenance  # noqa: E402
from megatron_deberta.config.schema import ModelConfig, RunConfig  # noqa: E402
from megatron_deberta.model import DropoutSeeds  # noqa: E402
from megatron_deberta.parallel.topology import single_process_groups  # noqa: E402
from megatron_deberta.sharding import build_model  # noqa: E402
from tests.support.memory import peak_resident_bytes  # noqa: E402
from tests.support.stock_weights import copy_from_stock, stock_config  # noqa: E402

TOKENS = 2048


@dataclass(frozen=True)
class Case:
    """What is measured; ``target`` is the speed-up to reach."""

    name: str
    layers: int
    vocab: int
    length: int
    dtype: str = "fp32"
    target: float | None = None


CASES = (
    Case("12 layers, 128K", 12, 128100, 512, target=1.7),
    Case("12 layers, 32K", 12, 32000, 512, target=1.35),
    Case("4 layers, 128K", 4, 128100, 512, target=2.5),
    Case("12 layers, 128K, N=128", 12, 128100, 128),
    Case("12 layers, 128K, bf16", 12, 128100, 512, dtype="bf16"),
)


def model_config(case: Case) -> ModelConfig:
    """Base width with the case's depth and vocabulary."""
    return ModelConfig(num_layers=case.layers, vocab_size=case.vocab)


def make_batch(case: Case) -> dict[str, torch.Tensor]:
    """Rows of random tokens, 15 % of them masked: 80 % [MASK], the rest kept or random."""
    generator = torch.Generator().manual_seed(7)
    rows, count = TOKENS // case.length, round(0.15 * case.length)
    original = torch.randint(5, case.vocab - 200, (rows, case.length), generator=generator)
    order = torch.rand(rows, case.length, generator=generator).argsort(1)
    picked = order[:, :count].sort(1).values
    labels = original.gather(1, picked)
    ids = original.scatter(1, picked, case.vocab - 100)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return {"input_ids": ids, "attention_mask": mask, "masked_positions": picked, "labels": labels}


class Ours:
    """This project's model and step."""

    def __init__(self, case: Case, *, mask_decoder: bool = True, dropout: float = 0.1) -> None:
        config = replace(model_config(case), hidden_dropout=dropout, attention_dropout=dropout)
        if not mask_decoder:
            config = replace(config, mask_decoder_passes=0, absolute_positions="none")
        groups = single_process_groups(torch.device("cpu"))
        self.model = build_model(RunConfig(model=config), groups).module
        self.batch = make_batch(case)
        self.step_number = 0

    def prepare(self, dtype: torch.dtype) -> None:
        """Cast, and make the optimizer."""
        self.model.to(dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def loss(self) -> torch.Tensor:
        """Mean loss of a masked token."""
        self.step_number += 1
        rows = torch.arange(self.batch["input_ids"].size(0))
        seeds = DropoutSeeds(1, self.step_number, rows)
        total, _ = self.model(**self.batch, seeds=seeds)
        return total / self.batch["labels"].numel()


class HuggingFace:
    """transformers' model with its own step."""

    def __init__(self, case: Case, *, dropout: float = 0.1) -> None:
        config = stock_config(
            replace(model_config(case), mask_decoder_passes=0, absolute_positions="none")
        )
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = dropout
        self.model = DebertaV2ForMaskedLM(config)
        batch = make_batch(case)
        self.ids, self.mask = batch["input_ids"], batch["attention_mask"].long()
        self.labels = torch.full_like(self.ids, -100)
        self.labels.scatter_(1, batch["masked_positions"], batch["labels"])

    prepare = Ours.prepare

    def loss(self) -> torch.Tensor:
        """Mean loss of a masked token."""
        loss: torch.Tensor = self.model(self.ids, self.mask, labels=self.labels).loss
        return loss


def step(side: Any) -> float:
    """Seconds of one whole step."""
    start = time.perf_counter()
    side.loss().backward()
    side.optimizer.step()
    side.optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - start


def check(case: Case) -> float:
    """Relative difference of the two losses without dropout and mask decoder."""
    small = replace(case, layers=2, dtype="fp32")
    ours, theirs = Ours(small, mask_decoder=False, dropout=0.0), HuggingFace(small, dropout=0.0)
    copy_from_stock(ours.model, theirs.model)
    with torch.no_grad():
        mine, stock = ours.loss().item(), theirs.loss().item()
    difference = abs(mine - stock) / stock
    if difference > 1e-5:
        raise SystemExit(f"losses differ: ours {mine}, transformers {stock}")
    return difference


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Alternate steps of both sides."""
    difference = check(case)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
    sides = [Ours(case), HuggingFace(case)]
    for side in sides:
        side.prepare(dtype)
        step(side)
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for side, kept in zip(sides, times, strict=True):
            kept.append(step(side))
    ours, theirs = (statistics.median(kept) for kept in times)
    return {
        **asdict(case),
        "loss_difference": difference,
        "ours_seconds": ours,
        "huggingface_seconds": theirs,
        "speedup": theirs / ours,
        "ours_all": times[0],
        "huggingface_all": times[1],
    }


def peak_memory(case: Case, side: str) -> int:
    """Peak resident bytes of two steps in a process of its own."""
    command = [sys.executable, __file__, "--peak", side, "--case", case.name]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(output.strip().splitlines()[-1])


def run_peak(case: Case, side: str) -> None:
    """Two steps of one side, then print this process's peak resident bytes."""
    work: Any = Ours(case) if side == "ours" else HuggingFace(case)
    work.prepare(torch.float32 if case.dtype == "fp32" else torch.bfloat16)
    for _ in range(2):
        step(work)
    print(peak_resident_bytes())


def write(output: Path, result: dict[str, Any]) -> None:
    """Put a case into the result file in place of an older one of its name."""
    rows = json.loads(output.read_text())["results"] if output.exists() else []
    rows = [row for row in rows if row["name"] != result["name"]] + [{**result, **provenance()}]
    order = [case.name for case in CASES]
    rows.sort(key=lambda row: order.index(row["name"]))
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {"tokens": TOKENS, "threads": 2, "results": rows}
    output.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Measure the chosen cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps a side (default 5)")
    parser.add_argument("--case", help="only the case of this name")
    parser.add_argument("--peak", choices=["ours", "huggingface"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(2)
    cases = [case for case in CASES if args.case in (None, case.name)]
    if args.peak:
        run_peak(cases[0], args.peak)
        return
    for case in cases:
        result = measure(case, args.repeats)
        for side in ("ours", "huggingface"):
            result[f"{side}_peak_bytes"] = peak_memory(case, side)
        print(
            f"{case.name:26} ours {result['ours_seconds']:6.2f} s  transformers "
            f"{result['huggingface_seconds']:6.2f} s  {result['speedup']:.2f}x  peak memory "
            f"{result['ours_peak_bytes'] / 2**30:.1f} / "
            f"{result['huggingface_peak_bytes'] / 2**30:.1f} GiB",
            flush=True,
        )
        if args.output:
            write(args.output, result)


if __name__ == "__main__":
    main()
