"""Search of the quickstart's recipe: equal processor time, few changes per row.

Each recipe is trained by one process on the files of a quickstart, for as many steps as the
processor time of its steps allows. Judged are the validation loss, with the masks of the recipe,
and what does not depend on it: bits per byte of held-out text, one masked piece in seven, and 400
held-out words, exported and filled by ``tools/fill_held_out.py``. Finished recipes are kept when
the program starts again.

    launch/quickstart.sh
    python -m benchmarks.learn.quickstart_recipes --quickstart runs/quickstart \
        --runs runs/recipes --output benchmarks/results/cpu/quickstart_recipes.json
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import ROOT, program_environment, provenance
from megatron_deberta.observe.metrics import read_metrics

PRIOR_WEIGHT = 0.5
HELD_OUT_CHARACTERS = 60_000
CONFIG = "benchmarks/learn/recipes/baseline.yaml"
NARROW = ("model.ffn_hidden_size=384",)
MIDDLE = ("model.ffn_hidden_size=768",)
HALF_BATCH = ("train.global_batch_size=16", "train.micro_batch_size=16")
RECIPES: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "rate 1.4e-3": ("optimizer.learning_rate=1.4e-3",),
    "rate 3e-3": ("optimizer.learning_rate=3e-3",),
    "half the batch": HALF_BATCH,
    "half the batch, rate 1.5e-3": (*HALF_BATCH, "optimizer.learning_rate=1.5e-3"),
    "epsilon 1e-8": ("optimizer.eps=1e-8",),
    "mask 20 %": ("objective.mask_probability=0.2",),
    "no convolution": ("model.conv_kernel_size=null",),
    "FFN of 768": MIDDLE,
    "FFN of 768, convolution of 5 tokens": (*MIDDLE, "model.conv_kernel_size=5"),
    "FFN of 768, mask 40 %": (*MIDDLE, "objective.mask_probability=0.4"),
    "FFN of 384": NARROW,
    "FFN of 384, rate 1.4e-3": (*NARROW, "optimizer.learning_rate=1.4e-3"),
    "FFN of 384, 3 layers": (*NARROW, "model.num_layers=3"),
}  # fmt: skip
"""Overrides of the judge's baseline, by name."""


def train(quickstart: Path, folder: Path, overrides: tuple[str, ...], budget: float) -> None:
    """Measure the steps of a recipe, and train it for the budget in seconds of processor time."""
    command = [
        "-m", "benchmarks.learn.judge_train", CONFIG, f"tokenizer.path={quickstart}/tokenizer",
        *(f"data.{part}={_shard(quickstart, part)}" for part in ("train", "validation")),
        "checkpoint.save_every=null", "train.eval_batches=40", *overrides,
    ]  # fmt: skip
    measured = folder / "seconds.json"
    if not measured.exists():
        _run(
            *command, f"train.run_dir={folder}/measured", "train.steps=40", "train.eval_every=null",
            "--measure", str(measured),
        )  # fmt: skip
    steps = round(budget / json.loads(measured.read_text()))
    _run(*command, f"train.run_dir={folder}/run", f"train.steps={steps}",
         f"train.eval_every={steps}")  # fmt: skip


def judge(quickstart: Path, folder: Path) -> dict[str, Any]:
    """Return the scores of a trained recipe."""
    validation = sorted((quickstart / "text/validation").glob("part-*.jsonl"))
    held_out = folder / "held_out.txt"
    held_out.write_text(held_out_text(validation))
    perplexity = folder / "perplexity.json"
    _run(
        "-m", "megatron_deberta", "evaluate", "perplexity", "--model", f"{folder}/run", "--data",
        str(held_out), "--form", "masked", "--output", str(perplexity), "data.sequence_length=64",
        "train.device=cpu",
    )  # fmt: skip
    exported = folder / "exported"
    shutil.rmtree(exported, ignore_errors=True)
    _run("-m", "megatron_deberta", "convert", "--checkpoint", f"{folder}/run", "--to", "hf",
         "--output", str(exported))  # fmt: skip
    records = list(read_metrics(folder / "run" / "metrics.jsonl"))
    last = [r for r in records if r["kind"] == "validation" and "loss" in r][-1]
    return {
        "seconds_per_step": json.loads((folder / "seconds.json").read_text()),
        "steps": last["step"],
        "loss": last["loss"],
        "unigram_loss": next(r["unigram_loss"] for r in records if "unigram_loss" in r),
        "bits_per_byte": json.loads(perplexity.read_text())["bits_per_byte"],
        **held_out_words(quickstart, exported),
        "with_prior_weight": held_out_words(
            quickstart, exported, "--prior-weight", str(PRIOR_WEIGHT)
        ),
    }


def held_out_text(parts: list[Path]) -> str:
    """Return the first documents of JSON Lines files, about ``HELD_OUT_CHARACTERS`` long."""
    texts: list[str] = []
    for part in parts:
        for line in part.read_text(encoding="utf-8").splitlines():
            if sum(map(len, texts)) > HELD_OUT_CHARACTERS:
                return "\n".join(texts)
            texts.append(json.loads(line)["text"])
    return "\n".join(texts)


def _shard(quickstart: Path, part: str) -> str:
    return f"{quickstart}/shards/{part}_text_document"


def held_out_words(quickstart: Path, exported: Path, *options: str) -> dict[str, int]:
    """Return how many of 400 answers are right, and how often the most frequent one is given."""
    options = ("--sentences", "400", "--words", "500", "--max-share", "0.08", *options)
    right, most_frequent = fill_held_out(quickstart, exported, *options)
    return {"right_of_400": right, "most_frequent_of_400": most_frequent}


def fill_held_out(quickstart: Path, exported: Path, *options: str) -> tuple[int, int]:
    """Return how many answers of a table are right, and how often the most frequent one occurs."""
    validation = sorted((quickstart / "text/validation").glob("part-*.jsonl"))
    table = _run(
        "tools/fill_held_out.py", "--model", str(exported),
        "--prior-shards", _shard(quickstart, "train"), *options, "--input", *map(str, validation),
    )  # fmt: skip
    return _number("right in first place", table), _number("most frequent answer", table)


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
    parser.add_argument("--budget-seconds", type=float, default=300, help="of processor time")
    parser.add_argument("--output", type=Path, required=True, help="result file")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="only this one")
    args = parser.parse_args()
    for name in args.recipe or RECIPES:
        record = read_json(args.output, {"recipes": {}})
        if name not in record["recipes"]:
            folder = args.runs.resolve() / re.sub(r"\W+", "-", name)
            folder.mkdir(parents=True, exist_ok=True)
            quickstart, overrides = args.quickstart.resolve(), RECIPES[name]
            train(quickstart, folder, overrides, args.budget_seconds)
            row = {"overrides": list(overrides), **judge(quickstart, folder), **provenance()}
            record = read_json(args.output, {"recipes": {}})
            record["recipes"][name] = row
            write_json(args.output, {"budget_seconds": args.budget_seconds, **record})


if __name__ == "__main__":
    main()
