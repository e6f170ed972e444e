"""A small part of the campaign ``tests.faults.hostile_files``: changes of each kind of file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.hostile_files import Case, run_thousand
from tests.faults.hostile_kinds import KINDS, Kind

COUNT = 20


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_changed_files_are_read_or_refused(kind: Kind, tmp_path: Path) -> None:
    result = run_thousand(Case(kind, tmp_path), 100_000, COUNT)
    assert not result["failed"]
    assert result["read"] + result["refused"] == COUNT


_DEEP = "[" * 100_000


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
    ],
)
def test_hostile_values_are_refused(name: str, old: str, new: str, tmp_path: Path) -> None:
    case = Case(next(kind for kind in KINDS if kind.name == name), tmp_path)
    content = case.replaced(old, new) if old else b'{"file": 1}'
    assert case.read_content(content) == "refused"
