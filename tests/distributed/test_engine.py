"""The DeepSpeed engine compared with the reference engine, and the latter with one process."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_deberta.distributed.topology import ProcessGroups, single_process_groups
from megatron_deberta.engine import deepspeed_engine
from tests.support.ranks import RankPool, grid
from tests.support.toy_engine import (
    MICRO_BATCHES,
    assert_same_states,
    micro_batch,
    start,
    states,
    toy_config,
    train,
)

STEPS = 6
# Sums of two ranks are the same in any order, so only the last bits of the norm may differ.
NORM = {"rel_tol": 1e-5}
SHARDED = [(d, s) for d in ("fp32", "bf16", "fp16") for s in (0, 1, 2, 3) if s or d == "fp32"]


FEW = [("fp32", 0), ("fp32", 3), ("bf16", 1), ("fp16", 2)]
"""Every stage and format, with tensor parallelism; the others without it."""


def marks_of(tp_size: int, dtype: str, stage: int) -> Any:
    """Return the marks of a case: a pairwise selection is not nightly."""
    if tp_size == 2:
        return () if (dtype, stage) in FEW else pytest.mark.nightly
    return pytest.mark.slow if (dtype, stage) not in FEW[1:] else pytest.mark.nightly


def compare_with_plain(rank: int, tp_size: int, dtype: str, stage: int, clip: float) -> None:
    groups = grid(tp_size)
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0
    config = toy_config("deepspeed", dtype, stage, dp_size=groups.dp_size, clip=clip)
    engine = start(config, groups)
    results = train(engine, config, groups, range(STEPS))
    tensors, scalars = states(engine), engine.state_dict()
    engine.destroy()

    config = toy_config("plain", dtype, dp_size=groups.dp_size, clip=clip)
    reference = start(config, groups)
    reference_results = train(reference, config, groups, range(STEPS))
    for (outcome, loss), (expected, expected_loss) in zip(results, reference_results, strict=True):
        assert math.isclose(outcome.grad_norm, expected.grad_norm, **NORM)
        assert (outcome.skipped, outcome.loss_scale) == (expected.skipped, expected.loss_scale)
        assert math.isclose(loss, expected_loss, rel_tol=1e-5)
    assert_same_states(tensors, states(reference), rtol=1e-5, atol=1e-6)
    assert scalars == reference.state_dict()


@pytest.mark.parametrize(
    ("tp_size", "dtype", "stage", "clip"),
    [
        # Clipping at half the usual norm, so that a wrong norm changes the update.
        *(
            pytest.param(tp_size, *case, 0.5, marks=marks_of(tp_size, *case))
            for tp_size in (1, 2)
            for case in SHARDED
        ),
        (1, "fp16", 1, 0.0),
        *(pytest.param(1, "fp16", stage, 0.0, marks=pytest.mark.slow) for stage in (2, 3)),
    ],
)
def test_every_stage_and_format_equals_the_reference_engine_on_two_ranks(
    two_ranks: RankPool, tp_size: int, dtype: str, stage: int, clip: float
) -> None:
    two_ranks.run(compare_with_plain, tp_size, dtype, stage, clip)


@pytest.mark.parametrize(
    ("dtype", "stage"),
    [
        ("bf16", 1), ("fp32", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fp32", 0), ("fp16", 2))),
    ],
)  # fmt: skip
def test_tensor_and_data_parallel_together_equal_the_reference_engine(
    four_ranks: RankPool, dtype: str, stage: int
) -> None:
    four_ranks.run(compare_with_plain, 2, dtype, stage, 0.5)


def frozen_layer(rank: int, tp_size: int, dtype: str, stage: int) -> None:
    groups = grid(tp_size)
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0
    results = []
    for name in ("deepspeed", "plain"):
        config = toy_config(name, dtype, stage, dp_size=groups.dp_size)
        config = replace(config, optimizer=replace(config.optimizer, freeze=("layers.0",)))
        engine = start(config, groups)
        before = states(engine)
        train(engine, config, groups, range(3))
        results.append(states(engine))
        engine.destroy()
        for parameter, state in results[-1].items():
            is_frozen = parameter.startswith("layers.0.")
            assert state.weight.equal(before[parameter].weight) == is_frozen, parameter
    assert_same_states(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tp_size", "dtype", "stage"), [(1, "fp32", 1), (2, "bf16", 3)])
def test_frozen_parameters_keep_their_bits_in_every_stage(
    two_ranks: RankPool, tp_size: int, dtype: str, stage: int
) -> None:
    two_ranks.run(frozen_layer, tp_size, dtype, stage)


def scale_grows_and_overflows(rank: int, tp_size: int, stage: int, clip: float) -> list[float]:
    """Run fp16 with growth every 2 steps and two overflows, the first without effect."""
    groups = grid(tp_size)
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0
    blown_up = {4: 1e6, 5: 1e6}
    results = []
    for name in ("deepspeed", "plain"):
        config = toy_config(name, "fp16", stage, dp_size=groups.dp_size, clip=clip, scale_window=2)
        engine = start(config, groups)
        history = train(engine, config, groups, range(10), blown_up)
        results.append((history, states(engine), engine.state_dict()))
        engine.destroy()
    (actual, tensors, scalars), (expected_outcomes, expected_tensors, expected_scalars) = results
    for (outcome, _), (expected, _) in zip(actual, expected_outcomes, strict=True):
        assert (outcome.skipped, outcome.loss_scale) == (expected.skipped, expected.loss_scale)
        assert math.isclose(outcome.grad_norm, expected.grad_norm, **NORM)
    assert_same_states(tensors, expected_tensors, rtol=1e-5, atol=1e-6)
    assert scalars == expected_scalars
    assert scalars["adam_step"] == 8
    return [outcome.loss_scale for outcome, _ in actual]


PAIRS = [(1, 1, 0.0), (1, 3, 0.5), (2, 1, 0.5), (2, 2, 0.0), (2, 3, 0.0)]
"""With the quick case every pair of settings."""


def marks_of_overflows(case: tuple[int, int, float]) -> Any:
    if case == (1, 2, 0.5):
        return ()
    return pytest.mark.slow if case in PAIRS else pytest.mark.nightly


@pytest.mark.parametrize(
    ("tp_size", "stage", "clip"),
    [
        pytest.param(*case, marks=marks_of_overflows(case))
        for case in itertools.product((1, 2), (1, 2, 3), (0.0, 0.5))
    ],
)
def test_fp16_update_with_growing_loss_scale_and_overflows(
    two_ranks: RankPool, tp_size: int, stage: int, clip: float
) -> None:
    scales = two_ranks.run(scale_grows_and_overflows, tp_size, stage, clip)[0]
    assert scales == [256, 256, 256, 512, 512, 512, 256, 256, 256, 512]


def gradient_norm(rank: int, tp_size: int, stage: int) -> tuple[float, float]:
    groups = grid(tp_size)
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0
    config = toy_config("deepspeed", "fp32", stage, dp_size=groups.dp_size)
    engine = start(config, groups)
    norm = train(engine, config, groups, range(1))[0][0].grad_norm
    engine.destroy()
    return norm, norm_on_one_process(groups)


def norm_on_one_process(groups: ProcessGroups) -> float:
    """Run the same global batch with the reference engine in one process."""
    alone = single_process_groups(torch.device("cpu"))
    engine = start(toy_config("plain"), alone)
    whole = [
        ProcessGroups(0, 1, 0, 1, dp_rank, groups.dp_size, None, None, alone.device)
        for dp_rank in range(groups.dp_size)
    ]
    for layout in whole:
        for index in range(MICRO_BATCHES):
            loss = engine.module(micro_batch(0, index, layout))
            engine.backward(loss / (MICRO_BATCHES * groups.dp_size))
    return engine.step(0.0).grad_norm


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradient_norm_equals_that_of_one_process(four_ranks: RankPool, stage: int) -> None:
    for tp_size in (1, 2, 4):
        for norm, expected in four_ranks.run(gradient_norm, tp_size, stage):
            assert math.isclose(norm, expected, rel_tol=1e-5), tp_size
