"""Checks of the tensors that callers from Python pass to a model."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_deberta.config.schema import ModelConfig
from megatron_deberta.errors import ModelInputError

_IGNORED_LABEL = -100


def check_inputs(
    config: ModelConfig,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    labels: Tensor | None = None,
    *,
    has_positions: bool,
) -> None:
    """Check shapes, and values on the CPU, where they can be read without waiting for a device.

    In compiled code nothing is checked.

    Args:
        config: the architecture.
        input_ids: int64 ``[B, N]``.
        attention_mask: bool, or 0 and 1, ``[B, N]``.
        token_type_ids: int64 ``[B, N]``.
        position_ids: int64 ``[B, N]``.
        labels: int64 ``[B, N]``, -100 = not scored.
        has_positions: absolute positions are read, so that rows have a longest length.

    Raises:
        ModelInputError: names the argument.
    """
    if torch.compiler.is_compiling():
        return
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
