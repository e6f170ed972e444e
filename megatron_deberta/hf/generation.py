"""Continuation of texts by a model with an autoregressive form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_deberta.config.rules import causal_fraction
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.hf.loading import (
    NONFINITE,
    build_model,
    check_folder,
    open_trained_model,
)
from megatron_deberta.model.incremental import IncrementalDecoder
from megatron_deberta.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of sampling; the defaults are greedy decoding.

    Attributes:
        temperature: divides the logits; 0: the most probable token (greedy).
        top_k: draw from the k most probable tokens only; 0: all.
        top_p: draw from the most probable tokens whose probabilities add up to this only.
        seed: of the draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class TextGenerator:
    """An autoregressive model with its tokenizer.

    Args:
        next_logits: maps token ids ``[1, N]`` to the logits ``[V]`` of the token after them.
        tokenizer: the model's tokenizer.
        max_tokens: maximum length, [CLS] included; 0: unlimited.
    """

    next_logits: Callable[[Tensor], Tensor]
    tokenizer: Tokenizer
    max_tokens: int

    def generate(self, prompt: str, num_tokens: int, sampling: Sampling | None = None) -> str:
        """Continue a text until [SEP], ``num_tokens`` more tokens, or the model's last position.

        Args:
            prompt: the text; it may be empty.
            num_tokens: maximum number of new tokens.
            sampling: None: greedy.

        Returns:
            The text with its continuation.

        Raises:
            ConfigError: the prompt is longer than the model's positions.
        """
        tokenizer = self.tokenizer
        ids = [tokenizer.cls_id, *tokenizer.encode(prompt)]
        if self.max_tokens and len(ids) >= self.max_tokens:
            raise ConfigError(
                f"prompt {prompt[:60]!r} has {len(ids) - 1} tokens, but the model has "
                f"{self.max_tokens} positions, one of them for [CLS]; shorten it"
            )
        return tokenizer.decode(self.continue_ids(ids, num_tokens, sampling)[1:])

    @torch.no_grad()
    def continue_ids(
        self, ids: Sequence[int], num_tokens: int, sampling: Sampling | None = None
    ) -> list[int]:
        """Return token ids with their continuation, without [SEP]; arguments as `generate`.

        Raises:
            CheckpointError: the model's outputs are infinite or not a number.
        """
        sampling = sampling or Sampling()
        random = torch.Generator().manual_seed(sampling.seed)
        found = list(ids)
        stop = len(found) + num_tokens
        if self.max_tokens:
            stop = min(stop, self.max_tokens)
        while len(found) < stop:
            logits = self.next_logits(torch.tensor([found])).double()
            if not logits.isfinite().all():
                raise CheckpointError(NONFINITE)
            token = choose(self._allowed(logits), sampling, random)
            if token == self.tokenizer.sep_id:
                break
            found.append(token)
        return found

    def _allowed(self, logits: Tensor) -> Tensor:
        """Return the logits of the vocabulary, -inf for special tokens other than [SEP]."""
        tokenizer = self.tokenizer
        excluded = [token for token in tokenizer.special_ids if token != tokenizer.sep_id]
        allowed = logits[: tokenizer.num_tokens].clone()
        allowed[excluded] = -math.inf
        return allowed


def choose(logits: Tensor, sampling: Sampling, random: torch.Generator) -> int:
    """Return the next token.

    Args:
        logits: ``[V]``, -inf for excluded tokens.
        sampling: parameters of sampling.
        random: random number generator.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    # Relative to the maximum, so that a low temperature does not overflow.
    scaled = (logits - logits.max()) / sampling.temperature
    ordered, tokens = scaled.sort(descending=True, stable=True)
    if sampling.top_k:
        ordered[sampling.top_k :] = -math.inf
    probabilities = ordered.softmax(0)
    # The most probable token stays, and so does the one that passes the limit.
    before = probabilities.cumsum(0) - probabilities
    probabilities[1:][before[1:] >= sampling.top_p] = 0
    return int(tokens[torch.multinomial(probabilities, 1, generator=random)])


def open_generator(path: Path, tokenizer_path: str = "") -> TextGenerator:
    """Open a run or a checkpoint with an autoregressive form.

    Args:
        path: the folder.
        tokenizer_path: tokenizer; empty: the model's own.

    Raises:
        CheckpointError: the folder holds no checkpoint, or a damaged one.
        ConfigError: the model has no autoregressive form.
        DataError: the tokenizer is missing or differs from the model's.
    """
    check_folder(path, "a run or a checkpoint")
    trained = open_trained_model(path, tokenizer_path)
    objective = trained.run.objective
    if not causal_fraction(objective):
        raise ConfigError(
            f"{path} was trained with objective.name={objective.name}, which does not predict next "
            "tokens; give a run with objective.name=autoregressive or =mlm+ar"
        )
    trained.check_trained(path)
    config, read = trained.open()
    next_logits = IncrementalDecoder(build_model(config, read))
    max_tokens = 0 if config.absolute_positions == "none" else config.max_position_embeddings
    return TextGenerator(next_logits, trained.tokenizer, max_tokens)
