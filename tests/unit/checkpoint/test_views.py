"""Views of weights: averages of checkpoints and of steps, longer tables, other classes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_deberta.checkpoint.layout import EMA, KINDS, step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader, Slice
from megatron_deberta.checkpoint.resume import check_continuation, check_same_architecture
from megatron_deberta.checkpoint.store import load, save_weights
from megatron_deberta.checkpoint.views import (
    ExtendedPositions,
    MovingAverage,
    TaskHead,
    average_checkpoints,
    class_order,
    extend_table,
    with_merged_adapters,
)
from megatron_deberta.config import RunConfig, load_config
from megatron_deberta.config.schema import ModelConfig, OptimizerConfig, with_task_head
from megatron_deberta.distributed.parallelize import build_model
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.engine.factory import build_engine
from megatron_deberta.errors import CheckpointError, ConfigError
from megatron_deberta.model.low_rank import is_adapter, is_trained
from megatron_deberta.model.task_models import parameter_shapes
from tests.support.checkpoints import (
    assert_holds,
    load_on,
    logical_states,
    metadata,
    on_threads,
    save_alone,
    save_on_grid,
    save_state,
)
from tests.support.labelled import labelled_run
from tests.unit.checkpoint.test_resume import IDENTITY, resume

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
    assert averaged.tensor("head.bias", part=Slice(0, 1, 2)).tolist() == [6.0]


def test_exponential_average_of_all(run_dir: Path) -> None:
    averaged = average_checkpoints(run_dir, 0, 0.5)
    expected = (0.25 * 0 + 0.5 * 3 + 9) / 1.75
    assert averaged.tensor("head.bias").tolist() == pytest.approx([expected] * 3)


def test_too_few_checkpoints_or_a_wrong_decay(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="has 3 checkpoints, not 4"):
        average_checkpoints(run_dir, 4, 1.0)
    with pytest.raises(ConfigError, match="--ema 1.5"):
        average_checkpoints(run_dir, 2, 1.5)


def average_config() -> RunConfig:
    return load_config(None, ["optimizer.ema_decay=0.9"])


@pytest.mark.parametrize(("saved_on", "loaded_on"), [((2, 2), 1), ((1, 3), 2), ((1, 1), 4)])
def test_moving_average_is_saved_and_loaded_on_any_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_on: tuple[int, int], loaded_on: int
) -> None:
    logical = logical_states()
    saved = metadata(3, average_config())
    path = save_on_grid(monkeypatch, *saved_on, tmp_path, saved, average=1.0)[0]
    for engine in on_threads(monkeypatch, loaded_on, 1, partial(load_on, path=path)):
        assert_holds(engine, logical)
        for name, spec in engine._specs.items():
            state = engine.states[name]
            assert spec.true_part(state.ema).equal(spec.true_part(state.weight) + 1), name
    reader = CheckpointReader(path)
    assert reader.kinds == (*KINDS, EMA)
    weights = MovingAverage(reader)
    for name, kinds in logical.items():
        assert weights.tensor(name).equal(kinds["weight"] + 1)
        assert weights.tensor(name, part=Slice(0, 0, 1)).equal(kinds["weight"][:1] + 1)


def test_checkpoint_without_a_moving_average(tmp_path: Path) -> None:
    reader = CheckpointReader(save_alone(tmp_path, 1))
    with pytest.raises(ConfigError, match="train with optimizer.ema_decay"):
        MovingAverage(reader)
    with pytest.raises(CheckpointError, match=r"optimizer.ema_decay=0.9 but .* or pass --allow"):
        resume(reader, average_config(), allow_change=False)
    resume(reader, average_config(), allow_change=True)


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
    assert extended.tensor(TABLE, part=Slice(0, 4, 6)).equal(reader.tensor(TABLE)[:2])
    assert extended.tensor("head.bias").equal(reader.tensor("head.bias"))


def test_what_may_differ_in_a_run_that_continues_another(tmp_path: Path) -> None:
    reader = CheckpointReader(save_alone(tmp_path, 8))
    # The checkpoint has read 4 samples per step.
    base = replace(RunConfig(), train=replace(RunConfig().train, global_batch_size=4))
    schedule = replace(base.optimizer, schedule="wsd", decay_steps=4, learning_rate=1e-4)
    assert check_continuation(reader, replace(base, optimizer=schedule), IDENTITY)
    larger = replace(base.train, global_batch_size=1 << 40)
    for changed, message in (
        (replace(base, train=replace(base.train, seed=2)), "train.seed=2"),
        (replace(base, model=replace(base.model, num_layers=2)), "model.num_layers=2"),
        (replace(base, train=larger), "as the first phase"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_continuation(reader, changed, IDENTITY)
    with pytest.raises(CheckpointError, match="another tokenizer"):
        check_continuation(reader, base, replace(IDENTITY, tokenizer_fingerprint="u"))


class Weights:
    """A head with three rows."""

    path = Path("model")
    shapes = {"classifier.weight": (3, 4), "classifier.bias": (3,), "pooler.dense.weight": (4, 4)}

    def tensor(self, name: str, *args: Any) -> Tensor:
        assert not args or args == ("weight", None) or args == ("weight",)
        rows = torch.arange(3.0)
        return rows if name.endswith("bias") else rows[:, None].expand(3, 4)


MODEL = with_task_head(ModelConfig(), "classification", ("yes", "no", "maybe"))


@pytest.mark.parametrize(
    ("own", "wanted", "order"),
    [
        ("a b c", "a b c", [0, 1, 2]),
        ("a b c", "c a b", [2, 0, 1]),
        ("A B C", "c a b", [2, 0, 1]),
        ("a A", "A a", [1, 0]),
        ("a A", "b a", None),
        ("a b c", "a b", None),
        ("a b", "a b c", None),
        ("a a", "a a", None),
        ("LABEL_0 LABEL_1", "no yes", None),
    ],
)
def test_class_order(own: str, wanted: str, order: list[int] | None) -> None:
    assert class_order(own.split(), wanted.split()) == order


def test_rows_are_permuted_by_name() -> None:
    head = TaskHead(Weights(), MODEL, replace(MODEL, labels=("no", "maybe", "yes")))
    assert head.tensor("classifier.bias").tolist() == [1, 2, 0]
    assert head.tensor("classifier.weight", part=Slice(0, 1, 3))[:, 0].tolist() == [2, 0]
    assert "rows permuted to the order of the task's classes: no, maybe, yes" in head.describe([])
    same = TaskHead(Weights(), MODEL, MODEL)
    assert same.tensor("classifier.bias").tolist() == [0, 1, 2]
    assert same.describe([]) == "the head is taken over unchanged"
    none = TaskHead(Weights(), MODEL, with_task_head(MODEL, "embed"))
    assert none.describe([]) == "the head has no weights of its own"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        (replace(MODEL, labels=("a", "b", "c")), "has the classes yes, no, maybe, not a, b, c"),
        (replace(MODEL, head="tokens"), "has the head classification, not tokens"),
    ],
)
def test_rows_of_another_meaning_start_anew(wanted: ModelConfig, why: str) -> None:
    """Also where their number is the same."""
    head = TaskHead(Weights(), MODEL, wanted)
    assert head.shapes.keys() == {"pooler.dense.weight"}
    assert why in head.describe(["classifier.weight"])


QUERY = "encoder.layers.0.attention.query"


def save_adapter(folder: Path, step: int, value: float) -> None:
    """Write a checkpoint of a layer of zeros with an adapter whose factors have one value."""
    weights = {
        f"{QUERY}.weight": torch.zeros(4, 3),
        f"{QUERY}.lora.A": torch.full((2, 3), value),
        f"{QUERY}.lora.B": torch.full((4, 2), value),
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    config = labelled_run("classification", lora_rank=2)
    save_weights(folder, weights.items(), shapes, metadata(step, config))


def test_adapters_are_merged_before_checkpoints_are_averaged(tmp_path: Path) -> None:
    """Checkpoints are averaged after alpha / rank * B A is added to each weight."""
    for step, value in ((1, 1.0), (2, 3.0)):
        save_adapter(tmp_path, step, value)
    merged = with_merged_adapters(CheckpointReader(step_dir(tmp_path, 2)))
    assert merged.shapes == {f"{QUERY}.weight": (4, 3)}
    assert merged.tensor(f"{QUERY}.weight").equal(torch.full((4, 3), 8.0 * 2 * 9))
    assert merged.tensor(f"{QUERY}.weight", part=Slice(0, 1, 3)).shape == (2, 3)
    averaged = average_checkpoints(tmp_path, 2, 1.0)
    assert averaged.shapes == merged.shapes
    assert averaged.tensor(f"{QUERY}.weight").equal(torch.full((4, 3), 8.0 * 2 * 5))


def test_frozen_weights_are_stored_without_moments_and_average(tmp_path: Path) -> None:
    run = labelled_run("classification", lora_rank=2)
    run = replace(run, optimizer=OptimizerConfig(ema_decay=0.9))
    groups = single_process_groups(torch.device("cpu"))
    model = build_model(run, groups)
    engine = build_engine(run, model.module, model.specs, groups)
    for _ in range(2):
        engine.backward(sum(p.sum() for p in model.module.parameters() if p.requires_grad))  # type: ignore[arg-type]
        engine.step(0.1)
    path = save_state(tmp_path, engine, model.specs, groups, metadata(2, run))
    reader = CheckpointReader(path)
    average = with_merged_adapters(MovingAverage(reader))
    assert average.shapes == parameter_shapes(run.model)
    for name in reader.shapes:
        weight, moment = reader.tensor(name), reader.tensor(name, "exp_avg")
        assert bool(moment.any()) == is_trained(name, 2)
        assert weight.equal(reader.tensor(name, EMA)) != is_trained(name, 2)
    table = "embeddings.token.weight"
    assert average.tensor(table, part=Slice(0, 2, 5)).equal(reader.tensor(table)[2:5])
    # A query's weight is frozen, and its adapter is not.
    query = average.tensor(f"{QUERY}.weight")
    assert not query.equal(with_merged_adapters(reader).tensor(f"{QUERY}.weight"))

    other = build_model(replace(run, train=replace(run.train, seed=5)), groups)
    resumed = build_engine(run, other.module, other.specs, groups)
    load(reader, resumed, other.specs)
    for one, same in zip(resumed.local_shards(), engine.local_shards(), strict=True):
        assert one.name == same.name
        assert len(one.tensors) == (4 if is_trained(one.name, 2) else 1)
        assert all(a.equal(b) for a, b in zip(one.tensors, same.tensors, strict=True)), one.name
    assert sum(map(is_adapter, reader.shapes)) == 2 * 2 * 6
