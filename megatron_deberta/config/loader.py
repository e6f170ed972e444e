"""Loading and saving of run configs: YAML files and ``section.key=value`` overrides."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_deberta.config.renamed_keys import use_new_names
from megatron_deberta.config.rules import validate
from megatron_deberta.config.schema import AUTO, RunConfig
from megatron_deberta.config.yaml_reader import parse_yaml, read_yaml
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
    layers = list(_layers(_find(Path(), os.fspath(path)), ())) if path is not None else []
    layers.append((OVERRIDES, _parse_overrides(overrides)))
    return _build(layers)


def config_from_dict(data: Mapping[str, Any], source: str) -> RunConfig:
    """Build a config from plain data, such as a checkpoint's metadata.

    Args:
        data: sections of keys; missing keys take their defaults.
        source: origin of the data, for messages.

    Raises:
        ConfigError: unknown key, wrong type, or a broken rule.
    """
    return _build([(source, data)])


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
    return _build([*layers, (OVERRIDES, _parse_overrides(overrides))])


def config_to_dict(config: DataclassInstance) -> dict[str, Any]:
    """Convert a config or one of its sections to JSON types (tuples become lists)."""
    return cast(dict[str, Any], json.loads(json.dumps(asdict(config))))


def save_config(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Write the resolved config as YAML, atomically."""
    text = OmegaConf.to_yaml(OmegaConf.structured(config))
    write_atomically(Path(path), text.encode())


def _build(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> RunConfig:
    merged: DictConfig = OmegaConf.structured(RunConfig)
    for section in merged:
        # Frozen dataclasses arrive read-only. Layers are applied key by key, to name wrong keys.
        OmegaConf.set_readonly(merged[section], False)
    for source, data in layers:
        _apply(merged, data, source)
    config = cast(RunConfig, OmegaConf.to_object(merged))
    validate(config)
    return config


def _layers(path: Path, ancestors: tuple[Path, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a file's bases, depth first, then the file."""
    resolved = path.resolve()
    if resolved in ancestors:
        raise ConfigError(
            f"{path}: extends itself through `{BASE_KEY}`; remove one of the references"
        )
    data = read_yaml(path)
    bases = data.pop(BASE_KEY, [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"{path}: {BASE_KEY}={bases!r} is not a file name or a list of file names"
        )
    for base in bases:
        yield from _layers(_find(path.parent, base), (*ancestors, resolved))
    yield str(path), data


def _find(folder: Path, name: str) -> Path:
    """Return a file of a folder or, if it does not exist, the packaged ``configs/...`` file."""
    path = folder / name
    if not path.exists() and Path(name).parts[:1] == ("configs",):
        return next((root / name for root in CONFIG_ROOTS if (root / name).is_file()), path)
    return path


def _parse_overrides(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        section, dot, key = name.strip().partition(".")
        if not equals or not dot or not section or not key:
            raise ConfigError(
                f"{OVERRIDES}: {override!r} is not section.key=value, as in train.steps=1000"
            )
        # `checkpoint.load_from=` sets an empty string; YAML alone would read it as null.
        parsed = parse_yaml(value, OVERRIDES) if value.strip() else ""
        sections.setdefault(section, {})[key] = parsed
    return sections


def _apply(config: DictConfig, data: Mapping[str, Any], source: str) -> None:
    """Check the names of one layer and apply it to the config."""
    for section, values in data.items():
        known = _section_keys().get(section)
        if known is None:
            raise ConfigError(f"{source}: no section {section!r}{_suggest_section(section)}")
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
    if isinstance(value, str) and isinstance(getattr(getattr(RunConfig(), section), key), tuple):
        # A single item stands for a list of one, as in data.train=shards/books_text_document.
        value = [value] if value else []
    if (name, value) == ("model.vocab_size", "auto"):
        value = AUTO
    try:
        OmegaConf.update(config, name, value)
    except (OmegaConfBaseException, OverflowError) as error:
        remedy = _expected(section, key)
        raise ConfigError(f"{source}: {name}={value!r} has the wrong type; {remedy}") from error


def mentions_interpolation(value: Any) -> bool:
    """Return whether OmegaConf would replace a value, or a part of it, by something else."""
    if isinstance(value, list):
        return any(mentions_interpolation(item) for item in value)
    if isinstance(value, dict):
        return any(mentions_interpolation(item) for item in (*value, *value.values()))
    return isinstance(value, str) and ("${" in value or value == "???")


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
