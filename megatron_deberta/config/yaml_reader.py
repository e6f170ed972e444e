"""Strict YAML reader for config files.

Tags, anchors, aliases, duplicate keys, files over 1 MB and nesting over 20 levels are errors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from megatron_deberta.errors import ConfigError
from megatron_deberta.files import did_you_mean, open_regular

MAX_BYTES = 1_000_000
MAX_DEPTH = 20
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_STRING_TAG = "tag:yaml.org,2002:str"


@dataclass(frozen=True, slots=True)
class PlainScalar:
    """Unquoted scalar that YAML takes for a number, a truth value, a date or null.

    The type of a key decides which of the two is used (``loader.read_value``): YAML reads
    ``20241126_1530`` as a number, ``12:30`` as 750 and ``no`` as false.

    Attributes:
        value: what YAML makes of it.
        text: the text as it was written.
    """

    value: Any
    text: str

    def __repr__(self) -> str:
        """Return what stands there, for messages; ``True`` and ``None`` for YAML's spellings."""
        return repr(self.value) if isinstance(self.value, bool | None) else self.text


class PlainLoader(yaml.SafeLoader):
    """Safe loader that also rejects features a config does not need."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node; reject aliases, anchors, tags and deep nesting."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _error("anchors and aliases (& and *) are not allowed", event)
        if getattr(event, "tag", None) is not None:
            raise _error(f"tag {event.tag!r} is not allowed; write plain values", event)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _error(f"nested deeper than {MAX_DEPTH} levels", event)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        """Construct a scalar; reject text that no path or message may contain."""
        value = super().construct_scalar(node)
        if isinstance(value, str) and _UNSAFE.search(value):
            raise _error(f"{value!r} contains control characters or surrogates", node)
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Construct a mapping; reject duplicate keys."""
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _error("a list or mapping cannot be a key; write text", key_node)
            if key_node.value in seen:
                raise _error(f"key {key_node.value!r} is duplicated; keep one", key_node)
            seen.add(str(key_node.value))
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


class TextLoader(PlainLoader):
    """Loader that keeps the text of scalars that are no strings, as ``PlainScalar``."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Construct a value; keep its text."""
        if not isinstance(node, yaml.ScalarNode) or node.tag == _STRING_TAG:
            return super().construct_object(node, deep=deep)
        try:
            return PlainScalar(super().construct_object(node, deep=deep), node.value)
        except (ValueError, OverflowError, yaml.constructor.ConstructorError):
            # An impossible date or number, which can be a string.
            return PlainScalar(node.value, node.value)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Construct a mapping; its keys are strings."""
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                key_node.tag = _STRING_TAG
        return super().construct_mapping(node, deep=deep)


def _error(problem: str, place: yaml.Event | yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=cast("yaml.Mark", place.start_mark))


def parse_yaml(text: str, source: str, loader: type[PlainLoader] = PlainLoader) -> Any:
    """Parse YAML text.

    Args:
        text: the YAML.
        source: file or override, for messages.
        loader: decides which scalars are text; ``TextLoader`` keeps the text of all.

    Returns:
        Dictionaries, lists and scalars; None for empty text.

    Raises:
        ConfigError: invalid or rejected YAML.
    """
    try:
        return yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{source}:{mark.line + 1}" if mark is not None else source
        raise ConfigError(f"{place}: {error.problem or error}") from error
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{source}: not valid YAML: {reason}") from error
    except (ValueError, OverflowError) as error:  # an invalid date or number
        raise ConfigError(f"{source}: {error}; quote it if it is a string") from error


def parse_string(text: str, source: str) -> str:
    """Return the value of a string that is given as ``key=value``: the text as it stands.

    Spaces around it are removed, and quotes if the whole of it is quoted.

    Raises:
        ConfigError: control characters, or quotes that do not end.
    """
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        try:
            # The cells of a search are JSON, whose escapes above U+FFFF YAML does not know.
            text = str(json.loads(text))
        except ValueError:
            text = str(parse_yaml(text, source))
    if _UNSAFE.search(text):
        raise ConfigError(f"{source}: {text!r} contains control characters or surrogates")
    return text


def read_yaml(path: Path, loader: type[PlainLoader] = PlainLoader) -> dict[str, Any]:
    """Read a YAML file that contains one mapping.

    Args:
        path: the file.
        loader: as for ``parse_yaml``.

    Raises:
        ConfigError: the file is missing, too large, not UTF-8, not valid, or not a mapping.
    """
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read the config: {error.strerror}{did_you_mean(path)}"
        ) from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES:,} bytes; is it a config file?")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    data = parse_yaml(text, str(path), loader)
    if data is None or data == PlainScalar(None, ""):
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: contains a {type(data).__name__}; write `section:` with keys below"
        )
    return data
