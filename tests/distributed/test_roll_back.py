"""Rollback to a checkpoint on real ranks: state, data position, guard state; also after a kill."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.checkpoint import store
from megatron_deberta.checkpoint.layout import committed_steps
from megatron_deberta.checkpoint.retention import Retention
from megatron_deberta.checkpoint.saver import Saver
from megatron_deberta.errors import NumericsError
from megatron_deberta.train.stability.guard import Guard, GuardState
from megatron_deberta.train.stability.rollback import resumed_position, rollback
from megatron_deberta.train.state import TrainState
from megatron_deberta.train.step import TrainStep
from tests.support.checkpoints import metadata
from tests.support.layout_matrix import Layout, build, micro_batches, run_config
from tests.support.ranks import RankPool, grid

LAYOUTS = [Layout(2, 1, False, "none"), Layout(1, 3, False, "none")]


def there_and_back(rank: int, layout: Layout, run_dir: str) -> dict[str, Any]:
    """Train five steps with checkpoints after two and four, and roll back at the fourth."""
    config = run_config(layout)
    config = replace(config, train=replace(config.train, run_dir=run_dir))
    groups = grid(layout.tp_size)
    model, engine = build(config, groups)
    guard = Guard.of_run(config)
    take, saver = (
        TrainStep(engine, config, groups, guard),
        Saver(run_dir, engine, model.specs, groups),
    )
    losses = []
    for step in range(5):
        losses.append(take(step, micro_batches(step, groups)).loss)
        if step in (1, 3):
            known = replace(metadata(step + 1, config), guard=asdict(guard.state))
            saver.save(known, Retention())
    window = list(guard.state.losses)
    guard.state.skips = [4, 5]
    state, memory, done = rollback(config, saver, TrainState(5, 40), guard)
    again = TrainStep(engine, config, groups, Guard.of_run(config, memory))
    repeated = again(2, micro_batches(2, groups)).loss
    # A new process sees the same; from an older checkpoint there is no rollback.
    reader = store.choose_intact(run_dir, groups)
    assert reader is not None
    found = resumed_position(config, groups, reader)
    nowhere = Guard.of_run(config, GuardState(skips=[2]))
    with pytest.raises(NumericsError, match="no earlier checkpoint"):
        rollback(config, saver, TrainState(5, 40), nowhere)
    engine.destroy()
    assert memory.losses[:2] == window[:2]
    return {
        "losses": losses,
        "repeated": repeated,
        "state": state,
        "done": asdict(done),
        "found": found,
        "memory": (memory.rollbacks, memory.vain_rollbacks, memory.trouble_step, memory.skips),
    }


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.slow if layout.zero_stage == 3 else ())
        for layout in LAYOUTS
    ],
    ids=lambda layout: layout.name,
)
def test_rollback_restores_state_and_skips_the_data(
    four_ranks: RankPool, tmp_path: Path, layout: Layout
) -> None:
    for rank in four_ranks.run(there_and_back, layout, str(tmp_path)):
        assert rank["repeated"] == rank["losses"][2]
        assert rank["state"] == TrainState(2, 40)
        assert (rank["done"]["step"], rank["done"]["skipped"]) == (2, 2)
        assert rank["memory"] == (1, 1, 5, [])
        state, memory = rank["found"]
        assert state == TrainState(2, 40)
        assert (memory.rollbacks, memory.skips, len(memory.losses)) == (1, [], 2)
    assert committed_steps(tmp_path) == [2]
