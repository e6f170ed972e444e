"""Import of published Hugging Face and Microsoft models as checkpoints to continue pretraining."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor

from megatron_deberta.checkpoint.layout import WEIGHT, CheckpointMetadata, step_dir
from megatron_deberta.checkpoint.reader import Slice
from megatron_deberta.checkpoint.store import HEAD_PREFIXES, save_weights
from megatron_deberta.config import config_to_dict, save_config, validate
from megatron_deberta.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    TokenizerConfig,
)
from megatron_deberta.errors import CheckpointError, ConfigError, MissingModelError
from megatron_deberta.hf.config import UNTRAINED_FIELD, from_hf_config, padding_id
from megatron_deberta.hf.export_model import output_folder
from megatron_deberta.hf.loading import check_folder, load_export_tokenizer
from megatron_deberta.hf.names import TOKEN_TYPES, HFTensor, ModelType, hf_tensors, standard_names
from megatron_deberta.hf.weight_files import StoredTensor, read_object, stored_tensors, weight_files
from megatron_deberta.model.shapes import parameter_shapes
from megatron_deberta.model.weight_init import fill_initial
from megatron_deberta.tokenizer import Tokenizer

Source: TypeAlias = Literal["hf", "microsoft"]

RUN_FILE = "run.yaml"
CONFIG_FILES = ("config.json", "model_config.json")
"""Of a published model; the first that exists is read."""
GENERATOR_CONFIG = "generator_config.json"
"""In the folder of a discriminator: config of the generator, whose weights have a name with
``.generator.``, such as ``pytorch_model.generator.bin``."""
_TOKENIZER_FOLDER = "tokenizer"
_OPTIONAL_PREFIXES = ("head.", "mask_decoder.", *HEAD_PREFIXES)
_IGNORED = re.compile(
    r"(mask_predictions|(roberta\.)?pooler|classifier|qa_outputs)\.|.*position_ids$|.*\._weight$"
)
_PRETRAINING_HEAD = re.compile(
    r"lm_predictions\.|cls\.predictions\.|lm_head\.|deberta\.embeddings\.position_embeddings\."
)
_TIED = re.compile(r"(cls\.predictions\.decoder|lm_head\.decoder)\.(weight|bias)")
_TOKEN_TABLE = re.compile(r"(deberta|roberta)\.embeddings\.word_embeddings\.weight")


@dataclass(frozen=True)
class ImportResult:
    """Files and architecture of an imported model."""

    checkpoint: Path
    """Folder for ``checkpoint.load_from``."""
    run_file: Path
    """Run config that starts from the checkpoint; data and number of steps are to be added."""
    config: ModelConfig
    notes: tuple[str, ...]
    """Parameters that were newly initialised or ignored."""
    why_no_masks: str = ""
    """Why the model cannot fill masks before further training; empty if it can."""


def import_model(
    directory: Path,
    source: Source,
    output: Path,
    *,
    tokenizer_path: str = "",
    allow_pickle: bool = False,
    sha256: str = "",
    seed: int = 0,
    generator: bool = False,
) -> ImportResult:
    """Write checkpoint, tokenizer and run file to ``output``, published only when complete.

    Args:
        directory: folder of the published model.
        source: format of the files.
        output: folder to create; must not exist, or be empty.
        tokenizer_path: the model's tokenizer; empty: the one in ``directory``.
        allow_pickle: read a ``.bin`` file (see ``hf/legacy_bin.py``).
        sha256: expected digest of the weight file; empty: unchecked, and pickles are rejected.
        seed: seed of parameters that the file lacks.
        generator: import the generator that is published beside the model.

    Raises:
        CheckpointError: the model cannot be read, or the checkpoint cannot be written.
        ConfigError: ``output`` is in use, the tokenizer has more ids than the model, or the
            architecture violates a config rule.
        DataError: there is no usable tokenizer.
    """
    check_folder(directory, "one with config.json and weights")
    fields = read_config(directory, (*CONFIG_FILES, *([GENERATOR_CONFIG] if generator else ())))
    tokenizer = load_export_tokenizer(fields, tokenizer_path or directory)
    output = output.absolute()
    with output_folder(output) as folder, tempfile.TemporaryDirectory(dir=folder) as scratch:
        release = open_release(
            directory, source, Path(scratch),
            allow_pickle=allow_pickle, sha256=sha256, seed=seed, generator=generator,
        )  # fmt: skip
        if generator and (why := release.why_no_masks):
            raise CheckpointError(f"{directory}: the generator cannot fill masks: {why}")
        done = write_import(
            folder, output, release.config, release.tensors(), tokenizer, release.notes,
            why_untrained=release.why_untrained,
        )  # fmt: skip
        return replace(done, why_no_masks=release.why_no_masks)


def write_import(
    folder: Path,
    output: Path,
    model: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: Tokenizer,
    notes: tuple[str, ...],
    objective: ObjectiveConfig | None = None,
    why_untrained: str = "",
) -> ImportResult:
    """Write checkpoint, tokenizer and run file.

    Args:
        folder: existing folder, published as ``output`` later.
        output: absolute path, which the run file names.
        model: the architecture.
        tensors: canonical name and tensor of every parameter, of the shape
            ``parameter_shapes(model)[name]``.
        tokenizer: the model's tokenizer.
        notes: of the result.
        objective: of the run; None: masked language modelling with our defaults.
        why_untrained: why the model cannot predict tokens; empty: it can.

    Raises:
        ConfigError: the tokenizer has more ids than the model, or the architecture violates a
            config rule.
    """
    if tokenizer.num_tokens > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.num_tokens} ids, the model {model.vocab_size} rows; "
            "give the model's own with --tokenizer"
        )
    tokenizer.save(str(folder / _TOKENIZER_FOLDER))
    run = RunConfig(
        model=model,
        objective=objective or ObjectiveConfig(name=model.head),
        tokenizer=TokenizerConfig(path=str(output / _TOKENIZER_FOLDER)),
        data=DataConfig(sequence_length=min(512, model.max_position_embeddings)),
        checkpoint=CheckpointConfig(load_from=str(step_dir(output, 0))),
    )
    validate(run)
    metadata = CheckpointMetadata(
        step=0,
        consumed_samples=0,
        config=config_to_dict(run),
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_path=str(output / _TOKENIZER_FOLDER),
        why_untrained=why_untrained,
    )
    save_weights(folder, tensors, parameter_shapes(model), metadata)
    save_config(run, str(folder / RUN_FILE))
    return ImportResult(step_dir(output, 0), output / RUN_FILE, model, notes)


@dataclass(frozen=True)
class Release:
    """A published model, read one tensor at a time."""

    path: Path
    config: ModelConfig
    missing: tuple[HFTensor, ...]
    """Tensors that the file lacks; ``tensors`` initialises them."""
    ignored: tuple[str, ...]
    """Tensors that are not part of the model."""
    _tensors: tuple[tuple[HFTensor, StoredTensor], ...]
    _token_types: StoredTensor | None
    _seed: int
    _recorded: str = ""
    """Why the head is not trained, as recorded by the export of such an import."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about parameters that are newly initialised or ignored."""
        parts = [part for entry in self.missing for part in entry.parts]
        notes = {
            "missing in the file, newly initialised": parts,
            "ignored, not part of the model": self.ignored,
        }
        return tuple(f"{what}: {', '.join(names)}" for what, names in notes.items() if names)

    @property
    def why_untrained(self) -> str:
        """Why the model cannot predict tokens; empty if it can, or has another head."""
        if self.missing:
            return f"the file lacks {self.missing[0].name}"
        if "mask_predictions.classifier.weight" in self.ignored:
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
        missing = {part for entry in self.missing for part in entry.parts}
        shapes = parameter_shapes(self.config)
        return {name: shape for name, shape in shapes.items() if name not in missing}

    def tensor(self, name: str, kind: str = WEIGHT, part: Slice | None = None) -> Tensor:
        """Read a parameter in fp32; arguments as in `CheckpointReader.tensor`."""
        entry, stored = next(pair for pair in self._tensors if name in pair[0].parts)
        tensor = entry.unpack(stored.load().float())[name]
        if name == "embeddings.position.weight":
            tensor = self._add_token_type(tensor)
        return tensor if part is None else part.of(tensor)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield canonical name and fp32 tensor of every parameter."""
        found: set[str] = set()
        for entry, stored in self._tensors:
            for name, tensor in entry.unpack(stored.load().float()).items():
                found.add(name)
                if name == "embeddings.position.weight":
                    tensor = self._add_token_type(tensor)
                yield name, tensor
        for name, shape in parameter_shapes(self.config).items():
            if name not in found:
                initial = torch.empty(shape)
                fill_initial(initial, name, shape, self.config, self._seed)
                yield name, initial

    def _add_token_type(self, positions: Tensor) -> Tensor:
        """Add RoBERTa's single token-type row, which applies to every token, to all positions."""
        if self._token_types is None:
            return positions
        row = self._token_types.load().float()
        return positions + row if row.any() else positions


def open_release(
    directory: Path,
    source: Source | None,
    scratch: Path,
    *,
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
        allow_pickle: read a ``.bin`` file with ``weights_only`` in a separate process.
        sha256: expected digest of the weight file; empty: unchecked.
        seed: seed of parameters that the file lacks.
        adapt: changes the head of the architecture; None: the one that the model has.
        generator: read the generator, if the folder also has it, instead of the discriminator.

    Raises:
        CheckpointError: a file is missing or damaged, or the architecture is not supported.
    """
    check_folder(directory, "one with config.json and weights")
    generator = generator and (directory / GENERATOR_CONFIG).is_file()
    fields = read_config(directory, [GENERATOR_CONFIG] if generator else CONFIG_FILES)
    source = source or ("hf" if "model_type" in fields else "microsoft")
    in_files = stored_tensors(
        weight_files(directory, scratch, allow_pickle, sha256, generator=generator)
    )
    model_type = _model_type(fields, source, in_files)
    names = standard_names(in_files, model_type)
    stored = {names[name]: tensor for name, tensor in in_files.items()}
    config = _infer_from_tensors(from_hf_config(fields, model_type), fields, stored)
    if adapt is not None:
        config = adapt(config)
    expected = hf_tensors(config, model_type, padding_id(fields, model_type))
    recorded = fields.get(UNTRAINED_FIELD, "")
    return replace(_match(directory, config, expected, stored, seed), _recorded=str(recorded))


def _match(
    directory: Path,
    config: ModelConfig,
    expected: list[HFTensor],
    stored: dict[str, StoredTensor],
    seed: int,
) -> Release:
    tensors: list[tuple[HFTensor, StoredTensor]] = []
    missing: list[HFTensor] = []
    for entry in expected:
        tensor = stored.get(entry.name)
        if tensor is None:
            if not all(part.startswith(_OPTIONAL_PREFIXES) for part in entry.parts):
                raise CheckpointError(
                    f"the weights lack {entry.name}; the file is damaged or of another model"
                )
            if entry.parts:
                missing.append(entry)
        elif tensor.shape != entry.shape and all(p.startswith(HEAD_PREFIXES) for p in entry.parts):
            # The head of another task
            missing.append(entry)
        elif tensor.shape != entry.shape:
            raise CheckpointError(
                f"{tensor.name}: shape {tensor.shape} is not {entry.shape} of config.json; "
                "config and weights are of different models"
            )
        elif entry.parts:
            tensors.append((entry, tensor))
    ignored = sorted(stored.keys() - {entry.name for entry in expected})
    others = [name for name in ignored if config.head == "mlm" or not _PRETRAINING_HEAD.match(name)]
    if config.position_terms == "none":
        # transformers builds it whether there is a table or not.
        others = [name for name in others if not name.startswith("deberta.encoder.LayerNorm.")]
    _check_ignored(others, stored)
    token_types = stored.get(TOKEN_TYPES) if config.type_vocab_size == 0 else None
    return Release(
        directory, config, tuple(missing), tuple(ignored), tuple(tensors), token_types, seed
    )


def _check_ignored(names: list[str], stored: dict[str, StoredTensor]) -> None:
    """Reject unmatched tensors unless they are known heads or copies of tied weights."""
    for name in names:
        if _TIED.fullmatch(name):
            kind = name.rpartition(".")[2]
            pattern = _TOKEN_TABLE if kind == "weight" else re.compile(r".*lm_head\.bias")
            original = next((other for other in stored if pattern.fullmatch(other)), None)
            if original is None or not torch.equal(stored[name].load(), stored[original].load()):
                raise CheckpointError(
                    f"{name} differs from {original}; only models with tied embeddings can be "
                    "imported"
                )
        elif not _IGNORED.match(name):
            raise CheckpointError(
                f"the weights hold {name}, which config.json does not account for; "
                "config and weights are of different models"
            )


def _infer_from_tensors(
    config: ModelConfig, fields: dict[str, Any], stored: dict[str, StoredTensor]
) -> ModelConfig:
    """Set what the tensors determine: vocabulary size, and whether there is a mask decoder."""
    token_table = next((name for name in stored if _TOKEN_TABLE.fullmatch(name)), None)
    if token_table is None:
        first = next(iter(stored.values())).name if stored else "none"
        raise CheckpointError(
            "the weights lack embeddings.word_embeddings.weight (the first tensor is "
            f"{first}); give a whole DeBERTa or RoBERTa in transformers' or Microsoft's names"
        )
    config = replace(config, vocab_size=stored[token_table].shape[0])
    legacy_head = any("cls.predictions." in tensor.name for tensor in stored.values())
    head = "lm_predictions.lm_head.dense.weight" in stored
    stock_head = legacy_head or (head and fields.get("legacy") is False)
    positions = "deberta.embeddings.position_embeddings.weight" in stored
    if stock_head and not positions and "mask_decoder_passes" not in fields:
        # Trained by transformers' own class, which has no mask decoder.
        config = replace(config, mask_decoder_passes=0, absolute_positions="none")
    return config


def read_config(directory: Path, names: Sequence[str] = CONFIG_FILES) -> dict[str, Any]:
    """Return the content of a published model's config file, the first of these names.

    Raises:
        MissingModelError: it has none.
        CheckpointError: it is damaged.
    """
    for name in names:
        if (directory / name).is_file():
            return read_object(directory / name)
    raise MissingModelError(f"{directory} has no {' or '.join(names)}; add one")


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
