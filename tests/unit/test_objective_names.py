"""The trainer, the data, the engines and the plan name no objective; its own file describes it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

import megatron_deberta
from megatron_deberta.config.schema import PRETRAINING_HEADS, ObjectiveName

PACKAGE = Path(megatron_deberta.__file__).parent
# The discriminator is a part of a model, which no objective trains alone.
EVERY = frozenset(get_args(ObjectiveName)) - {"discriminator"}
PRETRAINING = frozenset({*PRETRAINING_HEADS, "mlm+ar", "retromae"})
FOLDERS = {
    "train": EVERY,
    "engine": EVERY,
    "distributed": EVERY,
    "observe": EVERY,
    "data": PRETRAINING,
    "planning": PRETRAINING,
    "ops": PRETRAINING,
}
"""Names that must not occur as a string in a folder."""


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_objective_is_named(folder: str) -> None:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    named = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value in FOLDERS[folder]
    ]
    assert not named
