"""Reading and writing of run configs: YAML files, ``section.key=value`` overrides, plain data.

Names and types of keys are checked here, their values in ``rules.py``.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import yaml

from megatron_deberta.config.phases import resolve_durations
from megatron_deberta.config.rules import validate
from megatron_deberta.config.schema import (
    AUTO,
    PHASE_KEYS,
    RENAMED_VALUES,
    SECTIONS,
    Phase,
    RunConfig,
    head_of,
)
from megatron_deberta.config.yaml_reader import (
    PlainScalar,
    TextLoader,
    parse_string,
    parse_yaml,
    read_yaml,
)
from megatron_deberta.errors import ConfigError
from megatron_deberta.files import write_atomically

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BASE_KEY = "base"
"""Top-level key that names the file or files that a file extends, relative to it."""
OVERRIDES = "command line"
"""Source of ``section.key=value`` in messages."""
CONFIG_ROOTS = tuple(Path(__file__).resolve().parents[1:3])
"""Folders that hold ``configs/``: the installed package, or else the checkout."""

RENAMED_KEYS = {
    "cluster.timeout_minutes": "cluster.collective_timeout_minutes",
    "data.ledger": "data.sample_log",
    "guard.drift_every": "stability.replica_check_every",
    "precision.engine": "parallel.engine",
    "precision.offload_optimizer": "parallel.offload_optimizer",
    "precision.zero_stage": "parallel.zero_stage",
    "train.eval_steps": "train.eval_batches",
    "train.stop_after": "train.exit_step",
}
"""Old to new name."""
RENAMED_SECTIONS = {"guard": "stability"}
"""Old to new name; the other keys of these sections keep their names."""
_PHASES = "phases"
_DURATIONS = ("steps", "tokens", "fraction")

_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*|0x[0-9a-fA-F]+|0b[01]+)")
"""Whole numbers; not YAML's octal ``010`` (8) and sexagesimal ``1:30`` (90)."""
_FLOAT = re.compile(
    r"[+-]?((0|[1-9][0-9]*(_[0-9]+)*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?\.(inf|nan)",
    re.IGNORECASE,
)
_NULL = ("~", "null", "Null", "NULL", "")
_TRUTH_VALUES = {
    "yes": True, "y": True, "on": True, "true": True, "1": True,
    "no": False, "n": False, "off": False, "false": False, "0": False,
}  # fmt: skip

logger = logging.getLogger(__name__)


def load_config(path: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Load a run's config; later layers win: defaults, files under ``base``, the file, overrides.

    Args:
        path: YAML file, or the name of a packaged one (``configs/runs/small.yaml``); None: the
            defaults.
        overrides: ``section.key=value`` with YAML values; the last one for a key wins.

    Returns:
        The config, validated by ``rules.validate``.

    Raises:
        ConfigError: unreadable file, unknown or duplicate key, wrong type, or a broken rule.
    """
    layers = []
    if path is not None:
        _refuse_bare_name(Path(path))
        layers = list(_file_layers(find_config(Path(), os.fspath(path)), ()))
    return config_from_layers(layers, overrides)


def config_from_dict(data: Mapping[str, Any], source: str) -> RunConfig:
    """Build a config from plain data, such as a checkpoint's metadata.

    Args:
        data: sections of keys; missing keys take their defaults.
        source: origin of the data, for messages.

    Raises:
        ConfigError: unknown key, wrong type, or a broken rule.
    """
    return _build([(source, data)], is_stored=True)


def config_from_layers(
    layers: Sequence[tuple[str, Mapping[str, Any]]], overrides: Sequence[str] = ()
) -> RunConfig:
    """Build a config from plain data; later layers win, the overrides last.

    Args:
        layers: origin of the data, for messages, and sections of keys.
        overrides: ``section.key=value`` with YAML values.

    Raises:
        ConfigError: unknown key, wrong type, or a broken rule.
    """
    return _build([*layers, (OVERRIDES, parse_overrides(overrides))])


def config_to_dict(config: DataclassInstance) -> dict[str, Any]:
    """Convert a config or one of its sections to JSON types (tuples become lists)."""
    data = asdict(config)
    for section in (data, data.get("train", {})):
        if _PHASES in section:
            section[_PHASES] = [_phase_to_dict(phase) for phase in section[_PHASES]]
    return cast(dict[str, Any], json.loads(json.dumps(data)))


def _phase_to_dict(phase: dict[str, Any]) -> dict[str, Any]:
    """Return a phase as it is written in YAML."""
    durations = {name: phase[name] for name in _DURATIONS if phase[name] is not None}
    return {**durations, **dict(phase["overrides"])}


def config_to_yaml(config: RunConfig) -> str:
    """Return the resolved config as YAML."""
    data = config_to_dict(config)
    if config.model.vocab_size == AUTO:
        data["model"]["vocab_size"] = "auto"
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def save_config(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Write the resolved config as YAML, atomically."""
    write_atomically(Path(path), config_to_yaml(config).encode())


def _build(layers: Sequence[tuple[str, Mapping[str, Any]]], is_stored: bool = False) -> RunConfig:
    config = merge_layers(layers, is_stored=is_stored)
    source, last = layers[-1]
    given = plain_value(last.get("train", {}).get("steps"))
    config = resolve_durations(config, given, source)
    validate(config)
    return config


def _file_layers(path: Path, ancestors: tuple[Path, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a file's bases, depth first, then the file."""
    resolved = path.resolve()
    if resolved in ancestors:
        raise ConfigError(
            f"{path}: extends itself through `{BASE_KEY}`; remove one of the references"
        )
    data = read_yaml(path, TextLoader)
    bases = data.pop(BASE_KEY, [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"{path}: {BASE_KEY}={bases!r} is not a file name or a list of file names; quote a "
            "name that looks like a number"
        )
    for base in bases:
        yield from _file_layers(find_config(path.parent, base), (*ancestors, resolved))
    yield str(path), data


def find_config(folder: Path, name: str) -> Path:
    """Return a file of a folder or, if it does not exist, the packaged ``configs/...`` file."""
    path = folder / name
    if not path.exists() and Path(name).parts[:1] == ("configs",):
        return next((root / name for root in CONFIG_ROOTS if (root / name).is_file()), path)
    return path


def _refuse_bare_name(path: Path) -> None:
    """Reject a name without folder that exists only among the packaged runs, such as ``small``.

    Raises:
        ConfigError: it names the packaged run.
    """
    name = f"configs/runs/{path.stem}.yaml"
    is_bare = len(path.parts) == 1 and not path.exists()
    if is_bare and any((root / name).is_file() for root in CONFIG_ROOTS):
        raise ConfigError(f"{path}: no such file; did you mean {name}?")


def parse_overrides(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse ``section.key=value`` into sections of keys.

    The text of a string stands as it is; other values are YAML.

    Args:
        overrides: the last one for a key wins.

    Raises:
        ConfigError: not of that form, or the value is no YAML.
    """
    sections: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not dot or not section or not key:
            raise ConfigError(
                f"{OVERRIDES}: {override!r} is not section.key=value, as in train.steps=1000"
            )
        sections.setdefault(section, {})[key] = parse_override(f"{section}.{key}", value)
    return sections


def parse_override(name: str, text: str, source: str = OVERRIDES) -> Any:
    """Parse the value of a key: text if the key's type is str, otherwise YAML.

    Args:
        name: ``section.key``.
        text: the value; nothing at all is null.
        source: where it comes from, for messages.

    Returns:
        The value, with ``PlainScalar`` for scalars that YAML does not take for strings.

    Raises:
        ConfigError: it is no YAML.
    """
    section, _, key = name.partition(".")
    hint, is_optional = _without_none(key_types(section).get(key))
    if not text.strip() or (is_optional and text.strip() in _NULL):
        return PlainScalar(None, text.strip())
    if hint is str:
        return parse_string(text, source)
    try:
        return parse_yaml(text, source, TextLoader)
    except ConfigError:
        if hint == tuple[str, ...] and not text.lstrip().startswith(("[", "-")):
            return parse_string(text, source)
        raise


def merge_layers(
    layers: Iterable[tuple[str, Mapping[str, Any]]], *, is_stored: bool = False
) -> RunConfig:
    """Apply layers to a config, key by key; later layers win.

    ``model.head`` follows from ``objective.name`` if no layer sets it.

    Args:
        layers: origin of the data, for messages, and sections of keys.
        is_stored: the data are a saved config, so do not warn of 0 and "" for none.

    Raises:
        ConfigError: unknown key or wrong type.
    """
    merged: dict[str, dict[str, Any]] = {}
    for source, data in layers:
        values: dict[str, Any] = {}
        for section, keys in _with_train_phases(data, source).items():
            if RENAMED_SECTIONS.get(section, section) not in SECTIONS:
                raise ConfigError(f"{source}: no section {section}{_suggest_section(section)}")
            if not isinstance(keys, Mapping):
                raise ConfigError(
                    f"{source}: {section}={keys!r} is not a section; set {section}.key"
                )
            values |= {f"{section}.{key}": value for key, value in keys.items()}
        for name, value in use_new_names(values, source).items():
            section, _, key = name.partition(".")
            types = key_types(section)
            if key not in types:
                raise ConfigError(f"{source}: no key {name}{_suggest_key(key, section)}")
            typed = _typed(section, key, value, source)
            if not is_stored and typed in (0, "") and _without_none(types[key])[1]:
                logger.warning("%s: %s=%r for none is deprecated; write null", source, name, typed)
            merged.setdefault(section, {})[key] = typed
    if objective := merged.get("objective", {}).get("name"):
        merged.setdefault("model", {}).setdefault("head", head_of(objective))
    base = RunConfig()
    sections = {name: replace(getattr(base, name), **values) for name, values in merged.items()}
    return replace(base, **sections)


def _with_train_phases(data: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Move ``phases`` at the top level, the old place, into the section ``train``."""
    if _PHASES not in data:
        return data
    logger.warning("%s: %s is now a key of train; write train: {phases: ...}", source, _PHASES)
    train = data.get("train", {})
    moved = {**train, _PHASES: data[_PHASES]} if isinstance(train, Mapping) else train
    return {**{name: data[name] for name in data if name != _PHASES}, "train": moved}


def new_name(name: str) -> str:
    """Return the present name of ``section.key``."""
    section, dot, key = name.partition(".")
    return RENAMED_KEYS.get(name, f"{RENAMED_SECTIONS.get(section, section)}{dot}{key}")


def use_new_names(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Replace old names of keys by the new ones, with a warning.

    Args:
        values: by ``section.key``.
        source: where they come from, for messages.

    Raises:
        ConfigError: a key is given under two names.
    """
    renamed: dict[str, Any] = {}
    changes: dict[str, str] = {}
    for old, value in values.items():
        new = new_name(old)
        if new in renamed or (new != old and new in values):
            raise ConfigError(f"{source}: {old} is the old name of {new}; remove {old}")
        if old in RENAMED_KEYS:
            changes[old] = new
        elif new != old:
            # Once for all keys of the section.
            changes[old.partition(".")[0]] = new.partition(".")[0]
        renamed[new] = value
    for old, new in changes.items():
        logger.warning("%s: %s was renamed to %s; use the new name", source, old, new)
    return renamed


@cache
def key_types(section: str) -> Mapping[str, Any]:
    """Return the types of a section's keys; empty: there is no such section."""
    return get_type_hints(SECTIONS[section]) if section in SECTIONS else {}


def _without_none(hint: Any) -> tuple[Any, bool]:
    """Return the type of a key without None, and whether None is allowed."""
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    (kind,) = (item for item in get_args(hint) if item is not type(None))
    return kind, True


def _typed(section: str, key: str, value: Any, source: str) -> Any:
    """Return the value of a key of the config.

    Raises:
        ConfigError: it has another type.
    """
    name = f"{section}.{key}"
    if mentions_interpolation(value):
        raise ConfigError(
            f"{source}: {name}={value!r}: '${{' and '???' are not supported; write the value"
        )
    if (name, value) == ("model.vocab_size", "auto"):
        return AUTO
    old, new = RENAMED_VALUES.get(name, (None, None))
    if old is not None and value == old:
        logger.warning("%s: %s=%s was renamed to %s; use the new value", source, name, old, new)
        return new
    if name == "train.phases":
        return _phases(value, f"{source}: {name}")
    try:
        return read_value(key_types(section)[key], value, name, source)
    except (OverflowError, ValueError) as error:
        remedy = _expected(section, key)
        is_choice = get_origin(_without_none(key_types(section)[key])[0]) is Literal
        problem = "is none of its values" if is_choice else "has the wrong type"
        raise ConfigError(f"{source}: {name}={value!r} {problem}; {remedy}") from error


def _phases(value: Any, place: str) -> tuple[Phase, ...]:
    """Return the phases of a run.

    Args:
        value: a list of mappings with a duration and ``section.key`` to value; or, as they were
            written before, of strings such as ``steps=1000 data.sequence_length=128``.
        place: source and key, for messages.

    Raises:
        ConfigError: not such a list, or a key that a phase cannot change.
    """
    if isinstance(value, PlainScalar) and value.value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ConfigError(
            f"{place}={value!r} is not a list of mappings; write `- steps: 1000` with lines such "
            "as `data.sequence_length: 128` below"
        )
    return tuple(_phase(item, f"{place}[{number}]") for number, item in enumerate(value))


def _phase(value: Any, place: str) -> Phase:
    if isinstance(value, str):
        value = _phase_of_text(value, place)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place}={value!r} is not a mapping; write `steps: 1000`")
    durations: dict[str, Any] = {}
    overrides = []
    for name, item in value.items():
        section, _, key = str(name).partition(".")
        if name in _DURATIONS:
            kind = float if name == "fraction" else int
            try:
                durations[name] = read_value(kind, item, name, place)
            except ValueError:
                durations[name] = 0
            if not 0 < durations[name] < math.inf:
                raise ConfigError(f"{place}: {name}={item!r} is not a number above 0")
        elif name in PHASE_KEYS:
            overrides.append((name, _typed(section, key, item, place)))
        elif isinstance(item, Mapping):
            raise ConfigError(f"{place}: {name} is a section; write {name}.KEY: VALUE")
        else:
            raise ConfigError(
                f"{place}: {name} cannot change in a phase; these can: {', '.join(_DURATIONS)}, "
                f"{', '.join(sorted(PHASE_KEYS))}"
            )
    if len(durations) != 1:
        raise ConfigError(f"{place}: give one of {', '.join(_DURATIONS)}, as in steps: 1000")
    return Phase(**durations, overrides=tuple(overrides))


def _phase_of_text(text: str, place: str) -> dict[str, Any]:
    """Read a phase that is written as one string."""
    try:
        words = [word.partition("=") for word in shlex.split(text)]
    except ValueError as error:
        raise ConfigError(f"{place}: {text!r}: {error}") from error
    return {
        name: PlainScalar(value, value)
        if name in _DURATIONS
        else parse_override(name, value, place)
        for name, _, value in words
    }


def read_value(hint: Any, value: Any, name: str, source: str) -> Any:
    """Return a value from YAML as the type of its key demands.

    Args:
        hint: type of the key.
        value: with ``PlainScalar`` for scalars whose text was kept.
        name: the key, for messages.
        source: where the value comes from, for messages.

    Raises:
        ConfigError: the value is a string whose text is lost.
        ValueError: it has another type.
    """
    hint, is_optional = _without_none(hint)
    if value is None or _is_null(value):
        if is_optional:
            return None
        if get_origin(hint) is tuple:
            return ()
    if get_origin(hint) is tuple:
        return _list(get_args(hint)[0], value, name, source)
    return _string(value, name, source) if hint is str else _scalar(hint, value)


def _scalar(hint: Any, value: Any) -> Any:
    """Return a number, a truth value or one of a few values."""
    text = value.text if isinstance(value, PlainScalar) else value
    if isinstance(text, str) and hint is int:
        return _number(_INTEGER, text, lambda digits: int(digits, 0))
    if isinstance(text, str) and hint is float:
        return _number(_FLOAT, text, _float)
    value = plain_value(value)
    if get_origin(hint) is Literal:
        if (type(value), value) not in [(type(choice), choice) for choice in get_args(hint)]:
            raise ValueError(f"{value!r} is not one of {get_args(hint)}")
    elif hint is bool:
        value = _truth_value(value)
    elif hint is float and type(value) is int:
        value = float(value)
    elif hint in (int, float) and type(value) is not hint:
        raise ValueError(f"{value!r} is not of type {hint.__name__}")
    return value


def _truth_value(value: Any) -> bool:
    found = _TRUTH_VALUES.get(str(value).lower())
    if found is None:
        raise ValueError(f"{value!r} is no truth value")
    return found


def _list(item: Any, value: Any, name: str, source: str) -> tuple[Any, ...]:
    if isinstance(value, PlainScalar | str) and item is str:
        # A single item stands for a list of one, as in data.train=shards/books_text_document.
        text = read_value(str, value, name, source)
        return (text,) if text else ()
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} is no list")
    return tuple(read_value(item, each, name, source) for each in value)


def holds_text(name: str) -> bool:
    """Return whether the type of ``section.key`` is a string or a list of strings."""
    section, _, key = name.partition(".")
    return _without_none(key_types(section).get(key))[0] in (str, tuple[str, ...])


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


def _number(pattern: re.Pattern[str], text: str, convert: Callable[[str], Any]) -> Any:
    text = text.strip()
    if not pattern.fullmatch(text):
        raise ValueError(f"{text!r} is not a decimal number without leading zeros")
    return convert(text)


def _float(text: str) -> float:
    number = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if math.isinf(number) and "inf" not in text.lower():
        raise ValueError(f"{text} is too large")
    return number


def _string(value: Any, name: str, source: str) -> str:
    if isinstance(value, PlainScalar):
        if value.text and _is_null(value):
            logger.warning('%s: %s=%s is the text "%s"', source, name, value.text, value.text)
        return value.text
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple | dict):
        raise ValueError(f"{value!r} is not text")
    raise ConfigError(
        f"{source}: {name}={value!r} is not text, and how it was written is lost; quote it, as in "
        f'{name.rpartition(".")[2]}: "..."'
    )


def _is_null(value: Any) -> bool:
    return isinstance(value, PlainScalar) and value.text in _NULL


def mentions_interpolation(value: Any) -> bool:
    """Return whether a value, or a part of it, looks like a reference to a variable."""
    if isinstance(value, list):
        return any(mentions_interpolation(item) for item in value)
    if isinstance(value, dict):
        return any(mentions_interpolation(item) for item in (*value, *value.values()))
    value = value.text if isinstance(value, PlainScalar) else value
    return isinstance(value, str) and ("${" in value or value == "???")


def _suggest_section(wrong: object) -> str:
    close = difflib.get_close_matches(str(wrong), SECTIONS, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    owner = next((f"{name}.{wrong}" for name in SECTIONS if wrong in key_types(name)), None)
    return f"; did you mean {owner}?" if owner else f"; the sections are {', '.join(SECTIONS)}"


def _suggest_key(wrong: str, section: str) -> str:
    """Suggest a key of the same name in another section, or a similar one in this section."""
    keys = key_types(section)
    close = [f"{name}.{wrong}" for name in SECTIONS if wrong in key_types(name)]
    close += [f"{section}.{key}" for key in difflib.get_close_matches(wrong, keys, n=1)]
    return f"; did you mean {close[0]}?" if close else f"; {section} has {', '.join(keys)}"


def _expected(section: str, key: str) -> str:
    """Describe the values that a key accepts."""
    hint, is_optional = _without_none(key_types(section)[key])
    if get_origin(hint) is Literal:
        return f"write one of {', '.join(map(str, get_args(hint)))}"
    if get_origin(hint) is tuple:
        return f"write a list, as in {section}.{key}=[first,second]"
    default = getattr(SECTIONS[section](), key)
    example = "null" if default is None else json.dumps(default)
    return f"write a value of type {hint.__name__}{' or null' * is_optional}, such as {example}"
