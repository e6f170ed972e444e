"""Loading and saving of run configs: YAML files and ``section.key=value`` overrides."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import OmegaConf

from megatron_deberta.config.merge import OVERRIDES, merge_layers, parse_overrides
from megatron_deberta.config.phases import PHASES_KEY, phase_lines, resolve_durations
from megatron_deberta.config.rules import validate
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.config.yaml_reader import TextLoader, read_yaml
from megatron_deberta.errors import ConfigError
from megatron_deberta.files import write_atomically

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

BASE_KEY = "base"
"""Top-level key that names the file or files that a file extends, relative to it."""

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
    layers.append((OVERRIDES, parse_overrides(overrides)))
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
    return _build([*layers, (OVERRIDES, parse_overrides(overrides))])


def config_to_dict(config: DataclassInstance) -> dict[str, Any]:
    """Convert a config or one of its sections to JSON types (tuples become lists)."""
    return cast(dict[str, Any], json.loads(json.dumps(asdict(config))))


def save_config(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Write the resolved config as YAML, atomically."""
    text = OmegaConf.to_yaml(OmegaConf.structured(config))
    write_atomically(Path(path), text.encode())


def _build(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> RunConfig:
    layers = list(layers)
    config = resolve_durations(merge_layers(layers), layers[-1])
    validate(config)
    return config


def _layers(path: Path, ancestors: tuple[Path, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a file's bases, depth first, then the file."""
    resolved = path.resolve()
    if resolved in ancestors:
        raise ConfigError(
            f"{path}: extends itself through `{BASE_KEY}`; remove one of the references"
        )
    data = read_yaml(path, TextLoader)
    if PHASES_KEY in data:
        lines = phase_lines(data.pop(PHASES_KEY), str(path))
        train = data.get("train")
        data["train"] = {**(train if isinstance(train, Mapping) else {}), PHASES_KEY: lines}
    bases = data.pop(BASE_KEY, [])
    if isinstance(bases, str):
        bases = [bases]
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"{path}: {BASE_KEY}={bases!r} is not a file name or a list of file names; quote a "
            "name that looks like a number"
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
