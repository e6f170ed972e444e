"""Run the test suite against thirty random one-line mutants of the package.

The seed of the draw is fixed. A mutant changes one operator, condition, constant or call. The tests
nearest to the mutated module run first, then those of ``tests/run.sh --all``, then those that only
``--nightly`` runs. A line per mutant records the first test that failed and the part of the
suite it belongs to; mutants whose line is there are skipped, unless their file has changed. Once
all have a line, these mutants are kept and found again in changed code. A test that fails without
the mutant, too, ends the program. Mutants of ``EQUIVALENT``, which change nothing that a test could
see, are not run: their line has the reason. Commit first: the checkouts are clones. Keep the
machine idle: a test that fails because it ran out of time counts as a kill.

  python -m tests.faults.random_mutants
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.campaigns import RESULTS, append_line, code_digest, read_lines
from benchmarks.lib.provenance import ROOT, provenance

OUTPUT = RESULTS / "random_mutants.jsonl"
SEED, COUNT = 39, 30
PACKAGE = "megatron_deberta"
TIMEOUT_SECONDS = 3600
FOLDERS = ("unit", "integration", "parity", "golden", "judges", "distributed", "faults", "slurm")
"""Of the tests; unit tests first, because they are the fastest to find most mutants."""
WORKERS = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
SUITE = (*WORKERS, *(f"tests/{name}" for name in FOLDERS))
PARTS = (("all", "not nightly"), ("nightly", "nightly"))
"""Name and marks of the parts of the suite, in the order in which they run."""
SWAPPED: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip

EQUIVALENT = {
    ("checkpoint/layout.py", "return json.dumps(content, indent=2).encode()"): (
        "indentation of JSON"
    ),
    ("finetune/data.py", "pairs = list(zip(config.model.labels, weights, strict=False))"): (
        "the number of weights has been checked (`config/rules.py`)"
    ),
    (
        "hf/onnx/graph.py",
        "for head, slot in zip(keys.heads, (index.first, index.last), strict=False)",
    ): "both tuples have two entries by their type",
    (
        "ops/triton/gathered.py",
        "head_pointer(V, batch, head), V.row_stride, first, length, True, BLOCK, HEAD_DIM",
    ): "what is computed from rows of V beyond the length is not stored",
}
"""Reason by file and changed line."""


@dataclass(frozen=True, slots=True)
class RandomMutant:
    """A change of a stretch of one line.

    Attributes:
        file: from the root of the checkout.
        line: number, from 1.
        start: first column (bytes) of what is replaced.
        end: column after it.
        new: the replacement.
    """

    file: str
    line: int
    start: int
    end: int
    new: str

    def mutated(self, text: str) -> str:
        """Return the file's text with the change."""
        lines = text.encode().split(b"\n")
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: self.start] + self.new.encode() + old[self.end :]
        return b"\n".join(lines).decode()

    def changed_line(self, text: str) -> tuple[str, str]:
        """Return the changed line before and after the change, without indentation."""
        old, new = (each.split("\n")[self.line - 1].strip() for each in (text, self.mutated(text)))
        return old, new


def mutants_of(file: str, text: str) -> Iterator[RandomMutant]:
    """Yield every mutant of a file, in source order of its syntax tree.

    Annotations are left out, because no test can see a change of them.
    """
    lines = [line.encode() for line in text.split("\n")]
    for node in _executed(ast.parse(text)):
        for line, start, end, new in _changes(node, lines):
            yield RandomMutant(file, line, start, end, new)


def _changes(node: ast.AST, lines: list[bytes]) -> Iterator[tuple[int, int, int, str]]:
    """Yield changes of a node as line, first column, column after it, and new text."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield from _swap(operator, left, right, lines)
        case ast.BinOp(left=left, op=operator, right=right):
            yield from _swap(operator, left, right, lines)
        case ast.BoolOp(op=operator, values=[left, right]):
            yield from _swap(operator, left, right, lines)
        case ast.UnaryOp(op=ast.Not(), operand=operand) if operand.lineno == operand.end_lineno:
            yield from _replace(node, f"({_source(operand, lines)})")
        case ast.Constant(value=bool(value)):
            yield from _replace(node, str(not value))
        case ast.Constant(value=int(value)):
            yield from _replace(node, str(value + 1))
        case ast.If(test=test) | ast.IfExp(test=test) if test.lineno == test.end_lineno:
            yield from _replace(test, f"(not ({_source(test, lines)}))")
        case ast.Expr(value=ast.Call()):
            yield from _replace(node, "pass")


def _swap(
    operator: ast.AST, first: ast.expr, second: ast.expr, lines: list[bytes]
) -> Iterator[tuple[int, int, int, str]]:
    """Swap the operator between two operands of one line."""
    start = first.end_col_offset or 0
    if type(operator) in SWAPPED and first.end_lineno == second.lineno:
        between = lines[second.lineno - 1][start : second.col_offset].decode()
        if found := re.search(r"[^\s()]+(?: not| in)?", between):
            new = SWAPPED[type(operator)]
            yield second.lineno, start + found.start(), start + found.end(), new


def _replace(node: ast.expr | ast.stmt, new: str) -> Iterator[tuple[int, int, int, str]]:
    """Replace a node of one line."""
    if node.lineno == node.end_lineno and node.end_col_offset is not None:
        yield node.lineno, node.col_offset, node.end_col_offset, new


def _source(node: ast.expr, lines: list[bytes]) -> str:
    return lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it, without annotations."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _executed(child)


def draw(count: int = COUNT, seed: int = SEED) -> list[RandomMutant]:
    """Return mutants of the package, each line of code with a mutant equally likely."""
    by_line: dict[tuple[str, int], list[RandomMutant]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for mutant in mutants_of(file, path.read_text(encoding="utf-8")):
            by_line.setdefault((file, mutant.line), []).append(mutant)
    generator = random.Random(seed)
    places = generator.sample(sorted(by_line), count)
    return [generator.choice(by_line[place]) for place in places]


def find_again(line: dict[str, Any]) -> RandomMutant:
    """Return the mutant of a line of the results, at its present place in the file.

    Raises:
        SystemExit: its line of code is gone.
    """
    text = (ROOT / line["file"]).read_text(encoding="utf-8")
    changed = line["old"], line["new"]
    found = [x for x in mutants_of(line["file"], text) if x.changed_line(text) == changed]
    if not found:
        raise SystemExit(f"{line['file']}: `{line['old']}` is gone; remove its line and draw again")
    return min(found, key=lambda mutant: abs(mutant.line - line["line"]))


def first_failure(root: Path, *arguments: str) -> str:
    """Return the first test that fails in a checkout, or an empty string."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments],
        cwd=root, capture_output=True, text=True, timeout=TIMEOUT_SECONDS,
        env={**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    if done.returncode in (0, 5):  # 5: no test has these marks
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"pytest {' '.join(arguments)}: {(done.stdout + done.stderr)[-2000:]}")
    return found[1]


def _tests_near(root: Path, file: str) -> list[str]:
    """Return the tests to run first: the nearest unit tests, and files that import the module."""
    path = Path(file)
    module = re.compile(rf"\b{'.'.join(path.with_suffix('').parts)}\b".replace(".", r"\."))
    near = [
        str(test.relative_to(root))
        for test in sorted((root / "tests").rglob("test_*.py"))
        if test.stem.startswith(f"test_{path.stem}") or module.search(test.read_text("utf-8"))
    ]
    for folder in path.relative_to(PACKAGE).parents:
        if (root / "tests/unit" / folder).is_dir():
            return [str("tests/unit" / folder), *near]
    raise AssertionError(file)


def run_mutant(mutant: RandomMutant) -> dict[str, Any]:
    """Return the first test that fails with a mutant, and its part of the suite."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    old, new = mutant.changed_line(text)
    line: dict[str, Any] = {
        "file": mutant.file, "line": mutant.line, "old": old, "new": new,
        "part": "", "killed_by": "", "reason": "",
    }  # fmt: skip
    if reason := EQUIVALENT.get((mutant.file.removeprefix(f"{PACKAGE}/"), line["new"])):
        return line | {"reason": reason}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkout"
        # All files: some tests read the README, launchers and the repository.
        subprocess.run(["git", "clone", "--quiet", ROOT, root], check=True)
        (root / mutant.file).write_text(mutant.mutated(text), encoding="utf-8")
        near = _tests_near(root, mutant.file)
        for part, marks in PARTS:
            killed_by = ""
            if part == "all":
                killed_by = first_failure(root, *WORKERS, "-m", marks, *near)
            killed_by = killed_by or first_failure(root, *SUITE, "-m", marks)
            if killed_by:
                (root / mutant.file).write_text(text, encoding="utf-8")
                if first_failure(root, killed_by.split("[")[0]):
                    raise RuntimeError(f"{killed_by} fails without a mutant, too")
                return line | {"part": part, "killed_by": killed_by}
    return line


def main() -> int:
    """Run the mutants that have no line; return 1 if one passes all tests of ``--all``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    args = parser.parse_args()
    lines = read_lines(args.output)
    known = {(x["file"], x["line"], x["new"], x["code_digest"]): x for x in lines}
    drawn = {(x["file"], x["old"], x["new"]): x for x in lines}
    results = []
    # A change of the package would change the draw.
    for mutant in draw() if len(drawn) < COUNT else map(find_again, drawn.values()):
        code = code_digest([mutant.file], imports=False)
        _, new = mutant.changed_line((ROOT / mutant.file).read_text(encoding="utf-8"))
        line = known.get((mutant.file, mutant.line, new, code))
        if line is None:
            line = run_mutant(mutant)
            append_line(args.output, line | {"code_digest": code} | provenance())
            result = line["killed_by"] or line["reason"] or "SURVIVED"
            print(f"{mutant.file}:{mutant.line}: {result}", flush=True)
        results.append(line)
    return int(any(not line["reason"] and line["part"] != "all" for line in results))


if __name__ == "__main__":
    raise SystemExit(main())
