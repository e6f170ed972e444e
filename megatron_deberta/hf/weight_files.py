"""Weight files of published models: which ones, and the names of their tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_deberta.errors import CheckpointError
from megatron_deberta.files import sha256_file
from megatron_deberta.hf.legacy_bin import convert_bin
from megatron_deberta.parsing import read_json

_V1_TOKENIZER = "bpe_encoder.bin"
"""In the folders of v1: a pickle of the pieces, which ``vocab.json`` has as well."""
_WRAPPED_TABLE = re.compile(
    r"((?:.+?\.)??)(?:(?:deberta|roberta|bert)\.)?embeddings\.word_embeddings\.weight"
)
"""Token embeddings, with or without a prefix before the names of transformers."""


class StoredTensor(NamedTuple):
    """Location of a tensor in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def load(self) -> Tensor:
        """Read the tensor in its stored dtype."""
        with safe_open(self.path, framework="pt") as file:
            return cast(Tensor, file.get_tensor(self.name))


def read_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a published model.

    Raises:
        CheckpointError: it is no JSON object.
    """
    return read_json(
        path, dict[str, Any], "a JSON object", error=CheckpointError, remedy="download it again"
    )


def stored_tensors(files: list[Path]) -> dict[str, StoredTensor]:
    """Return the location of every tensor, by its name without what wrappers of a model add.

    Raises:
        CheckpointError: a file is damaged, or holds several models.
    """
    stored: dict[str, StoredTensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name in stored:
                        raise CheckpointError(
                            f"{stored[name].path} and {path} both hold {name}; keep the file of "
                            "one model"
                        )
                    shape = tuple(file.get_slice(name).get_shape())
                    stored[name] = StoredTensor(path, name, shape)
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}; download it again") from None
    return _without_wrappers(stored)


def _without_wrappers(stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Remove what wrappers of a model add to the names of its tensors.

    These are ``_orig_mod.`` of ``torch.compile``, which may stand inside a name too, ``module.`` of
    DistributedDataParallel, and a prefix of the whole model such as Lightning's ``model.``.

    Raises:
        CheckpointError: there are several models, or two tensors get the same name.
    """
    names = {name: name.replace("_orig_mod.", "") for name in stored}
    prefixes = {found[1] for name in names.values() if (found := _WRAPPED_TABLE.fullmatch(name))}
    if len(prefixes) > 1:
        shown = ", ".join(map(repr, sorted(prefixes)))
        raise CheckpointError(
            f"the weights hold several models, with the prefixes {shown}; give a file with the "
            "tensors of one of them"
        )
    prefix = next(iter(prefixes), "")
    renamed = {name.removeprefix(prefix): stored[old] for old, name in names.items()}
    if len(renamed) < len(stored):
        raise CheckpointError(
            f"the weights hold tensors both with and without the prefix {prefix or '_orig_mod.'}; "
            "give a file with the tensors of one model"
        )
    return renamed


def weight_files(
    directory: Path, scratch: Path, allow_pickle: bool, sha256: str, *, generator: bool
) -> list[Path]:
    """Return the safetensors files of a published model.

    Args:
        directory: its folder.
        scratch: folder for the safetensors copy of a ``.bin`` file.
        allow_pickle: read a ``.bin`` file.
        sha256: expected digest of the weight file; empty: unchecked.
        generator: of the generator beside a discriminator.

    Raises:
        CheckpointError: a file is missing or damaged, or is a pickle that may not be read.
    """
    single = directory / "model.safetensors"
    use_single = single.is_file() and not generator
    files = [single] if use_single else _files_of(directory, ("*.safetensors",), generator)
    index = directory / "model.safetensors.index.json"
    if index.is_file() and not generator:
        files = [directory / name for name in _indexed_files(index)]
    for path in files:
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing, but {index.name} names it; download it again"
            )
    if sha256 and len(files) > 1:
        raise CheckpointError(
            f"--sha256 checks one file, but {directory} has {len(files)}; omit it"
        )
    if not files:
        return [_convert_pickle(directory, scratch, allow_pickle, sha256, generator)]
    _check_digest(files[0], sha256)
    return files


def _files_of(directory: Path, patterns: Sequence[str], generator: bool) -> list[Path]:
    """Return the files of one of the two models, or all if only one model has files."""
    found = sorted(path for pattern in patterns for path in directory.glob(pattern))
    found = [path for path in found if path.name != _V1_TOKENIZER]
    own = [path for path in found if (".generator." in path.name) == generator]
    return own or ([] if generator and any(directory.glob("*.generator.*")) else found)


def _convert_pickle(
    directory: Path, scratch: Path, allow_pickle: bool, sha256: str, generator: bool
) -> Path:
    pickles = _files_of(directory, ("*.bin", "*.pt"), generator)
    if len(pickles) != 1:
        found = ", ".join(path.name for path in pickles) or "none"
        raise CheckpointError(
            f"{directory} must hold *.safetensors or exactly one .bin file; found {found}"
        )
    if not allow_pickle:
        raise CheckpointError(
            f"{pickles[0]} is a pickle, which can run code; give safetensors, or "
            "--allow-pickle-weights-only to read its tensors in a separate process"
        )
    if not sha256:
        raise CheckpointError(
            f"{pickles[0]} is a pickle; give the SHA-256 stated by its publisher as --sha256"
        )
    _check_digest(pickles[0], sha256)
    target = scratch / "weights.safetensors"
    try:
        convert_bin(pickles[0], target)
    except ValueError as error:
        raise CheckpointError(f"{pickles[0]} cannot be read as plain weights: {error}") from None
    return target


def _indexed_files(index: Path) -> list[str]:
    weight_map = read_object(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(
            f"{index}: weight_map={str(weight_map)[:80]} does not map tensors to files in the same "
            "folder; download it again"
        )
    return sorted(set(names))


def _check_digest(path: Path, sha256: str) -> None:
    if sha256 and (actual := sha256_file(path)) != sha256.lower():
        raise CheckpointError(
            f"{path}: SHA-256 is {actual}, not {sha256.lower()}; download the file again"
        )
