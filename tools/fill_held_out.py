#!/usr/bin/env python3
"""Mask one word in each of several held-out sentences and show what a model fills in.

The seed selects the sentences and, in each, one of the most frequent words of the model's
vocabulary. No word is masked in more than 5 % of them. Answers are whole words of the vocabulary.

    tools/fill_held_out.py --model exported --input text/validation/part-*.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import sys
from collections import Counter
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_deberta.cli.fill_mask import read_penalty
from megatron_deberta.hf.fill_mask import MaskFiller, open_filler
from megatron_deberta.hf.loading import load_model_tokenizer
from megatron_deberta.tokenizer import Tokenizer

SENTENCE = re.compile(r"[A-Z][^.?!]{30,150}[.?!]")
WORD = re.compile(r"(?<= )[a-z]+(?=[ ,.;:?!])")
SHOWN = 5


class Answer(NamedTuple):
    """A masked sentence, its word, and the most probable words."""

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


def frequent_words(tokenizer: Tokenizer, number: int) -> list[str]:
    """Return the words that are one piece, the most frequent ones first, as pieces are ordered."""
    pieces = (tokenizer.piece(token) for token in range(tokenizer.num_tokens))
    words = (piece[1:] for piece in pieces if re.fullmatch("\u2581[a-z]+", piece))
    return list(itertools.islice(words, number))


def choose_word(sentence: str, words: Container[str], seed: str) -> re.Match[str] | None:
    """Return the place of a random one of the words in a sentence; None: it has none."""
    found = [match for match in WORD.finditer(sentence) if match[0] in words]
    return random.Random(f"{seed} {sentence}").choice(found) if found else None


def with_floor(penalty: Tensor, weight: float, floor: float) -> Tensor:
    """Return a penalty in which tokens less frequent than ``floor`` have that frequency."""
    return penalty.clamp(min=weight * math.log(floor)) if floor else penalty


def answer(
    filler: MaskFiller,
    candidates: Container[str],
    place: re.Match[str],
    penalty: Tensor | None = None,
) -> Answer:
    """Mask a word and predict it; the penalty is that of ``MaskFiller.fill``."""
    sentence = place.string
    masked = f"{sentence[: place.start()]}{filler.mask_token}{sentence[place.end() :]}"
    predictions = filler.fill(masked, 100, penalty)[0]
    filled = [p.text.strip() for p in predictions if p.text.strip() in candidates]
    return Answer(masked, place[0], filled[:SHOWN])


def main() -> int:
    """Print the table and the number of words predicted correctly."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="held-out JSON Lines")
    parser.add_argument("--sentences", type=int, default=40, help="how many (default 40)")
    parser.add_argument(
        "--words", type=int, default=250, help="the most frequent words to choose from (250)"
    )
    parser.add_argument(
        "--max-share",
        type=float,
        default=0.05,
        help="largest share of the sentences in which the same word is masked (0.05)",
    )
    parser.add_argument("--seed", type=int, default=2021, help="selects them (default 2021)")
    parser.add_argument(
        "--prior-weight", type=float, default=0.0, help="as for megatron-deberta fill-mask (0)"
    )
    parser.add_argument(
        "--prior-shards", nargs="+", default=[], help="as for megatron-deberta fill-mask"
    )
    parser.add_argument(
        "--prior-floor",
        type=float,
        default=0.0,
        metavar="F",
        help="tokens with a relative frequency below F count as this frequent (0): the weight then "
        "holds frequent tokens back and does not favour rare ones",
    )
    args = parser.parse_args()
    if not 0 <= args.prior_floor < 1:
        parser.error(f"--prior-floor is a relative frequency from 0 to 1, got {args.prior_floor}")

    filler = open_filler(args.model)
    penalty = read_penalty(filler, args.prior_weight, args.prior_shards)
    if penalty is not None:
        penalty = with_floor(penalty, args.prior_weight, args.prior_floor)
    tokenizer = load_model_tokenizer(args.model)
    candidates = set(frequent_words(tokenizer, tokenizer.num_tokens))
    words = set(frequent_words(tokenizer, args.words))
    found = sentences(args.input)
    random.Random(args.seed).shuffle(found)
    limit = max(1, int(args.max_share * args.sentences))
    answers: list[Answer] = []
    repeats: Counter[str] = Counter()
    for sentence in found:
        place = choose_word(sentence, words, str(args.seed))
        if len(answers) == args.sentences:
            break
        if place and repeats[place[0]] < limit:
            repeats[place[0]] += 1
            answers.append(answer(filler, candidates, place, penalty))
    if not answers:
        print("fill_held_out: error: no sentence of 30 to 150 characters found", file=sys.stderr)
        return 2

    table = Table("held-out sentence", "word", "five most probable", show_lines=False)
    for sentence, word, filled in answers:
        style = "green" if filled[:1] == [word] else ""
        shown = sentence.replace("[", r"\[")
        table.add_row(shown, word, " ".join(filled), style=style)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    first = sum(filled[:1] == [word] for _, word, filled in answers)
    five = sum(word in filled for _, word, filled in answers)
    given = Counter(filled[0] for _, _, filled in answers if filled)
    common, times = given.most_common(1)[0]
    frequent = Counter(word for _, word, _ in answers).most_common(1)[0][1]
    print(f"masked words            {len(answers)} (seed {args.seed})")
    print(f"right in first place    {first} ({first / len(answers):.0%})")
    print(f"right in the first five {five} ({five / len(answers):.0%})")
    print(f"most frequent answer    {common!r}, {times} times")
    print(f"by one constant answer  {frequent} ({frequent / len(answers):.0%}) at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
