"""Attention maps of DeBERTa, three of its ablations and RoBERTa, trained on the same text.

The paper's Figures 3 to 5 with small models: the five are trained as by
``benchmarks.learn.ablations`` with ``configs/runs/attention_maps_cpu.yaml`` (started again, the
program continues), and the maps of a sentence that is not in the text are drawn side by side.

    megatron-deberta train-tokenizer --input TEXT... --vocab-size 2000 --output tokenizer
    megatron-deberta preprocess --input TEXT... --tokenizer tokenizer --output books
    python -m benchmarks.learn.attention_maps --data books_text_document --tokenizer tokenizer \
        --runs runs/attention_maps
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.learn.ablations import Experiment, train
from benchmarks.lib.measuring import write_json
from benchmarks.lib.provenance import ROOT, provenance
from megatron_deberta.attention_maps.compute import TERMS, TextMaps, compute_maps
from megatron_deberta.attention_maps.drawing import draw
from megatron_deberta.files import write_atomically

CONFIG = ROOT / "configs" / "runs" / "attention_maps_cpu.yaml"
OUTPUT = ROOT / "benchmarks" / "results" / "cpu" / "attention_maps"
MODELS = ("DeBERTa", "-EMD", "-C2P", "-P2C", "RoBERTa")
TEXT = "The old man looked at the child, and then he took the letter from the table."


def spread(maps: TextMaps, term: str) -> float | None:
    """Return how much a term of the scores varies over the keys of a query.

    A constant over the keys does not change the softmax, so this is the term's influence.

    Returns:
        The root mean square of the deviations from each row's mean; None: there is no such term.
    """
    found = [maps.map(layer, head, term) for layer in maps.layers for head in maps.heads]
    squares = [float(values.var(axis=1).mean()) for values in found if values is not None]
    return math.sqrt(sum(squares) / len(squares)) if squares else None


def describe(experiment: Experiment) -> list[dict[str, Any]]:
    """Return each model's last validation, and the spread of its terms over layers and heads."""
    models = []
    for run in experiment.runs():
        maps = compute_maps(run.folder, TEXT, "all", "all")
        # Without the mean over the heads, which `all` contains.
        maps = replace(maps, heads=maps.heads[1:], values=maps.values[:, 1:])
        models.append({
            "variant": run.variant,
            **run.validations()[-1],
            "unigram_loss": run.unigram_loss(),
            "spread": {term: spread(maps, term) for term in TERMS},
        })  # fmt: skip
    return models


def picture(experiment: Experiment, layers: str, heads: str) -> bytes:
    """Return the PNG with a row for each model."""
    maps = (compute_maps(run.folder, TEXT, layers, heads) for run in experiment.runs())
    return draw([
        replace(found, name=run.variant) for found, run in zip(maps, experiment.runs(), strict=True)
    ])  # fmt: skip


def main() -> None:
    """Train the missing models, then write the picture and the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="shard prefix")
    parser.add_argument("--tokenizer", required=True, help="tokenizer folder")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--layers", default="2", help="in the picture (default 2)")
    parser.add_argument("--heads", default="mean", help="in the picture (default mean)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="without .json, .png")
    args = parser.parse_args()
    experiment = Experiment(CONFIG, args.data, args.tokenizer, args.runs, MODELS, (1,))
    train(experiment, math.inf)
    config = experiment.config(experiment.runs()[0])
    record = {
        **provenance(),
        "text": TEXT,
        "config": str(CONFIG.relative_to(ROOT)),
        "layers": config.model.num_layers,
        "width": config.model.hidden_size,
        "tokens": config.train.steps * config.train.global_batch_size * config.data.sequence_length,
        "picture": {"layers": args.layers, "heads": args.heads},
        "models": describe(experiment),
    }
    write_atomically(args.output.with_suffix(".png"), picture(experiment, args.layers, args.heads))
    write_json(args.output.with_suffix(".json"), record)


if __name__ == "__main__":
    main()
