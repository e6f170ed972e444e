"""Parity of an ONNX graph with our model on real text, and its speed against transformers'."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.hf.config import choose_model_type
from megatron_deberta.hf.heads import HEADS, GraphKind
from megatron_deberta.hf.loading import quiet_transformers
from megatron_deberta.hf.onnx.graph import OnnxDtype
from megatron_deberta.hf.onnx.libraries import export_stock, open_session
from megatron_deberta.hf.verify import FP32_TOLERANCE, REAL_TEXTS, their_output
from megatron_deberta.model import (
    DebertaBackbone,
    DebertaForPretraining,
    DebertaForTask,
    ModelInputs,
)
from megatron_deberta.tokenizer import Tokenizer

Batch: TypeAlias = dict[str, Tensor]
Logits: TypeAlias = Callable[[ModelInputs], Tensor]
"""Maps tokens ``[B, N]`` to ``[B, K]`` or ``[B, N, K]``, like `DebertaForTask.logits`."""

CASES = ((1, 1), (1, 2), (2, 17), (5, 64), (8, 128), (3, 333), (8, 512))
"""Compared batch sizes and lengths; rows but the first are padded."""
LIMITS = {"fp16": 5e-2, "int8": 0.5}
"""Maximum relative (Frobenius) error. Wide: it detects overflow and wrong scales; the loss of
accuracy is measured on a task."""
_MASKED_SHARE = 7
"""One of this many tokens is masked in the fill-mask comparison."""

TIMED_CASES = ((1, 128), (8, 384))
"""Timed batch sizes and lengths."""
_ROUNDS = 7
_BUDGET_SECONDS = 60.0


@dataclass(frozen=True)
class OnnxParity:
    """Differences between a graph and our fp32 model.

    Attributes:
        max_error: maximum difference, relative to the largest absolute value (or 1).
        relative_error: relative (Frobenius) error of the worst case.
        cases: compared batch sizes and lengths.
        masks: number of compared masks of a fill-mask graph; 0: another graph.
        same_answers: those of them with the same most probable token.
    """

    max_error: float
    relative_error: float
    cases: tuple[tuple[int, int], ...]
    masks: int = 0
    same_answers: int = 0


def check_graph(
    path: Path, ours: DebertaBackbone, kind: GraphKind, tokenizer: Tokenizer, dtype: OnnxDtype
) -> OnnxParity:
    """Compare a graph with our fp32 model at real tokens; see `compare_graph`."""
    expected = partial(our_output, ours, kind)
    return compare_graph(path, expected, ours.config, kind, tokenizer, dtype, "our model")


def compare_graph(
    path: Path,
    reference: Callable[[Batch], Tensor],
    config: ModelConfig,
    kind: GraphKind,
    tokenizer: Tokenizer,
    dtype: OnnxDtype,
    what: str,
) -> OnnxParity:
    """Compare a graph with a model at real tokens.

    Args:
        path: the graph.
        reference: returns the model's fp32 output for a batch of ``[B, N]`` inputs, in the form of
            `graph_runner`.
        config: the architecture.
        kind: head of the graph.
        tokenizer: the tokenizer used in training.
        dtype: of the graph.
        what: the model, for messages.

    Raises:
        CheckpointError: outputs differ by more than the limit of ``dtype``, or are not finite.
    """
    run = graph_runner(path, kind)
    longest = config.max_position_embeddings
    limited = tuple(dict.fromkeys((rows, min(length, longest)) for rows, length in CASES))
    largest = worst = 0.0
    masks = same_answers = 0
    for rows, length in limited:
        batch = text_batch(tokenizer, rows, length, config.type_vocab_size > 0)
        if kind == "fill-mask":
            add_masks(batch, tokenizer)
        expected, found = reference(batch), run(batch)
        if kind == "fill-mask":
            masks += len(expected)
            same_answers += int((expected.argmax(-1) == found.argmax(-1)).sum())
        if kind in ("encoder", "masked-lm", "tokens", "spans"):
            real = batch["attention_mask"].bool()
            expected, found = expected[real], found[real]
        difference = found - expected
        scale = max(1.0, expected.abs().max().item())
        largest = max(largest, difference.abs().max().item() / scale)
        error = (difference.norm() / expected.norm().clamp(min=1e-6)).item()
        worst = max(worst, error)
        limit = FP32_TOLERANCE if dtype == "fp32" else LIMITS[dtype]
        reached = largest if dtype == "fp32" else error
        if not reached <= limit:
            raise CheckpointError(
                f"the ONNX graph differs from {what} by {reached:.2g} for {rows} rows of "
                f"{length} tokens (limit of {dtype}: {limit:g}); nothing was exported"
                + ("" if dtype == "fp32" else "; export with --dtype fp32")
            )
    return OnnxParity(largest, worst, limited, masks, same_answers)


def text_batch(tokenizer: Tokenizer, rows: int, length: int, with_types: bool) -> Batch:
    """Return a batch of real text; later rows are shorter.

    Args:
        tokenizer: the model's tokenizer.
        rows: number of rows.
        length: tokens of the first row.
        with_types: add token types.

    Returns:
        int64 ``[rows, length]`` inputs by name.
    """
    text: list[int] = []
    while len(text) < 2 * length:
        text += tokenizer.encode(" ".join(REAL_TEXTS))
    ids = torch.full((rows, length), tokenizer.pad_id)
    for row in range(rows):
        tokens = max(1, length * (rows - row) // rows)
        start = row * 7 % length
        content = [tokenizer.cls_id, *text[start : start + tokens - 2], tokenizer.sep_id]
        ids[row, :tokens] = torch.tensor(content[:tokens])
    batch = {"input_ids": ids, "attention_mask": (ids != tokenizer.pad_id).long()}
    if with_types:
        batch["token_type_ids"] = (torch.arange(length) >= length // 2).long().expand_as(ids)
    return batch


def add_masks(batch: Batch, tokenizer: Tokenizer) -> None:
    """Mask several tokens of every row, and add ``masked_positions`` ``[B, M]``, -1 = none."""
    lengths = batch["attention_mask"].sum(1)
    count = max(1, int(lengths.max()) // _MASKED_SHARE)
    positions = (1 + torch.arange(count) * _MASKED_SHARE).expand(len(lengths), count)
    positions = torch.where(positions < lengths[:, None], positions, -1)
    positions[:, 0] = positions[:, 0].clamp(min=0)
    for row, at in enumerate(positions):
        batch["input_ids"][row, at[at >= 0]] = tokenizer.mask_id
    batch["masked_positions"] = positions


@torch.no_grad()
def our_output(ours: DebertaBackbone, kind: GraphKind, batch: Batch) -> Tensor:
    """Return our model's output for a batch, in the form of `graph_runner`.

    Args:
        ours: our model.
        kind: what the graph computes.
        batch: inputs ``[B, N]`` by name.
    """
    masked = batch.get("masked_positions")
    mask, types = batch["attention_mask"], batch.get("token_type_ids")
    inputs = ModelInputs(batch["input_ids"], mask, token_type_ids=types)
    if kind == "encoder":
        return ours.encode(inputs)
    if kind == "fill-mask":
        assert isinstance(ours, DebertaForPretraining)
        assert masked is not None
        return ours.masked_logits(inputs, masked)[masked >= 0]
    assert isinstance(ours, DebertaForPretraining | DebertaForTask)
    return ours.logits(inputs)


def graph_runner(path: Path, kind: GraphKind, threads: int = 0) -> Callable[[Batch], Tensor]:
    """Open a graph as a function from a batch ``[B, N]`` to its output.

    Args:
        path: of the graph.
        kind: what the graph computes.
        threads: number of threads; 0: torch's.

    Returns:
        The function; it returns ``[B, N, D]`` states, logits ``[masks, V]`` of real masks, or a
        head's logits as `DebertaForTask.logits` does.
    """
    session = open_session(path, threads)

    def run(batch: Batch) -> Tensor:
        arrays = {name: value.long().numpy() for name, value in batch.items()}
        if kind == "choices":
            arrays = {name: value[None] for name, value in arrays.items()}
        outputs = [torch.from_numpy(output) for output in session(arrays)]
        if kind == "choices":
            return outputs[0].view(-1, 1)
        if kind == "fill-mask":
            return outputs[0][batch["masked_positions"] >= 0]
        return torch.stack(outputs, -1) if len(outputs) > 1 else outputs[0]

    return run


def graph_logits(path: Path, kind: GraphKind) -> Logits:
    """Open the graph of a task as a function with the arguments of `DebertaForTask.logits`."""
    run = graph_runner(path, kind)

    def logits(inputs: ModelInputs) -> Tensor:
        batch = {"input_ids": inputs.input_ids, "attention_mask": inputs.is_token}
        if inputs.token_type_ids is not None:
            batch["token_type_ids"] = inputs.token_type_ids
        return run(batch)

    return logits


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
    load = round(os.getloadavg()[0], 1)
    result: dict[str, Any] = {"threads": torch.get_num_threads(), "load": load}
    if model_type == "megatron-deberta":
        return result | {"skipped": f"no class of transformers implements {reason}", "cases": []}
    with quiet_transformers():
        # A head that the class lacks is new, which does not change times.
        auto_class = stock_class(config, kind)
        stock = auto_class.from_pretrained(export, local_files_only=True, dtype=torch.float32)
    stock.eval()
    ours = graph_runner(path, kind)
    # Beside the graph, so that nothing is left elsewhere if the process is killed.
    with TemporaryDirectory(dir=path.parent) as folder:
        sides: dict[str, Callable[[Batch], object]] = {"onnx": ours}
        sides["transformers"] = torch.no_grad()(lambda batch: stock(**_stock_inputs(batch, kind)))
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
        for rows, longest in TIMED_CASES:
            length = min(longest, config.max_position_embeddings)
            row = text_batch(tokenizer, 1, length, False)
            batch = {name: value.repeat(rows, 1) for name, value in row.items()}
            if kind == "fill-mask":
                add_masks(batch, tokenizer)
            cases.append({"batch": rows, "length": length, **_in_turns(sides, batch)})
    return result | {"cases": cases}


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


def stock_class(config: ModelConfig, kind: GraphKind) -> Any:
    """Return the Auto class of transformers that computes a graph's outputs."""
    return getattr(
        transformers, "AutoModel" if kind == "encoder" else HEADS[config.head].auto_class
    )


@torch.no_grad()
def stock_output(model: Any, kind: GraphKind, batch: Batch) -> Tensor:
    """Return the output of a model of transformers, in the form of `graph_runner`.

    Args:
        model: the model, in fp32 and in evaluation mode.
        kind: what the graph computes; not ``fill-mask``.
        batch: inputs ``[B, N]`` by name.
    """
    if kind == "choices":
        batch = {name: value[None] for name, value in batch.items()}
    output = their_output(model, batch)
    return output.view(-1, 1) if kind == "choices" else output


def _stock_inputs(batch: Batch, kind: GraphKind) -> Batch:
    """Return ids and mask, with an axis for the choices if there are any."""
    names = ("input_ids", "attention_mask")
    return {name: batch[name][None] if kind == "choices" else batch[name] for name in names}
