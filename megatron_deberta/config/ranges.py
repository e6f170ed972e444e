"""Ranges of numeric config keys, declared as metadata of their dataclass fields."""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from megatron_deberta.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Number = TypeVar("_Number", int, float)


class Range(NamedTuple):
    """Allowed values of a number; finiteness is checked in addition."""

    text: str
    low: float
    high: float = math.inf

    def contains(self, value: float) -> bool:
        """Return whether the value is allowed."""
        return self.low <= value <= self.high


NOT_NEGATIVE = Range("0 or more", 0)
"""Range of every number without another one."""


def positive(default: _Number) -> _Number:
    """Declare a config key above 0."""
    allowed = Range("a number above 0", math.nextafter(0, 1))
    return field(default=default, metadata={"range": allowed})


def fraction(default: float) -> float:
    """Declare a config key from 0 to 1."""
    return field(default=default, metadata={"range": Range("a number from 0 to 1", 0, 1)})


def below_one(default: float, limit: float = 1) -> float:
    """Declare a config key from 0 to below 1, or another limit."""
    allowed = Range(f"a number from 0 to below {limit:g}", 0, math.nextafter(limit, 0))
    return field(default=default, metadata={"range": allowed})


def check_ranges(config: DataclassInstance) -> None:
    """Check that every number of a run's config is in its range.

    Raises:
        ConfigError: names the key, its value and the range.
    """
    for section in fields(config):
        values = getattr(config, section.name)
        for key in fields(values):
            value, allowed = getattr(values, key.name), key.metadata.get("range", NOT_NEGATIVE)
            # Comparisons are exact, also where an integer has no floating-point number.
            largest = (1 << 63) - 1 if isinstance(value, int) else 1e300
            if isinstance(value, int | float) and not (
                -largest <= value <= largest and allowed.contains(value)
            ):
                raise ConfigError(
                    f"{section.name}.{key.name}={value} is out of range; write {allowed.text}"
                )
