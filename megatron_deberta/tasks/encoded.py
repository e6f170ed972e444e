"""Encoded examples: arrays of tokens and labels, and their files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.config.schema import CLASS_HEADS
from megatron_deberta.errors import DataError
from megatron_deberta.files import NPY_ERRORS, published_folder
from megatron_deberta.tasks.task import Head

IGNORED = -100
"""Integer label of what is not labelled or not scored."""
FINGERPRINT_FILE = "fingerprint"
"""In the folder of a saved dataset: its fingerprint."""
_EMPTY_BYTES = 128
"""Size of an empty array's file, which is only a header."""


@dataclass(frozen=True, slots=True)
class EncodedDataset:
    """Encoded examples: rows of tokens behind each other, with labels.

    A row is an example or a window of one (of classes and scores only if the task's ``long_text``
    asks for windows), one of its choices or passages, or one of its texts (embed: text, second
    text, negative; as many in every example). Rows of one example are contiguous.

    Attributes:
        input_ids: int32 ``[total]``, [CLS] and [SEP] included, without padding.
        token_type_ids: uint8 ``[total]``, 1 in the second segment.
        row_offsets: int64 ``[rows + 1]``; row i is ``row_offsets[i] : row_offsets[i + 1]``.
        example_index: int64 ``[rows]``, non-decreasing.
        labels: classification int64 ``[rows]``; multilabel int8 ``[rows, labels]``, 1 or 0;
            regression, rerank float32 ``[rows]``; spans int64 ``[rows, 2]``, first and last token
            of the answer in the row, 0 0 without an answer in this window; tokens int32
            ``[total]``; choices int64 ``[examples]``; embed float32 ``[examples]``, similarity from
            0 to 1. -100 (NaN in float32) is not scored.
        char_offsets: spans: int32 ``[total, 2]``, characters of the passage that a token stands
            for, -1 outside the passage; otherwise ``[0, 2]``.
        word_index: tokens: int32 ``[total]``, index of the word whose label is read at this token,
            else -1; otherwise ``[0]``.
    """

    input_ids: npt.NDArray[np.int32]
    token_type_ids: npt.NDArray[np.uint8]
    row_offsets: npt.NDArray[np.int64]
    example_index: npt.NDArray[np.int64]
    labels: (
        npt.NDArray[np.int64]
        | npt.NDArray[np.int32]
        | npt.NDArray[np.int8]
        | npt.NDArray[np.float32]
    )
    char_offsets: npt.NDArray[np.int32]
    word_index: npt.NDArray[np.int32]

    @property
    def num_rows(self) -> int:
        """Rows of all examples."""
        return len(self.example_index)

    @property
    def num_examples(self) -> int:
        """Number of examples."""
        return int(self.example_index[-1]) + 1 if self.num_rows else 0

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens per row, int64 ``[rows]``."""
        return np.diff(self.row_offsets)

    @property
    def example_offsets(self) -> npt.NDArray[np.int64]:
        """Rows of each example: int64 ``[examples + 1]``, as ``row_offsets`` for tokens."""
        return np.searchsorted(self.example_index, np.arange(self.num_examples + 1))

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the arrays."""
        digest = hashlib.sha256()
        for name, array in self.arrays().items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def row(self, index: int) -> slice:
        """Return the slice of a row in the arrays of tokens."""
        return slice(int(self.row_offsets[index]), int(self.row_offsets[index + 1]))

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the arrays by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def find_problem(
        self, head: Head, num_words: Sequence[int], vocab_size: int, num_labels: int
    ) -> str:
        """Return what is wrong with the arrays; empty: each index lies in what it refers to.

        Args:
            head: of the task.
            num_words: words of each example that was encoded, for the head tokens.
            vocab_size: token ids are below it.
            num_labels: of the task; 0: the head has none.
        """
        ids, rows, examples = self.input_ids, self.row_offsets, self.example_index
        tokens, size, num_examples = ids.size, examples.size, len(num_words)
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "input_ids": ("int32", (tokens,)),
            "token_type_ids": ("uint8", (tokens,)),
            "row_offsets": ("int64", (size + 1,)),
            "example_index": ("int64", (size,)),
            "labels": {
                "multilabel": ("int8", (size, num_labels)),
                "regression": ("float32", (size,)),
                "rerank": ("float32", (size,)),
                "spans": ("int64", (size, 2)),
                "tokens": ("int32", (tokens,)),
                "choices": ("int64", (num_examples,)),
                "embed": ("float32", (num_examples,)),
            }.get(head, ("int64", (size,))),
            "char_offsets": ("int32", (tokens if head == "spans" else 0, 2)),
            "word_index": ("int32", (tokens if head == "tokens" else 0,)),
        }
        for name, array in self.arrays().items():
            kind, shape = shapes[name]
            if array.dtype != kind or array.shape != shape:
                return f"{name} {array.dtype} {list(array.shape)} instead of {kind} {list(shape)}"
        # Differences of huge offsets would overflow.
        if rows[0] != 0 or rows[-1] != tokens or np.any(rows[1:] <= rows[:-1]):
            return "row_offsets do not divide the tokens into rows"
        steps = set(np.diff(examples, prepend=-1, append=num_examples).tolist())
        if not steps <= {0, 1}:
            return "example_index does not number the examples"
        if tokens and not 0 <= ids.min() <= ids.max() < vocab_size:
            return f"input_ids {ids.min()} to {ids.max()} with a vocabulary of {vocab_size}"
        if tokens and self.token_type_ids.max() > 1:
            return "token_type_ids other than 0 and 1"
        words = self.word_index[self.word_index >= 0]
        if head == "tokens" and not np.array_equal(
            words, np.concatenate([*map(np.arange, num_words)])
        ):
            return "word_index does not number the words"
        if head in CLASS_HEADS and self.labels.size:
            most = 2 if head == "multilabel" else num_labels
            known = self.labels[self.labels != IGNORED]
            if known.size and not 0 <= known.min() <= known.max() < most:
                return f"labels {known.min()} to {known.max()} of {most} classes"
        return ""

    def save(self, folder: Path) -> None:
        """Write the arrays as ``.npy`` files and their fingerprint into a new folder, atomically.

        Raises:
            DataError: the folder cannot be written.
        """
        try:
            with published_folder(folder) as staging:
                for name, array in self.arrays().items():
                    np.save(staging / f"{name}.npy", array, allow_pickle=False)
                (staging / FINGERPRINT_FILE).write_text(self.fingerprint + "\n")
        except OSError as error:
            # Another process may have published the same content meanwhile.
            if not folder.is_dir():
                raise DataError(
                    f"{folder}: cannot be written: {error.strerror or error}"
                ) from error

    @classmethod
    def load(cls, folder: Path) -> EncodedDataset:
        """Map the arrays of a saved dataset into memory, and verify their fingerprint.

        Raises:
            DataError: the folder is damaged.
        """
        try:
            loaded = cls(**{f.name: _load_array(folder / f"{f.name}.npy") for f in fields(cls)})
            recorded = (folder / FINGERPRINT_FILE).read_text(encoding="ascii").strip()
        except NPY_ERRORS as error:
            problem = " ".join(str(error).split())
            raise DataError(f"{folder}: damaged ({problem}); remove this folder") from error
        if loaded.fingerprint != recorded:
            raise DataError(
                f"{folder}: damaged (its arrays are not what was written: their SHA-256 differs); "
                "remove this folder"
            )
        return loaded


def _load_array(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is missing or not a regular file")
    # Mapped, so that the processes of a node share its pages; an empty array cannot be.
    mode: Any = "r" if path.stat().st_size > _EMPTY_BYTES else None
    return np.load(path, mmap_mode=mode, allow_pickle=False)
