"""Published models of Hugging Face and Microsoft: config, weight files and names of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_deberta.checkpoint.layout import WEIGHT
from megatron_deberta.checkpoint.reader import Slice
from megatron_deberta.config.schema import ModelConfig, with_task_head
from megatron_deberta.errors import CheckpointError, MissingModelError
from megatron_deberta.files import sha256_file
from megatron_deberta.hf.config import UNTRAINED_FIELD, from_hf_config, padding_id
from megatron_deberta.hf.heads import task_head
from megatron_deberta.hf.legacy_bin import convert_bin
from megatron_deberta.hf.loading import check_folder
from megatron_deberta.hf.names import (
    DISCRIMINATOR_HEAD,
    LM_HEAD,
    OTHER_HEADS,
    PRETRAINING_HEAD,
    TIED_COPIES,
    TOKEN_TABLE,
    TOKEN_TYPES,
    WRAPPED_TOKEN_TABLE,
    HFTensor,
    ModelType,
    hf_tensors,
    standard_names,
)
from megatron_deberta.model.low_rank import HEAD_PREFIXES
from megatron_deberta.model.task_models import parameter_shapes
from megatron_deberta.model.weight_init import fill_initial
from megatron_deberta.parsing import read_json

Source: TypeAlias = Literal["hf", "microsoft"]

CONFIG_FILES = ("config.json", "model_config.json")
"""Of a published model; the first that exists is read."""
GENERATOR_CONFIG = "generator_config.json"
"""In the folder of a discriminator: config of the generator, whose weights have a name with
``.generator.``, such as ``pytorch_model.generator.bin``."""
_V1_TOKENIZER = "bpe_encoder.bin"
"""In the folders of v1: a pickle of the pieces, which ``vocab.json`` has as well."""
_OPTIONAL_PREFIXES = ("head.", "mask_decoder.", *HEAD_PREFIXES)


@dataclass(frozen=True)
class Release:
    """A published model, read one tensor at a time."""

    path: Path
    config: ModelConfig
    missing: tuple[HFTensor, ...]
    """Tensors that the file lacks; ``tensors`` initialises them."""
    ignored: tuple[str, ...]
    """Tensors that are not part of the model."""
    _tensors: dict[str, tuple[HFTensor, StoredTensor]]
    """Where the file has each parameter, by canonical name."""
    _token_types: StoredTensor | None
    _seed: int
    _recorded: str
    """Why the head is not trained, as recorded by the export of such an import."""

    @property
    def missing_names(self) -> tuple[str, ...]:
        """Canonical names of the parameters that the file lacks."""
        return tuple(name for entry in self.missing for name in entry.canonical_names)

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about parameters that are newly initialised or ignored."""
        notes = {
            "missing in the file, newly initialised": self.missing_names,
            "ignored, not part of the model": self.ignored,
        }
        return tuple(f"{what}: {', '.join(names)}" for what, names in notes.items() if names)

    @property
    def why_untrained(self) -> str:
        """Why the model cannot predict tokens; empty if it can, or has another head."""
        if self.missing:
            return f"the file lacks {self.missing[0].name}"
        if f"{DISCRIMINATOR_HEAD}.classifier.weight" in self.ignored:
            return "it is a discriminator (DeBERTaV3), whose head of masked tokens is not trained"
        return self._recorded

    @property
    def why_no_masks(self) -> str:
        """Why the model cannot fill masks; empty if it can."""
        if self.why_untrained:
            return self.why_untrained
        return "" if self.config.head == "mlm" else f"its head is {self.config.head}"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Logical shape of every parameter that the file has, by canonical name."""
        shapes = parameter_shapes(self.config)
        return {name: shape for name, shape in shapes.items() if name not in self.missing_names}

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a parameter in fp32; arguments as in `CheckpointReader.tensor`."""
        entry, stored = self._tensors[name]
        tensor = entry.unpack(stored.load().float())[name]
        if name == "embeddings.position.weight" and self._token_types is not None:
            # RoBERTa's single token-type row applies to every token.
            row = self._token_types.load().float()
            tensor = tensor + row if row.any() else tensor
        return tensor if part is None else part.of(tensor)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield canonical name and fp32 tensor of every parameter."""
        for name in self._tensors:
            yield name, self.tensor(name)
        shapes = parameter_shapes(self.config)
        for name in self.missing_names:
            initial = torch.empty(shapes[name])
            fill_initial(initial, name, shapes[name], self.config, self._seed)
            yield name, initial


def open_release(
    directory: Path,
    source: Source | None,
    scratch: Path,
    *,
    fields: dict[str, Any] | None = None,
    allow_pickle: bool = False,
    sha256: str = "",
    seed: int = 0,
    adapt: Callable[[ModelConfig], ModelConfig] | None = None,
    generator: bool = False,
) -> Release:
    """Read the config of a published model and match its tensors to our architecture.

    Args:
        directory: a folder with ``config.json`` (or ``model_config.json``) and weights.
        source: format; Microsoft's configs have no ``model_type``, tensor names determine it.
            None: Hugging Face's if the config has one.
        scratch: folder for the safetensors copy of a ``.bin`` file.
        fields: result of `read_config`; None: it is called here.
        allow_pickle: read a ``.bin`` file with ``weights_only`` in a separate process.
        sha256: expected digest of the weight file; empty: unchecked.
        seed: seed of parameters that the file lacks.
        adapt: changes the head of the architecture; None: the one that the model has.
        generator: read the generator, if the folder also has it, instead of the discriminator.

    Raises:
        CheckpointError: a file is missing or damaged, or the architecture is not supported.
    """
    check_folder(directory, "one with config.json and weights")
    if fields is None:
        fields = read_config(directory, generator=generator)
    generator = generator and (directory / GENERATOR_CONFIG).is_file()
    source = source or ("hf" if "model_type" in fields else "microsoft")
    in_files = _stored_tensors(
        _weight_files(directory, scratch, allow_pickle, sha256, generator=generator)
    )
    model_type = _model_type(fields, source, in_files)
    new_names = standard_names(in_files, model_type)
    stored = {new_names[name]: tensor for name, tensor in in_files.items()}
    config = _infer_from_tensors(from_hf_config(fields, model_type), fields, stored)
    if adapt is not None:
        config = adapt(config)
    expected = hf_tensors(config, model_type, padding_id(fields, model_type))
    tensors: dict[str, tuple[HFTensor, StoredTensor]] = {}
    missing: list[HFTensor] = []
    for entry in expected:
        tensor, names = stored.get(entry.name), entry.canonical_names
        if tensor is None:
            if not all(name.startswith(_OPTIONAL_PREFIXES) for name in names):
                raise CheckpointError(
                    f"the weights lack {entry.name}; the file is damaged or of another model"
                )
            if names:
                missing.append(entry)
        elif tensor.shape != entry.shape and all(name.startswith(HEAD_PREFIXES) for name in names):
            # The head of another task
            missing.append(entry)
        elif tensor.shape != entry.shape:
            raise CheckpointError(
                f"{tensor.name}: shape {tensor.shape} is not {entry.shape} of config.json; "
                "config and weights are of different models"
            )
        else:
            tensors |= dict.fromkeys(names, (entry, tensor))
    ignored = sorted(stored.keys() - {entry.name for entry in expected})
    others = [name for name in ignored if config.head == "mlm" or not PRETRAINING_HEAD.match(name)]
    if config.position_terms == "none":
        # transformers builds it whether there is a table or not.
        others = [name for name in others if not name.startswith("deberta.encoder.LayerNorm.")]
    _check_ignored(others, stored)
    token_types = stored.get(TOKEN_TYPES) if config.type_vocab_size == 0 else None
    recorded = str(fields.get(UNTRAINED_FIELD, ""))
    return Release(
        directory,
        config,
        tuple(missing),
        tuple(ignored),
        tensors,
        token_types,
        seed,
        recorded,
    )


def safetensors_folder(
    directory: Path, scratch: Path, *, allow_pickle: bool = False, sha256: str = ""
) -> Path:
    """Return a folder with a published model's files whose weights are safetensors.

    Args:
        directory: folder of the model.
        scratch: empty folder for the files of a model that has a pickle.
        allow_pickle: read a ``.bin`` file.
        sha256: expected digest of the weight file; empty: unchecked, and pickles are rejected.

    Raises:
        CheckpointError: a file is missing or damaged, or is a pickle that may not be read.
    """
    check_folder(directory, "one with config.json and weights")
    if any(directory.glob("*.safetensors")):
        _weight_files(directory, scratch, allow_pickle, sha256, generator=False)
        return directory
    folder = scratch / directory.resolve().name
    folder.mkdir()
    (weights,) = _weight_files(directory, folder, allow_pickle, sha256, generator=False)
    weights.rename(folder / "model.safetensors")
    for path in directory.resolve().iterdir():
        if path.suffix not in (".bin", ".pt"):
            (folder / path.name).symlink_to(path)
    return folder


def open_with_head(directory: Path, fields: dict[str, Any]) -> Release:
    """Open a published model with the head that its config names; see `open_release`.

    Args:
        directory: a folder with ``config.json`` and safetensors files.
        fields: result of `read_config`.

    Raises:
        CheckpointError: a file is missing or damaged, or the architecture is not supported.
    """
    own = task_head(fields)

    def adapt(model: ModelConfig) -> ModelConfig:
        return with_task_head(model, own.head, own.labels, own.dropout)

    adapt_head = None if own.head == "mlm" else adapt
    return open_release(directory, None, directory, fields=fields, adapt=adapt_head)


def _check_ignored(names: list[str], stored: dict[str, StoredTensor]) -> None:
    """Reject unmatched tensors unless they are known heads or copies of tied weights."""
    for name in names:
        if TIED_COPIES.fullmatch(name):
            kind = name.rpartition(".")[2]
            pattern = TOKEN_TABLE if kind == "weight" else re.compile(r".*lm_head\.bias")
            original = next((other for other in stored if pattern.fullmatch(other)), None)
            if original is None or not torch.equal(stored[name].load(), stored[original].load()):
                raise CheckpointError(
                    f"{name} differs from {original}; only models with tied embeddings can be "
                    "imported"
                )
        elif not OTHER_HEADS.match(name):
            raise CheckpointError(
                f"the weights hold {name}, which config.json does not account for; "
                "config and weights are of different models"
            )


def _infer_from_tensors(
    config: ModelConfig, fields: dict[str, Any], stored: dict[str, StoredTensor]
) -> ModelConfig:
    """Set what the tensors determine: vocabulary size, and whether there is a mask decoder."""
    token_table = next((name for name in stored if TOKEN_TABLE.fullmatch(name)), None)
    if token_table is None:
        first = next(iter(stored.values())).name if stored else "none"
        raise CheckpointError(
            "the weights lack embeddings.word_embeddings.weight (the first tensor is "
            f"{first}); give a whole DeBERTa or RoBERTa in transformers' or Microsoft's names"
        )
    config = replace(config, vocab_size=stored[token_table].shape[0])
    legacy_head = any("cls.predictions." in tensor.name for tensor in stored.values())
    head = f"{LM_HEAD}.dense.weight" in stored
    stock_head = legacy_head or (head and fields.get("legacy") is False)
    positions = "deberta.embeddings.position_embeddings.weight" in stored
    if stock_head and not positions and "mask_decoder_passes" not in fields:
        # Trained by transformers' own class, which has no mask decoder.
        config = replace(config, mask_decoder_passes=0, absolute_positions="none")
    return config


def read_config(directory: Path, *, generator: bool = False) -> dict[str, Any]:
    """Return the content of a published model's config file.

    Args:
        directory: its folder.
        generator: read the generator's instead, if the folder has it.

    Raises:
        MissingModelError: it has none.
        CheckpointError: it is damaged.
    """
    for name in (*([GENERATOR_CONFIG] if generator else ()), *CONFIG_FILES):
        if (directory / name).is_file():
            return _read_object(directory / name)
    raise MissingModelError(f"{directory} has no {' or '.join(CONFIG_FILES)}; add one")


def _model_type(
    fields: dict[str, Any], source: Source, in_files: dict[str, StoredTensor]
) -> ModelType:
    if source == "microsoft":
        v1 = any(name.endswith(".in_proj.weight") for name in in_files)
        return "deberta" if v1 else "deberta-v2"
    model_type = fields.get("model_type")
    if model_type not in get_args(ModelType):
        raise CheckpointError(
            f"config.json: model_type={model_type!r} is not supported; supported are "
            f"{', '.join(get_args(ModelType))}, and files without a type by --from microsoft"
        )
    return cast(ModelType, model_type)


class StoredTensor(NamedTuple):
    """Location of a tensor in a safetensors file."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def load(self) -> Tensor:
        """Read the tensor in its stored dtype."""
        with safe_open(self.path, framework="pt") as file:
            return cast(Tensor, file.get_tensor(self.name))


def _read_object(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of a published model.

    Raises:
        CheckpointError: it is no JSON object.
    """
    return read_json(
        path, dict[str, Any], "a JSON object", error=CheckpointError, remedy="download it again"
    )


def _stored_tensors(files: list[Path]) -> dict[str, StoredTensor]:
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
    prefixes = {
        found[1] for name in names.values() if (found := WRAPPED_TOKEN_TABLE.fullmatch(name))
    }
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


def _weight_files(
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
        if not pickles and any(directory.glob("onnx/*.onnx")):
            raise CheckpointError(
                f"{directory} has ONNX graphs but no weights; run the graph in onnx/ with "
                "onnxruntime or optimum, or give the folder of the model it was exported from"
            )
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
    weight_map = _read_object(index).get("weight_map")
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
