"""Reads YAML that people write by hand: plain data, nothing clever, and every slip is an error.

Owns what a config file may contain. Refuses tags, anchors and aliases, duplicate keys, files over
1 MB and nesting over 20 levels, because each of them is either a slip or an attack.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any, cast

import yaml

from megatron_deberta.errors import ConfigError

MAX_BYTES = 1_000_000
MAX_DEPTH = 20


class PlainLoader(yaml.SafeLoader):
    """A safe loader that also refuses what a config has no use for."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node; refuse aliases, anchors, tags and deep nesting."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _refusal("anchors and aliases (& and *) are not allowed", event)
        if getattr(event, "tag", None) is not None:
            raise _refusal(f"tag {event.tag!r} is not allowed; write plain values", event)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _refusal(f"nested deeper than {MAX_DEPTH} levels", event)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Construct a mapping; refuse a key that stands twice."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise _refusal(f"key {key_node.value!r} stands twice; keep one", key_node)
            seen.add(str(key_node.value))
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def _refusal(problem: str, place: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=cast("yaml.Mark", place.start_mark))


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML text.

    Args:
        text: the YAML.
        source: file or override that errors name.

    Returns:
        Plain dictionaries, lists and scalars; None for nothing.

    Raises:
        ConfigError: not valid YAML, or something that is refused.
    """
    try:
        return yaml.load(text, Loader=PlainLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}:{mark.line + 1}" if mark is not None else source
        raise ConfigError(f"{place}: {error.problem or error}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{source}: not valid YAML: {reason}") from error
    except ValueError as error:  # dates and numbers that look right and are not
        raise ConfigError(f"{source}: {error}; quote it if text is meant") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file that holds one mapping.

    Raises:
        ConfigError: the file is missing, too large, not UTF-8, not valid, or not a mapping.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the config: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes; a config is a few hundred")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    data = parse_yaml(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: holds a {type(data).__name__}; write `section:` and keys below")
    return data
