"""Masked, autoregressive and mixed training (the paper's Table 10) at equal tokens, very small.

Each model is a ``megatron-deberta pretrain`` of one process on the same rows, then ``evaluate
perplexity`` in each form that it was trained in, and ``evaluate blimp``. A finished part is kept
when the program starts again.

    python -m benchmarks.learn.forms --corpus CORPUS --work runs/forms

CORPUS holds ``books-*.jsonl.gz``, ``wikitext103.valid.txt.gz`` and BLiMP in ``tasks/blimp``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.lib.measuring import read_json, write_json
from benchmarks.lib.provenance import ROOT, program_environment, provenance
from benchmarks.lib.shards import shards_of
from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.observe.metrics import read_metrics

CONFIG = "configs/runs/learn_cpu.yaml"
COMMON = (
    "model.vocab_size=auto", "checkpoint.save_every=100", "log.level=warning",
    "parallel.engine=plain", "parallel.zero_stage=0", "optimizer.warmup_fraction=0.1",
    "model.conv_kernel_size=3", "objective.mask_probability=0.3",
)  # fmt: skip
MODELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "MLM": ((), ("masked",)),
    "MT": (("objective.name=mlm+ar",), ("masked", "autoregressive")),
    "AR": (
        ("objective.name=autoregressive", "model.head=autoregressive"), ("autoregressive",),
    ),
}  # fmt: skip
"""Overrides and forms by model."""
PAPER = {
    "RoBERTa": "21.6 / 21.6",
    "DeBERTa-AP": "20.7 / 20.0",
    "MLM": "20.5 / 19.9",
    "MT": "19.5 / 19.5",
    "AR": "(GPT-2: 37.5 test)",
}
"""WikiText-103 perplexity of He et al. 2021, Table 10, validation / test. Its DeBERTa and
DeBERTa-MT are MLM and MT; it has no autoregressive DeBERTa."""
RESULT = ROOT / "benchmarks" / "results" / "cpu" / "forms.json"
VOCABULARY = 2100
STRIDE = 31


def first_words(path: Path, num_words: int) -> str:
    """Return the first lines of a text, at least ``num_words`` words, ends of lines included."""
    opener = gzip.open if path.suffix == ".gz" else open
    lines, words = [], 0
    with opener(path, "rt", encoding="utf-8", newline="\n") as file:
        for line in file:
            if words >= num_words:
                break
            lines.append(line)
            words += len(line.split()) + 1
    return "".join(lines)


def measure(name: str, args: argparse.Namespace, data: Path, text: Path) -> dict[str, Any]:
    """Train and evaluate one model; return its row.

    Args:
        name: key of ``MODELS``.
        args: options of the program.
        data: shard prefix.
        text: of the perplexities.
    """
    overrides, forms = MODELS[name]
    folder = args.work / name
    if args.steps not in committed_steps(folder):
        settings = (
            f"train.run_dir={folder}", f"train.steps={args.steps}", f"train.seed={args.seed}",
            f"train.eval_every={args.steps}", f"data.train=[{data}]",
        )  # fmt: skip
        _run("pretrain", CONFIG, *COMMON, *settings, *overrides)
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "validation"]
    row: dict[str, Any] = {
        "overrides": list(overrides),
        "unigram_loss": next(r["unigram_loss"] for r in records if "unigram_loss" in r),
        "validation": records[-1],
        "perplexity": {},
    }
    for form in forms:
        output = folder / f"perplexity_{form}.json"
        if not output.exists():
            options = ("--form", form, "--stride", str(STRIDE), "--output", str(output))
            _run(
                "evaluate", "perplexity", "--model", str(folder), "--data", str(text), *options,
                "train.micro_batch_size=64",
            )  # fmt: skip
        row["perplexity"][form] = read_json(output, None)
    output = folder / "blimp.json"
    if not output.exists():
        limit = ("--limit", str(args.pairs), "--output", str(output))
        _run(
            "evaluate",
            "blimp",
            "--model",
            str(folder),
            "--data",
            str(args.corpus / "tasks/blimp"),
            *limit,
        )
    blimp = read_json(output, None)
    row["blimp"] = {key: blimp[key] for key in ("accuracy", "num_pairs", "fields")}
    return row


def _run(*arguments: str) -> None:
    environment = program_environment(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
    command = [sys.executable, "-m", "megatron_deberta", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)


def main() -> None:
    """Measure all models and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True, metavar="DIR")
    parser.add_argument("--work", type=Path, required=True, help="folder of shards and runs")
    parser.add_argument("--output", type=Path, default=RESULT, metavar="FILE")
    parser.add_argument("--steps", type=int, default=1800, help="of 1,024 tokens each")
    parser.add_argument("--words", type=int, default=10_000, help="words of the text")
    parser.add_argument("--pairs", type=int, default=10, help="BLiMP pairs of each paradigm")
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args()
    args.work, args.corpus = args.work.resolve(), args.corpus.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    books = sorted(args.corpus.glob("books-*.jsonl.gz"))
    if not books:
        raise SystemExit(f"--corpus {args.corpus} has no books-*.jsonl.gz")
    text = args.work / "text.txt"
    words = first_words(args.corpus / "wikitext103.valid.txt.gz", args.words)
    text.write_text(words, encoding="utf-8", newline="\n")
    data = shards_of(args.work, books, VOCABULARY).prefix
    manifest = json.loads(Path(f"{data}.manifest.json").read_text())
    result = {
        **provenance("cpu"),
        "config": CONFIG,
        "steps": args.steps,
        "tokens": args.steps * 16 * 64,
        "vocabulary": manifest["vocab_size"],
        "models": {},
    }
    for name in MODELS:
        result["models"][name] = measure(name, args, data, text)
        write_json(args.output, result)


if __name__ == "__main__":
    main()
