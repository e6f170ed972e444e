"""Merging of config layers: names and types of keys are checked, values are not."""

from __future__ import annotations

import copy
import difflib
import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_deberta.config.renamed_keys import use_new_names
from megatron_deberta.config.schema import AUTO, RunConfig
from megatron_deberta.config.yaml_reader import (
    PlainScalar,
    TextLoader,
    parse_string,
    parse_yaml,
)
from megatron_deberta.errors import ConfigError

OVERRIDES = "command line"
"""Source of ``section.key=value`` in messages."""

_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*|0x[0-9a-fA-F]+|0b[01]+)")
"""Whole numbers; not YAML's octal ``010`` (8) and sexagesimal ``1:30`` (90)."""
_FLOAT = re.compile(
    r"[+-]?((0|[1-9][0-9]*(_[0-9]+)*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?\.(inf|nan)",
    re.IGNORECASE,
)
_NULL = ("~", "null", "Null", "NULL")

logger = logging.getLogger(__name__)


def merge_layers(
    layers: Iterable[tuple[str, Mapping[str, Any]]], base: RunConfig | None = None
) -> RunConfig:
    """Apply layers to a config, key by key; later layers win.

    Args:
        layers: origin of the data, for messages, and sections of keys.
        base: config to start from; None: the defaults.

    Raises:
        ConfigError: unknown key or wrong type.
    """
    merged = copy.deepcopy(_writable_defaults()) if base is None else _writable(base)
    for source, data in layers:
        _apply(merged, data, source)
    return cast(RunConfig, OmegaConf.to_object(merged))


@cache
def _writable_defaults() -> DictConfig:
    """Return the defaults, to be copied: building them takes five times as long as a copy."""
    return _writable(RunConfig)


def _writable(config: RunConfig | type[RunConfig]) -> DictConfig:
    """Return a config as OmegaConf's, whose layers are applied key by key, to name wrong keys."""
    merged: DictConfig = OmegaConf.structured(config)
    for section in merged:
        # Frozen dataclasses arrive read-only.
        OmegaConf.set_readonly(merged[section], False)
    return merged


def parse_overrides(overrides: Sequence[str], source: str = OVERRIDES) -> dict[str, dict[str, Any]]:
    """Parse ``section.key=value`` into sections of keys.

    The text of a string stands as it is; other values are YAML.

    Args:
        overrides: the last one for a key wins.
        source: where they come from, for messages.

    Raises:
        ConfigError: not of that form, or the value is no YAML.
    """
    sections: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not dot or not section or not key:
            raise ConfigError(
                f"{source}: {override!r} is not section.key=value, as in train.steps=1000"
            )
        sections.setdefault(section, {})[key] = parse_override(f"{section}.{key}", value, source)
    return sections


def parse_override(name: str, text: str, source: str = OVERRIDES) -> Any:
    """Parse the value of a key: text if the key's type is str, otherwise YAML.

    Args:
        name: ``section.key``.
        text: the value.
        source: where it comes from, for messages.

    Returns:
        The value, with ``PlainScalar`` for scalars that YAML does not take for strings.

    Raises:
        ConfigError: it is no YAML.
    """
    section, _, key = name.partition(".")
    hint = key_types(section).get(key)
    # `checkpoint.load_from=` sets an empty string; YAML alone would read it as null.
    if not text.strip():
        return ""
    if hint is str:
        _warn_of_null(name, text.strip(), source)
        return parse_string(text, source)
    try:
        return parse_yaml(text, source, TextLoader)
    except ConfigError:
        if hint == tuple[str, ...] and not text.lstrip().startswith(("[", "-")):
            return parse_string(text, source)
        raise


@cache
def key_types(section: str) -> Mapping[str, Any]:
    """Return the types of a section's keys; empty: there is no such section."""
    values = getattr(RunConfig(), section, None) if section in _section_keys() else None
    return {} if values is None else get_type_hints(type(values))


def read_value(hint: Any, value: Any, name: str, source: str) -> Any:
    """Return a value from YAML as the type of its key demands.

    Args:
        hint: type of the key.
        value: with ``PlainScalar`` for scalars whose text was kept.
        name: the key, for messages.
        source: where the value comes from, for messages.

    Raises:
        ConfigError: the value is a string whose text is lost.
        ValueError: text that is no number, or a truth value of another kind.
    """
    if hint == tuple[str, ...] or hint == tuple[int, ...]:
        item = get_args(hint)[0]
        if isinstance(value, PlainScalar | str) and item is str and not _is_null(value):
            # A single item stands for a list of one, as in data.train=shards/books_text_document.
            text = read_value(str, value, name, source)
            return [text] if text else []
        if isinstance(value, list | tuple):
            return [read_value(item, each, name, source) for each in value]
        return plain_value(value)
    if hint is str:
        return _string(value, name, source)
    text = value.text if isinstance(value, PlainScalar) else value
    if isinstance(text, str):
        if hint is int:
            return _number(_INTEGER, text, lambda digits: int(digits, 0))
        if hint is float:
            return _number(_FLOAT, text, _float)
    value = plain_value(value)
    if hint is bool and not isinstance(value, bool | str) and value not in (0, 1):
        raise ValueError(f"{value!r} is no truth value")
    return value


def holds_text(name: str) -> bool:
    """Return whether the type of ``section.key`` is a string or a list of strings."""
    section, _, key = name.partition(".")
    return key_types(section).get(key) in (str, tuple[str, ...])


def read_alternatives(name: str, value: Any, source: str) -> Any:
    """Return a value of ``section.key``, or a list of values, as searches and tasks state them.

    Args:
        name: ``section.key``; its type is checked when a run is built.
        value: with ``PlainScalar`` for scalars whose text was kept.
        source: where the value comes from, for messages.

    Raises:
        ConfigError: a number in a notation that is refused, or a string whose text is lost.
    """
    try:
        if not holds_text(name):
            return plain_value(value)
        if isinstance(value, list):
            return [read_value(str, item, name, source) for item in value]
        return read_value(str, value, name, source)
    except ValueError as error:
        raise ConfigError(f"{source}: {name}: {error}; write it as a decimal number") from error


def plain_value(value: Any) -> Any:
    """Replace every ``PlainScalar`` by YAML's value; numbers in odd notation are refused.

    Raises:
        ValueError: octal or sexagesimal numbers.
    """
    if isinstance(value, list):
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        return {key: plain_value(item) for key, item in value.items()}
    if not isinstance(value, PlainScalar):
        return value
    number = value.value
    if isinstance(number, int | float) and not isinstance(number, bool):
        pattern = _INTEGER if isinstance(number, int) else _FLOAT
        _number(pattern, value.text, str)
    return number


def _number(pattern: re.Pattern[str], text: str, convert: Any) -> Any:
    text = text.strip()
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r} is not a decimal number without leading zeros")
    return convert(text)


def _float(text: str) -> float:
    number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if math.isinf(number) and "inf" not in text.lower():
        raise ValueError(f"{text} is too large")
    return number


def _string(value: Any, name: str, source: str) -> Any:
    if isinstance(value, PlainScalar):
        _warn_of_null(name, value.text, source)
        return value.text
    if isinstance(value, list | tuple | dict | str):
        return value
    raise ConfigError(
        f"{source}: {name}={value!r} is not text, and how it was written is lost; quote it, as in "
        f'{name.rpartition(".")[2]}: "..."'
    )


def _is_null(value: Any) -> bool:
    return isinstance(value, PlainScalar) and value.text in _NULL


def _warn_of_null(name: str, text: str, source: str) -> None:
    if text in _NULL:
        logger.warning('%s: %s=%s is the text "%s"; write "" for none', source, name, text, text)


def _apply(config: DictConfig, data: Mapping[str, Any], source: str) -> None:
    """Check the names of one layer and apply it to the config."""
    for section, values in data.items():
        known = _section_keys().get(section)
        if known is None:
            raise ConfigError(f"{source}: no section {section}{_suggest_section(section)}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{source}: {section}={values!r} is not a section; set {section}.key")
        for key, value in use_new_names(section, values, source).items():
            if key not in known:
                meant = _suggest_key(str(key), section)
                raise ConfigError(f"{source}: no key {section}.{key}{meant}")
            _set(config, section, str(key), value, source)


def _set(config: DictConfig, section: str, key: str, value: Any, source: str) -> None:
    name = f"{section}.{key}"
    if mentions_interpolation(value):
        raise ConfigError(
            f"{source}: {name}={value!r}: '${{' and '???' are not supported; write the value"
        )
    if (name, value) == ("model.vocab_size", "auto"):
        value = AUTO
    try:
        value = read_value(key_types(section)[key], value, name, source)
        OmegaConf.update(config, name, value)
    except (OmegaConfBaseException, OverflowError, ValueError) as error:
        remedy = _expected(section, key)
        raise ConfigError(f"{source}: {name}={value!r} has the wrong type; {remedy}") from error


def mentions_interpolation(value: Any) -> bool:
    """Return whether OmegaConf would replace a value, or a part of it, by something else."""
    if isinstance(value, list):
        return any(mentions_interpolation(item) for item in value)
    if isinstance(value, dict):
        return any(mentions_interpolation(item) for item in (*value, *value.values()))
    value = value.text if isinstance(value, PlainScalar) else value
    return isinstance(value, str) and ("${" in value or value == "???")


@cache
def _section_keys() -> dict[str, tuple[str, ...]]:
    default = RunConfig()
    sections = ((item.name, getattr(default, item.name)) for item in fields(RunConfig))
    return {name: tuple(key.name for key in fields(section)) for name, section in sections}


def _suggest_section(wrong: object) -> str:
    keys = _section_keys()
    close = difflib.get_close_matches(str(wrong), keys, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    owner = next((f"{name}.{wrong}" for name, known in keys.items() if wrong in known), None)
    return f"; did you mean {owner}?" if owner else f"; the sections are {', '.join(keys)}"


def _suggest_key(wrong: str, section: str) -> str:
    """Suggest a key of the same name in another section, or a similar one in this section."""
    keys = _section_keys()
    close = [f"{name}.{wrong}" for name, known in keys.items() if wrong in known]
    close += [f"{section}.{key}" for key in difflib.get_close_matches(wrong, keys[section], n=1)]
    return f"; did you mean {close[0]}?" if close else f"; {section} has {', '.join(keys[section])}"


def _expected(section: str, key: str) -> str:
    """Describe the values that a key accepts."""
    values = getattr(RunConfig(), section)
    hint = get_type_hints(type(values))[key]
    default = getattr(values, key)
    if get_origin(hint) is Literal:
        return f"write one of {', '.join(map(str, get_args(hint)))}"
    if isinstance(default, tuple):
        return f"write a list, as in {section}.{key}=[first,second]"
    return f"write a value of type {hint.__name__}, such as {json.dumps(default)}"
