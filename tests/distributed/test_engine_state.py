"""Engine state: exact resume, exchange between stages, ZeRO-3 partitioning during build."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine import deepspeed_engine
from megatron_deberta.engine.base import ParameterState
from megatron_deberta.engine.deepspeed_engine import zero3_partition
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.errors import TopologyError
from tests.support.ranks import RankPool, grid
from tests.support.toy_engine import (
    Toy,
    assert_same_states,
    build_toy,
    start,
    states,
    toy_config,
    toy_specs,
    train,
)

SHARDED = [(d, s) for d in ("fp32", "bf16", "fp16") for s in (0, 1, 2, 3) if s or d == "fp32"]
QUICK = [(1, "bf16", 1), (2, "fp16", 2), (1, "fp32", 3)]
"""Stages and formats, with and without tensor parallelism."""
SLOW = [
    (1, "fp32", 0), (1, "fp32", 1), (1, "fp32", 2), (1, "bf16", 2), (1, "fp16", 3),
    (2, "fp32", 0), (2, "bf16", 3), (2, "fp16", 1),
]  # fmt: skip
"""With the quick ones every pair of settings."""
# The first and the last step before the checkpoint increase the loss scale; step 4 overflows.
LOSS_FACTORS = {4: 1e6}


def resumed(rank: int, tp_size: int, name: str, dtype: str, stage: int) -> None:
    groups = grid(tp_size)
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0
    config = toy_config(name, dtype, stage, dp_size=groups.dp_size, scale_window=2)
    uninterrupted = start(config, groups)
    train(uninterrupted, config, groups, range(3), LOSS_FACTORS)
    saved, scalars = states(uninterrupted), uninterrupted.state_dict()
    # Reading the state must not change the run.
    expected = train(uninterrupted, config, groups, range(3, 7), LOSS_FACTORS)
    expected_states, expected_scalars = states(uninterrupted), uninterrupted.state_dict()
    uninterrupted.destroy()

    engine = start(config, groups)
    with torch.no_grad():
        # Other initial weights, so that loading must replace all of them.
        engine.load_states(lambda n: ParameterState(*(t + 1 for t in _fields(saved[n]))))
    engine.load_states(saved.__getitem__)
    engine.load_state_dict(scalars)
    assert_same_states(states(engine), saved)
    history = train(engine, config, groups, range(3, 7), LOSS_FACTORS)
    assert history == expected
    assert_same_states(states(engine), expected_states)
    assert engine.state_dict() == expected_scalars
    engine.destroy()


def _fields(state: ParameterState) -> tuple[torch.Tensor, ...]:
    return state.weight, state.exp_avg, state.exp_avg_sq


@pytest.mark.parametrize(
    ("tp_size", "dtype", "stage"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(
            pytest.param(tp_size, *case, marks=pytest.mark.nightly)
            for tp_size in (1, 2)
            for case in SHARDED
            if (tp_size, *case) not in {*QUICK, *SLOW}
        ),
    ],
)
def test_resumed_run_is_bit_identical(
    two_ranks: RankPool, tp_size: int, dtype: str, stage: int
) -> None:
    two_ranks.run(resumed, tp_size, "deepspeed", dtype, stage)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_reference_engine_resumes_bit_identically(two_ranks: RankPool, dtype: str) -> None:
    two_ranks.run(resumed, 1, "plain", dtype, 1)


def states_before_the_first_step(rank: int, stage: int) -> None:
    groups = grid(1)
    engine = start(toy_config("deepspeed", "fp32", stage, dp_size=2), groups)
    fresh = states(engine)
    plain = start(toy_config("plain", dp_size=2), groups)
    assert_same_states(fresh, states(plain))
    assert engine.state_dict() == plain.state_dict()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_new_engine_has_its_weights_and_zero_moments(two_ranks: RankPool, stage: int) -> None:
    two_ranks.run(states_before_the_first_step, stage)


def partitioned_while_building(rank: int, dtype: str) -> None:
    groups = grid(1)
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0
    config = toy_config("deepspeed", dtype, 3, dp_size=2)
    whole_elements: list[int] = []
    built: list[nn.Parameter] = []

    def partition(leaf: nn.Module) -> None:
        own = list(leaf.parameters(recurse=False))
        built.extend(p for p in own if all(p is not q for q in built))
        zero3_partition(leaf, groups, config)
        whole_elements.append(sum(p.numel() for p in built))

    linear = nn.functional.linear
    module = build_toy(groups, dtype, partition)
    assert nn.functional.linear is linear
    # All parameters built so far are partitioned: this rank holds half of them.
    assert set(whole_elements) == {0}
    logical = sum(p.numel() for p in Toy(groups).parameters())
    kept = sum(p.ds_tensor.numel() for p in module.parameters())  # type: ignore[attr-defined]
    assert logical / 2 <= kept <= logical / 2 + len(built)

    engine = build_engine(config, module, toy_specs(module), groups)
    history = train(engine, config, groups, range(3))
    result = states(engine)
    engine.destroy()
    ordinary = start(config, groups)
    assert history == train(ordinary, config, groups, range(3))
    assert_same_states(result, states(ordinary))
    ordinary.destroy()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_zero3_partitions_during_build_and_trains_the_same(two_ranks: RankPool, dtype: str) -> None:
    two_ranks.run(partitioned_while_building, dtype)


def grid_of_one_in_a_world_of_two(rank: int) -> str:
    with pytest.raises(TopologyError) as refusal:
        start(toy_config("deepspeed"), single_process_groups(torch.device("cpu")))
    return str(refusal.value)


def test_grid_of_another_world_size_raises(two_ranks: RankPool) -> None:
    assert "has 2" in two_ranks.run(grid_of_one_in_a_world_of_two)[0]
