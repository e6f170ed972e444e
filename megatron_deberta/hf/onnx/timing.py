"""Speed of an ONNX graph against transformers' model, in torch and as exported by torch."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.hf.config import choose_model_type
from megatron_deberta.hf.heads import HEADS, GraphKind
from megatron_deberta.hf.loading import quiet_transformers
from megatron_deberta.hf.onnx.check import Batch, add_masks, graph_runner, text_batch
from megatron_deberta.hf.onnx.libraries import export_stock, open_session
from megatron_deberta.tokenizer import Tokenizer

CASES = ((1, 128), (8, 384))
"""Timed batch sizes and lengths."""
_ROUNDS = 7
_BUDGET_SECONDS = 60.0


def time_graph(
    path: Path, export: Path, config: ModelConfig, kind: GraphKind, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Time a graph, transformers' model in torch, and torch's export of that model, in turns.

    All three get the same full rows of text and threads. For fill-mask, transformers' class has
    no mask decoder and computes logits at every token; ours at the masked tokens, one of seven.

    Args:
        path: our graph.
        export: the same model in Hugging Face format.
        config: the architecture.
        kind: head of the graph.
        tokenizer: the tokenizer used in training.

    Returns:
        JSON values: threads, load of the machine, and per case median ``seconds`` and
        ``cpu_seconds`` (of all threads) of each side. ``skipped`` says what could not be timed.
    """
    model_type, reason = choose_model_type(config)
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "load": round(_load(), 1)}
    if model_type == "megatron-deberta":
        return result | {"skipped": f"no class of transformers implements {reason}", "cases": []}
    stock = _load_stock(export, config, kind)
    ours = graph_runner(path, kind)
    with TemporaryDirectory() as folder:
        sides: dict[str, Callable[[Batch], object]] = {"onnx": ours}
        sides["transformers"] = lambda batch: _run_torch(stock, _stock_inputs(batch, kind))
        try:
            file = Path(folder) / "stock.onnx"
            example = text_batch(tokenizer, 2, min(16, config.max_position_embeddings), False)
            inputs = _stock_inputs(example, kind)
            if kind == "choices":  # sizes of 1 would become constants
                inputs = {name: value.repeat(2, 1, 1) for name, value in inputs.items()}
            export_stock(stock, inputs, file)
            session = open_session(file)
            sides["transformers_onnx"] = lambda batch: session(
                {name: value.numpy() for name, value in _stock_inputs(batch, kind).items()}
            )
        except ConfigError as error:
            result["skipped"] = str(error)
        cases = []
        for rows, longest in CASES:
            length = min(longest, config.max_position_embeddings)
            batch = _full_rows(tokenizer, rows, length)
            if kind == "fill-mask":
                add_masks(batch, tokenizer)
            cases.append({"batch": rows, "length": length, **_in_turns(sides, batch)})
    return result | {"cases": cases}


def _full_rows(tokenizer: Tokenizer, rows: int, length: int) -> Batch:
    one = text_batch(tokenizer, 1, length, False)
    return {name: value.repeat(rows, 1) for name, value in one.items()}


def _in_turns(
    sides: dict[str, Callable[[Batch], object]], batch: Batch
) -> dict[str, dict[str, float]]:
    """Return the median wall-clock and processor time of each side, in seconds."""
    clocks = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}
    times: dict[str, dict[str, list[float]]] = {c: {name: [] for name in sides} for c in clocks}
    begin = time.perf_counter()
    for turn in range(_ROUNDS + 1):
        if turn > 1 and time.perf_counter() - begin > _BUDGET_SECONDS:
            break
        for name, run in sides.items():
            start = {clock: now() for clock, now in clocks.items()}
            run(batch)
            if turn:  # the first one allocates
                for clock, now in clocks.items():
                    times[clock][name].append(now() - start[clock])
    return {
        clock: {name: statistics.median(found) for name, found in by_side.items()}
        for clock, by_side in times.items()
    }


def _load_stock(export: Path, config: ModelConfig, kind: GraphKind) -> Any:
    """Load transformers' own class; a head that it lacks is new, which does not change times."""
    name = "AutoModel" if kind == "encoder" else HEADS[config.head].auto_class
    auto_class = getattr(transformers, name)
    with quiet_transformers():
        return auto_class.from_pretrained(export, local_files_only=True, dtype=torch.float32).eval()


def _stock_inputs(batch: Batch, kind: GraphKind) -> Batch:
    """Return ids and mask, with an axis for the choices if there are any."""
    names = ("input_ids", "attention_mask")
    return {name: batch[name][None] if kind == "choices" else batch[name] for name in names}


@torch.no_grad()
def _run_torch(model: Any, inputs: dict[str, Tensor]) -> object:
    return model(**inputs)


def _load() -> float:
    return os.getloadavg()[0]
