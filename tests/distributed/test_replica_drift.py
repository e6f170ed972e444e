"""Replica check: a flipped bit in one rank's weights is detected and the rank is reported."""

from __future__ import annotations

import random
import socket
from dataclasses import replace

import pytest
import torch

from megatron_deberta.errors import EXIT_FAILURE, ReplicaError
from megatron_deberta.train.setup import build_rank_model
from megatron_deberta.train.stability.replicas import check_replicas
from megatron_deberta.train.step import TrainStep
from tests.support.layout_matrix import Layout, build, micro_batches, run_config
from tests.support.ranks import RankPool, grid

LAYOUTS = [Layout(tp, zero, tp > 1, "none") for tp, zero in ((1, 0), (2, 1), (4, 2), (2, 3))]


def healthy(rank: int, layout: Layout, dtype: str) -> int:
    """Train, and assert that replicas are bit-identical; return their number."""
    config = run_config(layout)
    config = replace(config, precision=replace(config.precision, dtype=dtype))  # type: ignore[arg-type]
    groups = grid(layout.tp_size)
    model, engine = build(config, groups)
    take = TrainStep(engine, config, groups)
    for step in range(3):
        take(step, micro_batches(step, groups))
        check_replicas(engine.module, model.specs, groups, step)
    engine.destroy()
    return len(model.specs)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.nightly if layout.zero_stage > 1 else ())
        for layout in LAYOUTS
    ],
    ids=lambda layout: layout.name,
)
def test_no_false_alarm(four_ranks: RankPool, layout: Layout) -> None:
    # 16-bit formats that DeepSpeed supports, where rounding must not differ between ranks.
    dtype = "bf16" if layout.zero_stage else "fp32"
    assert min(four_ranks.run(healthy, layout, dtype)) > 10


def flips(rank: int, tp_size: int, number: int) -> list[str]:
    """Flip one bit at a time of one rank's copy of a parameter; return wrong reports."""
    config = run_config(Layout(tp_size, 0, False, "none"))
    groups = grid(tp_size)
    model = build_rank_model(config, groups)
    named = dict(model.module.named_parameters())
    drawn, problems = random.Random(tp_size), []
    for _ in range(number):
        victim, name = drawn.randrange(groups.world_size), drawn.choice(sorted(named))
        bits = named[name].data.view(-1).view(torch.int32)
        element, bit = drawn.randrange(10**9) % len(bits), drawn.randrange(31)
        if rank == victim:
            bits[element] ^= 1 << bit
        message, code = "not found", 0
        try:
            check_replicas(model.module, model.specs, groups, 50)
        except ReplicaError as error:
            message, code = str(error), error.exit_code
        if rank == victim:
            bits[element] ^= 1 << bit
        # A split parameter has one copy per data-parallel rank: with two, either may be wrong.
        holders = [victim]
        if model.specs[name].dim is not None and groups.dp_size < 3:
            holders = [r for r in range(groups.world_size) if r % tp_size == victim % tp_size]
        if len(holders) == 1 and groups.dp_size == 1 and model.specs[name].dim is not None:
            expected = "not found"
        else:
            where = ", ".join(f"rank {r} ({socket.gethostname()})" for r in holders)
            of_two = "one of " if len(holders) > 1 else ""
            expected = f"step 50: {name} differs from the other ranks' on {of_two}{where};"
        if not message.startswith(expected) or code not in (0, EXIT_FAILURE):
            problems.append(f"{message} instead of {expected}")
    check_replicas(model.module, model.specs, groups, 50)
    return problems


@pytest.mark.parametrize(("tp_size", "number"), [(1, 100), (2, 40), (4, 40)])
def test_flipped_bits_are_found_and_the_rank_named(
    four_ranks: RankPool, tp_size: int, number: int
) -> None:
    assert four_ranks.run(flips, tp_size, number) == [[]] * 4
