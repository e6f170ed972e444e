"""Search of the quickstart's recipe: equal numbers of tokens, one change per row.

Each recipe is a ``megatron-deberta pretrain`` of one process on the files of a quickstart, then
an export and ``tools/fill_held_out.py``. Finished recipes are kept when the program starts again.

    launch/quickstart.sh
    python -m benchmarks.learn.quickstart_recipes --quickstart runs/quickstart \
        --runs runs/recipes --output benchmarks/results/cpu/quickstart_recipes.json
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import ROOT, program_environment, provenance
from megatron_deberta.observe.metrics import read_metrics

PRIOR_WEIGHT = 0.6
CONFIG = "configs/runs/quickstart.yaml"
COMMON = (
    "parallel.tensor_parallel_size=1", "precision.dtype=bf16", "train.steps=300",
    "train.eval_every=300", "checkpoint.save_every=300", "model.num_layers=4",
    "model.hidden_size=256", "model.num_heads=4", "model.ffn_hidden_size=1024",
    "objective.mask_probability=0.15", "model.mask_decoder_passes=2",
)  # fmt: skip
WIDE = (
    "model.num_layers=2", "model.hidden_size=384", "model.num_heads=6",
    "model.ffn_hidden_size=1536",
)  # fmt: skip
THOUSAND = (
    *WIDE, "objective.mask_probability=0.3", "model.conv_init=normal", "train.steps=1000",
    "train.eval_every=500", "checkpoint.save_every=1000",
)  # fmt: skip
# Config overrides by name; every recipe sees 0.6 million tokens unless its name has other steps.
RECIPES: dict[str, tuple[str, ...]] = {
    "4 layers of 256, length 64": (),
    "length 128": (
        "data.sequence_length=128", "train.global_batch_size=16", "train.micro_batch_size=16",
    ),
    "fp32": ("precision.dtype=fp32",),
    "half the batch": (
        "train.global_batch_size=16", "train.micro_batch_size=16", "train.steps=600",
    ),
    "rate 1e-3": ("optimizer.learning_rate=1e-3",),
    "initial range 0.04": ("model.initializer_range=0.04",),
    "no mask decoder": ("model.mask_decoder_passes=0", "model.absolute_positions=none"),
    "no convolution": ("model.conv_kernel_size=null",),
    "mask 30 %": ("objective.mask_probability=0.3",),
    "2 layers of 384": WIDE,
    "2 layers of 384, mask 30 %": (*WIDE, "objective.mask_probability=0.3"),
    "the last, 1,000 steps": THOUSAND,
    "1,000 steps, rate 3e-3": (*THOUSAND, "optimizer.learning_rate=3e-3"),
    "2,000 steps of half the batch": (
        *THOUSAND, "train.global_batch_size=16", "train.micro_batch_size=16", "train.steps=2000",
        "optimizer.warmup_steps=100", "train.eval_every=2000",
    ),
    "1,000 steps, convolution of 5 tokens": (*THOUSAND, "model.conv_kernel_size=5"),
    "1,000 steps, one pass of the mask decoder": (*THOUSAND, "model.mask_decoder_passes=1"),
    "1,700 steps, one pass": (
        *THOUSAND, "model.mask_decoder_passes=1", "model.conv_init=microsoft", "train.steps=1700",
        "train.eval_every=1700", "checkpoint.save_every=1700",
    ),
}  # fmt: skip


def train(quickstart: Path, folder: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Train and export one recipe and fill 400 held-out words; return its row."""
    parts = {part: f"{quickstart}/shards/{part}_text_document" for part in ("train", "validation")}
    _run(
        "-m", "megatron_deberta", "pretrain", CONFIG, f"train.run_dir={folder}",
        f"tokenizer.path={quickstart}/tokenizer", *(f"data.{k}=[{v}]" for k, v in parts.items()),
        *COMMON, *overrides,
    )  # fmt: skip
    exported = f"{folder}/exported"
    shutil.rmtree(exported, ignore_errors=True)
    _run(
        *("-m", "megatron_deberta", "convert", "--checkpoint", f"{folder}"),
        *("--to", "hf", "--output", exported),
    )
    held_out = map(str, sorted((quickstart / "text/validation").glob("part-*.jsonl")))
    command = ["tools/fill_held_out.py", "--model", exported, "--sentences", "400", "--input"]
    command += held_out
    plain = _run(*command)
    prior = ("--prior-weight", str(PRIOR_WEIGHT), "--prior-shards", parts["train"])
    weighted = _run(*command, *prior)
    records = list(read_metrics(folder / "metrics.jsonl"))
    last = [r for r in records if r["kind"] == "validation" and "loss" in r][-1]
    unigram = next(r["unigram_loss"] for r in records if "unigram_loss" in r)
    return {
        "overrides": list(overrides),
        "loss": last["loss"],
        "unigram_loss": unigram,
        "accuracy": last["masked_accuracy"],
        "right_of_400": _number("right in first place", plain),
        "most_frequent_of_400": _number("most frequent answer", plain),
        "with_prior_weight": {
            "right_of_400": _number("right in first place", weighted),
            "most_frequent_of_400": _number("most frequent answer", weighted),
        },
    }


def _number(name: str, table: str) -> int:
    found = re.search(rf"{name} +(?:'\w+', )?(\d+)", table)
    if found is None:
        raise SystemExit(f"no {name!r} in the output of fill_held_out.py:\n{table}")
    return int(found[1])


def _run(*command: str) -> str:
    environment = program_environment(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {result.returncode}\n{result.stdout}")
    return result.stdout


def main() -> None:
    """Train the recipes that the result file lacks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quickstart", type=Path, required=True, help="folder of a quickstart")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--output", type=Path, required=True, help="result file")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="only this one")
    args = parser.parse_args()
    for name in args.recipe or RECIPES:
        record = read_json(args.output, {"recipes": {}})
        if name not in record["recipes"]:
            folder = args.runs.resolve() / re.sub(r"\W+", "-", name)
            row = train(args.quickstart.resolve(), folder, RECIPES[name])
            record = read_json(args.output, {"recipes": {}})
            record = {**provenance(), "common": list(COMMON), "recipes": record["recipes"]}
            record["recipes"][name] = row
            write_json(args.output, record)


if __name__ == "__main__":
    main()
