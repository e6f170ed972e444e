"""The digest of tested code ignores comments, docstrings and local names, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.lib import campaigns
from benchmarks.lib.campaigns import canonical_code, code_digest
from benchmarks.tables import faults
from tests.faults.mutants import MUTANTS, OUTPUT

SOURCE = '''
"""Module."""
LIMIT = 3
"""About the limit."""


class Counter:
    """Counts."""

    step: int = 1

    def add(self, value: int, *, scale: float = 2.0) -> float:
        """Add."""
        total = value * scale  # a comment
        try:
            pairs = [(x, total) for x in range(value) if x]
        except ValueError as error:
            raise KeyError(total) from error

        def inner(y):
            nonlocal total
            total += y
            return total

        match pairs:
            case [first, *others]:
                return inner(first) + len(others)
        return sum(map(lambda pair: pair[1], pairs)) + LIMIT
'''
RENAMED = '''
"""Another module docstring,
of two lines."""

LIMIT = 3


class Counter:
    step: int = 1

    def add(this, number: int, *, factor: float = 2.0) -> float:
        # Another comment.
        product = number * factor
        try:
            found = [(index, product) for index in range(number) if index]
        except ValueError as problem:
            raise KeyError(product) from problem
        def inner_function(other):
            """Inner."""
            nonlocal product
            product += other
            return product
        match found:
            case [head, *tail]:
                return inner_function(head) + len(tail)
        return sum(map(lambda item: item[1], found)) + LIMIT
'''


def test_docstrings_and_local_names_do_not_count() -> None:
    assert canonical_code(RENAMED) == canonical_code(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LIMIT = 3", "LIMIT = 4"),
        ("value * scale", "value + scale"),
        ("LIMIT", "BOUND"),
        ("step: int", "steps: int"),
        ("ValueError", "TypeError"),
        ("scale: float = 2.0", "scale: float = 2.5"),
        ("def add", "def plus"),
        ("class Counter", "class Adder"),
        ("inner(first)", "inner(len(others))"),
        ("total += y", "total -= y"),
        ("(x, total) for", "(total, x) for"),
        ("            nonlocal total\n", ""),
        ("pair[1]", "pair[0]"),
        ("if x]", "if not x]"),
    ],
)
def test_changed_code_counts(old: str, new: str) -> None:
    assert old in SOURCE
    assert canonical_code(SOURCE.replace(old, new)) != canonical_code(SOURCE)


def test_local_variables_are_distinguished() -> None:
    first, second = "def f(a, b): return a - b", "def f(a, b): return b - a"
    assert canonical_code(first) != canonical_code(second)
    assert canonical_code(first) == canonical_code("def f(b, a): return b - a")


def test_digest_covers_files_and_folders(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaigns, "ROOT", tmp_path)
    (tmp_path / "code" / "triton").mkdir(parents=True)
    (tmp_path / "code" / "a.py").write_text(SOURCE)
    (tmp_path / "code" / "triton" / "kernel.py").write_text("x = 1\n")
    (tmp_path / "job.sh").write_text("echo 1\n")
    places = ("code", "job.sh")
    before = code_digest(places)
    (tmp_path / "code" / "triton" / "kernel.py").write_text("x = 2\n")
    (tmp_path / "code" / "a.py").write_text(RENAMED)
    assert code_digest(places) == before
    (tmp_path / "job.sh").write_text("echo 2\n")
    assert code_digest(places) != before


def test_digest_follows_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaigns, "ROOT", tmp_path)
    package = tmp_path / "megatron_deberta"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("def __getattr__(name): import megatron_deberta.lazy\n")
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "inner.py").write_text("x = 1\n")
    (package / "lazy.py").write_text("x = 1\n")
    (package / "types.py").write_text("x = 1\n")
    (package / "top.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from megatron_deberta import types\n"
        "def f():\n    from megatron_deberta.deep.inner import x\n"
    )
    places = ("megatron_deberta/top.py",)
    names = [str(path.relative_to(package)) for path in campaigns.covered_files(places)]
    assert names == ["__init__.py", "deep/__init__.py", "deep/inner.py", "top.py"]
    before = code_digest(places)
    (package / "deep" / "inner.py").write_text("x = 2\n")
    assert code_digest(places) != before


@pytest.mark.slow
def test_every_campaign_of_training_covers_the_functions_that_flush_files() -> None:
    kinds = [case.places for case in faults.CHAOS_CASES.values()]
    for places in (
        *kinds, faults.LOST_NODES_CODE, faults.SLURM_CODE, faults.HANGS_CODE,
        faults.LAYOUT_MOVES_CODE,
    ):  # fmt: skip
        names = {str(path.relative_to(campaigns.ROOT)) for path in campaigns.covered_files(places)}
        assert {"megatron_deberta/files.py", "megatron_deberta/hashing.py"} <= names


def test_empty_constant_at_the_end_of_an_fstring_does_not_count() -> None:
    """Python 3.12 adds an empty constant to nested format specifications."""
    source = 'text = f"{name:<{width}}"\n'
    tree = ast.parse(source)
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]:
        node.values.append(ast.Constant(""))
    assert "".join(campaigns._Writer().tokens(tree)) == canonical_code(source)


def test_recorded_mutants_are_in_the_list() -> None:
    """The table shows what is recorded: a mutant that is no longer there must leave the record."""
    recorded = {(line["mutant"], line["test"]) for line in campaigns.read_lines(OUTPUT)}
    assert recorded <= {(mutant.name, mutant.test) for mutant in MUTANTS}


@pytest.mark.slow
def test_table_of_random_mutants() -> None:
    file = "megatron_deberta/files.py"
    line = {
        "file": file, "line": 3, "old": "a: int | None = 1", "new": "a: int | None = 2",
        "killed_by": "", "reason": "", "revision": "r", "hardware": "a CPU",
        "code_digest": code_digest([file], imports=False),
    }  # fmt: skip
    lines = [
        line | {"killed_by": "tests/unit/test_files.py::test_a[x]"},
        line | {"reason": "no difference"},
        line,
        line | {"code_digest": "older"},
    ]
    *_, killed, equivalent, survived = faults.random_mutants(lines).splitlines()
    assert r"| `files.py:3` | `` a: int \| None = 1 `` |" in killed
    assert killed.endswith("| `unit/test_files.py::test_a` |")
    assert equivalent.endswith("| no difference |")
    assert survived.endswith("| **none** |")
    table = faults.campaigns([], [], lines, *([] for _ in faults.CAMPAIGNS))
    assert "(`random_mutants`) | 2 / 3 | 30 |  | r | a CPU |" in table
