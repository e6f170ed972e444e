"""Averages of checkpoints, and context extension."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_deberta.checkpoint.average import average_checkpoints
from megatron_deberta.checkpoint.layout import step_dir
from megatron_deberta.checkpoint.positions import ExtendedPositions, extend_table
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.resume import check_continuation, check_same_architecture
from megatron_deberta.checkpoint.store import save_weights
from megatron_deberta.config import RunConfig, load_config
from megatron_deberta.errors import CheckpointError, ConfigError
from tests.support.checkpoints import metadata, save_alone

TABLE = "mask_decoder.position.weight"


def save(folder: Path, step: int, value: float) -> None:
    weights = {TABLE: torch.arange(8.0).reshape(4, 2) + value, "head.bias": torch.full((3,), value)}
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    config = load_config(None, ["model.max_position_embeddings=4", "data.sequence_length=4"])
    save_weights(folder, weights.items(), shapes, metadata(step, config))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step, value in ((1, 0.0), (2, 3.0), (3, 9.0)):
        save(tmp_path, step, value)
    return tmp_path


def test_mean_of_the_last_checkpoints(run_dir: Path) -> None:
    averaged = average_checkpoints(run_dir, 2, 1.0)
    assert (averaged.steps, averaged.metadata.step) == ([2, 3], 3)
    assert averaged.tensor("head.bias").tolist() == [6.0] * 3
    assert averaged.tensor("head.bias", dim=0, start=1, stop=2).tolist() == [6.0]


def test_exponential_average_of_all(run_dir: Path) -> None:
    averaged = average_checkpoints(run_dir, 0, 0.5)
    expected = (0.25 * 0 + 0.5 * 3 + 9) / 1.75
    assert averaged.tensor("head.bias").tolist() == pytest.approx([expected] * 3)


def test_too_few_checkpoints_or_a_wrong_decay(run_dir: Path) -> None:
    with pytest.raises(CheckpointError, match="has 3 checkpoints, not 4"):
        average_checkpoints(run_dir, 4, 1.0)
    with pytest.raises(ConfigError, match="--ema 1.5"):
        average_checkpoints(run_dir, 2, 1.5)


def test_tables_grow_by_the_rule() -> None:
    table = torch.arange(8.0).reshape(4, 2)
    repeated = extend_table(table, 10, "repeat")
    assert repeated[:4].equal(table)
    assert repeated[4:8].equal(table)
    assert repeated[8:].equal(table[:2])
    between = extend_table(table, 7, "interpolate")
    assert between[::2].equal(table)
    assert between[1].tolist() == [1.0, 2.0]


def test_extension_needs_a_named_rule(run_dir: Path) -> None:
    reader = CheckpointReader(step_dir(run_dir, 3))
    keys = ["model.max_position_embeddings=10", "data.sequence_length=4"]
    with pytest.raises(CheckpointError, match=r"extend_positions=repeat or =interpolate"):
        check_same_architecture(reader, load_config(None, keys))
    keys.append("checkpoint.extend_positions=repeat")
    check_same_architecture(reader, load_config(None, keys))
    fewer = [*keys, "model.max_position_embeddings=4"]
    longer = CheckpointReader(step_dir(run_dir, 3))
    longer.metadata.config["model"]["max_position_embeddings"] = 8
    with pytest.raises(CheckpointError, match="max_position_embeddings=4"):
        check_same_architecture(longer, load_config(None, fewer))
    extended = ExtendedPositions(reader, 10, "repeat")
    assert extended.shapes[TABLE] == (10, 2)
    assert extended.tensor(TABLE, dim=0, start=4, stop=6).equal(reader.tensor(TABLE)[:2])
    assert extended.tensor("head.bias").equal(reader.tensor("head.bias"))


def test_what_may_differ_in_a_run_that_continues_another(tmp_path: Path) -> None:
    reader = CheckpointReader(save_alone(tmp_path, 8))
    # The checkpoint has read 4 samples per step.
    base = replace(RunConfig(), train=replace(RunConfig().train, global_batch_size=4))
    same = {"tokenizer_fingerprint": "t" * 64}
    schedule = replace(base.optimizer, schedule="wsd", decay_steps=4, learning_rate=1e-4)
    assert check_continuation(reader, replace(base, optimizer=schedule), **same)
    for changed, message in (
        (replace(base, train=replace(base.train, seed=2)), "train.seed=2"),
        (replace(base, model=replace(base.model, num_layers=2)), "model.num_layers=2"),
        (
            replace(base, train=replace(base.train, global_batch_size=1 << 40)),
            "as the first phase",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_continuation(reader, changed, **same)
    with pytest.raises(CheckpointError, match="another tokenizer"):
        check_continuation(reader, base, tokenizer_fingerprint="u")
