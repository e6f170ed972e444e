#!/usr/bin/env python3
"""Mask one word in each of several held-out sentences and show what a model fills in.

The seed selects the sentences and, in each, a word that is one piece of the model's vocabulary.

    tools/fill_held_out.py --model exported --input text/validation/part-*.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from megatron_deberta.hf.fill_mask import MaskFiller, open_filler
from megatron_deberta.hf.loading import load_model_tokenizer

SENTENCE = re.compile(r"[A-Z][^.?!]{30,150}[.?!]")
WORD = re.compile(r"(?<= )[a-z]+(?=[ ,.;:?!])")


class Answer(NamedTuple):
    """A masked sentence, its word, and the five most probable words."""

    sentence: str
    word: str
    filled: list[str]


def sentences(paths: list[Path]) -> list[str]:
    """Return the sentences of 30 to 150 characters of JSON Lines files, each once."""
    found: dict[str, None] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            for paragraph in json.loads(line)["text"].splitlines():
                found.update(dict.fromkeys(SENTENCE.findall(paragraph)))
    return sorted(found)


def answer(filler: MaskFiller, one_piece: set[str], sentence: str, seed: str) -> Answer | None:
    """Mask a random word that is one piece of the vocabulary and predict it; None: no such word."""
    words = [match for match in WORD.finditer(sentence) if match[0] in one_piece]
    if not words:
        return None
    word = random.Random(f"{seed} {sentence}").choice(words)
    masked = f"{sentence[: word.start()]}{filler.mask_token}{sentence[word.end() :]}"
    candidates = filler.fill(masked, top_k=5)[0]
    return Answer(masked, word[0], [candidate.text.strip() for candidate in candidates])


def main() -> int:
    """Print the table and the number of words predicted correctly."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="held-out JSON Lines")
    parser.add_argument("--sentences", type=int, default=40, help="how many (default 40)")
    parser.add_argument("--seed", type=int, default=2021, help="selects them (default 2021)")
    args = parser.parse_args()

    filler = open_filler(args.model)
    tokenizer = load_model_tokenizer(args.model)
    pieces = [tokenizer.piece(token) for token in range(tokenizer.num_tokens)]
    one_piece = {piece[1:] for piece in pieces if piece.startswith("\u2581")}
    candidates = sentences(args.input)
    random.Random(args.seed).shuffle(candidates)
    answers: list[Answer] = []
    for sentence in candidates:
        if len(answers) < args.sentences:
            filled = answer(filler, one_piece, sentence, str(args.seed))
            answers += [filled] if filled else []
    if not answers:
        print("fill_held_out: error: no sentence of 30 to 150 characters found", file=sys.stderr)
        return 2

    table = Table("held-out sentence", "word", "five most probable", show_lines=False)
    for sentence, word, filled in answers:
        style = "green" if filled[0] == word else ""
        shown = sentence.replace("[", r"\[")
        table.add_row(shown, word, " ".join(filled), style=style)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    first = sum(filled[0] == word for _, word, filled in answers)
    five = sum(word in filled for _, word, filled in answers)
    common, times = Counter(filled[0] for _, _, filled in answers).most_common(1)[0]
    frequent = Counter(word for _, word, _ in answers).most_common(1)[0][1]
    print(f"masked words            {len(answers)} (seed {args.seed})")
    print(f"right in first place    {first} ({first / len(answers):.0%})")
    print(f"right in the first five {five} ({five / len(answers):.0%})")
    print(f"most frequent answer    {common!r}, {times} times")
    print(f"by one constant answer  {frequent} ({frequent / len(answers):.0%}) at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
