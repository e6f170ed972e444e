"""Collectives compared with the same linear map in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_deberta.distributed import collectives
from megatron_deberta.errors import TopologyError
from tests.support.ranks import RankPool, grid

B, N, C = 2, 8, 12

# The reference: a function from the list of all ranks' inputs to the list of all ranks' outputs.
ORACLES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "copy_to_tensor_parallel_region": lambda xs: list(xs),
    "reduce_from_tensor_parallel_region": lambda xs: [sum(xs, torch.zeros(()))] * len(xs),
    "gather_from_sequence_parallel_region": lambda xs: [torch.cat(xs, dim=1)] * len(xs),
    "reduce_scatter_to_sequence_parallel_region": lambda xs: list(
        sum(xs, torch.zeros(())).chunk(len(xs), dim=1)
    ),
    "scatter_to_sequence_parallel_region": lambda xs: [
        x.chunk(len(xs), dim=1)[r] for r, x in enumerate(xs)
    ],
    "gather_to_replicated": lambda xs: [torch.cat(xs, dim=1)] * len(xs),
    "gather_from_tensor_parallel_region": lambda xs: [torch.cat(xs, dim=-1)] * len(xs),
    "all_to_all_hp2sp": lambda xs: list(torch.cat(xs, dim=-1).chunk(len(xs), dim=1)),
}
REPLICATED_INPUT = {"copy_to_tensor_parallel_region", "scatter_to_sequence_parallel_region"}
"""The input is equal on all ranks, so its gradient is the sum over ranks."""
REPLICATED_OUTPUT = {
    "reduce_from_tensor_parallel_region",
    "gather_to_replicated",
    "gather_from_tensor_parallel_region",
}
"""All ranks compute the same loss from the output, so the loss counts once."""


def collective(name: str) -> Callable[[Tensor, ProcessGroup | None], Tensor]:
    if name == "gather_to_replicated":
        gather = collectives.gather_from_sequence_parallel_region
        return functools.partial(gather, tensor_parallel_output_grad=False)
    function: Callable[[Tensor, ProcessGroup | None], Tensor] = getattr(collectives, name)
    return function


def _local_shape(name: str, tp: int) -> tuple[int, int, int]:
    if name in {"gather_from_sequence_parallel_region", "gather_to_replicated"}:
        return B, N // tp, C
    if name in {"gather_from_tensor_parallel_region", "all_to_all_hp2sp"}:
        return B, N, C // tp
    return B, N, C


def _inputs(name: str, tp: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = _local_shape(name, tp)
    count = 1 if name in REPLICATED_INPUT else tp
    # Integers, so that 16-bit sums are exact and all dtypes can be compared for equality.
    drawn = [torch.randint(-8, 8, shape, generator=generator).to(dtype) for _ in range(count)]
    return drawn * (tp // count)


def _weights(shape: torch.Size, seed: int, dtype: torch.dtype) -> Tensor:
    """Return the coefficients of a scalar loss, different at every element."""
    return torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _loss_seed(name: str, rank: int) -> int:
    return 0 if name in REPLICATED_OUTPUT else rank


def run_collective(
    rank: int, name: str, tp: int, dtype: torch.dtype, strided: bool
) -> tuple[Tensor, Tensor, bool]:
    groups = grid(tp)
    x = _inputs(name, tp, dtype)[groups.tp_rank].clone()
    if strided:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    x.requires_grad_()
    contiguous: list[bool] = []
    x.register_hook(lambda grad: contiguous.append(grad.is_contiguous()))
    before = x.detach().clone()
    y = collective(name)(x, groups.tp_group)
    weights = _weights(y.shape, _loss_seed(name, groups.tp_rank), dtype)
    if strided:  # So that the gradient of y is strided.
        (y.mT.contiguous() * weights.mT.contiguous()).sum().backward()
    else:
        (y * weights).sum().backward()
    assert x.grad is not None
    assert y.dtype == x.grad.dtype == dtype
    assert torch.equal(x.detach(), before), "the input was overwritten"
    return y.detach(), x.grad, contiguous == [True]


def _expected(name: str, tp: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    leaves = [x.double().requires_grad_() for x in _inputs(name, tp, dtype)]
    if name in REPLICATED_INPUT:
        leaves = [leaves[0]] * tp
    outputs = ORACLES[name](leaves)
    counted = 1 if name in REPLICATED_OUTPUT else tp
    losses = [
        (y * _weights(y.shape, _loss_seed(name, rank), torch.float64)).sum()
        for rank, y in enumerate(outputs[:counted])
    ]
    sum(losses, torch.zeros(())).backward()
    grads = [leaf.grad for leaf in leaves]
    return [y.detach() for y in outputs], [g for g in grads if g is not None]


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_forward_and_gradient_equal_one_process(
    four_ranks: RankPool, name: str, tp: int, dtype: torch.dtype
) -> None:
    outputs, grads = _expected(name, tp, dtype)
    for strided in (False, True):
        results = four_ranks.run(run_collective, name, tp, dtype, strided)
        for rank, (y, grad, contiguous) in enumerate(results):
            assert torch.equal(y.double(), outputs[rank % tp].double())
            assert torch.equal(grad.double(), grads[rank % tp])
            assert contiguous


def run_uneven(rank: int) -> list[str]:
    messages = []
    for name in (
        "reduce_scatter_to_sequence_parallel_region",
        "scatter_to_sequence_parallel_region",
        "all_to_all_hp2sp",
    ):
        with pytest.raises(TopologyError) as caught:
            collective(name)(torch.zeros(1, 7, 2), grid(2).tp_group)
        messages.append(str(caught.value))
    return messages


def test_uneven_sequence_raises_before_communication(two_ranks: RankPool) -> None:
    for messages in two_ranks.run(run_uneven):
        assert all("sequence_length=7" in m and "tensor_parallel_size=2" in m for m in messages)


def run_identity(rank: int) -> bool:
    x = torch.randn(2, 3, 4)
    assert grid(1).dp_group is not None
    assert grid(2).tp_group is not None
    alone = (grid(1).tp_group, grid(2).dp_group)
    assert alone == (None, None)
    return all(collective(name)(x, None) is x for name in ORACLES)


def test_groups_of_one_rank_are_none_and_the_identity(two_ranks: RankPool) -> None:
    assert two_ranks.run(run_identity) == [True, True]
