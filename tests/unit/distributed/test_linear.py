"""Parallel layers on one device; tests/distributed/test_collectives.py has those on ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_deberta.distributed.linear import row_parallel


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_row_parallel_without_a_group_is_linear(sequence: bool, with_bias: bool) -> None:
    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    bias = torch.randn(5) if with_bias else None
    y = row_parallel(x, weight, bias, None, sequence=sequence)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias))
