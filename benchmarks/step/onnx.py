"""ONNX graphs against transformers and torch: speed, filled masks, accuracy of int8.

``speed`` times a model of base width with random weights, per head and format, in turns with
transformers' class in torch and with torch's export of that class. ``fill-mask`` compares the
graph of a pretrained run with our model in torch on sentences of real text with several masks.
``accuracy`` scores the fp32 and int8 graphs of a fine-tuned run on the dev split of its task.
Every part replaces its entry in ``--output``, so they can be measured one by one.

Examples:
  python -m benchmarks.step.onnx speed --output benchmarks/results/cpu/onnx.json
  python -m benchmarks.step.onnx fill-mask --run runs/first --text valid.txt.gz --output onnx.json
  python -m benchmarks.step.onnx accuracy --run runs/sst2 --data glue/SST-2 --output onnx.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.provenance import provenance, version
from megatron_deberta.config.schema import ModelConfig, with_task_head
from megatron_deberta.evaluate.predict import compare_accuracy
from megatron_deberta.files import write_atomically
from megatron_deberta.hf.config import SpecialIds, choose_model_type
from megatron_deberta.hf.export_model import write_hf_model
from megatron_deberta.hf.loading import build_model, build_task_model, open_trained_model
from megatron_deberta.hf.onnx.check import Batch, graph_runner, our_output, time_graph
from megatron_deberta.hf.onnx.graph import graph_kind, write_graph
from megatron_deberta.model import DebertaForMaskedLM, task_model
from megatron_deberta.tokenizer import Tokenizer

BASE = ModelConfig(num_layers=4, vocab_size=32128)
"""v3's base width with fewer layers and tokens."""
MASK_EVERY = 6
"""One of this many tokens of a sentence is masked."""
BATCH = 8


def speed(config: ModelConfig, tokenizer: Tokenizer, formats: list[str]) -> list[dict[str, Any]]:
    """Time the classification and the fill-mask graph of a model with random weights."""
    results = []
    for model in (with_task_head(config, "classification", ("no", "yes")), config):
        cls = DebertaForMaskedLM if model.head == "mlm" else task_model(model)
        weights = dict(cls(model, seed=0).named_parameters())

        def read(name: str, tensors: dict[str, Any] = weights) -> Tensor:
            return tensors[name].detach()

        kind = graph_kind(model)
        with TemporaryDirectory() as folder:
            export = Path(folder)
            write_hf_model(export, model, choose_model_type(model)[0], read, SpecialIds())
            for dtype in formats:
                path = export / f"{dtype}.onnx"
                write_graph(path, model, read, kind, dtype)  # type: ignore[arg-type]
                found = time_graph(path, export, model, kind, tokenizer)
                results.append({"graph": kind, "dtype": dtype, "layers": model.num_layers, **found})
                print(json.dumps(results[-1]), flush=True)
    return results


def fill_masks(run: Path, text: Path, sentences: int) -> dict[str, Any]:
    """Compare a run's fill-mask graph with our model on real sentences, several masks each."""
    trained = open_trained_model(run)
    config, read = trained.open()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_graph(path, config, read, "fill-mask")
        graph = graph_runner(path, "fill-mask")
        ours = build_model(config, read)
        masks = same = 0
        largest = 0.0
        for batch in mask_batches(text, trained.tokenizer, sentences):
            expected, found = our_output(ours, "fill-mask", batch), graph(batch)
            masks += len(expected)
            same += int((expected.argmax(-1) == found.argmax(-1)).sum())
            difference = expected.softmax(-1) - found.softmax(-1)
            largest = max(largest, difference.abs().max().item())
    return {
        "sentences": sentences, "masks": masks, "same_first_answer": same,
        "largest_difference_of_probability": largest,
        "layers": config.num_layers, "width": config.hidden_size,
        "step": trained.reader.metadata.step,
    }  # fmt: skip


def mask_batches(text: Path, tokenizer: Tokenizer, sentences: int) -> Iterator[Batch]:
    """Yield padded batches of sentences with at least two masks."""
    rows: list[list[int]] = []
    for sentence in read_sentences(text):
        ids = tokenizer.encode(sentence)[:126]
        if len(ids) < 2 * MASK_EVERY:
            continue
        rows.append([tokenizer.cls_id, *ids, tokenizer.sep_id])
        sentences -= 1
        if len(rows) == BATCH or not sentences:
            yield masked(rows, tokenizer)
            rows = []
        if not sentences:
            return
    raise SystemExit(f"{text} lacks {sentences} sentences; give more text")


def masked(rows: list[list[int]], tokenizer: Tokenizer) -> Batch:
    """Pad rows and mask every ``MASK_EVERY``-th token."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_id] * (longest - len(row)) for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    at = torch.arange(2, longest - 1, MASK_EVERY).expand(len(rows), -1)
    positions = torch.where(at < lengths[:, None] - 1, at, -1)
    for row, own in enumerate(positions):
        ids[row, own[own >= 0]] = tokenizer.mask_id
    mask = (torch.arange(longest) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, "masked_positions": positions}


def read_sentences(text: Path) -> Iterator[str]:
    """Yield sentences of a text file, compressed or not."""
    opened = gzip.open(text, "rt", encoding="utf-8") if text.suffix == ".gz" else open(text)
    with opened as lines:
        for line in lines:
            yield from re.split(r"(?<=[.!?]) +", line.strip())


def accuracy(run: Path, data: str) -> list[dict[str, Any]]:
    """Score the graphs of a fine-tuned run on the dev split of its task."""
    trained = open_trained_model(run)
    config, read = trained.open()
    kind, results = graph_kind(config), []
    with TemporaryDirectory() as folder:
        finetune = replace(trained.run.finetune, data=data, cache=folder)
        settings = replace(trained.run, finetune=finetune)
        for dtype in ("fp32", "fp16", "int8"):
            path = Path(folder) / f"{dtype}.onnx"
            write_graph(path, config, read, kind, dtype)  # type: ignore[arg-type]
            ours = build_task_model(config, read)
            found = compare_accuracy(settings, trained.tokenizer, ours, path, kind)
            step = trained.reader.metadata.step
            results.append({"dtype": dtype, "bytes": path.stat().st_size, "step": step, **found})
    return results


def main() -> None:
    """Measure one part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["speed", "fill-mask", "accuracy"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--run", type=Path, help="fill-mask, accuracy: the run; speed: tokenizer")
    parser.add_argument("--text", type=Path, help="fill-mask: real text, plain or .gz")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--data", default="", help="accuracy: folder of the task's files")
    parser.add_argument("--layers", type=int, default=BASE.num_layers)
    parser.add_argument("--formats", nargs="+", default=["fp32", "int8"])
    args = parser.parse_args()
    if args.part == "speed":
        tokenizer = open_trained_model(args.run).tokenizer
        found: Any = speed(replace(BASE, num_layers=args.layers), tokenizer, args.formats)
    elif args.part == "fill-mask":
        found = fill_masks(args.run, args.text, args.sentences)
    else:
        found = accuracy(args.run, args.data)
    record = json.loads(args.output.read_text()) if args.output.exists() else {}
    measured = provenance() | {"onnxruntime": version("onnxruntime"), "onnx": version("onnx")}
    record[args.part] = {"results": found, "provenance": measured}
    write_atomically(args.output, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
