"""Corpora with known duplicates, and functions to deduplicate them."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_deberta.text.deduplicate.pipeline import deduplicate
from megatron_deberta.text.deduplicate.sign import Settings
from megatron_deberta.text.jobs.executors import RunOptions
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import find_sources
from tests.support.machine_text import documents


def distinct_texts(count: int) -> list[str]:
    """Return texts of 120 English words in random order, which are not similar to each other."""
    # Words whose upper case loses letters (\u00df becomes SS) would make copies inexact.
    words = [word for word in " ".join(documents()).split() if word.upper().lower() == word.lower()]
    return [" ".join(random.Random(number).sample(words, 120)) for number in range(count)]


def edited(text: str, share: float, seed: int = 0) -> str:
    """Replace a share of a text's words."""
    draw = random.Random(seed)
    words = text.split()
    for place in draw.sample(range(len(words)), round(share * len(words))):
        words[place] = f"w{draw.randrange(10**6)}"
    return " ".join(words)


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def make_corpus(folder: Path) -> list[str]:
    """Write three files of 140 originals, 40 exact copies, 40 near copies and 20 distant copies."""
    originals = distinct_texts(140)
    copies = [
        *(text.upper() for text in originals[:40]),
        *(edited(text, 0.02, n) for n, text in enumerate(originals[40:80])),
        *(edited(text, 0.2, n) for n, text in enumerate(originals[80:100])),
    ]
    kinds = ["exact"] * 40 + ["near"] * 40 + ["far"] * 20
    records = [{"id": f"o{n}", "kind": "", "text": text} for n, text in enumerate(originals)]
    records += [
        {"id": f"c{n}", "kind": kind, "text": text}
        for n, (kind, text) in enumerate(zip(kinds, copies, strict=True))
    ]
    random.Random(1).shuffle(records)
    return [write_jsonl(folder / f"part-{part}.jsonl", records[part::3]) for part in range(3)]


def run(inputs: list[str], output: Path, **options: Any) -> dict[str, Any]:
    """Deduplicate with the default settings."""
    settings = options.pop("settings", Settings())
    options = with_run_options(options)
    return deduplicate(find_sources(inputs), output, settings, ReadOptions(), **options)


def with_run_options(options: dict[str, Any]) -> dict[str, Any]:
    """Put the fields of ``RunOptions`` among keyword arguments together as ``run``."""
    names = {field.name for field in fields(RunOptions)}
    run_options = {name: value for name, value in options.items() if name in names}
    others = {name: value for name, value in options.items() if name not in names}
    return {**others, "run": RunOptions(**run_options)}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
