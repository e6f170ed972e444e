"""Inputs that the fine-tuning runs of a folder have in common, recorded as fingerprints.

Paths do not suffice: the files behind them may have changed between two starts of a search, or of
``finetune-checkpoints``, and the results of both would be compared.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, read_mark
from megatron_deberta.errors import ConfigError
from megatron_deberta.files import sha256_file, write_atomically
from megatron_deberta.hf.loading import load_model_tokenizer
from megatron_deberta.parsing import read_json
from megatron_deberta.tasks.reading import read_examples
from megatron_deberta.tasks.task import DEV, TRAIN, TaskConfig

logger = logging.getLogger(__name__)


def fingerprint_inputs(task: TaskConfig, data: str, tokenizer: str) -> dict[str, str]:
    """Return fingerprints of task, examples and tokenizer.

    Args:
        task: the task.
        data: folder of its files.
        tokenizer: path of the tokenizer.

    Raises:
        DataError: a file is missing or malformed, or the tokenizer cannot be loaded.
    """
    examples = hashlib.sha256()
    for split in (TRAIN, DEV):
        for example in read_examples(task, data, split) if split in task.splits else ():
            examples.update(f"{split} {example!r}\n".encode("utf-8", "surrogatepass"))
    values = asdict(task)
    # Without keys that have their default, so that later releases may have more of them.
    for item in fields(task):
        default = item.default if item.default_factory is MISSING else item.default_factory()
        if item.name == "description" or values[item.name] == default:
            del values[item.name]
    settings = json.dumps(values, sort_keys=True)
    return {
        "task_fingerprint": hashlib.sha256(settings.encode()).hexdigest(),
        "data_fingerprint": examples.hexdigest(),
        "tokenizer_fingerprint": load_model_tokenizer(tokenizer).fingerprint,
    }


def fingerprint_weights(path: Path) -> str:
    """Return a fingerprint of a checkpoint, export or release: of its manifest or its files."""
    if (path / COMMITTED_FILE).exists():
        return read_mark(path)
    digest = hashlib.sha256()
    for suffix in ("json", "safetensors", "bin"):
        for file in sorted(path.glob(f"*.{suffix}")):
            digest.update(f"{file.name} {sha256_file(file)}\n".encode())
    return digest.hexdigest()


def check_inputs(path: Path, inputs: Mapping[str, Any], *, has_runs: bool, remedy: str) -> None:
    """Check that a folder has no runs with other inputs.

    Args:
        path: file of the recorded inputs.
        inputs: those of the runs to come, by name.
        has_runs: whether the folder has runs; if not, its record does not count.
        remedy: for the message.

    Raises:
        ConfigError: it has.
    """
    if not (has_runs and path.exists()):
        return
    known = read_json(path, dict[str, Any], "inputs of runs", remedy=remedy)
    for name, value in inputs.items():
        if name not in known:
            logger.warning("%s does not record %s; it may have been another one", path, name)
        elif known[name] != value:
            raise ConfigError(
                f"{path.parent} has runs with {name}={known[name]!r}, not {value!r}; {remedy}"
            )


def record_inputs(path: Path, inputs: Mapping[str, Any]) -> None:
    """Record the inputs of the runs to come."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(inputs, indent=1) + "\n").encode())
