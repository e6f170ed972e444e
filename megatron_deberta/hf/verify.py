"""Compares an export, loaded as its users load it, with our own model on real text.

Owns the texts, the ways users load and the tolerances of an export. Refuses to repair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from megatron_deberta.errors import CheckpointError
from megatron_deberta.hf.loading import (
    load_complete,
    private_module_cache,
    quiet_transformers,
)
from megatron_deberta.hf.names import ModelType
from megatron_deberta.hf.write_model import DTYPES
from megatron_deberta.model import DebertaForPretraining
from megatron_deberta.tokenizer import Tokenizer

FP32_TOLERANCE = 1e-4
"""Largest difference of fp32 logits and encoder states, relative to the largest of them (or 1)."""
RUNNING_TOLERANCE = {"fp16": 5e-2, "bf16": 2.5e-1}
"""Largest relative (Frobenius) error of logits computed in 16 bits, against fp32.

Wide, because rounding grows with depth: it is there for overflow and not for rounding, which the
fp32 comparison of rounded weights has already taken out.
"""
_MAX_TOKENS = 256
_TEXTS = (
    "The library was nearly empty, and only the rustle of a page or the tick of the tall clock "
    "by the door told the reader that time was passing. She had come to find one letter, written "
    "in the spring of 1848, and had found instead a drawer full of maps; some of them showed "
    "islands that no ship had ever reached. “Who drew these?” she asked, but nobody answered.",
    "In 2021, a model's attention was split in two: what a word is, and where it stands.",
    "Is it raining?",
)


@dataclass(frozen=True)
class ExportCheck:
    """What was compared and how well it agreed."""

    max_error: float
    """Largest difference of fp32 logits, relative to the largest logit (or 1)."""
    running_error: float
    """Relative (Frobenius) error of the logits in the export's own format; 0 for fp32."""


def check_export(
    directory: Path,
    model_type: ModelType,
    build_ours: Callable[[], DebertaForPretraining],
    tokenizer: Tokenizer,
    dtype: str,
) -> ExportCheck:
    """Load what users load from ``directory`` and compare it with our model.

    One model at a time is in memory.

    Args:
        directory: the export.
        model_type: of the export.
        build_ours: gives our model with the weights as exported, rounded to ``dtype``, in fp32.
        tokenizer: the one that training used.
        dtype: format of the exported weights.

    Raises:
        CheckpointError: token ids, logits or encoder states differ; the export must not be used.
    """
    with private_module_cache():
        return _check(directory, model_type, build_ours, tokenizer, dtype)


def _check(
    directory: Path,
    model_type: ModelType,
    build_ours: Callable[[], DebertaForPretraining],
    tokenizer: Tokenizer,
    dtype: str,
) -> ExportCheck:
    ours = build_ours()
    rows = _encode(directory, tokenizer, ours.config.max_position_embeddings)
    inputs = [_Inputs(rows[0].unsqueeze(0)), _pad(rows, tokenizer.pad_id)]
    if ours.config.type_vocab_size > 0:
        inputs = [one.with_types() for one in inputs]
    expected = [_our_outputs(ours, one) for one in inputs]
    pairs = [_our_pairs(ours, one) for one in inputs] if ours.config.next_sentence_head else []
    del ours

    model = _load(transformers.AutoModelForMaskedLM, directory, torch.float32)
    max_error = max(
        _compare("logits", _logits(model, one), logits, one.mask)
        for one, (logits, _) in zip(inputs, expected, strict=True)
    )
    del model
    # RoBERTa's pooler is no part of pretraining; transformers would add an untrained one.
    options = {"add_pooling_layer": False} if model_type == "roberta" else {}
    encoder = _load(transformers.AutoModel, directory, torch.float32, **options)
    for one, (_, states) in zip(inputs, expected, strict=True):
        _compare("encoder states", _states(encoder, one), states, one.mask)
    del encoder
    if pairs and model_type != "megatron-deberta":
        model = _load(transformers.AutoModelForSequenceClassification, directory, torch.float32)
        for one, logits in zip(inputs, pairs, strict=True):
            _compare("next-sentence logits", _logits(model, one), logits, None)
        del model
    if dtype == "fp32":
        return ExportCheck(max_error, 0.0)
    model = _load(transformers.AutoModelForMaskedLM, directory, DTYPES[dtype])
    running = _relative_error(_logits(model, inputs[-1]), expected[-1][0], inputs[-1].mask)
    if not running <= RUNNING_TOLERANCE[dtype]:
        raise CheckpointError(
            f"logits computed in {dtype} are off by {running:.2g} (limit "
            f"{RUNNING_TOLERANCE[dtype]}); export with --dtype fp32"
        )
    return ExportCheck(max_error, running)


def _encode(directory: Path, tokenizer: Tokenizer, max_positions: int) -> list[Tensor]:
    """Rows of real text, each of which the exported tokenizer must encode as training does."""
    with quiet_transformers():
        theirs = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=True
        )
    rows = []
    for text in _TEXTS:
        ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
        if theirs(text)["input_ids"] != ids:
            raise CheckpointError(
                f"the exported tokenizer gives other ids than training for {text[:40]!r}"
            )
        # A mask in every row: users ask nothing else.
        ids[1] = tokenizer.mask_id
        rows.append(torch.tensor(ids[: min(_MAX_TOKENS, max_positions)]))
    return rows


class _Inputs(NamedTuple):
    ids: Tensor
    mask: Tensor | None = None
    types: Tensor | None = None

    def with_types(self) -> _Inputs:
        """The second half of each row as a second segment."""
        second = torch.arange(self.ids.size(1)) >= self.ids.size(1) // 2
        return self._replace(types=second.long().expand_as(self.ids))

    def arguments(self) -> dict[str, Tensor]:
        """What a class of transformers is called with, besides ids."""
        found = {} if self.mask is None else {"attention_mask": self.mask.long()}
        return found if self.types is None else {**found, "token_type_ids": self.types}


def _pad(rows: list[Tensor], pad_id: int) -> _Inputs:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)
    lengths = torch.tensor([len(row) for row in rows])
    return _Inputs(ids, torch.arange(ids.size(1)) < lengths[:, None])


@torch.no_grad()
def _our_outputs(ours: DebertaForPretraining, inputs: _Inputs) -> tuple[Tensor, Tensor]:
    """Logits ``[B, N, V]`` and encoder states ``[B, N, D]``."""
    states = ours.encode(inputs.ids, inputs.mask, token_type_ids=inputs.types)
    return ours.logits(*inputs), states


@torch.no_grad()
def _our_pairs(ours: DebertaForPretraining, inputs: _Inputs) -> Tensor:
    """Logits ``[B, 2]`` of the next-sentence head."""
    return ours.next_sentence_logits(*inputs)


def _load(kind: Any, directory: Path, dtype: torch.dtype, **options: Any) -> Any:
    """Load as users do: code in the folder runs, where ``auto_map`` names it."""
    return load_complete(kind, directory, dtype=dtype, trust_remote_code=True, **options)


@torch.no_grad()
def _logits(model: Any, inputs: _Inputs) -> Tensor:
    logits: Tensor = model(inputs.ids, **inputs.arguments()).logits
    return logits


@torch.no_grad()
def _states(encoder: Any, inputs: _Inputs) -> Tensor:
    states: Tensor = encoder(inputs.ids, **inputs.arguments()).last_hidden_state
    return states


def _compare(what: str, theirs: Tensor, ours: Tensor, mask: Tensor | None) -> float:
    theirs, ours = _real(theirs, mask), _real(ours, mask)
    scale = max(1.0, ours.abs().max().item())
    error = (theirs - ours).abs().max().item() / scale
    if not error <= FP32_TOLERANCE:
        raise CheckpointError(
            f"{what} of the export differ from our model's by {error:.2g} (limit "
            f"{FP32_TOLERANCE:g}); nothing was exported"
        )
    return error


def _relative_error(theirs: Tensor, ours: Tensor, mask: Tensor | None) -> float:
    theirs, ours = _real(theirs, mask), _real(ours, mask)
    error: float = ((theirs - ours).norm() / ours.norm()).item()
    return error


def _real(values: Tensor, mask: Tensor | None) -> Tensor:
    """Values at real tokens, fp32; what stands at padding means nothing."""
    return values.float() if mask is None else values.float()[mask]
