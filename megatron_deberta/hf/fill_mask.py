"""Fill-mask prediction with an exported model or a training checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import CheckpointError, ConfigError, MissingModelError
from megatron_deberta.hf.heads import task_head
from megatron_deberta.hf.loading import (
    NONFINITE,
    build_model,
    check_folder,
    load_export_tokenizer,
    open_trained_model,
)
from megatron_deberta.hf.published import (
    CONFIG_FILES,
    GENERATOR_CONFIG,
    open_release,
    read_config,
)
from megatron_deberta.model import ModelInputs
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
        logits: maps tokens ``[1, N]`` to logits ``[1, N, V]``.
        tokenizer: the model's tokenizer.
        max_tokens: maximum input length; 0: unlimited.
        training_data: ``data.train`` of the run; empty: unknown, as for an export.
    """

    logits: Callable[[ModelInputs], Tensor]
    tokenizer: Tokenizer
    max_tokens: int
    training_data: tuple[str, ...] = ()

    @property
    def mask_token(self) -> str:
        """The tokenizer's mask token, usually ``[MASK]``."""
        return self.tokenizer.special.mask

    @torch.no_grad()
    def fill(
        self, text: str, top_k: int = 5, penalty: Tensor | None = None
    ) -> list[list[Prediction]]:
        """Predict the most probable tokens for every [MASK] of a text, in order.

        Embedding rows beyond the tokenizer's vocabulary are excluded.

        Args:
            text: with at least one [MASK].
            top_k: number of predictions per [MASK].
            penalty: [num_tokens] subtracted from the logits before the softmax, such as a weight
                times the log-frequencies of the tokens; None: nothing.

        Raises:
            CheckpointError: the model's outputs are infinite or not a number.
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
        logits = self.logits(ModelInputs(torch.tensor([ids])))[0, masked]
        logits = logits[:, : tokenizer.num_tokens].float()
        if not logits.isfinite().all():
            raise CheckpointError(NONFINITE)
        if penalty is not None:
            logits = logits - penalty
        best = logits.softmax(-1).topk(min(top_k, tokenizer.num_tokens))
        return [
            [
                Prediction(token, tokenizer.piece(token), tokenizer.decode([token]), probability)
                for token, probability in zip(*candidates, strict=True)
            ]
            for candidates in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]


def open_filler(path: Path, tokenizer_path: str = "") -> MaskFiller:
    """Open an export, a published model, a run or a checkpoint.

    Args:
        path: the folder.
        tokenizer_path: tokenizer; empty: the model's own.

    Raises:
        CheckpointError: the folder holds no model, or a damaged one, or one without trained head.
        DataError: the tokenizer is missing or differs from the model's.
    """
    check_folder(path, "an export, a downloaded model, a run or a checkpoint")
    training_data: tuple[str, ...] = ()
    if any((path / name).is_file() for name in CONFIG_FILES):
        config, read, tokenizer = _read_published(path, tokenizer_path)
    else:
        trained = open_trained_model(path, tokenizer_path)
        config, read = trained.open("generator")
        if config.head == "autoregressive":
            raise ConfigError(
                f"{path} was trained with objective.name=autoregressive and fills no masks; use "
                "megatron-deberta generate"
            )
        if config.head != "mlm":
            raise ConfigError(
                f"{path} is fine-tuned with the head {config.head} and fills no masks; use "
                "megatron-deberta predict"
            )
        trained.check_trained(path)
        tokenizer, training_data = trained.tokenizer, trained.run.data.train
    max_tokens = 0 if config.absolute_positions == "none" else config.max_position_embeddings
    return MaskFiller(build_model(config, read).logits, tokenizer, max_tokens, training_data)


def _read_published(
    path: Path, tokenizer_path: str
) -> tuple[ModelConfig, Callable[[str], Tensor], Tokenizer]:
    """Read a folder in the format of Hugging Face or Microsoft, such as an export."""
    generator = " --generator-only" if (path / GENERATOR_CONFIG).is_file() else ""
    importing = (
        f"megatron-deberta convert --from hf {path} --output NEW --allow-pickle-weights-only "
        f"--sha256 HEX{generator}"
    )
    if not any(path.glob("*.safetensors")) and any(path.glob("*.bin")):
        raise MissingModelError(f"{path} has pickled weights; import them first: {importing}")
    fields = read_config(path)
    head = task_head(fields).head
    if head != "mlm":
        raise ConfigError(
            f"{path} is fine-tuned with the head {head} and fills no masks; use megatron-deberta "
            "predict"
        )
    release = open_release(path, None, path, fields=fields)
    if release.missing:
        raise MissingModelError(
            f"{path} lacks {release.missing[0].name}, so predictions would come from random "
            "weights; give a model trained for masked language modelling"
        )
    if release.why_no_masks:
        remedy = f"import its generator: {importing}" if generator else "give its generator"
        raise MissingModelError(f"{path} cannot fill masks: {release.why_no_masks}; {remedy}")
    # Each tensor is released when it has been copied into the model.
    tokenizer = load_export_tokenizer(fields, tokenizer_path or path)
    return release.config, dict(release.tensors()).pop, tokenizer
