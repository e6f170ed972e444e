"""Validation samples (``samples.jsonl``): what the model predicts for the masks of a few rows.

The predictions come from the validation's own forward passes: hooks read the batch and the states
before the vocabulary projection. The cost is a projection of at most ``MAX_MASKS`` states per row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_deberta.data.batch import Batch
from megatron_deberta.distributed.collectives import all_gather
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.evaluate.validation import Evaluation
from megatron_deberta.model.heads import TokenLoss
from megatron_deberta.observe.metrics import JsonLines
from megatron_deberta.tokenizer import Tokenizer, load_tokenizer

FILE_NAME = "samples.jsonl"


MAX_MASKS = 16
"""Masks recorded per row, the first ones."""


NUM_CANDIDATES = 3


_TOKENS_AFTER = 12


_HEAD = "token_loss"
"""Name of the module that projects onto the vocabulary, in every objective that has one."""


class _Row(NamedTuple):
    """A validation row on the CPU."""

    sample: int
    tokens: list[int]
    positions: list[int]
    labels: list[int]
    candidates: list[list[int]]
    probabilities: list[list[float]]


class SampleRecorder:
    """Reads samples during a validation on the ranks of the first data-parallel rank.

    Args:
        module: the objective's model.
        groups: the rank grid.
        num_rows: rows to read, the first of the validation set.
    """

    def __init__(self, module: nn.Module, groups: ProcessGroups, num_rows: int) -> None:
        self._module = module
        self._groups = groups
        self._num_rows = num_rows if groups.dp_rank == 0 else 0
        self._heads = [
            each for name, each in module.named_modules() if name.rpartition(".")[2] == _HEAD
        ]
        self._batch: Batch | None = None
        self._found: list[_Row] = []

    def watch(self, validate: Callable[[], Evaluation | None]) -> Callable[[], Evaluation | None]:
        """Return the validation, during which samples are read."""
        if not self._num_rows or len(self._heads) != 1:
            return validate

        def validate_and_read() -> Evaluation | None:
            self._found = []
            try:
                with (
                    self._module.register_forward_pre_hook(self._keep_batch),
                    self._heads[0].register_forward_pre_hook(self._read),
                ):
                    return validate()
            finally:
                self._batch = None

        return validate_and_read

    def take(self) -> list[_Row]:
        """Return the rows of the last validation."""
        found, self._found = self._found, []
        return found

    def _keep_batch(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        batch = arguments[0]
        is_masked = isinstance(batch, Batch) and not batch.inputs.causal
        is_missing = len(self._found) < self._num_rows
        self._batch = batch if is_masked and is_missing else None

    @torch.no_grad()
    def _read(self, head: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Read the first rows of a batch. Collective over the tensor-parallel ranks."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        rows, masks = batch.masked_positions.shape
        rows, masks = min(rows, self._num_rows - len(self._found)), min(masks, MAX_MASKS)
        states, weight, bias = arguments[:3]
        states = states.view(*batch.masked_positions.shape, -1)[:rows, :masks].flatten(0, 1)
        vocabulary = cast(TokenLoss, head).vocabulary
        start, size = vocabulary.start, vocabulary.size
        group = self._groups.tp_group
        candidates = best_tokens(F.linear(states, weight, bias), start, size, group)
        ids, shares = (each.view(rows, masks, -1).tolist() for each in candidates)
        tokens, attended, positions, labels = (
            each[:rows].tolist()
            for each in (
                batch.inputs.input_ids, batch.inputs.is_token, batch.masked_positions, batch.labels,
            )
        )  # fmt: skip
        for row, sample in enumerate(batch.sample_index[:rows].tolist()):
            num = sum(position >= 0 for position in positions[row][:masks])
            if sample >= 0 and num:
                self._found.append(
                    _Row(
                        sample,
                        tokens[row][: sum(attended[row])],
                        positions[row][:num],
                        labels[row][:num],
                        ids[row][:num],
                        shares[row][:num],
                    )
                )


def best_tokens(
    logits: Tensor, vocab_start: int, vocab_size: int, group: Any | None
) -> tuple[Tensor, Tensor]:
    """Return the most probable tokens. Collective over ``group``.

    Args:
        logits: ``[T, V/tp]``, this rank's columns of the vocabulary.
        vocab_start: vocabulary index of the first column.
        vocab_size: vocabulary size; columns beyond it are padding.
        group: the tensor-parallel ranks; None: one.

    Returns:
        int64 and fp32 ``[T, K]``: up to ``NUM_CANDIDATES`` tokens in descending order and their
        probabilities, equal on all ranks.
    """
    logits = logits.float()
    logits[:, max(0, vocab_size - vocab_start) :] = -torch.inf
    total = logits.logsumexp(-1, keepdim=True)
    best = logits.topk(min(NUM_CANDIDATES, logits.shape[1]))
    values, ids = best.values, best.indices + vocab_start
    if group is not None:
        total = all_gather(total, group).logsumexp(0)
        values, ids = (all_gather(each, group).movedim(0, 1).flatten(1) for each in (values, ids))
        order = values.topk(min(NUM_CANDIDATES, values.shape[1])).indices
        values, ids = values.gather(1, order), ids.gather(1, order)
    return ids, (values - total).exp()


@dataclass(slots=True)
class SampleWriter:
    """Writes the samples of validations; rank 0 only.

    Args:
        lines: ``samples.jsonl``.
        recorder: what reads the samples.
        tokenizer_path: of the run; loaded when the first sample is written.
    """

    lines: JsonLines
    recorder: SampleRecorder
    tokenizer_path: str
    _tokenizer: Tokenizer | None = field(default=None, init=False)

    def write(self, step: int) -> None:
        """Write the samples of the validation of a step, if there are any."""
        if rows := self.recorder.take():
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self.tokenizer_path)
            samples = [_describe(row, self._tokenizer) for row in rows]
            self.lines.append({"step": step, "samples": samples})


def _describe(row: _Row, tokenizer: Tokenizer) -> dict[str, Any]:
    end = row.positions[-1] + 1 + _TOKENS_AFTER
    masks = [
        {
            "position": position,
            "token": _piece(label, tokenizer),
            "predictions": [
                [_piece(token, tokenizer), round(share, 5)]
                for token, share in zip(ids, shares, strict=True)
            ],
        }
        for position, label, ids, shares in zip(
            row.positions, row.labels, row.candidates, row.probabilities, strict=True
        )
    ]
    pieces = [_piece(token, tokenizer) for token in row.tokens[:end]]
    return {"sample": row.sample, "pieces": pieces, "masks": masks}


def _piece(token: int, tokenizer: Tokenizer) -> str:
    """Return a token's text; the embedding table has rows beyond the tokenizer's."""
    return tokenizer.piece(token) if token < tokenizer.num_tokens else f"<{token}>"
