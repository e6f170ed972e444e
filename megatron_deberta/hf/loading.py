"""Loads models through transformers, quietly, and only where every weight was in the file."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import dynamic_module_utils
from transformers.utils import logging

from megatron_deberta.errors import CheckpointError


def load_complete(kind: Any, directory: Path, **options: Any) -> Any:
    """Return ``kind.from_pretrained(directory)`` in evaluation mode.

    Args:
        kind: a model class of transformers or of ours.
        directory: a folder it can load.
        options: more arguments of ``from_pretrained``.

    Raises:
        CheckpointError: the folder cannot be loaded, or lacks a weight, which transformers would
            fill with random numbers.
    """
    try:
        with quiet_transformers():
            model, report = kind.from_pretrained(
                directory, local_files_only=True, output_loading_info=True, **options
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        raise CheckpointError(f"{directory} cannot be loaded: {error}; export it again") from error
    wrong = [*report["missing_keys"], *report["mismatched_keys"]]
    if wrong:
        raise CheckpointError(
            f"{directory} lacks {wrong[0]}, so {kind.__name__} would answer at random; "
            "give a model that was trained for this"
        )
    return model.eval()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence loading reports and progress bars, which say nothing to our users."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


@contextmanager
def private_module_cache() -> Iterator[None]:
    """Let transformers copy and import the code of a folder such that nothing of it stays.

    Its cache tells local folders apart by their last name, and outlives the process.
    """
    shared, path, known = dynamic_module_utils.HF_MODULES_CACHE, list(sys.path), set(sys.modules)
    with tempfile.TemporaryDirectory() as folder:
        dynamic_module_utils.HF_MODULES_CACHE = folder
        try:
            yield
        finally:
            dynamic_module_utils.HF_MODULES_CACHE = shared
            sys.path[:] = path
            prefix = dynamic_module_utils.TRANSFORMERS_DYNAMIC_MODULE_NAME
            for name in set(sys.modules) - known:
                if name.partition(".")[0] == prefix:
                    del sys.modules[name]
