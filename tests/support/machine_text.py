"""English text from Python's documentation, and lines that are difficult to tokenize."""

from __future__ import annotations

import random
from pydoc_data.topics import topics

HOSTILE_PIECES = (
    "[MASK]", "[CLS]", "[SEP]", "[PAD]", "[UNK]", "[MASK", "<s>", "</s>", "<mask>", "<unk>",
    "<|endoftext|>", "<0x41>", "［ＣＬＳ］", "[ CLS ]", " ", "  ", "     ", "\n", "\n\n", "\t",
    "\r\n", "\r", "\x00", "\x07", "\x0b", "\x0c", "\x1c", "\x1f", "\x7f", "\x85", "\u00a0",
    "\u2003", "\u2028", "\u3000", "\u200b", "\u200d", "\u200e", "\ufeff", "\u00ad", "e\u0301",
    "a\u0302\u0301", "\u0301", " \u0301", "q\u0307\u0323", "Vie\u0323\u0302t", "Việt Nam",
    "日本語のテキスト", "中文", "한국어", "\u1112\u1161\u11ab", "नमस्ते", "ภาษาไทยน้ำ", "שלום",
    "مرحبا", "\u202e", "\u0600", "👩\u200d👩\u200d👧", "🇩🇪", "👍🏽", "❤\ufe0f", "\u2581",
    "\u2581\u2581", "naïve", "Straße", "ﬁ", "①", "½", "¨", "´", "¸x", "‗", "Ω", "Å", "ﷺ",
    "\U0010ffff", "\ue000", "\ufffd", "x" * 300, "ab" * 200, "don't", "“quoted”", "—", "…",
    "http://a.b/c?d=e&f", "3.14e-10", "Hello", "world", "The", "of", ".", ",", "!!!", "_", "[", "]",
)  # fmt: skip


def documents() -> list[str]:
    """Return Python's documentation topics, about half a megabyte of English."""
    return [topics[name] for name in sorted(topics)]


def real_lines(count: int) -> list[str]:
    """Return a number of non-empty lines of the documents, repeated if necessary."""
    lines = [line for text in documents() for line in text.split("\n") if line.strip()]
    return [lines[index % len(lines)] for index in range(count)]


def hostile_lines(count: int) -> list[str]:
    """Return random concatenations of difficult strings, the same ones each time."""
    generator = random.Random(0)
    lines = [*HOSTILE_PIECES, *(f"a{piece}b {piece} c" for piece in HOSTILE_PIECES), ""]
    while len(lines) < count:
        separator = generator.choice(("", "", " "))
        lines.append(separator.join(generator.choices(HOSTILE_PIECES, k=generator.randint(2, 9))))
    return lines[:count]
