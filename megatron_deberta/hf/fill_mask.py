"""Predicts the [MASK]s of a text with any model: an export, a release, or our own checkpoint.

Owns what is predicted and for which texts. Refuses presentation (``cli/fill_mask.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.hf.checkpoints import open_trained_model, tokenizer_at
from megatron_deberta.hf.loading import load_complete
from megatron_deberta.hf.modeling_megatron_deberta import DebertaForMaskedLM
from megatron_deberta.hf.weights import build_filled
from megatron_deberta.tokenizer import Tokenizer


@dataclass(frozen=True)
class Guess:
    """One candidate for a [MASK]."""

    token_id: int
    piece: str
    """The piece as the vocabulary spells it."""
    text: str
    """The piece as text."""
    probability: float


class MaskFiller:
    """A model and its tokenizer.

    Args:
        logits: gives ``[1, N, V]`` for ids ``[1, N]``.
        tokenizer: of the model.
        max_tokens: longest row the model takes; 0: any.
    """

    def __init__(
        self, logits: Callable[[Tensor], Tensor], tokenizer: Tokenizer, max_tokens: int
    ) -> None:
        self._logits = logits
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens

    @property
    def mask_token(self) -> str:
        """How the text marks what is to be predicted."""
        return self._tokenizer.special.mask

    @torch.no_grad()
    def fill(self, text: str, top_k: int = 5) -> list[list[Guess]]:
        """Return the best guesses for every [MASK] of a text, in order.

        Only ids that the tokenizer knows are candidates: the table may have spare rows.

        Raises:
            ConfigError: the text has no [MASK], or is longer than the model's positions.
        """
        tokenizer = self._tokenizer
        ids = [tokenizer.cls_id, *tokenizer.encode(text, parse_special=True), tokenizer.sep_id]
        row = torch.tensor([ids])
        places = (row[0] == tokenizer.mask_id).nonzero().flatten()
        if len(places) == 0:
            raise ConfigError(f"text {text[:60]!r} has no {self.mask_token}; put one in")
        if self._max_tokens and len(ids) > self._max_tokens:
            raise ConfigError(
                f"text {text[:60]!r} has {len(ids)} tokens, but the model only "
                f"{self._max_tokens} positions; shorten it"
            )
        logits = self._logits(row)[0, places, : tokenizer.num_tokens].float()
        best = logits.softmax(-1).topk(min(top_k, tokenizer.num_tokens))
        return [
            [
                Guess(token, tokenizer.piece(token), tokenizer.decode([token]), probability)
                for token, probability in zip(token_ids, probabilities, strict=True)
            ]
            for token_ids, probabilities in zip(
                best.indices.tolist(), best.values.tolist(), strict=True
            )
        ]


def open_filler(path: Path, tokenizer_path: str = "") -> MaskFiller:
    """Open an exported folder, a run or a checkpoint.

    Args:
        path: the folder.
        tokenizer_path: tokenizer; empty: the model's own.

    Raises:
        CheckpointError: the folder holds no model, or a damaged one.
        DataError: the tokenizer is missing or not the model's.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give an export, a run or a checkpoint")
    if (path / "config.json").is_file():
        return _filler_of_export(path, tokenizer_path)
    trained = open_trained_model(path, tokenizer_path)
    config = trained.config
    model = build_filled(config, trained.reader.tensor)
    limit = 0 if config.absolute_positions == "none" else config.max_position_embeddings
    return MaskFiller(model.logits, trained.tokenizer, limit)


def _filler_of_export(directory: Path, tokenizer_path: str) -> MaskFiller:
    """Use an exported folder through the class that its users load."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        roberta = config.get("model_type") == "roberta"
        limit = config["max_position_embeddings"] - (config["pad_token_id"] + 1 if roberta else 0)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{directory}/config.json: {error!r}; export it again") from error
    kind = transformers.RobertaForMaskedLM if roberta else DebertaForMaskedLM
    model = load_complete(kind, directory)
    if config.get("absolute_positions") == "none":
        limit = 0
    tokenizer = tokenizer_at(tokenizer_path or directory)
    return MaskFiller(lambda ids: model(ids).logits, tokenizer, limit)
