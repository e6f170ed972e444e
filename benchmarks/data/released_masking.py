"""Microsoft's NGramMaskGenerator in plain loops: the reference of ``released`` masking.

Written from the description of the algorithm (docs/data.md names the source), not from our
vectorised form: one word, one window, one token at a time, with Python's own random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple


class Text(NamedTuple):
    """Vocabulary properties that the generator uses.

    Attributes:
        special: of each id: never masked.
        begins_word: of each id: False if the piece continues the word before it.
        mask_id: of [MASK].
        num_tokens: ids that a random token is drawn from, special ones too.
    """

    special: Sequence[bool]
    begins_word: Sequence[bool]
    mask_id: int
    num_tokens: int


def released_masks(
    tokens: Sequence[int],
    text: Text,
    random_numbers: random.Random,
    longest: int = 3,
    probability: float = 0.15,
) -> tuple[list[int], list[int]]:
    """Mask one row.

    Args:
        tokens: the row, framed by special tokens; not changed.
        text: facts of the vocabulary.
        random_numbers: where chance comes from.
        longest: most words of an n-gram.
        probability: share of tokens to predict.

    Returns:
        The row after masking, and the positions to predict.
    """
    words: list[list[int]] = []
    for place, token in enumerate(tokens):
        if text.special[token]:
            continue
        if longest > 1 and words and not text.begins_word[token]:
            words[-1].append(place)
        else:
            words.append([place])
    budget = max(1, round(len(tokens) * probability))
    window = int(1 / probability)
    sizes = range(1, longest + 1)
    taken = [False] * len(words)
    offset = 0
    while offset < len(words):
        n = random_numbers.choices(sizes, [1 / size for size in sizes])[0]
        context = min(n * window, len(words) - offset)
        start = offset + random_numbers.randint(0, context - 1)
        end = min(start + n, len(words))
        taken[start:end] = [True] * (end - start)
        offset = max(offset + context, end)
    masked, positions = list(tokens), []
    for chosen, word in zip(taken, words, strict=True):
        if not chosen:
            continue
        for place in word:
            positions.append(place)
            lot = random_numbers.random()
            if lot < 0.8:
                masked[place] = text.mask_id
            elif lot >= 0.9:
                masked[place] = random_numbers.randrange(text.num_tokens)
        if len(positions) >= budget:
            break
    return masked, positions
