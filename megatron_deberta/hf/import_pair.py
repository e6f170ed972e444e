"""Import of a published discriminator with its generator, to continue replaced-token detection."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from torch import Tensor

from megatron_deberta.config.schema import ModelConfig, ObjectiveConfig
from megatron_deberta.errors import CheckpointError
from megatron_deberta.hf.export_model import output_folder
from megatron_deberta.hf.import_model import (
    ImportResult,
    Release,
    Source,
    open_release,
    write_import,
)
from megatron_deberta.hf.loading import check_folder, load_model_tokenizer
from megatron_deberta.model.replaced_tokens import (
    DELTA,
    DISCRIMINATOR,
    GENERATOR,
    TOKENS,
    discriminator_config,
    generator_config,
)

OBJECTIVE = ObjectiveConfig(
    name="rtd", mask_token_probability=1.0, random_token_probability=0.0, max_span_words=1
)
"""Masking of the release."""
_TRAINING_KEYS = ("hidden_dropout", "attention_dropout", "head_dropout", "initializer_range")


@dataclass(frozen=True)
class WeightFile:
    """A folder with config and weights, and the expected SHA-256 of a pickle ('' = unchecked)."""

    directory: Path
    sha256: str = ""


def import_pair(
    discriminator: WeightFile,
    generator: WeightFile,
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
        generator: its generator.
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
    for file in (discriminator, generator):
        check_folder(file.directory, "one with config.json and weights")
    tokenizer = load_model_tokenizer(tokenizer_path or discriminator.directory)
    with (
        output_folder(output.absolute()) as folder,
        tempfile.TemporaryDirectory(dir=folder) as scratch,
    ):
        opened = []
        for name, file in (("d", discriminator), ("g", generator)):
            own = Path(scratch) / name
            own.mkdir()
            release = open_release(
                file.directory,
                source,
                own,
                allow_pickle=allow_pickle,
                sha256=file.sha256,
                seed=seed,
                adapt=discriminator_config if name == "d" else None,
            )
            opened.append(release)
        detecting, generating = opened
        model = _pair_config(detecting, generating)
        return write_import(
            folder,
            output.absolute(),
            model,
            _pair_tensors(detecting, generating),
            tokenizer,
            (*_notes("discriminator", detecting), *_notes("generator", generating)),
            objective=OBJECTIVE,
        )


def _notes(part: str, release: Release) -> tuple[str, ...]:
    return tuple(f"{part}: {note}" for note in release.notes)


def _pair_config(discriminator: Release, generator: Release) -> ModelConfig:
    """Return the architecture of both.

    Raises:
        CheckpointError: they differ in more than the number of layers.
    """
    model = replace(
        discriminator.config,
        head="rtd",
        mask_decoder_passes=generator.config.mask_decoder_passes,
        absolute_positions=generator.config.absolute_positions,
        generator_layers=generator.config.num_layers,
        embedding_sharing="gdes",
    )
    expected = generator_config(model)
    for key in (field.name for field in fields(ModelConfig)):
        theirs, ours = getattr(generator.config, key), getattr(expected, key)
        if theirs != ours and key not in _TRAINING_KEYS:
            raise CheckpointError(
                f"the generator has {key}={theirs!r}, the discriminator {ours!r}; give the two "
                "models of one release"
            )
    return model


def _pair_tensors(discriminator: Release, generator: Release) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in generator.tensors():
        yield GENERATOR + name, tensor
    for name, tensor in discriminator.tensors():
        if name == TOKENS:
            yield DISCRIMINATOR + DELTA, tensor.sub_(generator.tensor(TOKENS))
        else:
            yield DISCRIMINATOR + name, tensor
