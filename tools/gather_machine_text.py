#!/usr/bin/env python3
"""Gather English prose that every machine with Python has, as JSON Lines.

Sources are Python's documentation topics, and the docstrings, comments and documents of the
standard library and of installed packages, headers in C++ included. Only paragraphs of plain
sentences are kept: no code, signatures, lists of names, links or markup. A document holds the
paragraphs of one file. A paragraph is left out if it repeats an earlier one, or a run of 30 words
of an earlier one, so that documents held out for validation share no long passage with training.

    tools/gather_machine_text.py --output text.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics

RUN_WORDS = 30
"""No two paragraphs share a run of this many words."""
MIN_WORDS = 8
DOCSTRING = re.compile(r'"""(.*?)"""|\'\'\'(.*?)\'\'\'', re.DOTALL)
CPP_COMMENT = re.compile(r"((?:^[ \t]*//.*\n)+)|/\*(.*?)\*/", re.MULTILINE | re.DOTALL)
CPP_MARKER = re.compile(r"^[ \t]*(?://[/!]?|\*+) ?", re.MULTILINE)
COMMENTS = re.compile(r"(?:^[ \t]*#(?!!).*\n)+", re.MULTILINE)
BLANK_LINE = re.compile(r"\n[ \t]*\n")
LIST_MARKER = re.compile(r"^\s*(?:[-*•]|\d+[.)]|\.\. \w+::(?: [\d.]+)?)\s+", re.MULTILINE)
MARKUP = (
    (re.compile(r":(?:\w+:)+`[~.]?([^`<]*?)(?:\s*<[^>]*>)?`"), r"\1"),  # :class:`Name`
    (re.compile(r"``?([^`]+)``?"), r"\1"),
    (re.compile(r"\*\*?([^*\s][^*]*)\*\*?"), r"\1"),
)
NOT_PROSE = re.compile(
    r"[][{}<>=\\_|@#$%^*~/`+]|::|\.\.|https?:|\w\(|\(\)|\w\.\w|[a-z][A-Z]|--|[^\x20-\x7e’“”é]"
)
WORD = re.compile(r"[\"'“(]?[A-Za-z]+(?:['’-][A-Za-z]+)*[\"'”)]?[.,;:?!]?[\"”)]?")
SENTENCES = re.compile(r"[\"“(]?[A-Z].*[.?!][\"”)]?", re.DOTALL)


def clean_prose(paragraph: str) -> str | None:
    """Return the paragraph on one line without markup; ``None`` if it is not plain sentences."""
    for pattern, replacement in MARKUP:
        paragraph = pattern.sub(replacement, paragraph)
    if NOT_PROSE.search(paragraph.replace("\n", " ").replace("\t", " ")):
        return None
    words = paragraph.split()
    text = " ".join(words)
    if len(words) < MIN_WORDS or not SENTENCES.fullmatch(text):
        return None
    plain = [word for word in words if WORD.fullmatch(word)]
    lower = [word for word in plain if word.islower()]
    if len(plain) < 0.95 * len(words) or len(lower) < 0.75 * len(words):
        return None
    return text


def module_texts(source: str) -> Iterator[str]:
    """Yield the text of each docstring and block of comments of a Python file."""
    for match in DOCSTRING.finditer(source):
        yield match[1] or match[2] or ""
    for match in COMMENTS.finditer(source):
        yield re.sub(r"^[ \t]*#+ ?", "", match[0], flags=re.MULTILINE)


def header_texts(source: str) -> Iterator[str]:
    """Yield the text of each comment of a file in C or C++."""
    for match in CPP_COMMENT.finditer(source):
        yield CPP_MARKER.sub("", match[1] or match[2])


def document_texts(source: str) -> Iterator[str]:
    """Yield the text of a document."""
    yield source


READERS: dict[str, Callable[[str], Iterator[str]]] = {
    **dict.fromkeys((".py", ".pyi", ".pyx", ".pxd"), module_texts),
    **dict.fromkeys((".h", ".hpp", ".cuh"), header_texts),
    **dict.fromkeys((".md", ".rst", ".txt", "METADATA"), document_texts),
}
"""By the end of a file's name."""


def sources() -> Iterator[Iterable[str]]:
    """Yield the texts of each topic and file, in an order that does not change."""
    for name in sorted(topics):
        yield [topics[name]]
    stdlib, packages = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
    for root in (stdlib, packages):
        for path in sorted(Path(root).rglob("*")):
            reader = READERS.get(path.suffix or path.name)
            if (
                reader
                and path.is_file()
                and (root == packages or "site-packages" not in path.parts)
            ):
                yield reader(path.read_text(encoding="utf-8", errors="replace"))


def documents() -> Iterator[str]:
    """Yield the documents: the new prose of each topic and file, a paragraph per line."""
    seen: set[int] = set()
    for texts in sources():
        paragraphs = []
        for text in texts:
            for block in BLANK_LINE.split(text):
                prose = clean_prose(LIST_MARKER.sub("", block))
                if prose is None:
                    continue
                words = prose.lower().split()
                runs = {
                    hash(" ".join(words[start : start + RUN_WORDS]))
                    for start in range(max(1, len(words) - RUN_WORDS + 1))
                }
                if seen.isdisjoint(runs):
                    paragraphs.append(prose)
                seen |= runs
        if paragraphs:
            yield "\n".join(paragraphs)


def main() -> int:
    """Write the documents; the file appears under its name only when it is complete."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    parser.add_argument("--max-mb", type=float, default=10.0, help="stop at this size (default 10)")
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
