"""Verification of an export against the training model on real text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import CheckpointError
from megatron_deberta.hf.config import DTYPES
from megatron_deberta.hf.heads import HEADS
from megatron_deberta.hf.loading import load_pretrained, quiet_transformers, temporary_module_cache
from megatron_deberta.hf.names import ModelType
from megatron_deberta.model import DebertaBackbone, ModelInputs
from megatron_deberta.tokenizer import Tokenizer

FP32_TOLERANCE = 1e-4
"""Maximum difference of fp32 outputs, relative to the largest absolute value (or 1)."""
LOW_PRECISION_TOLERANCE = {"fp16": 5e-2, "bf16": 2.5e-1}
"""Maximum relative (Frobenius) error of logits computed in 16 bits, against fp32.

Wide, because rounding grows with depth: this check detects overflow. The effect of rounded weights
is excluded, since the fp32 comparison uses the same rounded weights.
"""
_MAX_TOKENS = 256
REAL_TEXTS = (
    "The library was nearly empty, and only the rustle of a page or the tick of the tall clock "
    "by the door told the reader that time was passing. She had come to find one letter, written "
    "in the spring of 1848, and had found instead a drawer full of maps; some of them showed "
    "islands that no ship had ever reached. “Who drew these?” she asked, but nobody answered.",
    "In 2021, a model's attention was split in two: what a word is, and where it stands.",
    "Is it raining?",
)

_Tensors: TypeAlias = dict[str, Tensor]
"""Keyword arguments of a transformers model, or outputs by name."""


@dataclass(frozen=True)
class ExportCheck:
    """Largest errors found by `check_export`."""

    max_error: float
    """Maximum difference of fp32 logits, relative to the largest logit (or 1)."""
    low_precision_error: float
    """Relative (Frobenius) error of the logits in the export's own dtype; 0 for fp32."""


@temporary_module_cache()
def check_export(
    directory: Path,
    model_type: ModelType,
    build_ours: Callable[[], DebertaBackbone],
    tokenizer: Tokenizer,
    dtype: str,
) -> ExportCheck:
    """Load an export as users do and compare its outputs with our model's.

    One model at a time is in memory. An export whose head transformers does not know is compared
    by its encoder states.

    Args:
        directory: the export.
        model_type: type of the export.
        build_ours: returns our fp32 model with the exported weights, rounded to ``dtype``.
        tokenizer: the tokenizer used in training.
        dtype: dtype of the exported weights.

    Raises:
        CheckpointError: token ids, outputs, or the names of the classes differ.
    """
    ours = build_ours()
    config = ours.config
    batches = _make_batches(directory, tokenizer, ours)
    compared = _compared(config, model_type)
    expected = [
        {what: _our_output(ours, method, batch) for what, (_, method) in compared.items()}
        for batch, _ in batches
    ]
    del ours
    head = HEADS[config.head]
    theirs = [batch for _, batch in batches]
    if config.head == "choices":
        theirs = [{name: rows.unsqueeze(0) for name, rows in b.items()} for b in theirs]

    def compare(what: str, auto_class: str) -> float:
        model = _load(directory, model_type, auto_class, torch.float32)
        names = tuple(model.config.id2label[n] for n in sorted(model.config.id2label))
        if config.labels and names != config.labels:
            raise CheckpointError(f"the export names the classes {names}, not {config.labels}")
        return max(
            _compare(what, their_output(model, batch), outputs[what], batch)
            for batch, outputs in zip(theirs, expected, strict=True)
        )

    errors = {what: compare(what, name) for what, (name, _) in compared.items()}
    what = "logits" if head.kind else "encoder states"
    if dtype == "fp32":
        return ExportCheck(errors[what], 0.0)
    model = _load(directory, model_type, head.auto_class, DTYPES[dtype])
    error = _low_precision_error(model, theirs[-1], expected[-1][what], dtype)
    return ExportCheck(errors[what], error)


def _compared(config: ModelConfig, model_type: ModelType) -> dict[str, tuple[str, str]]:
    """Return the compared outputs: the Auto class and the method of our model that compute them."""
    head = HEADS[config.head]
    compared = {"logits": (head.auto_class, "logits")} if head.kind else {}
    if head.is_encoder:
        compared["encoder states"] = ("AutoModel", "encode")
    if config.next_sentence_head and config.head == "mlm" and model_type != "megatron-deberta":
        classes = "AutoModelForSequenceClassification"
        compared["next-sentence logits"] = (classes, "next_sentence_logits")
    return compared


def _low_precision_error(model: Any, batch: _Tensors, expected: Tensor, dtype: str) -> float:
    """Return the error of outputs computed in the export's own dtype, relative to fp32 ones."""
    outputs = _real_tokens(their_output(model, batch), batch)
    reference = _real_tokens(expected, batch)
    error: float = ((outputs - reference).norm() / reference.norm()).item()
    if not error <= LOW_PRECISION_TOLERANCE[dtype]:
        raise CheckpointError(
            f"logits computed in {dtype} have a relative error of {error:.2g} (limit "
            f"{LOW_PRECISION_TOLERANCE[dtype]}); export with --dtype fp32"
        )
    return error


def _make_batches(
    directory: Path, tokenizer: Tokenizer, ours: DebertaBackbone
) -> list[tuple[_Tensors, _Tensors]]:
    """Encode the texts as one row and as a padded batch of rows, pairs if the model has segments.

    Returns:
        For each batch the inputs of our model, from the tokenizer used in training, and those of
        the exported model, as the exported tokenizer returns them.

    Raises:
        CheckpointError: the exported tokenizer returns other ids or token types.
    """
    with quiet_transformers():
        exported = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=True
        )
    limit = min(_MAX_TOKENS, ours.config.max_position_embeddings)
    has_pairs = ours.config.type_vocab_size > 1
    # The short text comes first, so that cut rows have two segments, too.
    pairs = [(REAL_TEXTS[-1], text) if has_pairs else (text, None) for text in REAL_TEXTS]
    rows, theirs = [], []
    for text, second in pairs:
        row = _our_row(tokenizer, text, second)
        # verbose: texts that are longer than the model's positions are cut below.
        found = exported(text, second, verbose=False)
        for name, values in row.items():
            # A model without segments ignores token types.
            if found.get(name, [0] * len(values)) != values:
                raise CheckpointError(
                    f"the exported tokenizer gives other {name} than training for {text[:40]!r}"
                )
        row["input_ids"][1] = found["input_ids"][1] = tokenizer.mask_id
        rows.append({name: values[:limit] for name, values in row.items()})
        theirs.append({name: values[:limit] for name, values in found.items()})
    if not ours.config.type_vocab_size:
        rows = [{"input_ids": row["input_ids"]} for row in rows]
    one, all_rows = pad_rows(rows[:1], tokenizer.pad_id), pad_rows(rows, tokenizer.pad_id)
    del one["attention_mask"]
    return [
        (one, exported.pad(theirs[:1], return_tensors="pt").data),
        (all_rows, exported.pad(theirs, return_tensors="pt").data),
    ]


def _our_row(tokenizer: Tokenizer, text: str, second: str | None) -> dict[str, list[int]]:
    """Return ids and token types of a text or a pair, as training encodes them."""
    ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
    more = [] if second is None else [*tokenizer.encode(second), tokenizer.sep_id]
    return {"input_ids": ids + more, "token_type_ids": [0] * len(ids) + [1] * len(more)}


def pad_rows(rows: list[dict[str, list[int]]], pad_id: int) -> dict[str, Tensor]:
    """Return rows padded to the longest, ``[B, N]``, with their ``attention_mask``.

    Args:
        rows: lists of one length per row, by name: ``input_ids``, and others padded with 0.
        pad_id: id of the padding.
    """
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch = {
        name: torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(row[name]) for row in rows],
            batch_first=True,
            padding_value=pad_id if name == "input_ids" else 0,
        )
        for name in rows[0]
    }
    batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    return batch


@torch.no_grad()
def _our_output(ours: DebertaBackbone, method: str, batch: _Tensors) -> Tensor:
    mask, types = batch.get("attention_mask"), batch.get("token_type_ids")
    inputs = ModelInputs(batch["input_ids"], mask, token_type_ids=types)
    output: Tensor = getattr(ours, method)(inputs)
    # transformers expects [examples, choices, N].
    return output.view(1, -1) if ours.config.head == "choices" else output


def _load(directory: Path, model_type: ModelType, auto_class: str, dtype: torch.dtype) -> Any:
    """Load as users do: remote code in the folder is executed where ``auto_map`` names it."""
    options = {}
    if model_type == "roberta" and auto_class == "AutoModel":
        # RoBERTa's pooler is not pretrained; transformers would add an untrained one.
        options["add_pooling_layer"] = False
    loaded = getattr(transformers, auto_class)
    return load_pretrained(loaded, directory, dtype=dtype, trust_remote_code=True, **options)


@torch.no_grad()
def their_output(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return a transformers model's logits, or its last hidden state if it has no head.

    Args:
        model: the model.
        batch: its inputs ``[B, N]`` by name.
    """
    output = model(**batch)
    if "start_logits" in output:
        return torch.stack([output.start_logits, output.end_logits], -1)
    result: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return result


def _compare(what: str, theirs: Tensor, ours: Tensor, batch: _Tensors) -> float:
    theirs, ours = _real_tokens(theirs, batch), _real_tokens(ours, batch)
    scale = max(1.0, ours.abs().max().item())
    error = (theirs - ours).abs().max().item() / scale
    if not error <= FP32_TOLERANCE:
        raise CheckpointError(
            f"{what} of the export differ from our model's by {error:.2g} (limit "
            f"{FP32_TOLERANCE:g}); nothing was exported"
        )
    return error


def _real_tokens(values: Tensor, batch: _Tensors) -> Tensor:
    """Return fp32 values without those at padding; logits of whole rows ``[B, 2]`` unchanged."""
    mask = batch.get("attention_mask")
    return values.float() if mask is None or values.dim() == 2 else values.float()[mask.bool()]
