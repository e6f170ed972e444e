"""Import of Microsoft's package ``DeBERTa`` (2021 to 2023) on today's Python, NumPy and torch."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import importlib
import json
import logging
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

PACKAGE = "DeBERTa"


@contextlib.contextmanager
def microsoft_package(folder: Path) -> Iterator[None]:
    """Make the package ``DeBERTa`` in a folder importable until the end of the context.

    What it uses and is gone: ``torch._six``, ``collections.Sequence``, ``np.int``, and a tensor as
    the last argument of ``torch._softmax_backward_data``. ``ujson`` is replaced by ``json``,
    ``torch.cuda.device`` by a context without effect where torch has no CUDA, and ``six`` by a
    module that says Python 3. The package does not configure logging.

    Args:
        folder: the folder that contains ``DeBERTa``: of an installed package, or of a checkout.
    """
    six: Any = types.ModuleType("torch._six")
    six.string_classes, six.int_classes, six.FileNotFoundError = str, int, FileNotFoundError
    python: Any = types.ModuleType("six")
    python.PY3, python.PY2 = True, False
    stand_ins: dict[str, Any] = {"torch._six": six, "ujson": json, "six": python}
    before = set(sys.modules)
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))

        # The package sets OMP_NUM_THREADS.
        stack.enter_context(mock.patch.dict(os.environ))
        replace(sys, "path", [str(folder), *sys.path])
        replace(collections, "Sequence", collections.abc.Sequence)
        replace(collections, "Mapping", collections.abc.Mapping)
        replace(np, "int", int)
        replace(logging, "basicConfig", lambda **options: None)
        replace(torch, "_softmax_backward_data", _softmax_backward(torch._softmax_backward_data))
        if not torch.cuda.is_available():
            replace(torch.cuda, "device", lambda index: contextlib.nullcontext())
        for name, module in stand_ins.items():
            sys.modules.setdefault(name, module)
        try:
            yield
        finally:
            for name in [*sys.modules]:
                if name.partition(".")[0] == PACKAGE or (name in stand_ins and name not in before):
                    del sys.modules[name]


def load(name: str) -> Any:
    """Import a module of the package, such as ``deberta.ops``."""
    return importlib.import_module(f"{PACKAGE}.{name}")


def _softmax_backward(current: Any) -> Any:
    def backward(gradient: Any, output: Any, dim: int, dtype: Any) -> Any:
        return current(gradient, output, dim, getattr(dtype, "dtype", dtype))

    return backward
