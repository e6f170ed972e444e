"""Marks for the cases of parametrized tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Return test cases; all but every ``step``-th are marked ``slow``, so ``--all`` runs them.

    Args:
        step: 1 marks none.
        cases: values of one parameter, or tuples of those of several.
    """
    return [
        case if index % step == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]  # fmt: skip
