"""Attention maps of one text in a model on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.evaluate.models import open_source_model
from megatron_deberta.hf.loading import build_encoder
from megatron_deberta.model import DebertaModel, ModelInputs
from megatron_deberta.model.attention import DisentangledSelfAttention
from megatron_deberta.model.layers import Layer
from megatron_deberta.ops.reference import AttentionMaps
from megatron_deberta.tokenizer import Tokenizer

PROBABILITIES = "probabilities"
TERMS = ("c2c", "c2p", "p2c")
PARTS = (PROBABILITIES, *TERMS)
MEAN: Literal["mean"] = "mean"
LAST = "last"
_CHECKPOINTS = "checkpoints"
ALL = "all"
MAX_TOKENS = 1024
"""Of models without absolute positions, whose rows have no other limit."""
Head: TypeAlias = int | Literal["mean"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextMaps:
    """Attention maps of one model for one text.

    Attributes:
        name: of the model.
        pieces: N tokens as text, [CLS] and [SEP] included.
        num_layers: of the model.
        layers: numbers of the layers below, from 1.
        heads: numbers of the heads below, from 1, or ``mean``, the mean over all heads.
        parts: the probabilities and the terms of the scores that the model has, of ``PARTS``.
        values: float32 ``[layers, heads, parts, N, N]``, queries before keys.
    """

    name: str
    pieces: tuple[str, ...]
    num_layers: int
    layers: tuple[int, ...]
    heads: tuple[Head, ...]
    parts: tuple[str, ...]
    values: npt.NDArray[np.float32]

    def map(self, layer: int, head: Head, part: str) -> npt.NDArray[np.float32] | None:
        """Return the map of a layer, head and part.

        Args:
            layer: one of ``layers``.
            head: one of ``heads``.
            part: one of ``PARTS``.

        Returns:
            ``[N, N]``; None: the model has no such part.
        """
        if part not in self.parts:
            return None
        at = self.layers.index(layer), self.heads.index(head), self.parts.index(part)
        found: npt.NDArray[np.float32] = self.values[at]
        return found


def compute_maps(
    path: Path, text: str, layers: str = LAST, heads: str = MEAN, tokenizer_path: str = ""
) -> TextMaps:
    """Compute the maps of the encoder's self-attention, without dropout, in fp32 on the CPU.

    Args:
        path: run, checkpoint, export or release; of replaced-token detection, the discriminator.
        text: special tokens in it are parsed; [CLS] and [SEP] are added.
        layers: numbers from 1, separated by commas, negative ones from the end; ``last``; ``all``.
        heads: numbers from 1, separated by commas; ``mean``; ``all``.
        tokenizer_path: the model's tokenizer; empty: its own.

    Raises:
        CheckpointError: the folder holds no model, or a damaged one.
        ConfigError: the text is empty or too long, or there is no such layer or head.
        DataError: the tokenizer is missing or malformed.
    """
    source = open_source_model(path, tokenizer_path)
    config = source.config
    chosen = choose_layers(layers, config.num_layers, path)
    chosen_heads = choose_heads(heads, config.num_heads, path)
    source.verify()
    tokenizer = source.load_tokenizer()
    ids = encode_text(tokenizer, text, config, path)
    model = build_encoder(config, source.read)
    found = record_maps(model, ids, chosen)
    parts = tuple(part for part in PARTS if part == PROBABILITIES or part in found[0].terms)
    return TextMaps(
        name=model_name(path),
        pieces=tuple(tokenizer.piece_text(token) for token in ids),
        num_layers=config.num_layers,
        layers=chosen,
        heads=chosen_heads,
        parts=parts,
        values=np.stack([_of_heads(maps, parts, chosen_heads) for maps in found]),
    )


def model_name(path: Path) -> str:
    """Return a model's name: its folder, after that of its run if it is a checkpoint."""
    if path.parent.name == _CHECKPOINTS:
        return f"{path.parent.parent.name}/{path.name}"
    return path.name or str(path)


def encode_text(tokenizer: Tokenizer, text: str, config: ModelConfig, path: Path) -> list[int]:
    """Return the ids of ``[CLS] text [SEP]``.

    Args:
        tokenizer: the model's tokenizer.
        text: the text; names of special tokens in it are parsed.
        config: the architecture.
        path: of the model, for messages.

    Raises:
        ConfigError: the text has no tokens, or more than the model has positions.
    """
    ids = tokenizer.encode(text, parse_special=True)
    if not ids:
        raise ConfigError(f"text {text!r} has no tokens; give a sentence")
    ids = [tokenizer.cls_id, *ids, tokenizer.sep_id]
    has_positions = config.absolute_positions != "none"
    limit = config.max_position_embeddings if has_positions else MAX_TOKENS
    if len(ids) > limit:
        raise ConfigError(
            f"text {text[:60]!r} has {len(ids)} tokens, but {path} takes {limit}; shorten it"
        )
    if max(ids) >= config.vocab_size:
        raise ConfigError(
            f"{path} has {config.vocab_size} embeddings, but the text has token {max(ids)}; give "
            "the model's tokenizer with --tokenizer"
        )
    return ids


@torch.no_grad()
def record_maps(
    model: DebertaModel, ids: Sequence[int], layers: Sequence[int]
) -> list[AttentionMaps]:
    """Run a model on one row and return the attention maps of some of its layers.

    An autoregressive model attends to earlier tokens only.

    Args:
        model: on the CPU.
        ids: of the tokens.
        layers: numbers of layers, from 1.

    Returns:
        The maps of each of ``layers``, in that order.
    """
    found: dict[int, AttentionMaps] = {}

    def record(number: int) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            hidden, tokens, context, *_ = arguments
            found[number] = cast(DisentangledSelfAttention, module).maps(hidden, tokens, context)

        return hook

    with ExitStack() as hooks:
        for number in layers:
            attention = cast(Layer, model.encoder.layers[number - 1]).attention
            hooks.enter_context(attention.register_forward_pre_hook(record(number)))
        causal = model.config.head == "autoregressive"
        model.encode(ModelInputs(torch.tensor([ids]), causal=causal))
    return [found[number] for number in layers]


def choose_layers(spec: str, count: int, path: Path) -> tuple[int, ...]:
    """Parse the numbers of layers, from 1.

    Args:
        spec: ``all``, or numbers with commas between, from 1 or negative from the end, or ``last``.
        count: number of layers.
        path: of the model, for messages.

    Raises:
        ConfigError: a layer is no number, or there is no such layer.
    """
    numbers = tuple(range(1, count + 1))
    known: dict[int | str, int] = {LAST: count}
    for number in numbers:
        known |= {number: number, number - count - 1: number}
    has = f"{path} has layers 1 to {count} (-{count} to -1 from the end)"
    return numbers if spec == ALL else _choose(spec, "layers", LAST, known, has)


def choose_heads(spec: str, count: int, path: Path) -> tuple[Head, ...]:
    """Parse the numbers of heads, from 1, or ``mean``; ``all`` is the mean and every head.

    Args:
        spec: ``all``, or numbers from 1 and ``mean`` with commas between.
        count: number of heads.
        path: of the model, for messages.

    Raises:
        ConfigError: a head is no number, or there is no such head.
    """
    every: tuple[Head, ...] = (MEAN, *range(1, count + 1))
    known: dict[int | str, Head] = {each: each for each in every}
    has = f"{path} has heads 1 to {count}"
    return every if spec == ALL else _choose(spec, "heads", MEAN, known, has)


def _choose(
    spec: str, option: str, name: str, known: Mapping[int | str, T], has: str
) -> tuple[T, ...]:
    """Return what numbers and a name stand for, each once; other words are errors."""
    chosen = []
    for word in map(str.strip, spec.split(",")):
        try:
            chosen.append(known[word if word == name else int(word)])
        except ValueError:
            raise ConfigError(
                f"--{option} {word!r}: must be numbers separated by commas, {name} or {ALL}"
            ) from None
        except KeyError:
            raise ConfigError(f"--{option} {word}: {has}") from None
    return tuple(dict.fromkeys(chosen))


def _of_heads(
    maps: AttentionMaps, parts: Sequence[str], heads: Sequence[Head]
) -> npt.NDArray[np.float32]:
    """Return ``[heads, parts, N, N]`` of one layer."""
    of_parts = [maps.probabilities if part == PROBABILITIES else maps.terms[part] for part in parts]
    values = torch.stack([part[0] for part in of_parts], 1)  # [A, parts, N, N]
    chosen = [values[head - 1] if isinstance(head, int) else values.mean(0) for head in heads]
    found: npt.NDArray[np.float32] = torch.stack(chosen).numpy()
    return found
