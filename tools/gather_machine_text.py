#!/usr/bin/env python3
"""Gather real English text that every machine with Python has, one JSON document a line.

Python's documentation topics and the docstrings of the standard library and of installed packages,
one document a module, each docstring once. What the quickstart trains on where no text is given.

    tools/gather_machine_text.py --output text.jsonl --max-mb 8
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

MIN_CHARACTERS = 200
"""Shorter docstrings say little that is English."""
BROKEN = re.compile("[\0\ud800-\udfff]")
"""What no text holds: NUL and lone surrogates."""


def module_docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of a Python file, of modules, classes and functions alike."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's escape sequences
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError, RecursionError):
        return  # test data of other packages holds files that are broken on purpose
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None and len(text) >= MIN_CHARACTERS and not BROKEN.search(text):
                yield text


def documents() -> Iterator[str]:
    """Yield the topics, then a document a module, in an order that does not change."""
    for name in sorted(topics):
        yield topics[name]
    seen: set[str] = set()
    roots = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    for root in roots:
        for path in sorted(Path(root).rglob("*.py")):
            if "site-packages" in path.parts and root == roots[0]:
                continue
            fresh = [text for text in module_docstrings(path) if text not in seen]
            seen.update(fresh)
            if fresh:
                yield "\n\n".join(fresh)


def main() -> int:
    """Write the documents; the file appears under its name only when it is complete."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--max-mb", type=float, default=8.0, help="stop at this size (default 8)")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    partial = args.output.with_name(args.output.name + ".tmp")
    limit, written, count = int(args.max_mb * 1e6), 0, 0
    with partial.open("w", encoding="utf-8") as file:
        for text in documents():
            line = json.dumps({"text": text}, ensure_ascii=True) + "\n"
            written += file.write(line)
            count += 1
            if written >= limit:
                break
    os.replace(partial, args.output)
    print(f"gathered {count} documents, {written / 1e6:.1f} MB: {args.output}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
