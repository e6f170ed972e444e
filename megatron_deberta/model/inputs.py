"""Inputs of a model: the tokens of a micro batch and of its hidden states, packed rows, checks.

Shapes: B rows, N tokens per row, P packed rows of L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import ModelInputError
from megatron_deberta.model.dropout import DropoutSeeds

_IGNORED_LABEL = -100


@dataclass(frozen=True)
class ModelInputs:
    """Tokens that a model reads.

    Attributes:
        input_ids: int64 ``[B, N]``.
        attention_mask: bool (or 0 and 1) ``[B, N]``, True = token; None: no padding.
        position_ids: int64 ``[B, N]`` absolute positions; None: 0 to N-1.
        token_type_ids: int64 ``[B, N]`` segments of a pair, 0 at padding; None: all 0. Ignored by
            models without token types.
        document_ids: int64 ``[B, N]``, non-decreasing; attention, convolution and positions stay
            inside a document. None: each row is one sequence.
        causal: no state depends on later tokens.
    """

    input_ids: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    token_type_ids: Tensor | None = None
    document_ids: Tensor | None = None
    causal: bool = False

    @property
    def is_token(self) -> Tensor:
        """Bool ``[B, N]``: False for padding."""
        if self.attention_mask is None:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return self.attention_mask.bool()


@dataclass(frozen=True)
class TokenInfo:
    """Tokens that the rows of a hidden-state tensor ``[B, R, D]`` stand for.

    Attributes:
        positions: int64 ``[B, R]``: index of the token in its sequence, a dropout key; -1 =
            padding.
        position_ids: int64 ``[B, R]``: absolute position, which restarts in packed documents.
        is_token: bool ``[B, R]``: False for padding.
        is_sequence: True: the token sequence, possibly sharded over ranks; False: replicated on
            all ranks.
        types: int64 ``[B, R]``: segment of a pair; None: all 0. Used by the embeddings only.
    """

    positions: Tensor
    position_ids: Tensor
    is_token: Tensor
    is_sequence: bool
    types: Tensor | None = None

    @staticmethod
    def of_sequence(inputs: ModelInputs) -> TokenInfo:
        """Return the tokens of a batch ``[B, N]``."""
        ids = inputs.input_ids
        positions = torch.arange(ids.size(1), device=ids.device).expand(ids.shape)
        position_ids = positions if inputs.position_ids is None else inputs.position_ids
        return TokenInfo(positions, position_ids, inputs.is_token, True, inputs.token_type_ids)

    def select(self, positions: Tensor) -> TokenInfo:
        """Return the tokens at ``positions``, int64 ``[B, M]``, -1 = padding."""
        ids = self.position_ids.gather(1, positions.clamp(min=0))
        return TokenInfo(positions, ids, positions >= 0, is_sequence=False)

    def replicated(self) -> TokenInfo:
        """Return the same tokens after they were gathered on all ranks."""
        return replace(self, is_sequence=False)


def gather_tokens(hidden: Tensor, positions: Tensor) -> Tensor:
    """Gather ``[B, M, D]`` from ``[B, N, D]`` at positions ``[B, M]``; -1 reads position 0."""
    rows, length, _ = hidden.shape
    starts = torch.arange(0, rows * length, length, device=hidden.device).unsqueeze(1)
    # Backward of an embedding is deterministic on CUDA, where that of ``gather`` sorts and waits.
    return functional.embedding(positions.clamp(min=0) + starts, hidden.flatten(0, 1))


class RowPacking(NamedTuple):
    """Which rows of a batch ``[B, N]`` stand side by side, in fewer rows ``[P, L]``.

    Attributes:
        tokens: int64 ``[P, L]``: token ``N * row + place`` of the batch, -1 = padding at the end.
            The rows of a packed row are in ascending order.
        firsts: int64 ``[P, S]``: place of the first token of each of its rows, -1 = padding.
        places: int64 ``[B]``: where each row is in ``firsts``, flattened.
    """

    tokens: Tensor
    firsts: Tensor
    places: Tensor

    def inputs(self, inputs: ModelInputs) -> ModelInputs:
        """Return the tokens ``[P, L]`` side by side, each row a document."""
        input_ids, types = inputs.input_ids, inputs.token_type_ids
        is_token, index = self.tokens >= 0, self.tokens.clamp(min=0)
        return ModelInputs(
            input_ids.take(index),
            is_token,
            position_ids=index % input_ids.size(1),
            token_type_ids=None if types is None else types.take(index),
            # Padding at the end belongs to a document of its own.
            document_ids=(index // input_ids.size(1)).masked_fill(~is_token, len(input_ids)),
        )

    def seeds(self, seeds: DropoutSeeds | None, length: int) -> DropoutSeeds | None:
        """Return the dropout keys of the packed rows: each has that of its first row.

        Args:
            seeds: of the B rows.
            length: N.
        """
        if seeds is None:
            return None
        return replace(seeds, samples=seeds.samples[self.tokens[:, 0].clamp(min=0) // length])

    def unpacked(self, x: Tensor, length: int) -> Tensor:
        """Return the values ``[B, N, K]`` of ``[P, L, K]``; those of padding have no meaning.

        Args:
            x: a value of each token side by side.
            length: N.
        """
        packed_row = self.places // self.firsts.size(1)
        begins = packed_row * x.size(1) + self.firsts.flatten()[self.places]
        index = begins.unsqueeze(1) + torch.arange(length, device=x.device)
        # Deterministic on CUDA, as in `gather_tokens`
        return functional.embedding(index.clamp(max=x[..., 0].numel() - 1), x.flatten(0, 1))


def check_inputs(
    config: ModelConfig,
    inputs: ModelInputs,
    labels: Tensor | None = None,
    *,
    has_positions: bool,
) -> None:
    """Check shapes, and values on the CPU, where they can be read without waiting for a device.

    In compiled code nothing is checked.

    Args:
        config: the architecture.
        inputs: the tokens.
        labels: int64 ``[B, N]``, -100 = not scored.
        has_positions: absolute positions are read, so that rows have a longest length.

    Raises:
        ModelInputError: names the argument.
    """
    if torch.compiler.is_compiling():
        return
    if not isinstance(inputs, ModelInputs):
        raise ModelInputError(
            f"inputs: got {type(inputs).__name__}, expected ModelInputs(input_ids, attention_mask, "
            "...)"
        )
    input_ids, attention_mask = inputs.input_ids, inputs.attention_mask
    token_type_ids, position_ids = inputs.token_type_ids, inputs.position_ids
    _check_ids(input_ids)
    others = {
        "attention_mask": attention_mask, "token_type_ids": token_type_ids,
        "position_ids": position_ids, "labels": labels,
    }  # fmt: skip
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != input_ids.shape:
            raise ModelInputError(
                f"{name}: got shape {list(tensor.shape)}, expected {list(input_ids.shape)} as "
                "input_ids"
            )
    limit = config.max_position_embeddings
    if has_positions and position_ids is None and input_ids.size(1) > limit:
        raise ModelInputError(
            f"input_ids: got rows of {input_ids.size(1)} tokens, but the model has {limit} "
            "positions (max_position_embeddings); cut the rows"
        )
    _check_values("input_ids", input_ids, config.vocab_size, "rows of vocab_size")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        _check_values("attention_mask", attention_mask, 2, "values 0 and 1")
        if attention_mask.is_floating_point() and attention_mask.device.type == "cpu":
            fractions = attention_mask[attention_mask.frac() != 0]
            if fractions.numel():
                raise ModelInputError(
                    f"attention_mask: got {fractions[0].item()}, expected values 0 and 1"
                )
    if config.type_vocab_size:
        _check_values("token_type_ids", token_type_ids, config.type_vocab_size, "token types")
    if has_positions:
        _check_values("position_ids", position_ids, limit, "positions")
    if labels is not None and labels.device.type == "cpu":
        scored = labels.masked_fill(labels == _IGNORED_LABEL, 0)
        _check_values("labels", scored, config.vocab_size, "rows of vocab_size, or -100")


def _check_ids(input_ids: Tensor) -> None:
    if not isinstance(input_ids, Tensor) or input_ids.is_floating_point():
        kind = f"{input_ids.dtype}" if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ModelInputError(f"input_ids: got {kind}, expected a tensor of int64")
    if input_ids.dim() != 2:
        raise ModelInputError(
            f"input_ids: got shape {list(input_ids.shape)}, expected [batch, tokens]"
        )
    if not input_ids.size(1):
        raise ModelInputError("input_ids: got rows without tokens; give at least one token per row")


def _check_values(name: str, tensor: Tensor | None, count: int, what: str) -> None:
    if tensor is None or tensor.device.type != "cpu" or tensor.numel() == 0:
        return
    # The bounds are not a number if any value is none.
    low, high = (bound.item() for bound in tensor.aminmax())
    if low < 0 or not high < count:
        wrong = low if low < 0 else high
        raise ModelInputError(f"{name}: got {wrong}, expected 0 to {count - 1}: {count} {what}")
