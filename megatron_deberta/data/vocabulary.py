"""Special ids and word starts of a tokenizer, as packing and masking use them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from megatron_deberta.data import Booleans, Integers
from megatron_deberta.errors import DataError

if TYPE_CHECKING:
    from megatron_deberta.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """Special ids and word starts of a tokenizer.

    Attributes:
        size: rows of the embedding table.
        num_tokens: ids in use; those from here to ``size`` are unused.
        pad_id: id of [PAD], at the end of a row.
        cls_id: id of [CLS], at the beginning of a row.
        sep_id: id of [SEP], at the end of a row and of each document in it.
        mask_id: id of [MASK].
        special_ids: ids of all special tokens, [UNK] included.
        word_starts: [size] bool, True = the piece begins a word.
        fingerprint: hash of the tokenizer's content, as in shard manifests.
        single_marks: [size] bool, True = the piece is one character of punctuation or white space,
            a word of its own for ``masking: microsoft``; None: there are none.
        is_special: [size] bool, derived.
        ordinary_ids: [num_tokens - specials] int64, derived.

    Raises:
        DataError: ``word_starts`` has another length, a special id is outside the vocabulary, or
            all ids are special.
    """

    size: int
    num_tokens: int
    pad_id: int
    cls_id: int
    sep_id: int
    mask_id: int
    special_ids: tuple[int, ...]
    word_starts: Booleans
    fingerprint: str
    single_marks: Booleans | None = None
    is_special: Booleans = field(init=False, repr=False)
    ordinary_ids: Integers = field(init=False, repr=False)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Read the attributes of a tokenizer."""
        return cls(
            size=tokenizer.vocab_size,
            num_tokens=tokenizer.num_tokens,
            pad_id=tokenizer.pad_id,
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
            mask_id=tokenizer.mask_id,
            special_ids=tokenizer.special_ids,
            word_starts=tokenizer.word_starts(),
            fingerprint=tokenizer.fingerprint,
            single_marks=tokenizer.single_marks(),
        )

    def __post_init__(self) -> None:
        """Check the fields and derive the tables."""
        specials = {*self.special_ids, self.pad_id, self.cls_id, self.sep_id, self.mask_id}
        if self.word_starts.shape != (self.size,):
            raise DataError(
                f"tokenizer: word_starts has shape {self.word_starts.shape}, not ({self.size},)"
            )
        if not (
            len(specials) < self.num_tokens <= self.size
            and min(specials) >= 0
            and max(specials) < self.num_tokens
        ):
            raise DataError(
                f"tokenizer: special ids {sorted(specials)} do not fit {self.num_tokens} tokens "
                f"in a vocabulary of {self.size}"
            )
        is_special = np.zeros(self.size, np.bool_)
        is_special[sorted(specials)] = True
        object.__setattr__(self, "is_special", is_special)
        object.__setattr__(self, "ordinary_ids", np.flatnonzero(~is_special[: self.num_tokens]))
