"""Loading of trained models for inference: training checkpoints, tokenizers, exported folders."""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import dynamic_module_utils
from transformers.utils import logging

from megatron_deberta.checkpoint.reader import CheckpointReader, StoredRun
from megatron_deberta.checkpoint.store import find_checkpoint
from megatron_deberta.checkpoint.views import Part, open_part
from megatron_deberta.config import config_from_dict
from megatron_deberta.config.schema import ModelConfig, RunConfig
from megatron_deberta.errors import CheckpointError, DataError, MissingModelError
from megatron_deberta.files import did_you_mean
from megatron_deberta.hf.config import SENTENCEPIECE_FIELD, TOKENIZER_FIELD
from megatron_deberta.model import (
    DebertaBackbone,
    DebertaForPretraining,
    DebertaForTask,
    DebertaModel,
    RuntimeOptions,
    task_model,
)
from megatron_deberta.model.task_models import model_class
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer

NONFINITE = (
    "the model's outputs are infinite or not a number; give an earlier checkpoint, or one trained "
    "with a lower optimizer.learning_rate"
)
"""Message of the error about such outputs."""

_LOCAL_FOLDERS = ("checkpoints", "exports", "runs")
"""Folders of the documentation's commands, not users of the Hub."""
_Model = TypeVar("_Model", bound=DebertaBackbone)


@dataclass(frozen=True)
class TrainedModel:
    """A verified training checkpoint with its run's config and tokenizer."""

    reader: StoredRun
    run: RunConfig
    tokenizer: Tokenizer

    def check_trained(self, path: Path) -> None:
        """Check that the head that predicts tokens is trained.

        Raises:
            MissingModelError: it is not: the checkpoint is an import of a model without one.
        """
        if why := self.reader.metadata.why_untrained:
            raise MissingModelError(
                f"{path} cannot predict tokens before it is trained to, so predictions would be "
                f"noise: {why}; train it, or give a model with a trained head"
            )

    def open(self, part: Part = "generator") -> tuple[ModelConfig, Callable[[str], Tensor]]:
        """Return the architecture, and the function from canonical name to logical tensor.

        Args:
            part: which model of replaced-token detection; no meaning for other objectives.
        """
        config, weights = open_part(self.reader, self.run.model, part)
        return config, weights.tensor


def check_folder(path: Path, expected: str) -> None:
    """Check that a model's folder exists.

    Args:
        path: the folder.
        expected: the folders that are accepted, for the message.

    Raises:
        MissingModelError: it does not exist; names a similar folder, or else, if the name may be
            one of the Hub, says how to get the model from there.
    """
    if path.is_dir():
        return
    hint = did_you_mean(path)
    is_local = path.parts[:1] in [(name,) for name in _LOCAL_FOLDERS]
    if (
        not hint
        and not is_local
        and re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(path))
        and not path.parent.is_dir()
    ):
        hint = (
            "; nothing is downloaded from the Hugging Face Hub, get a model there with: "
            f"hf download {path} --local-dir {path.name}"
        )
    raise MissingModelError(f"{path}: no such folder; give {expected}{hint}")


def open_trained_model(path: Path, tokenizer_path: str = "") -> TrainedModel:
    """Open a training checkpoint and verify the hashes of its files and its tokenizer.

    Args:
        path: folder of one step, or of a run (its best checkpoint is used if one is recorded,
            else the newest).
        tokenizer_path: current location of the run's tokenizer; empty: the recorded one.

    Raises:
        MissingModelError: there is no committed checkpoint.
        CheckpointError: the checkpoint is damaged.
        DataError: the tokenizer is missing or differs from the one used in training.
    """
    check_folder(path, "the folder of a run or of one of its steps")
    step = find_checkpoint(path)
    if step is None:
        raise MissingModelError(
            f"{path} holds no committed checkpoint; give the folder of a run or of one of its steps"
        )
    reader = CheckpointReader(step)
    reader.verify()
    metadata = reader.metadata
    location = tokenizer_path or metadata.tokenizer_path
    if not location:
        raise DataError(f"{reader.path} records no tokenizer; give --tokenizer")
    tokenizer = load_model_tokenizer(location)
    check_tokenizer(metadata.tokenizer_fingerprint, location, tokenizer)
    return TrainedModel(reader, config_from_dict(metadata.config, str(step)), tokenizer)


def check_tokenizer(recorded: str, location: str, tokenizer: Tokenizer) -> None:
    """Check that a tokenizer is the one that a checkpoint's model was trained with.

    Args:
        recorded: fingerprint in the checkpoint; empty: nothing is checked.
        location: where the tokenizer is, for the message.
        tokenizer: the tokenizer.

    Raises:
        DataError: it is another one.
    """
    if recorded not in ("", tokenizer.fingerprint):
        raise DataError(
            f"tokenizer {location} has fingerprint {tokenizer.fingerprint}, but the run was "
            f"trained with {recorded}; give that one with --tokenizer"
        )


def tokenizer_fields(trained: Tokenizer, exported: Tokenizer) -> dict[str, Any]:
    """Return what ``config.json`` of an export records of its tokenizer.

    Args:
        trained: the tokenizer used in training.
        exported: the same with the offsets that the export needs.
    """
    prints = list(dict.fromkeys((trained.fingerprint, exported.fingerprint)))
    model = exported.sentencepiece_model
    digest = {} if model is None else {SENTENCEPIECE_FIELD: hashlib.sha256(model).hexdigest()}
    return {TOKENIZER_FIELD: prints, **digest}


def load_export_tokenizer(fields: Mapping[str, Any], location: str | Path) -> Tokenizer:
    """Load the tokenizer of an export, and check that it is the recorded one.

    Args:
        fields: content of ``config.json``; that of other exporters, and of earlier releases,
            records no tokenizer.
        location: where the tokenizer is.

    Raises:
        DataError: it is missing, invalid, or another one.
    """
    tokenizer = load_model_tokenizer(location)
    recorded, digest = fields.get(TOKENIZER_FIELD) or (), fields.get(SENTENCEPIECE_FIELD)
    model, field = tokenizer.sentencepiece_model, TOKENIZER_FIELD
    is_same = not recorded or tokenizer.fingerprint in recorded
    if is_same and digest and model is not None:
        is_same, field = hashlib.sha256(model).hexdigest() == digest, SENTENCEPIECE_FIELD
    if not is_same:
        raise DataError(
            f"tokenizer {location} is not the one that the model was exported with ({field} in its "
            "config.json); restore it, or give that one with --tokenizer; if you have changed it "
            "together with the model, remove the field"
        )
    return tokenizer


def load_model_tokenizer(path: str | Path) -> Tokenizer:
    """Load a model's tokenizer.

    Raises:
        DataError: it is missing or invalid; the message names the ``--tokenizer`` option.
    """
    try:
        return load_tokenizer(str(path))
    except DataError as error:
        raise type(error)(f"{error}; give the model's tokenizer with --tokenizer") from error


def build_model(
    config: ModelConfig, read: Callable[[str], Tensor], attention_backend: str | None = None
) -> DebertaForPretraining:
    """Build the single-device fp32 model on the CPU, with weights, in evaluation mode.

    Args:
        config: the architecture.
        read: returns the whole tensor of a canonical name, of the shape
            ``parameter_shapes(config)[name]``.
        attention_backend: backend of the attention operator; None: automatic.
    """
    return _build(DebertaForPretraining, config, read, attention_backend)


def build_encoder(
    config: ModelConfig, read: Callable[[str], Tensor], attention_backend: str | None = None
) -> DebertaModel:
    """Build the encoder of a model with any head; arguments as in `build_model`."""
    return _build(DebertaModel, config, read, attention_backend)


def build_task_model(
    config: ModelConfig, read: Callable[[str], Tensor], attention_backend: str | None = None
) -> DebertaForTask:
    """Build the model of a labelled task; arguments as in `build_model`."""
    return _build(task_model(config), config, read, attention_backend)


def build_with_head(
    config: ModelConfig, read: Callable[[str], Tensor], attention_backend: str | None = None
) -> DebertaBackbone:
    """Build the model with the head of ``config.head``; arguments as in `build_model`."""
    chosen = model_class(config)
    assert issubclass(chosen, DebertaBackbone)
    return _build(chosen, config, read, attention_backend)


def _build(
    chosen: type[_Model],
    config: ModelConfig,
    read: Callable[[str], Tensor],
    attention_backend: str | None,
) -> _Model:
    with torch.device("meta"):
        model = chosen(config, RuntimeOptions(attention_backend=attention_backend))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(name))
    return model.eval()


def load_pretrained(model_class: Any, directory: Path, **options: Any) -> Any:
    """Return ``model_class.from_pretrained(directory)`` in evaluation mode.

    Args:
        model_class: a model class of transformers or of this package.
        directory: the exported folder.
        options: further arguments of ``from_pretrained``.

    Raises:
        CheckpointError: the folder cannot be loaded, or lacks a weight, which transformers would
            initialise randomly.
    """
    try:
        with quiet_transformers():
            model, report = model_class.from_pretrained(
                directory, local_files_only=True, output_loading_info=True, **options
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"{directory} cannot be loaded: {error}; export it again") from error
    missing = [*report["missing_keys"], *report["mismatched_keys"]]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {missing[0]}, so {model_class.__name__} would use random weights; "
            "give a model trained for this task"
        )
    return model.eval()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable transformers' loading reports and progress bars."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()


@contextmanager
def temporary_module_cache() -> Iterator[None]:
    """Load remote code through a temporary cache, and unload it afterwards.

    transformers' own cache identifies local folders by their last path component and outlives the
    process, so it could return the code of another export.
    """
    prefix = dynamic_module_utils.TRANSFORMERS_DYNAMIC_MODULE_NAME

    def loaded() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] == prefix]

    cache, path = dynamic_module_utils.HF_MODULES_CACHE, list(sys.path)
    # A package of another cache would not find the modules of this one.
    others = {name: sys.modules.pop(name) for name in loaded()}
    with tempfile.TemporaryDirectory() as folder:
        dynamic_module_utils.HF_MODULES_CACHE = folder
        try:
            yield
        finally:
            dynamic_module_utils.HF_MODULES_CACHE = cache
            sys.path[:] = path
            for name in loaded():
                del sys.modules[name]
            sys.modules.update(others)
