"""Training of SentencePiece vocabularies with the release's special ids."""

from __future__ import annotations

import io
import logging
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import published_folder
from megatron_deberta.tokenizer.loading import named_as_composing, sentencepiece_tokenizer
from megatron_deberta.tokenizer.tokenizer import (
    CONFIG_FILE,
    JSON_FILE,
    SENTENCEPIECE_FILE,
    Tokenizer,
)

logger = logging.getLogger(__name__)

ModelType = Literal["unigram", "bpe"]

# Maximum characters per line; SentencePiece silently drops longer lines.
_LONGEST_LINE = 4096
# Stands for unknown characters in SentencePiece's trainer.
_RESERVED = "\u2585"


def train_sentencepiece(
    texts: Iterable[str],
    output: str,
    *,
    vocab_size: int,
    model_type: ModelType = "unigram",
    character_coverage: float = 0.9995,
    force: bool = False,
) -> Tokenizer:
    """Train a vocabulary and write the tokenizer directory.

    Ids are those of the release: 0 [PAD], 1 [CLS], 2 [SEP], 3 [UNK], the other pieces up to
    ``vocab_size``, and [MASK] = ``vocab_size``. Text is brought to NFC, here and by the tokenizer,
    and normalized as SentencePiece's ``nmt_nfkc``. BPE spells characters outside its vocabulary in
    bytes.

    Args:
        texts: documents or lines.
        output: directory to create, atomically.
        vocab_size: number of pieces without [MASK].
        model_type: ``unigram`` or ``bpe``.
        character_coverage: share of the text's characters that become pieces. Printable ASCII
            characters that occur in the text always do, from 1,000 pieces on.
        force: replace an existing tokenizer directory.

    Returns:
        The tokenizer in ``output``.

    Raises:
        ConfigError: ``output`` exists, or a setting is out of range or exceeds what the text
            supports; the message names a vocabulary size that works.
        DataError: there is no text, or training fails for another reason.
        OSError: the disk is full or ``output`` cannot be written.
    """
    check_settings(vocab_size, character_coverage)
    refuse_existing(output, force)
    lines = [line for text in texts for line in split_lines(text)]
    if not lines:
        raise DataError("train-tokenizer: the input has no text; check --input and --input-key")
    lines = _without_reserved(lines)
    content = _train(lines, vocab_size, model_type, character_coverage)
    tokenizer = sentencepiece_tokenizer(content, "the trained model")
    with published_folder(Path(output), replace=True) as folder:
        tokenizer.save(str(folder))
    return tokenizer


def refuse_existing(output: str, force: bool) -> None:
    """Check that an output directory can be created or replaced.

    Raises:
        ConfigError: ``output`` is a file, or a non-empty directory without ``force`` or with
            anything but a tokenizer in it.
    """
    path = Path(output)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir():
        raise ConfigError(f"--output {output}: is a file; name a new directory")
    if not force:
        raise ConfigError(f"--output {output}: exists; name a new directory or add --force")
    ours = {SENTENCEPIECE_FILE, JSON_FILE, CONFIG_FILE}
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in ours)
    if others:
        raise ConfigError(
            f"--output {output}: --force replaces a tokenizer directory, but this one also holds "
            f"{others[0]}; name a new directory"
        )


def check_settings(vocab_size: int, character_coverage: float) -> None:
    """Check the options that need no text.

    Raises:
        ConfigError: a setting is out of range.
    """
    if vocab_size < 5:
        raise ConfigError(f"--vocab-size {vocab_size}: must exceed the 4 special pieces")
    if not 0.9 <= character_coverage <= 1.0:
        raise ConfigError(
            f"--character-coverage {character_coverage}: must be from 0.9 to 1; 0.9995 suits most"
        )


def split_lines(text: str) -> Iterator[str]:
    """Yield the lines in NFC that are not blank.

    SentencePiece would drop long ones, which are cut at a space, or else before a character that
    is not part of the one before it.
    """
    for line in unicodedata.normalize("NFC", text).split("\n"):
        if not line.strip():
            continue
        while len(line) > _LONGEST_LINE:
            cut = line.rfind(" ", 1, _LONGEST_LINE)
            if cut < 0:
                cut = _LONGEST_LINE
                while cut > 1 and unicodedata.category(line[cut])[0] == "M":
                    cut -= 1
            yield line[:cut]
            line = line[cut:]
        yield line


def _without_reserved(lines: list[str]) -> list[str]:
    """Replace SentencePiece's reserved character by a space; the trainer would skip the lines."""
    num_reserved = sum(_RESERVED in line for line in lines)
    if not num_reserved:
        return lines
    logger.warning(
        "warning: %d of %d lines of the sample hold U+2585, which SentencePiece reserves; they are "
        "trained on without it, and the tokenizer has no piece for it",
        num_reserved, len(lines),
    )  # fmt: skip
    cleaned = [line.replace(_RESERVED, " ") for line in lines]
    if not any(map(str.strip, cleaned)):
        raise DataError("train-tokenizer: the input has no text besides U+2585; check --input")
    return cleaned


def _required_characters(lines: list[str]) -> str:
    """Return the printable ASCII characters of the text: rare digits are not [UNK]."""
    return "".join(sorted(set().union(*lines) & {chr(code) for code in range(0x21, 0x7F)}))


def _train(
    lines: list[str], vocab_size: int, model_type: ModelType, character_coverage: float
) -> bytes:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            required_chars=_required_characters(lines) if vocab_size >= 1000 else "",
            byte_fallback=model_type == "bpe",
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            pad_piece="[PAD]",
            bos_piece="[CLS]",
            eos_piece="[SEP]",
            unk_piece="[UNK]",
            normalization_rule_name="nmt_nfkc",
            max_sentence_length=4 * _LONGEST_LINE,
            train_extremely_large_corpus=True,
            # Fixed, since the vocabulary depends on the order of the trainer's sums.
            num_threads=16,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise _explained(str(error), vocab_size) from error
    return named_as_composing(model.getvalue())


def _explained(message: str, vocab_size: int) -> ConfigError | DataError:
    if found := re.search(r"too high .* value <= (\d+)", message):
        return ConfigError(
            f"--vocab-size {vocab_size}: this text supports at most {found[1]} pieces; "
            f"use --vocab-size {found[1]} or more text"
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return ConfigError(
            f"--vocab-size {vocab_size}: the text's characters alone need {found[1]} pieces; "
            f"use --vocab-size {found[1]} or more, or a lower --character-coverage"
        )
    if "sentences_.empty()" in message or "all_chars_count" in message:
        return DataError("train-tokenizer: the input has no text left after normalization")
    return DataError(f"train-tokenizer: SentencePiece failed: {message}")
