"""Makes a checkpoint that pretraining continues from out of a published model.

Owns the order of steps. Refuses optimizer state: a release has none.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_deberta.checkpoint.layout import CheckpointMetadata, step_dir
from megatron_deberta.checkpoint.store import save_weights
from megatron_deberta.config import config_to_dict, save_config, validate
from megatron_deberta.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    TokenizerConfig,
)
from megatron_deberta.errors import ConfigError
from megatron_deberta.hf.checkpoints import tokenizer_at
from megatron_deberta.hf.export import output_folder
from megatron_deberta.hf.read_release import Source, open_release
from megatron_deberta.model import parameter_shapes

RUN_FILE = "run.yaml"
_TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True)
class Imported:
    """What was imported."""

    checkpoint: Path
    """Folder for ``checkpoint.load_from``."""
    run_file: Path
    """A run that starts from it; data and length are the user's to fill in."""
    config: ModelConfig
    notes: tuple[str, ...]
    """What was newly initialised or left out."""


def import_release(
    directory: Path,
    source: Source,
    output: Path,
    *,
    tokenizer_path: str = "",
    allow_pickle: bool = False,
    sha256: str = "",
    seed: int = 0,
) -> Imported:
    """Write checkpoint, tokenizer and a run file under ``output``, all or nothing.

    Args:
        directory: folder of the published model.
        source: Hugging Face's or Microsoft's files.
        output: folder to make; must not exist, or be empty.
        tokenizer_path: tokenizer of the model; empty: the one in ``directory``.
        allow_pickle: read a ``.bin`` file (``hf/legacy_bin.py``).
        sha256: digest that the weight file must have; empty checks nothing, and no pickle is read.
        seed: of parameters the file lacks.

    Raises:
        CheckpointError: the model cannot be read or the checkpoint not be written.
        ConfigError: ``output`` is in use, the tokenizer has more ids than the model, or the model
            breaks a rule of our configs.
        DataError: there is no usable tokenizer.
    """
    tokenizer = tokenizer_at(tokenizer_path or directory)
    output = output.absolute()
    with output_folder(output) as folder, tempfile.TemporaryDirectory(dir=folder) as scratch:
        release = open_release(
            directory, source, Path(scratch), allow_pickle=allow_pickle, sha256=sha256, seed=seed
        )
        model = release.config
        if tokenizer.num_tokens > model.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.num_tokens} ids, the model {model.vocab_size} rows; "
                "give the model's own with --tokenizer"
            )
        tokenizer.save(str(folder / _TOKENIZER_FOLDER))
        run = RunConfig(
            model=model,
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
            tokenizer_path=run.tokenizer.path,
        )
        save_weights(folder, release.tensors(), parameter_shapes(model), metadata)
        save_config(run, str(folder / RUN_FILE))
    return Imported(step_dir(output, 0), output / RUN_FILE, model, release.notes)
