"""Merging of config layers: names and types of keys are checked, values are not."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_deberta.config.renamed_keys import use_new_names
from megatron_deberta.config.schema import AUTO, RunConfig
from megatron_deberta.config.yaml_reader import parse_yaml
from megatron_deberta.errors import ConfigError

OVERRIDES = "command line"
"""Source of ``section.key=value`` in messages."""


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
    merged: DictConfig = OmegaConf.structured(RunConfig if base is None else base)
    for section in merged:
        # Frozen dataclasses arrive read-only. Layers are applied key by key, to name wrong keys.
        OmegaConf.set_readonly(merged[section], False)
    for source, data in layers:
        _apply(merged, data, source)
    return cast(RunConfig, OmegaConf.to_object(merged))


def parse_overrides(overrides: Sequence[str], source: str = OVERRIDES) -> dict[str, dict[str, Any]]:
    """Parse ``section.key=value`` with YAML values into sections of keys.

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
        # `checkpoint.load_from=` sets an empty string; YAML alone would read it as null.
        parsed = parse_yaml(value, source) if value.strip() else ""
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
