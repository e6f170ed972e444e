"""Text files whose perplexity is measured by word, such as WikiText-103's.

Source: Merity et al. 2016, arXiv:1609.07843: words are separated by white space, and the end of
each line counts as a word. The validation part of WikiText-103 has 217,646 words.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_deberta.errors import MalformedInputError
from megatron_deberta.tasks.readers.records import read_bytes


@dataclass(frozen=True, slots=True)
class WordText:
    """A text and its length.

    Attributes:
        lines: lines with their ends.
        num_words: words, the end of each line included.
        num_bytes: bytes in UTF-8.
    """

    lines: tuple[str, ...]
    num_words: int
    num_bytes: int

    @staticmethod
    def of(text: str) -> WordText:
        """Count the words of a text."""
        # Unlike str.splitlines, at newlines only.
        parts = text.split("\n")
        lines = tuple(part + "\n" for part in parts[:-1]) + tuple(filter(None, parts[-1:]))
        words = sum(len(line.split()) + 1 for line in lines)
        return WordText(lines, words, len(text.encode("utf-8")))


def read_words(path: str) -> WordText:
    """Read a text file, which may be compressed by gzip.

    Raises:
        DataError: it is missing, damaged, empty, or not in UTF-8.
    """
    try:
        text = read_bytes(Path(path)).decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedInputError(f"--data {path} is not in UTF-8: {error}; convert it") from error
    if not text.strip():
        raise MalformedInputError(f"--data {path} has no words; give a text file")
    return WordText.of(text)
