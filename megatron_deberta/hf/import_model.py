"""Import of published models as checkpoints to continue pretraining, alone or as a pair."""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_deberta.checkpoint.layout import CheckpointMetadata, step_dir
from megatron_deberta.checkpoint.store import save_weights
from megatron_deberta.config import config_to_dict, save_config, validate
from megatron_deberta.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    TokenizerConfig,
)
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.hf.export_model import output_folder
from megatron_deberta.hf.loading import check_folder, load_export_tokenizer
from megatron_deberta.hf.published import (
    GENERATOR_CONFIG,
    Release,
    Source,
    open_release,
    read_config,
)
from megatron_deberta.model.replaced_tokens import (
    DELTA,
    DISCRIMINATOR,
    GENERATOR,
    TOKENS,
    discriminator_config,
    generator_config,
)
from megatron_deberta.model.task_models import parameter_shapes
from megatron_deberta.model.weight_init import fill_initial
from megatron_deberta.tokenizer import Tokenizer

RUN_FILE = "run.yaml"
_TOKENIZER_FOLDER = "tokenizer"
OBJECTIVE = ObjectiveConfig(
    name="rtd", mask_token_probability=1.0, random_token_probability=0.0, max_span_words=1
)
"""Masking of the release."""
_TRAINING_KEYS = ("hidden_dropout", "attention_dropout", "head_dropout", "initializer_range")


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
    content = read_config(directory, generator=generator)
    tokenizer = load_export_tokenizer(content, tokenizer_path or directory)
    output = output.absolute()
    with output_folder(output) as folder, tempfile.TemporaryDirectory(dir=folder) as scratch:
        release = open_release(
            directory, source, Path(scratch), fields=content,
            allow_pickle=allow_pickle, sha256=sha256, seed=seed, generator=generator,
        )  # fmt: skip
        if generator and (why := release.why_no_masks):
            raise CheckpointError(f"{directory}: the generator cannot fill masks: {why}")
        done = _write_import(
            folder, output, release.config, release.tensors(), tokenizer, release.notes,
            why_untrained=release.why_untrained,
        )  # fmt: skip
        return replace(done, why_no_masks=release.why_no_masks)


def _write_import(
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
class WeightFile:
    """A folder with config and weights, and the expected SHA-256 of a pickle ('' = unchecked)."""

    directory: Path
    sha256: str = ""


def import_pair(
    discriminator: WeightFile,
    generator: WeightFile | None,
    source: Source,
    output: Path,
    *,
    tokenizer_path: str = "",
    allow_pickle: bool = False,
    seed: int = 0,
) -> ImportResult:
    """Import a discriminator and its generator as a checkpoint, a tokenizer and a run file.

    The checkpoint shares embeddings by ``gdes``: the delta is the difference of the two tables.

    Args:
        discriminator: the model that is published as such.
        generator: its generator, in a folder of its own or in the same one; None: a new one.
        source: format of the files.
        output: folder to create; must not exist, or be empty.
        tokenizer_path: the model's tokenizer; empty: the one of the discriminator.
        allow_pickle: read ``.bin`` files.
        seed: seed of parameters that the files lack.

    Raises:
        CheckpointError: a model cannot be read, the two do not belong together, or the checkpoint
            cannot be written.
        ConfigError: ``output`` is in use, or the tokenizer has more ids than the model.
        DataError: there is no usable tokenizer.
    """
    for file in filter(None, (generator, discriminator)):
        check_folder(file.directory, "one with config.json and weights")
    content = read_config(discriminator.directory)
    if generator and generator.directory.samefile(discriminator.directory):
        if not (generator.directory / GENERATOR_CONFIG).is_file():
            raise CheckpointError(
                f"{generator.directory} has no {GENERATOR_CONFIG}, so no generator; download it, "
                "or use --new-generator"
            )
    tokenizer = load_export_tokenizer(content, tokenizer_path or discriminator.directory)
    read = functools.partial(open_release, allow_pickle=allow_pickle, seed=seed)
    with (
        output_folder(output.absolute()) as folder,
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        tempfile.TemporaryDirectory(dir=folder) as other_scratch,
    ):
        detecting = read(
            discriminator.directory,
            source,
            Path(scratch),
            fields=content,
            sha256=discriminator.sha256,
            adapt=discriminator_config,
        )
        generating: Release | _NewGenerator = _NewGenerator(detecting, seed)
        if generator:
            generating = read(
                generator.directory,
                # The generator's config may have no model type.
                None if source == "hf" else source,
                Path(other_scratch),
                sha256=generator.sha256,
                generator=True,
            )
        model = _pair_config(detecting, generating.config)
        return _write_import(
            folder,
            output.absolute(),
            model,
            _pair_tensors(detecting, generating),
            tokenizer,
            (
                *(f"discriminator: {note}" for note in detecting.notes),
                *(f"generator: {note}" for note in generating.notes),
            ),
            objective=OBJECTIVE,
            why_untrained=generating.why_untrained,
        )


class _NewGenerator:
    """A generator for a discriminator that is published without one, in the form of a `Release`.

    Embeddings, position table and every second layer are the discriminator's, as Sanh et al. 2019,
    DistilBERT, arXiv:1910.01108, section 2 initialise a smaller model; mask decoder and head are
    new.

    Args:
        discriminator: opened with its own architecture.
        seed: of the new parameters.
    """

    def __init__(self, discriminator: Release, seed: int) -> None:
        self._discriminator = discriminator
        self._seed = seed
        own = discriminator.config
        positions = own.absolute_positions
        self.config = generator_config(
            replace(
                own,
                head="rtd",
                mask_decoder_passes=ModelConfig().mask_decoder_passes,
                absolute_positions="input" if positions == "input" else "decoder",
            )
        )
        self._step = own.num_layers // self.config.num_layers

    why_untrained = "its generator is new"

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about the origin of the parameters."""
        layers = ", ".join(str(i * self._step) for i in range(self.config.num_layers))
        return (
            f"embeddings and layers {layers} of the discriminator",
            f"newly initialised: {', '.join(filter(_is_new, parameter_shapes(self.config)))}",
        )

    def tensor(self, name: str) -> Tensor:
        """Return a parameter in fp32."""
        if _is_new(name):
            initial = torch.empty(parameter_shapes(self.config)[name])
            fill_initial(initial, name, initial.shape, self.config, self._seed)
            return initial
        if name.startswith("encoder.layers."):
            name = re.sub(r"\d+", lambda layer: str(int(layer[0]) * self._step), name, count=1)
        return self._discriminator.tensor(name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield canonical name and fp32 tensor of every parameter."""
        for name in parameter_shapes(self.config):
            yield name, self.tensor(name)


def _is_new(name: str) -> bool:
    return name.startswith(("head.", "mask_decoder."))


def _pair_config(discriminator: Release, generator: ModelConfig) -> ModelConfig:
    """Return the architecture of both.

    Raises:
        CheckpointError: they differ in more than the number of layers.
    """
    model = replace(
        discriminator.config,
        head="rtd",
        mask_decoder_passes=generator.mask_decoder_passes,
        absolute_positions=generator.absolute_positions,
        generator_layers=generator.num_layers,
        embedding_sharing="gdes",
    )
    if generator_config(replace(model, generator_layers=None)) == generator_config(model):
        # Half of the discriminator's, as in configs/models.
        model = replace(model, generator_layers=None)
    expected = generator_config(model)
    for key in (field.name for field in fields(ModelConfig)):
        theirs, ours = getattr(generator, key), getattr(expected, key)
        if theirs != ours and key not in _TRAINING_KEYS:
            raise CheckpointError(
                f"the generator has {key}={theirs!r}, the discriminator {ours!r}; give the two "
                "models of one release"
            )
    return model


def _pair_tensors(
    discriminator: Release, generator: Release | _NewGenerator
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in generator.tensors():
        yield GENERATOR + name, tensor
    for name, tensor in discriminator.tensors():
        if name == TOKENS:
            yield DISCRIMINATOR + DELTA, tensor.sub_(generator.tensor(TOKENS))
        else:
            yield DISCRIMINATOR + name, tensor
