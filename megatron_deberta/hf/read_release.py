"""Reads models of Hugging Face and of Microsoft's releases into canonical tensors.

Owns finding and reading their files and saying what they lack. Refuses writing checkpoints and
tokenizers (``hf/import_release.py``). Pickles are read by ``legacy_bin.py`` only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import CheckpointError
from megatron_deberta.files import sha256_file
from megatron_deberta.hf.config import from_hf_config, padding_id
from megatron_deberta.hf.legacy_bin import convert_bin
from megatron_deberta.hf.names import (
    TOKEN_TYPES,
    HFTensor,
    ModelType,
    hf_tensors,
    standard_names,
)
from megatron_deberta.model.shapes import parameter_shapes
from megatron_deberta.model.weight_init import fill_initial

Source: TypeAlias = Literal["hf", "microsoft"]

_TYPES = ("deberta", "deberta-v2", "roberta", "megatron-deberta")
_MAY_BE_MISSING = ("head.", "mask_decoder.")
_LEFT_OUT = re.compile(
    r"(mask_predictions|(roberta\.)?pooler|classifier)\.|.*position_ids$|.*\._weight$"
)
_TIED = re.compile(r"(cls\.predictions\.decoder|lm_head\.decoder)\.(weight|bias)")
_TOKEN_TABLE = re.compile(r"(deberta|roberta)\.embeddings\.word_embeddings\.weight")


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def load(self) -> Tensor:
        """Read it, in its own dtype."""
        with safe_open(self.path, framework="pt") as file:
            return cast(Tensor, file.get_tensor(self.name))


@dataclass(frozen=True)
class Release:
    """A foreign model, ready to be read tensor by tensor."""

    config: ModelConfig
    """Its architecture."""
    notes: tuple[str, ...]
    """What the user should know: what was initialised, what was left out."""
    _tensors: tuple[tuple[HFTensor, Stored], ...]
    _token_types: Stored | None
    _seed: int

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Canonical name and fp32 tensor of every parameter, one foreign tensor at a time."""
        found: set[str] = set()
        for entry, stored in self._tensors:
            for part, tensor in entry.unpack(stored.load().float()).items():
                found.add(part)
                if part == "embeddings.position.weight":
                    tensor = self._with_token_type(tensor)
                yield part, tensor
        for name, shape in parameter_shapes(self.config).items():
            if name not in found:
                fresh = torch.empty(shape)
                fill_initial(fresh, name, shape, self.config, self._seed)
                yield name, fresh

    def _with_token_type(self, positions: Tensor) -> Tensor:
        """RoBERTa adds the same token-type row to every token; our model has no such row."""
        if self._token_types is None:
            return positions
        row = self._token_types.load().float()
        return positions + row if row.any() else positions


def open_release(
    directory: Path,
    source: Source,
    scratch: Path,
    *,
    allow_pickle: bool = False,
    sha256: str = "",
    seed: int = 0,
) -> Release:
    """Find config and weights of a model and check that they fit our architecture.

    Args:
        directory: a folder with ``config.json`` (or ``model_config.json``) and weights.
        source: who wrote it; Microsoft's configs name no type, their files' names tell it.
        scratch: folder for the converted copy of a ``.bin`` file.
        allow_pickle: read a ``.bin`` file, with ``weights_only`` and in a process of its own.
        sha256: digest that the weight file must have; empty checks nothing.
        seed: of parameters the file lacks.

    Raises:
        CheckpointError: something is missing, damaged, or not our architecture.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no folder; give one with config.json and weights")
    fields = _read_config(directory)
    places = _stored_tensors(_weight_files(directory, scratch, allow_pickle, sha256))
    model_type = _model_type(fields, source, places)
    names = standard_names(places, model_type)
    stored = {names[name]: place for name, place in places.items()}
    config = _fit_config(from_hf_config(fields, model_type), fields, stored)
    expected = hf_tensors(config, model_type, padding_id(fields, model_type))
    return _match(config, expected, stored, seed)


def _match(
    config: ModelConfig,
    expected: list[HFTensor],
    stored: dict[str, Stored],
    seed: int,
) -> Release:
    tensors: list[tuple[HFTensor, Stored]] = []
    fresh: list[str] = []
    for entry in expected:
        if entry.name not in stored:
            if not all(part.startswith(_MAY_BE_MISSING) for part in entry.parts):
                raise CheckpointError(
                    f"the weights lack {entry.name}; the file is damaged or of another model"
                )
            fresh += entry.parts
            continue
        place = stored[entry.name]
        if place.shape != entry.shape:
            raise CheckpointError(
                f"{place.name}: shape {place.shape} is not {entry.shape} of config.json; "
                "config and weights are of different models"
            )
        if entry.parts:
            tensors.append((entry, place))
    known = {entry.name for entry in expected}
    left_out = sorted(name for name in stored if name not in known)
    _check_left_out(left_out, stored)
    notes = []
    if fresh:
        notes.append(f"not in the file, newly initialised: {', '.join(fresh)}")
    if left_out:
        notes.append(f"left out, no part of our model: {', '.join(left_out)}")
    folded = TOKEN_TYPES in known and config.type_vocab_size == 0
    token_types = stored.get(TOKEN_TYPES) if folded else None
    return Release(config, tuple(notes), tuple(tensors), token_types, seed)


def _check_left_out(left_out: list[str], stored: dict[str, Stored]) -> None:
    """Accept tensors without a place only where nothing is lost by leaving them out."""
    for name in left_out:
        if _TIED.fullmatch(name):
            kind = name.rpartition(".")[2]
            pattern = _TOKEN_TABLE if kind == "weight" else re.compile(r".*lm_head\.bias")
            twin = next((other for other in stored if pattern.fullmatch(other)), None)
            if twin is None or not torch.equal(stored[name].load(), stored[twin].load()):
                raise CheckpointError(
                    f"{name} differs from {twin}; only models with tied embeddings can be imported"
                )
        elif not _LEFT_OUT.match(name):
            raise CheckpointError(
                f"the weights hold {name}, which config.json does not account for; "
                "config and weights are of different models"
            )


def _fit_config(
    config: ModelConfig,
    fields: dict[str, Any],
    stored: dict[str, Stored],
) -> ModelConfig:
    """Let the tensors decide what configs leave open: the vocabulary and the mask decoder."""
    token_table = next((name for name in stored if _TOKEN_TABLE.fullmatch(name)), None)
    if token_table is None:
        raise CheckpointError("the weights lack word_embeddings; give a whole model's files")
    config = replace(config, vocab_size=stored[token_table].shape[0])
    legacy_head = any(place.name.startswith("cls.predictions.") for place in stored.values())
    head = "lm_predictions.lm_head.dense.weight" in stored
    plain_head = legacy_head or (head and fields.get("legacy") is False)
    positions = "deberta.embeddings.position_embeddings.weight" in stored
    if plain_head and not positions and "mask_decoder_passes" not in fields:
        # Trained by transformers' own class, which has no mask decoder.
        config = replace(config, mask_decoder_passes=0, absolute_positions="none")
    return config


def _read_config(directory: Path) -> dict[str, Any]:
    for name in ("config.json", "model_config.json"):
        if (directory / name).is_file():
            return _read_json(directory / name)
    raise CheckpointError(f"{directory} has neither config.json nor model_config.json; add one")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}; fetch it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; fetch it again")
    return content


def _model_type(fields: dict[str, Any], source: Source, places: dict[str, Stored]) -> ModelType:
    if source == "microsoft":
        v1 = any(name.endswith(".in_proj.weight") for name in places)
        return "deberta" if v1 else "deberta-v2"
    model_type = fields.get("model_type")
    if model_type not in _TYPES:
        raise CheckpointError(
            f"config.json: model_type={model_type!r} is none of {', '.join(_TYPES)}; "
            "give a DeBERTa or RoBERTa, or use --from microsoft"
        )
    return cast(ModelType, model_type)


def _stored_tensors(files: list[Path]) -> dict[str, Stored]:
    places: dict[str, Stored] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    places[name] = Stored(path, name, tuple(file.get_slice(name).get_shape()))
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}; fetch it again") from None
    return places


def _weight_files(directory: Path, scratch: Path, allow_pickle: bool, sha256: str) -> list[Path]:
    whole = directory / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = [directory / name for name in _files_of(index)]
    for path in files:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, but {index.name} names it; fetch it again")
    if sha256 and len(files) > 1:
        raise CheckpointError(
            f"--sha256 checks one file, but {directory} has {len(files)}; omit it"
        )
    if files:
        _check_digest(files[0], sha256)
        return files
    pickles = sorted([*directory.glob("*.bin"), *directory.glob("*.pt")])
    if len(pickles) != 1:
        found = ", ".join(path.name for path in pickles) or "none"
        raise CheckpointError(
            f"{directory} must hold *.safetensors or exactly one .bin file; found {found}"
        )
    if not allow_pickle:
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which can run code; give safetensors, or "
            "--allow-pickle-weights-only to read its tensors in a process of its own"
        )
    if not sha256:
        raise CheckpointError(
            f"{pickles[0]} is a pickle; give the SHA-256 that its publisher states as --sha256"
        )
    _check_digest(pickles[0], sha256)
    target = scratch / "weights.safetensors"
    try:
        convert_bin(pickles[0], target)
    except ValueError as error:
        raise CheckpointError(f"{pickles[0]} cannot be read as plain weights: {error}") from None
    return [target]


def _files_of(index: Path) -> list[str]:
    named = _read_json(index).get("weight_map")
    names = list(named.values()) if isinstance(named, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(
            f"{index}: weight_map={str(named)[:80]} does not map tensors to files beside it; "
            "fetch it again"
        )
    return sorted(set(names))


def _check_digest(path: Path, sha256: str) -> None:
    if sha256 and (found := sha256_file(path)) != sha256.lower():
        raise CheckpointError(
            f"{path}: SHA-256 is {found}, not {sha256.lower()}; fetch the file again"
        )
