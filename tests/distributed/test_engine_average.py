"""The moving average of the weights in both engines, in every stage and format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_deberta.config.schema import RunConfig
from megatron_deberta.engine import deepspeed_engine
from tests.support.ranks import RankPool, grid
from tests.support.toy_engine import assert_same_states, start, states, toy_config, train

DECAY = 0.75
OVERFLOW = {2: 1e6}


def averaged(rank: int, tp_size: int, name: str, dtype: str, stage: int) -> None:
    groups = grid(tp_size)
    deepspeed_engine.PERSISTENCE_THRESHOLD = 0
    plain = toy_config(name, dtype, stage, dp_size=groups.dp_size)
    config = with_average(plain, DECAY)
    engine = start(config, groups)
    history: list[dict[str, Tensor]] = []
    expected = {n: state.weight.double() for n, state in states(engine).items()}
    for step in range(5):
        ((outcome, _),) = train(engine, config, groups, range(step, step + 1), OVERFLOW)
        assert outcome.skipped == (dtype == "fp16" and step in OVERFLOW)
        now = states(engine)
        for n, state in now.items():
            if not outcome.skipped:
                expected[n] = DECAY * expected[n] + (1 - DECAY) * state.weight.double()
            torch.testing.assert_close(state.ema, expected[n].float(), rtol=1e-5, atol=1e-6)
        history.append({n: state.weight for n, state in now.items()})
        if step == 2:
            saved, scalars = now, engine.state_dict()
    last = states(engine)
    engine.destroy()
    moved = [n for n, state in last.items() if not same(state.ema, state.weight)]
    assert moved

    engine = start(config, groups)
    engine.load_states(saved.__getitem__)
    engine.load_state_dict(scalars)
    train(engine, config, groups, range(3, 5))
    assert_same_states(states(engine), last)
    # An average that the checkpoint lacks starts at the weights.
    engine.load_states(lambda n: replace(saved[n], ema=None))
    assert all(same(state.ema, state.weight) for state in states(engine).values())
    engine.destroy()

    engine = start(plain, groups)
    for step in range(5):
        train(engine, plain, groups, range(step, step + 1), OVERFLOW)
        now = states(engine)
        assert all(state.weight.equal(history[step][n]) for n, state in now.items())
        assert all(state.ema is None for state in now.values())
    engine.destroy()


def same(average: Tensor | None, weight: Tensor) -> bool:
    return average is not None and average.equal(weight)


def with_average(config: RunConfig, decay: float) -> RunConfig:
    return replace(config, optimizer=replace(config.optimizer, ema_decay=decay))


@pytest.mark.parametrize(
    ("tp_size", "name", "dtype", "stage"),
    [
        (1, "plain", "bf16", 1),
        (1, "deepspeed", "fp32", 0),
        pytest.param(2, "deepspeed", "bf16", 1, marks=pytest.mark.slow),
        pytest.param(1, "deepspeed", "fp16", 2, marks=pytest.mark.slow),
        (1, "deepspeed", "fp32", 3),
    ],
)
def test_average_of_the_weights_after_each_update(
    two_ranks: RankPool, tp_size: int, name: str, dtype: str, stage: int
) -> None:
    two_ranks.run(averaged, tp_size, name, dtype, stage)
