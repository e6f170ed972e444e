"""A small part of the campaign ``tests.faults.hostile_files``: changes of each kind of file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.hostile_files import KINDS, Case, run_thousand
from tests.faults.hostile_kinds import RUN_KINDS, Kind
from tests.support.selection import every

COUNT, FEW = 10, 3
"""Changes of each kind; of files of tasks and of their results, whose reading takes longer."""


@pytest.mark.parametrize("kind", every(4, KINDS, ["slow"]), ids=lambda kind: kind.name)
def test_changed_files_are_read_or_refused(kind: Kind, tmp_path: Path) -> None:
    count = COUNT if kind in RUN_KINDS else FEW
    result = run_thousand(Case(kind, tmp_path), 100_000, count)
    assert not result["failed"]
    assert result["read"] + result["refused"] == count


_DEEP = "[" * 100_000
_COLUMNS = "columns:\n  question: question\n  context: context\n  answers: answers\n  id: id\n"
# Ends of the first two texts of a table.
_OFFSETS = ("\x09\0\0\0\x13\0\0\0", "\x09\0\0\x7f\x13\0\0\0")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("rollback", '"step": 5', '"step": Infinity'),
        ("metrics", '"kind":"validation"', '"kind":["validation"]'),
        ("lock", '"job": "', '"job": "1\\u0000'),
        ("lock", '"pid": ', '"pid": "1" , "x": '),
        ("checkpoint_manifest", '"guard": {}', '"guard": {"novel": 1}'),
        ("checkpoint_manifest", '"guard": {}', '"guard": {"losses": "1.0"}'),
        ("tokenizer_config", '"model_vocab_size": ', f'"model_vocab_size": {10**15}, "x": '),
        ("tokenizer_config", "{", f'{{"x": {_DEEP}, '),
        ("vocabulary", '{"!": 0', f'{{"!": {2**32 - 1}'),
        ("hf_config", "{", f'{{"x": {_DEEP}, '),
        ("hf_config", '"num_hidden_layers": 3', f'"num_hidden_layers": {10**15}'),
        ("cluster_profile", "ranks_per_node: 16", "ranks_per_node: ???"),
        ("quarantine", "", ""),
        ("task_multilabel", "- 0.25", "- [0.25]"),
        ("task_regression", "label: score", "label: {a: 1}"),
        ("task_spans", _COLUMNS, "columns: [{}]"),
        ("data_arrow", *_OFFSETS),
        ("text_arrow", *_OFFSETS),
        ("encoded_tokens_labels", "'<i4'", "'|S4'"),
        ("encoded_tokens_word_index", "\x01\0\0\0", "\x02\0\0\0"),
        ("export_config", '"cls_dropout": 0.0', '"cls_dropout": "x"'),
        ("export_config", '"id2label": {', '"id2label": true, "x": {'),
        ("export_config", '"b": 1', '"b": 1.0'),
    ],
)
def test_hostile_values_are_refused(name: str, old: str, new: str, tmp_path: Path) -> None:
    case = Case(next(kind for kind in KINDS if kind.name == name), tmp_path)
    content = case.replaced(old, new) if old else b'{"file": 1}'
    assert case.read_content(content) == "refused"
