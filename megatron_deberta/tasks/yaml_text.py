"""YAML of task files, in which the type of a key decides how its text is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from megatron_deberta.config.yaml_reader import PlainLoader

_TYPED_KEYS = (
    "label_range", "max_length", "stride", "max_answer_length", "unanswerable", "merge_sentences",
    "header", "quoting", "skip_short_rows", "settings",
)  # fmt: skip
"""Keys whose values are numbers, booleans or settings; all others hold text."""
_TYPED_SPLIT_KEYS = ("part", "header")
_TEXT_TAG, _NULL_TAG = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null"


class TaskLoader(PlainLoader):
    """YAML loader that reads text as it stands: ``no``, ``01`` and ``2024-01-01`` are labels."""

    def construct_document(self, node: yaml.Node) -> Any:
        """Construct the document, with text where a task's keys hold text."""
        if isinstance(node, yaml.MappingNode):
            _mark_text(node, _TYPED_KEYS)
        return super().construct_document(node)


def _mark_text(mapping: yaml.MappingNode, typed: Sequence[str]) -> None:
    """Make the values of a mapping text, except for those of some keys."""
    for key, value in mapping.value:
        if isinstance(key, yaml.ScalarNode):
            key.tag = _TEXT_TAG
        if key.value == "splits" and typed is _TYPED_KEYS:
            for name, split in value.value if isinstance(value, yaml.MappingNode) else ():
                name.tag = _TEXT_TAG
                if isinstance(split, yaml.MappingNode):
                    _mark_text(split, _TYPED_SPLIT_KEYS)
                else:
                    _make_text(split)
        elif key.value not in typed and getattr(value, "tag", "") != _NULL_TAG:
            _make_text(value)


def _make_text(node: yaml.Node) -> None:
    if isinstance(node, yaml.ScalarNode):
        node.tag = _TEXT_TAG
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _make_text(item)
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            for item in pair:
                _make_text(item)
