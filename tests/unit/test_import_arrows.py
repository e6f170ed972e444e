"""The imports of the package follow the rules of ``docs/architecture.md``."""

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_deberta"
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.relative_to(PACKAGE).parts[0] for path in FILES})
"""Folders and modules of the package itself: a test per file would take longer to schedule."""
EVERYTHING = {"everything"}
SINGLE_MODULES = {"errors", "files", "hashing", "parsing", "processes", "__version__"}
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTATORS = {
    "append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear",
    "remove", "discard", "sort", "reverse",
}  # fmt: skip


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def arrows() -> dict[str, set[str]]:
    """Read the table of docs/architecture.md: folder -> folders (or modules) it may import."""
    table: dict[str, set[str]] = {}
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`") and cells[0].endswith("/`"):
            allowed = cells[2]
            folder = cells[0].strip("`/")
            if allowed == "everything above":
                table[folder] = set(table)
            elif allowed == "everything":
                table[folder] = EVERYTHING
            else:
                table[folder] = {
                    name.strip(" `") for name in allowed.split(",") if name != "nothing"
                }
    return table


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield all modules that a syntax tree imports, at any level."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a module comes from"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.AST) -> str:
    """Return the dotted name of an expression, such as ``torch.load``; empty for others."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def row_of(module: str, rooms: set[str]) -> str:
    """Return the row of the table that a module, without the package's name, belongs to."""
    parts = module.split(".")
    nested = "/".join(parts[:2])
    return nested if nested in rooms else parts[0]


def test_table_lists_every_folder() -> None:
    table = arrows()
    folders = {path.parent.name for path in FILES if path.parent.parent == PACKAGE}
    assert folders - {"config"} == {name for name in table if "/" not in name}
    assert table["ops"] == set()
    assert table["objectives"] == {"ops", "model", "data"}
    assert "engine" in table["train"]
    assert "cluster" not in table["train"]
    assert "evaluate" in table["train"]
    assert not {"train", "finetune"} & table["evaluate"]


def check_arrows(path: Path) -> None:
    relative = path.relative_to(PACKAGE)
    if len(relative.parts) == 1:
        return
    table = arrows()
    rooms = set(table)
    here = row_of(".".join(relative.with_suffix("").parts), rooms)
    allowed = {*table.get(here, set()), here, "config", *SINGLE_MODULES}
    if allowed >= EVERYTHING:
        return
    if here == "config":
        allowed = {"config", "errors", "files"}
    for module in imports(parse(path)):
        if module.startswith("megatron_deberta."):
            there = row_of(module.removeprefix("megatron_deberta."), rooms)
            assert there in allowed, f"{relative} imports {module}; {here}/ may: {sorted(allowed)}"


def check_distributed(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] not in {"model", "ops", "objectives"}:
        return
    tree = parse(path)
    assert not [module for module in imports(tree) if module.startswith("torch.distributed")]
    assert not [node for node in ast.walk(tree) if dotted(node).startswith("torch.distributed")]


def check_state(path: Path) -> None:
    tree = parse(path)
    containers = set()
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, MUTABLE):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            containers |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Global), f"{path.name}:{node.lineno}: global statement"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = dotted(node.func.value) if node.func.attr in MUTATORS else ""
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = dotted(node.value)
        elif isinstance(node, ast.AugAssign):
            changed = dotted(node.target)
        else:
            continue
        assert changed not in containers, f"{path.name}:{node.lineno}: changes {changed}"


def check_sizes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.stem not in {"utils", "helpers", "common"}
    assert text.count("\n") <= 800, f"{path.name} has {text.count(chr(10))} lines"
    tree = parse(path)
    assert not text or ast.get_docstring(tree), f"{path.name} does not say what it owns"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            # Docstrings are not counted.
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            lines = node.end_lineno - first.lineno + 1
            assert lines <= 100, f"{path.name}:{node.lineno}: {node.name} has {lines} lines"


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("check", [check_arrows, check_distributed, check_state, check_sizes])
def test_files_follow_the_rules(check: Callable[[Path], None], folder: str) -> None:
    for path in FILES:
        if path.relative_to(PACKAGE).parts[0] == folder:
            check(path)
