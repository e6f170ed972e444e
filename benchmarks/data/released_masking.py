"""Reference implementation of ``released`` masking: Microsoft's NGramMaskGenerator in plain loops.

Written from the description of the algorithm (docs/data.md names the source), independently of the
vectorised implementation, with Python's own random numbers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple


class Text(NamedTuple):
    """Vocabulary properties that the generator uses.

    Attributes:
        special: whether each id is a special token, which is never masked.
        begins_word: False for ids that continue a word; single punctuation marks do not.
        mask_id: id of [MASK].
        num_tokens: number of ids that random tokens are drawn from, including special tokens.
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
        text: properties of the vocabulary.
        random_numbers: random number generator.
        longest: maximum number of words of an n-gram.
        probability: share of tokens to predict.

    Returns:
        The row after masking, and the positions to predict.
    """
    words: list[list[int]] = []
    for position, token in enumerate(tokens):
        if text.special[token]:
            continue
        if longest > 1 and words and not text.begins_word[token]:
            words[-1].append(position)
        else:
            words.append([position])
    budget = max(1, round(len(tokens) * probability))
    window = int(1 / probability)
    sizes = range(1, longest + 1)
    chosen = [False] * len(words)
    offset = 0
    while offset < len(words):
        n = random_numbers.choices(sizes, [1 / size for size in sizes])[0]
        context = min(n * window, len(words) - offset)
        start = offset + random_numbers.randint(0, context - 1)
        end = min(start + n, len(words))
        chosen[start:end] = [True] * (end - start)
        offset = max(offset + context, end)
    masked, positions = list(tokens), []
    for word in itertools.compress(words, chosen):
        for position in word:
            positions.append(position)
            draw = random_numbers.random()
            if draw < 0.8:
                masked[position] = text.mask_id
            elif draw >= 0.9:
                masked[position] = random_numbers.randrange(text.num_tokens)
        if len(positions) >= budget:
            break
    return masked, positions
