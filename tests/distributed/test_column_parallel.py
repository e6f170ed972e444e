"""Column-parallel projections: bits, what runs while a gradient is reduced, and copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.planning.ranks import fake_grid
from megatron_deberta.config.schema import ParallelConfig, RunConfig, TrainConfig
from megatron_deberta.distributed import collectives
from megatron_deberta.distributed.parallelize import apply, build_model
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.model.attention import AttentionContext
from megatron_deberta.model.inputs import ModelInputs, TokenInfo
from megatron_deberta.model.layers import Layer
from megatron_deberta.model.parallel_layers import ColumnParallelInput, project_together
from tests.support.ranks import RankPool, grid
from tests.support.tiny_models import V2

B, N = 3, 10


def build_layer(sequence: bool, groups: ProcessGroups | None = None) -> Layer:
    """Return the first layer of this rank's model, two ranks wide."""
    config = RunConfig(
        model=V2,
        train=TrainConfig(seed=3),
        parallel=ParallelConfig(tensor_parallel_size=2, sequence_parallel=sequence),
    )
    layer: Layer = build_model(config, groups or grid(2)).module.encoder.layers[0]  # type: ignore[index,union-attr,assignment]
    return layer


def hidden_states(sequence: bool, rows: int = B) -> Tensor:
    """Return a layer's input, of this rank's tokens under sequence parallelism."""
    whole = torch.randn(rows, N, V2.hidden_size, generator=torch.Generator().manual_seed(5))
    local = whole.chunk(2, dim=1)[grid(2).tp_rank] if sequence else whole
    return local.clone().requires_grad_()


def all_tokens(rows: int = B) -> TokenInfo:
    return TokenInfo.of_sequence(ModelInputs(torch.ones(rows, N).long()))


def in_token_order(out: Tensor, rows: int) -> Tensor:
    """Return ``[B, N, ...]``, also of ``[tp * B, N/tp, ...]``."""
    return out if len(out) == rows else torch.cat(list(out.split(rows)), dim=1)


def one_by_one(
    block: ColumnParallelInput,
    x: Tensor,
    is_sequence: bool,
    layers: list[nn.Linear],
    with_bias: bool,
) -> tuple[Tensor, ...]:
    """Communicate first, then project: what ``ColumnParallelInput.project`` must equal."""
    value = block(x, is_sequence)
    if len(layers) > 1:
        return project_together(value, layers)
    return (functional.linear(value, layers[0].weight, layers[0].bias if with_bias else None),)


@contextmanager
def order_of_gpus() -> Iterator[None]:
    """Compute tokens in the order in which GPUs compute them."""
    with mock.patch.object(
        apply, "token_order", lambda _, per_token: "rank" if per_token else "sequence"
    ):
        yield


def run_both_ways(
    rank: int, sequence: bool, rows: int, reorders: bool
) -> list[tuple[Tensor, Tensor]]:
    with order_of_gpus() if reorders else nullcontext():
        return both_ways(rank, sequence, rows)


def both_ways(rank: int, sequence: bool, rows: int) -> list[tuple[Tensor, Tensor]]:
    """Return outputs and gradients of projections, each with and without overlap."""
    layer, pairs = build_layer(sequence), []
    attention, ffn = layer.attention, layer.ffn
    for block, layers, with_bias, is_sequence in (
        (attention.input, [attention.query, attention.key, attention.value], True, True),
        (attention.input, [attention.query], True, False),
        (ffn.input, [ffn.up], True, True),
        (ffn.input, [ffn.up], False, True),
    ):
        found = []
        for overlapped in (True, False):
            x = hidden_states(sequence and is_sequence, rows)
            outs = (
                block.project(x, is_sequence, layers, with_bias=with_bias)
                if overlapped
                else one_by_one(block, x, is_sequence, layers, with_bias)
            )
            leaves = [x, *(one.weight for one in layers)]
            leaves += [one.bias for one in layers if with_bias]
            outs = tuple(in_token_order(out, rows) for out in outs)
            # Different on every rank, so that the sum over ranks matters.
            loss = sum((out * out * (rank + 1)).sum() for out in outs)
            assert isinstance(loss, Tensor)
            found.append([*outs, *torch.autograd.grad(loss, leaves)])
        pairs += [(one.detach(), other.detach()) for one, other in zip(*found, strict=True)]
    return pairs


@pytest.mark.parametrize(
    ("sequence", "rows", "reorders"),
    [(False, B, False), (True, B, False), (True, 1, True), (True, B, True)],
)
def test_equal_to_communication_before_the_projection(
    two_ranks: RankPool, sequence: bool, rows: int, reorders: bool
) -> None:
    """In every bit, except that GPUs sum tokens of several rows in another order."""
    for pairs in two_ranks.run(run_both_ways, sequence, rows, reorders):
        assert len(pairs) == 10 + 4 + 4 + 3
        for one, other in pairs:
            if reorders and rows > 1:
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(one, other)


class Events(TorchDispatchMode):
    """Records matrix products by the shape of their result, and starts and ends of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.events.append(f"mm {'x'.join(map(str, out.shape))}")
        return out

    def recorded(self, collective: Any, name: str) -> Any:
        """Wrap ``collective`` to append each call, and each wait for it, to ``events``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("async_op"):
                self.events.append(f"blocking {name}")
                return collective(*args, **kwargs)
            self.events.append(f"start {name}")
            work = collective(*args, **kwargs)
            return _Work(work, lambda: self.events.append(f"wait {name}"))

        return call


class _Work:
    def __init__(self, work: Any, on_wait: Any) -> None:
        self._work, self._on_wait = work, on_wait

    def wait(self) -> None:
        self._on_wait()
        self._work.wait()


def run_recorded(rank: int, sequence: bool, monkeypatch_target: str) -> dict[str, list[str]]:
    layer, found = build_layer(sequence), {}
    attention, ffn = layer.attention, layer.ffn
    for name, block, layers in (
        ("attention", attention.input, [attention.query, attention.key, attention.value]),
        ("feed-forward", ffn.input, [ffn.up]),
    ):
        outs = block.project(hidden_states(sequence), True, layers)
        events = Events()
        owner = collectives if sequence else dist
        original = getattr(owner, monkeypatch_target)
        short = "reduce-scatter" if sequence else "all-reduce"
        setattr(owner, monkeypatch_target, events.recorded(original, short))
        try:
            with events:
                torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
        finally:
            setattr(owner, monkeypatch_target, original)
        found[name] = events.events
    return found


@pytest.mark.parametrize(
    ("sequence", "function", "name"),
    [
        (False, "all_reduce", "all-reduce"),
        (True, "_reduce_scatter_single", "reduce-scatter"),
    ],
)
def test_weight_gradients_are_computed_while_the_input_gradient_is_reduced(
    two_ranks: RankPool, sequence: bool, function: str, name: str
) -> None:
    """The order of the input's gradient, the collective's start, the weights' gradient, its end."""
    width, rows = V2.hidden_size, B * N
    for found in two_ranks.run(run_recorded, sequence, function):
        for block, outputs in (
            ("attention", 3 * width // 2),
            ("feed-forward", V2.ffn_hidden_size // 2),
        ):
            assert found[block] == [
                f"mm {rows}x{width}",
                f"start {name}",
                f"mm {outputs}x{width}",
                f"wait {name}",
            ]


def run_layer(rank: int, reorders: bool) -> list[Tensor]:
    """Return output and gradients of a layer under sequence parallelism."""
    layer, context = build_layer(True), AttentionContext(None, None, None, None, "chunked", False)
    x = hidden_states(True)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(rank))
    with order_of_gpus() if reorders else nullcontext():
        out = layer(x, all_tokens(), context)
        (out * weights).sum().backward()
    named = [*layer.named_parameters(), ("x", x)]
    return [out.detach(), *(one.grad for _, one in named if one.grad is not None)]


def test_a_layer_equals_that_in_the_order_of_gpus(two_ranks: RankPool) -> None:
    found, expected = (two_ranks.run(run_layer, reorders) for reorders in (True, False))
    for one, other in zip(found, expected, strict=True):
        assert len(one) == 18
        for actual, wanted in zip(one, other, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


class Copies(TorchDispatchMode):
    """Records the sizes of copied tensors ``[..., hidden size]``."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func in (aten.clone.default, aten.copy_.default, aten.cat.default):
            self.elements += [out.numel()] if out.shape[-1] == V2.hidden_size else []
        return out


@pytest.mark.parametrize("rows", [1, B])
def test_a_layer_copies_no_gathered_activation(rows: int) -> None:
    """Under sequence parallelism on a GPU, in forward and backward, with any number of rows.

    Attention transposes this rank's own tokens: two tensors in forward, two in backward.
    """
    with fake_grid(0, 2, "meta") as groups:
        layer, tokens = build_layer(True, groups), all_tokens(rows)
        x = torch.empty(rows, N // 2, V2.hidden_size, device="meta", requires_grad=True)
        context = AttentionContext(None, None, None, None, "reference", False)
        with Copies() as copies:
            out = layer(x, tokens, context)
            out.backward(torch.ones_like(out))
    gathered, own = rows * N * V2.hidden_size, rows * N * V2.hidden_size // 2
    assert gathered not in copies.elements
    assert copies.elements.count(own) == (4 if rows > 1 else 0)
