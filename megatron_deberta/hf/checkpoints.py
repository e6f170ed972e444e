"""Opens a training checkpoint for use outside training: weights, architecture and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_deberta.checkpoint.layout import COMMITTED_FILE
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.store import find_newest
from megatron_deberta.config import config_from_dict
from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import CheckpointError, DataError
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class TrainedModel:
    """A verified checkpoint and what belongs to it."""

    reader: CheckpointReader
    config: ModelConfig
    tokenizer: Tokenizer


def open_trained_model(path: Path, tokenizer_path: str = "") -> TrainedModel:
    """Open a checkpoint, checking its files' hashes and its tokenizer.

    Args:
        path: folder of one step, or of a run, whose newest committed checkpoint is taken.
        tokenizer_path: where the run's tokenizer is now; empty: where it was.

    Raises:
        CheckpointError: there is no committed checkpoint, or it is damaged.
        DataError: the tokenizer is missing, or is not the one that the run used.
    """
    step = path if (path / COMMITTED_FILE).exists() else find_newest(path)
    if step is None:
        raise CheckpointError(
            f"{path} holds no committed checkpoint; give the folder of a run or of one of its steps"
        )
    reader = CheckpointReader(step)
    reader.verify()
    config = config_from_dict(reader.metadata.config, str(step)).model
    return TrainedModel(reader, config, _tokenizer(reader, tokenizer_path))


def _tokenizer(reader: CheckpointReader, tokenizer_path: str) -> Tokenizer:
    metadata = reader.metadata
    where = tokenizer_path or metadata.tokenizer_path
    if not where:
        raise DataError(f"{reader.path} names no tokenizer; give --tokenizer")
    tokenizer = tokenizer_at(where)
    if metadata.tokenizer_fingerprint not in ("", tokenizer.fingerprint):
        raise DataError(
            f"tokenizer {where} has fingerprint {tokenizer.fingerprint}, but the run was trained "
            f"with {metadata.tokenizer_fingerprint}; give that one with --tokenizer"
        )
    return tokenizer


def tokenizer_at(where: str | Path) -> Tokenizer:
    """Load a model's tokenizer.

    Raises:
        DataError: it is not there or not usable; the message names the option for another place.
    """
    try:
        return load_tokenizer(str(where))
    except DataError as error:
        raise DataError(f"{error}; give the model's tokenizer with --tokenizer") from error
