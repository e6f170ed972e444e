"""Tiny models and a tiny tokenizer for tests of export, import and fill-mask."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import sentencepiece
import torch
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.model import parameter_shapes
from megatron_deberta.tokenizer import Tokenizer
from megatron_deberta.tokenizer.loading import sentencepiece_tokenizer

TEXT = (
    "The quick brown fox jumps over the lazy dog near the bank of the river.",
    "A model reads text, hides some of its words and learns to guess what they were.",
    "She sells sea shells by the sea shore, and he counts them one by one in the evening.",
    "When the rain stopped, the children went out to play until the sun had set.",
)
V2 = ModelConfig(
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    ffn_hidden_size=48,
    vocab_size=208,
    max_position_embeddings=96,
    max_relative_positions=32,
    position_buckets=8,
)
"""Like v2 and v3: log buckets, shared projections, LayerNorm on the position table."""
V1 = replace(
    V2,
    position_buckets=0,
    share_position_projections=False,
    normalize_position_table=False,
    key_bias=False,
    position_key_bias=False,
)
"""Like v1."""


def sentencepiece_model(lines: Iterable[str], **options: Any) -> bytes:
    """Train a SentencePiece model with the special tokens of the released models."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece="[PAD]",
        bos_piece="[CLS]",
        eos_piece="[SEP]",
        unk_piece="[UNK]",
        minloglevel=2,
        **options,
    )
    return model.getvalue()


@cache
def tiny_tokenizer() -> Tokenizer:
    """Return a SentencePiece unigram tokenizer with 200 pieces and [MASK]."""
    model = sentencepiece_model(TEXT * 20, vocab_size=200, hard_vocab_limit=False)
    return sentencepiece_tokenizer(model, "tiny")


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return random fp32 tensors by canonical name, including norms and biases."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(config).items():
        centre = 1.0 if re.search(r"norm\.weight$", name) else 0.0
        weights[name] = centre + 0.1 * torch.randn(shape, generator=generator)
    return weights


def reader(weights: dict[str, Tensor]) -> Callable[[str], Tensor]:
    """Return the function from name to tensor that export expects."""
    return lambda name: weights[name]
