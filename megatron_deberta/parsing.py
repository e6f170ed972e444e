"""Validation of JSON that is read from files, by pydantic, against the types of this package.

Every JSON file and line that the package reads passes through ``parse_json``. Values must have
exactly the declared types (text is not a number); nesting deeper than 200 levels, unpaired
surrogates and unknown keys are errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import Required, TypedDict, Unpack

from megatron_deberta.errors import ConfigError, DataError, MegatronDebertaError, printable
from megatron_deberta.files import MAX_RECORD_BYTES, read_regular

T = TypeVar("T")


class Options(TypedDict, total=False):
    """Keyword arguments of ``parse_json`` that the other functions pass on."""

    remedy: Required[str]
    error: type[MegatronDebertaError]
    ignore_unknown: bool


Count = Annotated[int, Field(ge=0, le=1 << 53)]
"""Steps, samples, bytes and the like; sums of a few of them fit into 64 bits."""
Number = Annotated[float, Field(allow_inf_nan=False, ge=-1e300, le=1e300)]
"""A finite number, also after additions."""
Scalar = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | float | str | bool | None
"""Any JSON value without structure."""
Seconds = Annotated[float, Field(allow_inf_nan=False, ge=0, le=1e11)]
"""Seconds since the epoch, or a duration; ``time.localtime`` accepts all of them."""


def _check_time(text: str) -> str:
    try:
        datetime.fromisoformat(text).timestamp()
    except OverflowError as error:
        raise ValueError(str(error)) from error
    return text


IsoTime = Annotated[str, AfterValidator(_check_time)]
"""ISO 8601, as ``datetime.fromisoformat`` and ``timestamp`` accept it."""

_SHOWN = 60
_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


def parse_json(
    content: bytes | str,
    schema: type[T],
    source: object,
    what: str,
    *,
    remedy: str,
    error: type[MegatronDebertaError] = DataError,
    ignore_unknown: bool = False,
) -> T:
    """Parse JSON and validate it.

    Args:
        content: the JSON text.
        schema: type of the result: a dataclass, ``TypedDict``, or built-in generic.
        source: file or line, for messages.
        what: what it should be, with its article, for messages.
        remedy: what to do about a wrong one, for messages.
        error: type of the error.
        ignore_unknown: keep keys that the schema, a ``TypedDict``, does not have.

    Raises:
        MegatronDebertaError: of type ``error``; names the first wrong value.
    """
    try:
        result: T = _adapter(cast(Hashable, schema)).validate_json(
            content, strict=True, extra="allow" if ignore_unknown else "forbid"
        )
        return result
    except ValidationError as failure:
        problem = _describe(failure)
    raise error(f"{source}: not {what} ({problem}); {remedy}")


def read_json(path: Path, schema: type[T], what: str, **options: Unpack[Options]) -> T:
    """Read and validate a JSON file; see ``parse_json``.

    Raises:
        OSError: it cannot be read.
        MegatronDebertaError: of type ``error``; names the first wrong value.
    """
    return parse_json(read_regular(path, MAX_RECORD_BYTES), schema, path, what, **options)


def dump_json(value: object) -> bytes:
    """Return the JSON of a dataclass, under the names that ``parse_json`` expects."""
    return _adapter(cast(Hashable, type(value))).dump_json(value, by_alias=True)


def conform(
    value: object, schema: type[T], source: object, what: str, **options: Unpack[Options]
) -> T:
    """Validate plain data that was parsed before, such as YAML; see ``parse_json``.

    Raises:
        MegatronDebertaError: of type ``error``; names the first wrong value.
    """
    # Dates, which only YAML has, become text.
    return parse_json(json.dumps(value, default=str), schema, source, what, **options)


def whole_number(variables: Mapping[str, str], name: str, default: int) -> int:
    """Return an environment variable that is a whole number of at most nine digits.

    Args:
        variables: environment variables.
        name: of the variable.
        default: if it is not set or empty.

    Raises:
        ConfigError: it is something else.
    """
    given = variables.get(name, "")
    text = given if given.strip() else str(default)
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ConfigError(f"{name}={text!r} is not a whole number; unset it, or let SLURM set it")
    return int(text)


@cache
def _adapter(schema: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, schema))


def _describe(failure: ValidationError) -> str:
    """Return the first problem as text of one line."""
    first = failure.errors(include_url=False, include_context=False)[0]
    place = " ".join(printable(".".join(map(str, first["loc"]))).split())
    if first["type"] == "json_invalid":
        return first["msg"]
    if first["type"] in _MISSING:
        return f"{place} is missing"
    if first["type"] in _UNKNOWN:
        return f"{place} is unknown"
    given = repr(first["input"])
    given = given if len(given) <= _SHOWN else f"{given[:_SHOWN]}..."
    expected = first["msg"][:1].lower() + first["msg"][1:]
    return f"{place}={given}: {expected}" if place else f"{given}: {expected}"
