"""Verification of an export against the training model on real text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor

from megatron_deberta.errors import CheckpointError
from megatron_deberta.hf.config import DTYPES, auto_class_name
from megatron_deberta.hf.loading import load_pretrained, quiet_transformers, temporary_module_cache
from megatron_deberta.hf.names import ModelType
from megatron_deberta.model import DebertaBackbone, DebertaForPretraining, DebertaForTask
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
    build_ours: Callable[[], DebertaForPretraining],
    tokenizer: Tokenizer,
    dtype: str,
) -> ExportCheck:
    """Load an export as users do and compare its outputs with our model's.

    One model at a time is in memory.

    Args:
        directory: the export.
        model_type: type of the export.
        build_ours: returns our fp32 model with the exported weights, rounded to ``dtype``.
        tokenizer: the tokenizer used in training.
        dtype: dtype of the exported weights.

    Raises:
        CheckpointError: token ids, logits or encoder states differ.
    """
    ours = build_ours()
    batches = _make_batches(directory, tokenizer, ours)
    expected = [_our_outputs(ours, batch) for batch in batches]
    has_classifier = ours.config.next_sentence_head and model_type != "megatron-deberta"
    del ours

    def compare(what: str, auto_class: Any, **options: Any) -> float:
        model = _load(auto_class, directory, torch.float32, **options)
        return max(
            _compare(what, _their_output(model, batch), outputs[what], batch)
            for batch, outputs in zip(batches, expected, strict=True)
        )

    max_error = compare("logits", transformers.AutoModelForMaskedLM)
    # RoBERTa's pooler is not pretrained; transformers would add an untrained one.
    options = {"add_pooling_layer": False} if model_type == "roberta" else {}
    compare("encoder states", transformers.AutoModel, **options)
    if has_classifier:
        compare("next-sentence logits", transformers.AutoModelForSequenceClassification)
    auto_class = transformers.AutoModelForMaskedLM
    return _check_dtype(
        directory, auto_class, batches[-1], expected[-1]["logits"], dtype, max_error
    )


@temporary_module_cache()
def check_encoder_export(
    directory: Path,
    model_type: ModelType,
    ours: DebertaBackbone,
    tokenizer: Tokenizer,
    dtype: str,
) -> ExportCheck:
    """Load an export without a head that transformers knows, and compare its encoder states.

    Args:
        directory: the export.
        model_type: type of the export.
        ours: our fp32 model with the exported weights, rounded to ``dtype``.
        tokenizer: the tokenizer used in training.
        dtype: dtype of the exported weights.

    Raises:
        CheckpointError: token ids or encoder states differ.
    """
    batches = _make_batches(directory, tokenizer, ours)
    with torch.no_grad():
        expected = [
            ours.encode(batch["input_ids"], batch.get("attention_mask")) for batch in batches
        ]
    options = {"add_pooling_layer": False} if model_type == "roberta" else {}
    auto_class = transformers.AutoModel
    return _check_tokens(
        "encoder states", directory, auto_class, batches, expected, dtype, **options
    )


@temporary_module_cache()
def check_causal_export(
    directory: Path, ours: DebertaForPretraining, tokenizer: Tokenizer, dtype: str
) -> ExportCheck:
    """Load the export of an autoregressive model as users do, and compare its logits.

    Args:
        directory: the export.
        ours: our fp32 model with the exported weights, rounded to ``dtype``.
        tokenizer: the tokenizer used in training.
        dtype: dtype of the exported weights.

    Raises:
        CheckpointError: token ids or logits differ.
    """
    batches = _make_batches(directory, tokenizer, ours)
    with torch.no_grad():
        expected = [
            ours.masked_logits(
                batch["input_ids"],
                batch.get("attention_mask"),
                token_type_ids=batch.get("token_type_ids"),
                causal=True,
            )
            for batch in batches
        ]
    auto_class = transformers.AutoModelForCausalLM
    return _check_tokens("logits", directory, auto_class, batches, expected, dtype)


def _check_tokens(
    what: str,
    directory: Path,
    auto_class: Any,
    batches: list[_Tensors],
    expected: list[Tensor],
    dtype: str,
    **options: Any,
) -> ExportCheck:
    """Compare outputs at every token; options are those of ``from_pretrained``."""
    model = _load(auto_class, directory, torch.float32, **options)
    error = max(
        _compare(what, _their_output(model, batch), ours, batch)
        for batch, ours in zip(batches, expected, strict=True)
    )
    return _check_dtype(directory, auto_class, batches[-1], expected[-1], dtype, error)


@temporary_module_cache()
def check_task_export(
    directory: Path, ours: DebertaForTask, tokenizer: Tokenizer, dtype: str
) -> ExportCheck:
    """Load a fine-tuned model's export as users do and compare its logits with our model's.

    Args:
        directory: the export.
        ours: our fp32 model with the exported weights, rounded to ``dtype``.
        tokenizer: the tokenizer used in training.
        dtype: dtype of the exported weights.

    Raises:
        CheckpointError: token ids, logits, or the names of the classes differ.
    """
    batches = _make_batches(directory, tokenizer, ours)
    expected = [_task_logits(ours, batch) for batch in batches]
    is_choices = ours.config.head == "choices"
    if is_choices:
        # transformers expects [examples, choices, N].
        batches = [{name: rows.unsqueeze(0) for name, rows in b.items()} for b in batches]
        expected = [logits.view(1, -1) for logits in expected]
    auto_class = getattr(transformers, auto_class_name(ours.config))
    model = _load(auto_class, directory, torch.float32)
    names = tuple(model.config.id2label[n] for n in sorted(model.config.id2label))
    if ours.config.labels and names != ours.config.labels:
        raise CheckpointError(f"the export names the classes {names}, not {ours.config.labels}")
    error = 0.0
    for batch, logits in zip(batches, expected, strict=True):
        per_token = logits.dim() == 3
        error = max(
            error,
            _compare("logits", _their_output(model, batch), logits, batch if per_token else {}),
        )
    mask = batches[-1] if expected[-1].dim() == 3 else {}
    return _check_dtype(directory, auto_class, batches[-1], expected[-1], dtype, error, mask)


@torch.no_grad()
def _task_logits(ours: DebertaForTask, batch: _Tensors) -> Tensor:
    mask = batch.get("attention_mask")
    mask = None if mask is None else mask.bool()
    return ours.logits(batch["input_ids"], mask, batch.get("token_type_ids"))


def _check_dtype(
    directory: Path,
    auto_class: Any,
    batch: _Tensors,
    expected: Tensor,
    dtype: str,
    max_error: float,
    mask: _Tensors | None = None,
) -> ExportCheck:
    """Compare the logits computed in the export's own dtype with fp32 ones."""
    if dtype == "fp32":
        return ExportCheck(max_error, 0.0)
    mask = batch if mask is None else mask
    model = _load(auto_class, directory, DTYPES[dtype])
    logits = _real_tokens(_their_output(model, batch), mask)
    reference = _real_tokens(expected, mask)
    error = ((logits - reference).norm() / reference.norm()).item()
    if not error <= LOW_PRECISION_TOLERANCE[dtype]:
        raise CheckpointError(
            f"logits computed in {dtype} have a relative error of {error:.2g} (limit "
            f"{LOW_PRECISION_TOLERANCE[dtype]}); export with --dtype fp32"
        )
    return ExportCheck(max_error, error)


def _make_batches(directory: Path, tokenizer: Tokenizer, ours: DebertaBackbone) -> list[_Tensors]:
    """Encode the texts as one single row and one padded batch, with two segments if supported.

    Raises:
        CheckpointError: the exported tokenizer encodes a text differently.
    """
    with quiet_transformers():
        exported = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=True
        )
    rows = []
    for text in REAL_TEXTS:
        ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
        # verbose: texts that are longer than the model's positions are cut below.
        if exported(text, verbose=False)["input_ids"] != ids:
            raise CheckpointError(
                f"the exported tokenizer gives other ids than training for {text[:40]!r}"
            )
        ids[1] = tokenizer.mask_id
        rows.append(torch.tensor(ids[: min(_MAX_TOKENS, ours.config.max_position_embeddings)]))
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_id)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(padded.size(1)) < lengths[:, None]
    batches = [
        {"input_ids": rows[0].unsqueeze(0)},
        {"input_ids": padded, "attention_mask": mask.long()},
    ]
    if ours.config.type_vocab_size > 0:
        for batch in batches:
            length = batch["input_ids"].size(1)
            second = torch.arange(length) >= length // 2
            batch["token_type_ids"] = second.long().expand_as(batch["input_ids"])
    return batches


@torch.no_grad()
def _our_outputs(ours: DebertaForPretraining, batch: _Tensors) -> _Tensors:
    ids, types, mask = batch["input_ids"], batch.get("token_type_ids"), batch.get("attention_mask")
    mask = None if mask is None else mask.bool()
    outputs = {
        "logits": ours.logits(ids, mask, types),
        "encoder states": ours.encode(ids, mask, token_type_ids=types),
    }
    if ours.config.next_sentence_head:
        outputs["next-sentence logits"] = ours.next_sentence_logits(ids, mask, types)
    return outputs


def _load(auto_class: Any, directory: Path, dtype: torch.dtype, **options: Any) -> Any:
    """Load as users do: remote code in the folder is executed where ``auto_map`` names it."""
    return load_pretrained(auto_class, directory, dtype=dtype, trust_remote_code=True, **options)


@torch.no_grad()
def _their_output(model: Any, batch: _Tensors) -> Tensor:
    """Return logits, or the last hidden state of a model without a head."""
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
