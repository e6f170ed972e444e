"""Divisibility of sizes by the tensor-parallel size."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_deberta.errors import ConfigError, MegatronDebertaError


def check_tensor_parallel_divides(
    tp_size: int,
    sizes: Mapping[str, int],
    *,
    reason: str = "",
    error: type[MegatronDebertaError] = ConfigError,
) -> None:
    """Check that the tensor-parallel size divides every one of ``sizes``.

    Args:
        tp_size: ``parallel.tensor_parallel_size``.
        sizes: what must be divisible: the name to show in the message -> the size.
        reason: clause appended to the message, such as "for sequence parallelism".
        error: type of the error to raise.

    Raises:
        ConfigError: (or ``error``) a size is not divisible.
    """
    for name, size in sizes.items():
        if tp_size < 1 or size % tp_size:
            common = math.gcd(*sizes.values())
            choices = [n for n in range(1, min(common, 64) + 1) if common % n == 0]
            raise error(
                f"parallel.tensor_parallel_size={tp_size} does not divide {name}={size}"
                f"{reason and ' '}{reason}; choose one of {choices}"
            )
