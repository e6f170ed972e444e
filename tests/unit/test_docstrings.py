"""Docstrings of public functions name their arguments, and the shapes of tensors.

The convention is Google's: a function or method with three or more arguments has an "Args:" section
that names each one, or refers to another docstring; one that takes a tensor also names a shape.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_deberta"
FOLDERS = sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")})
MIN_ARGUMENTS = 3
REFERENCE = re.compile(r"[Aa]rguments\s+(as|and|not\s+listed)\b|[;,]\s+see\s+`")
"""Words that refer to another docstring, such as "arguments as in ``save``"."""
SHAPE = re.compile(r"``[^`]*\[[^`]*``|any shape|[Ss]calar", re.DOTALL)
"""A shape is written ``[batch, hidden]``."""
PROPERTIES = {"property", "cached_property", "setter", "overload"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """Return the classes of the package by name."""
    found: dict[str, list[ast.ClassDef]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name, without call and subscript."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def overrides(method: Function, owner: ast.ClassDef) -> bool:
    """Whether a base class of the package has a documented method of this name."""
    for base in owner.bases:
        for parent in classes().get(last_name(base), []):
            if parent is owner:
                continue
            for node in parent.body:
                if isinstance(node, Function) and node.name == method.name:
                    if ast.get_docstring(node):
                        return True
            if overrides(method, parent):
                return True
    return False


def arguments(function: Function, owner: ast.ClassDef | None) -> list[ast.arg]:
    """Return the arguments of a function but for ``self`` and ``cls``."""
    named = [*function.args.posonlyargs, *function.args.args]
    static = any(last_name(decorator) == "staticmethod" for decorator in function.decorator_list)
    if owner is not None and not static:
        named = named[1:]
    return [*named, *function.args.kwonlyargs]


def takes_tensor(args: list[ast.arg]) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id == "Tensor")
        or (isinstance(node, ast.Attribute) and node.attr == "Tensor")
        for arg in args
        if arg.annotation is not None
        for node in ast.walk(arg.annotation)
    )


def named_in(docstring: str) -> set[str]:
    """Return the arguments that the "Args:" section of a docstring names."""
    section = re.search(r"^Args:\n((?:[ ].*\n|\n)*)", docstring + "\n", re.MULTILINE)
    if section is None:
        return set()
    entries = re.findall(r"^    (\w[\w, *]*?)(?: \([^)]*\))?:", section[1], re.MULTILINE)
    return {name.strip(" *") for entry in entries for name in entry.split(",")}


def faults(function: Function, owner: ast.ClassDef | None) -> Iterator[str]:
    """Yield what the docstring of a function lacks."""
    own = ast.get_docstring(function) or ""
    of_class = (ast.get_docstring(owner) or "") if owner is not None else ""
    args = arguments(function, owner)
    if function.name == "forward" and not {arg.arg for arg in args} - named_in(of_class):
        return
    if REFERENCE.search(own):
        return
    missing = [arg.arg for arg in args if arg.arg not in named_in(own)]
    if len(args) >= MIN_ARGUMENTS and missing:
        yield f"no {', '.join(missing)} under Args"
    if takes_tensor(args) and not SHAPE.search(own) and not SHAPE.search(of_class):
        yield "no shape of a tensor, like ``[batch, hidden]``"


def public_functions(
    body: list[ast.stmt], owner: ast.ClassDef | None
) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, node)
        elif isinstance(node, ast.If | ast.Try):
            yield from public_functions(node.body, owner)
            yield from public_functions(node.orelse, owner)
        elif isinstance(node, Function) and not node.name.startswith("_"):
            if PROPERTIES & {last_name(decorator) for decorator in node.decorator_list}:
                continue
            if owner is None or not overrides(node, owner):
                yield node, owner


def faults_in(folder: str) -> list[str]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] != folder:
            continue
        for function, owner in public_functions(parse(path).body, None):
            owner_name = f"{owner.name}." if owner is not None else ""
            found += [
                f"{name}:{function.lineno} {owner_name}{function.name}: {fault}"
                for fault in faults(function, owner)
            ]
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_public_functions_name_their_arguments_and_shapes(folder: str) -> None:
    found = faults_in(folder)
    assert not found, "\n".join(found)
