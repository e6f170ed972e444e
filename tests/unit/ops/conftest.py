"""Shortcuts in Triton's interpreter, which runs the fused kernels where there is no GPU."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def _fast_interpreter() -> None:
    """Skip work that the interpreter repeats for each call of a helper function.

    At each call it searches ``triton.language`` for functions to replace, although the launch of
    the kernel has replaced them, and it computes overflow checks that only debug mode asserts.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patched: set[str] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module.startswith("triton.") and module not in patched:
            patched.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
