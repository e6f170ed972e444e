"""Results of fault-injection campaigns: one JSON line per case, with a digest of the tested code.

A line counts only while the digest of the code is the same. The digest is taken over the syntax
trees of the tested files and of all files of the project that they import, so comments, docstrings,
formatting and names of local variables do not change it.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.lib.provenance import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "cpu"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (*_FUNCTIONS, *_COMPREHENSIONS, ast.ClassDef)


def code_digest(places: Iterable[str], *, imports: bool = True) -> str:
    """Return the digest of files and folders, and of what they import.

    GPU kernels, which no campaign runs, and the package of benchmarks are left out.

    Args:
        places: files, and folders whose Python files count, relative to the project's root.
        imports: follow imports.
    """
    digest = hashlib.sha256()
    for path in covered_files(places, imports=imports):
        text = path.read_text(encoding="utf-8")
        content = canonical_code(text) if path.suffix == ".py" else text
        digest.update(f"{path.relative_to(ROOT)}\0{content}\0".encode())
    return digest.hexdigest()[:12]


def covered_files(places: Iterable[str], *, imports: bool = True) -> list[Path]:
    """Return the files whose code a digest covers, sorted; see ``code_digest``."""
    left = [ROOT / place for place in places]
    found: set[Path] = set()
    while left:
        path = left.pop()
        if path.is_dir():
            left += path.rglob("*.py")
        elif path not in found and "triton" not in path.parts:
            found.add(path)
            if imports and path.suffix == ".py":
                names = imported_names(path.read_text(encoding="utf-8"), path.name)
                left += [file for name in names for file in _files_of(name)]
    return sorted(found)


@cache
def imported_names(source: str, name: str) -> tuple[str, ...]:
    """Return the modules and objects that a file imports, also in functions.

    Left out are imports for type checkers, and those in functions of a package's ``__init__.py``,
    which serve a user who asks for a name.
    """
    nodes: list[ast.AST] = [ast.parse(source)]
    names: list[str] = []
    while nodes:
        node = nodes.pop()
        if isinstance(node, _FUNCTIONS) and name == "__init__.py":
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name):
            if node.test.id == "TYPE_CHECKING":
                continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        nodes += ast.iter_child_nodes(node)
    return tuple(names)


@cache
def _files_of(name: str) -> tuple[Path, ...]:
    """Return the project's files that are run when a name is imported."""
    parts = name.split(".")
    if parts[0] not in ("megatron_deberta", "tests"):
        return ()
    folders = [ROOT.joinpath(*parts[:length]) for length in range(1, len(parts) + 1)]
    files = [folder / "__init__.py" for folder in folders] + [folders[-1].with_suffix(".py")]
    return tuple(path for path in files if path.is_file())


@cache
def canonical_code(source: str) -> str:
    """Return the syntax tree as text, without strings that are statements, locals renamed."""
    return "".join(_Writer().tokens(ast.parse(source)))


class _Writer:
    """Writes a syntax tree; keeps the canonical names of the scopes around the current node."""

    def __init__(self) -> None:
        self._scopes: list[dict[str, str]] = []
        self._names = (f"${number}" for number in count())

    def tokens(self, value: Any) -> Iterator[str]:
        """Yield the text of a node, a list of nodes or a constant."""
        if isinstance(value, list):
            yield "["
            for item in value:
                yield from self.tokens(item)
            yield "]"
        elif isinstance(value, _SCOPES):
            yield from self._scope(value)
        elif isinstance(value, ast.AST):
            yield from self._fields(value, value._fields)
        else:
            yield f"{value!r} "

    def _fields(self, node: ast.AST, fields: Iterable[str]) -> Iterator[str]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        yield f"({type(node).__name__} "
        for name in fields:
            value = getattr(node, name, None)
            if isinstance(node, ast.JoinedStr):  # Python 3.12 ends some with an empty constant
                value = [item for item in value if getattr(item, "value", None) != ""]
            if value is None or value == []:
                continue
            yield f"{name}="
            if isinstance(value, str) and _is_variable(node, name):
                value = self._renamed(value)
            elif isinstance(node, ast.Global | ast.Nonlocal):
                value = [self._renamed(item) for item in value]
            yield from self.tokens(value)
        yield ")"

    def _scope(self, node: ast.AST) -> Iterator[str]:
        """Write what is evaluated outside of a scope, then the rest with the scope's names."""
        outside = [
            name for name in ("name", "decorator_list", "bases", "keywords") if name in node._fields
        ]
        yield from self._fields(node, outside)
        bound = dict.fromkeys(_bound_names(node))
        if isinstance(node, ast.ClassDef):
            self._scopes.append({name: name for name in bound})
        else:
            self._scopes.append({name: next(self._names) for name in bound})
        yield from self._fields(node, [name for name in node._fields if name not in outside])
        self._scopes.pop()

    def _renamed(self, name: str) -> str:
        return next((scope[name] for scope in reversed(self._scopes) if name in scope), name)


def _is_variable(node: ast.AST, field: str) -> bool:
    """Return whether a string field holds the name of a variable."""
    if isinstance(node, ast.Name):
        return field == "id"
    if isinstance(node, ast.arg):
        return field == "arg"
    named = (ast.ExceptHandler, ast.MatchAs, ast.MatchStar, *_FUNCTIONS, ast.ClassDef)
    return field in ("name", "rest") and isinstance(node, (*named, ast.MatchMapping))


def _bound_names(scope: ast.AST) -> list[str]:
    """Return the names that a scope binds, in order; imported names keep theirs."""
    nodes = list(_own_nodes(scope))
    declared = {name for node in nodes for name in _declared(node)}
    return [name for node in nodes if (name := _bound_name(node)) and name not in declared]


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope in order, without the insides of nested scopes."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _SCOPES):
            yield from _own_nodes(node)


def _declared(node: ast.AST) -> list[str]:
    return node.names if isinstance(node, ast.Global | ast.Nonlocal) else []


def _bound_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) else None
    if isinstance(node, ast.alias):
        return None
    return getattr(node, "name", None) or getattr(node, "rest", None)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a results file, or none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line to a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.write(json.dumps(line) + "\n")
