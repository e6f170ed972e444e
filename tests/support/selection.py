"""Marks for the cases of parametrized tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

import pytest


def every(
    step: int, cases: Iterable[Any], others: Sequence[str] = ("slow", "nightly")
) -> list[Any]:
    """Mark all test cases except every ``step``-th, so that shorter test runs leave them out.

    Args:
        step: 1 marks none.
        cases: values of one parameter, or tuples of those of several.
        others: names of the marks of the other cases, which get them in turn.
    """
    marks = cycle(getattr(pytest.mark, name) for name in others)
    return [
        case if index % step == 0
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=next(marks))
        for index, case in enumerate(cases)
    ]  # fmt: skip
