"""Fill-mask prediction with an exported model or a training checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.hf.loading import (
    build_model,
    load_model_tokenizer,
    load_pretrained,
    open_trained_model,
)
from megatron_deberta.hf.modeling_megatron_deberta import DebertaForMaskedLM
from megatron_deberta.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prediction:
    """A candidate token for a [MASK], as vocabulary piece and decoded to text."""

    token_id: int
    piece: str
    """Token as spelled in the vocabulary."""
    text: str
    probability: float


@dataclass(frozen=True)
class MaskFiller:
    """A masked language model with its tokenizer.

    Args:
        logits: maps token ids ``[1, N]`` to logits ``[1, N, V]``.
        tokenizer: the model's tokenizer.
        max_tokens: maximum input length; 0: unlimited.
    """

    logits: Callable[[Tensor], Tensor]
    tokenizer: Tokenizer
    max_tokens: int

    @property
    def mask_token(self) -> str:
        """The tokenizer's mask token, usually ``[MASK]``."""
        return self.tokenizer.special.mask

    @torch.no_grad()
    def fill(self, text: str, top_k: int = 5) -> list[list[Prediction]]:
        """Predict the most probable tokens for every [MASK] of a text, in order.

        Embedding rows beyond the tokenizer's vocabulary are excluded.

        Raises:
            ConfigError: the text has no [MASK], or is longer than the model's positions.
        """
        tokenizer = self.tokenizer
        ids = [tokenizer.cls_id, *tokenizer.encode(text, parse_special=True), tokenizer.sep_id]
        masked = [position for position, token in enumerate(ids) if token == tokenizer.mask_id]
        if not masked:
            raise ConfigError(f"text {text[:60]!r} has no {self.mask_token}; add one")
        if self.max_tokens and len(ids) > self.max_tokens:
            raise ConfigError(
                f"text {text[:60]!r} has {len(ids)} tokens, but the model has "
                f"{self.max_tokens} positions; shorten it"
            )
        logits = self.logits(torch.tensor([ids]))[0, masked, : tokenizer.num_tokens].float()
        best = logits.softmax(-1).topk(min(top_k, tokenizer.num_tokens))
        return [
            [
                Prediction(token, tokenizer.piece(token), tokenizer.decode([token]), probability)
                for token, probability in zip(*candidates, strict=True)
            ]
            for candidates in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def open_filler(path: Path, tokenizer_path: str = "") -> MaskFiller:
    """Open an exported folder, a run or a checkpoint.

    Args:
        path: the folder.
        tokenizer_path: tokenizer; empty: the model's own.

    Raises:
        CheckpointError: the folder holds no model, or a damaged one.
        DataError: the tokenizer is missing or differs from the model's.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give an export, a run or a checkpoint")
    if (path / "config.json").is_file():
        return _open_export(path, tokenizer_path)
    trained = open_trained_model(path, tokenizer_path)
    config = trained.config
    model = build_model(config, trained.reader.tensor)
    max_tokens = 0 if config.absolute_positions == "none" else config.max_position_embeddings
    return MaskFiller(model.logits, trained.tokenizer, max_tokens)


def _open_export(directory: Path, tokenizer_path: str) -> MaskFiller:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        roberta = config.get("model_type") == "roberta"
        max_tokens = config["max_position_embeddings"]
        max_tokens -= config["pad_token_id"] + 1 if roberta else 0
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory}/config.json: {error!r}; export it again") from error
    if config.get("absolute_positions") == "none":
        max_tokens = 0
    model_class = transformers.RobertaForMaskedLM if roberta else DebertaForMaskedLM
    model = load_pretrained(model_class, directory)
    tokenizer = load_model_tokenizer(tokenizer_path or directory)
    return MaskFiller(lambda ids: model(ids).logits, tokenizer, max_tokens)
