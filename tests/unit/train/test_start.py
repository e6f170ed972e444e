"""What a run starts from."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_deberta.checkpoint.resume import Identity
from megatron_deberta.checkpoint.store import save_weights
from megatron_deberta.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
    TrainConfig,
)
from megatron_deberta.data.shards.writer import write_shard
from megatron_deberta.distributed.parallelize import ParameterSpec
from megatron_deberta.errors import (
    EXIT_FAILURE,
    EXIT_USAGE,
    CheckpointError,
    ConfigError,
    DataError,
    MegatronDebertaError,
    ReplicaError,
    refusals,
)
from megatron_deberta.train.fingerprint import data_fingerprint
from megatron_deberta.train.start import Start, choose_start, load_start
from megatron_deberta.train.state import TrainState
from tests.support.checkpoints import (
    SCALARS,
    SHAPES,
    FakeEngine,
    grid_place,
    logical_states,
    metadata,
    save_alone,
    specs_of,
)

GROUPS = grid_place(0, 1, 1)
IDENTITY = Identity("/tokenizer", "t" * 64, "d" * 64)


def run_config(run_dir: Path, **checkpoint: Any) -> RunConfig:
    return RunConfig(
        train=TrainConfig(run_dir=str(run_dir)), checkpoint=CheckpointConfig(**checkpoint)
    )


def start_of(config: RunConfig, identity: Identity = IDENTITY) -> Start:
    return choose_start(config, GROUPS, identity, allow_config_change=False)


def test_an_empty_folder_is_a_fresh_start(tmp_path: Path) -> None:
    assert start_of(run_config(tmp_path)) == Start(TrainState(0, 0))
    with pytest.raises(CheckpointError, match="resume=must"):
        start_of(run_config(tmp_path, resume="must"))


def test_a_used_folder_continues(tmp_path: Path) -> None:
    save_alone(tmp_path, 7)
    for resume in ("auto", "must"):
        start = start_of(run_config(tmp_path, resume=resume, load_from="ignored"))
        assert start.state == TrainState(7, 28)
        assert start.reader is not None
        assert not start.weights_only
    with pytest.raises(ConfigError, match="resume=never"):
        start_of(run_config(tmp_path, resume="never"))


def test_another_format_starts_with_a_loss_scale_of_its_own(tmp_path: Path) -> None:
    save_alone(tmp_path, 7)
    config = run_config(tmp_path)
    fp16 = replace(config, precision=PrecisionConfig(dtype="fp16"))
    for run, scale in ((config, SCALARS["loss_scale"]), (fp16, 65536.0)):
        engine: Any = FakeEngine(specs_of(GROUPS))
        engine.load_state_dict({"adam_step": 0, "loss_scale": 65536.0})
        start = choose_start(run, GROUPS, IDENTITY, allow_config_change=True)
        load_start(start, engine, specs_of(GROUPS))
        assert engine.state_dict() == {"adam_step": 7, "loss_scale": scale}


def test_other_data_is_refused(tmp_path: Path) -> None:
    save_alone(tmp_path, 7)
    with pytest.raises(CheckpointError, match=r"data\.train"):
        start_of(run_config(tmp_path), replace(IDENTITY, data_fingerprint="e" * 64))


def imported(folder: Path) -> Path:
    weights = ((name, kinds["weight"]) for name, kinds in logical_states().items())
    return save_weights(folder, weights, SHAPES, metadata(0))


@pytest.mark.parametrize("named", ["run folder", "checkpoint"])
def test_a_new_run_starts_with_given_weights(tmp_path: Path, named: str) -> None:
    path = imported(tmp_path / "release")
    source = tmp_path / "release" if named == "run folder" else path
    start = start_of(run_config(tmp_path / "run", load_from=str(source)))
    assert start.state == TrainState(0, 0)
    assert start.weights_only
    engine: Any = FakeEngine(specs_of(GROUPS))
    load_start(start, engine, specs_of(GROUPS))
    state = engine.states["embeddings.norm.weight"]
    assert state.weight.equal(logical_states()["embeddings.norm.weight"]["weight"])
    assert not state.exp_avg.any()


def test_a_decoder_may_be_new_and_is_left_out_where_there_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only row_decoder.* may be missing or left over when weights are loaded; the log names it."""
    # Of this logger, as the command line sets the level of the package's.
    caplog.set_level(logging.INFO, "megatron_deberta.train.start")
    path = imported(tmp_path / "release")
    start = start_of(run_config(tmp_path / "run", load_from=str(path)))
    specs = specs_of(GROUPS)
    decoder, other = (
        replace(specs["embeddings.norm.weight"], name=name)
        for name in ("row_decoder.ffn.norm.weight", "decoder.ffn.norm.weight")
    )

    def initial(spec: ParameterSpec) -> torch.Tensor:
        return torch.full(spec.local_shape, 3.0)

    engine: Any = FakeEngine({**specs, decoder.name: decoder})
    load_start(start, engine, {**specs, decoder.name: decoder}, initial)
    assert (engine.states[decoder.name].weight == 3).all()
    assert not engine.states[decoder.name].exp_avg.any()
    state = engine.states["embeddings.norm.weight"]
    assert state.weight.equal(logical_states()["embeddings.norm.weight"]["weight"])
    assert f"they start from new weights: {decoder.name}" in caplog.text
    with pytest.raises(CheckpointError, match=r"decoder\.ffn\.norm\.weight has shape None there"):
        load_start(start, engine, {**specs, other.name: other}, initial)

    weights = {name: kinds["weight"] for name, kinds in logical_states().items()}
    weights[decoder.name] = torch.ones(decoder.logical_shape)
    shapes = {**SHAPES, decoder.name: decoder.logical_shape}
    path = save_weights(tmp_path / "with decoder", weights.items(), shapes, metadata(0))
    start = start_of(run_config(tmp_path / "run", load_from=str(path)))
    engine = FakeEngine(specs)
    load_start(start, engine, specs, initial)
    assert decoder.name not in engine.states
    assert f"not loaded from {path}: {decoder.name}" in caplog.text
    # A run that resumes must find all of its own parameters.
    start = replace(start, weights_only=False)
    with pytest.raises(CheckpointError, match="of another model: row_decoder"):
        load_start(start, engine, specs, initial)


def test_weights_that_are_missing_damaged_or_of_another_model(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"nowhere is not a committed checkpoint \(COMMITTED is missing\)"
    ):
        start_of(run_config(tmp_path / "run", load_from=str(tmp_path / "nowhere")))
    path = imported(tmp_path / "release")
    config = run_config(tmp_path / "run", load_from=str(path))
    with pytest.raises(CheckpointError, match=r"model\.p2c_index='paper' .* has 'microsoft'"):
        start_of(replace(config, model=ModelConfig(p2c_index="paper")))
    next(path.glob("*.safetensors")).write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        start_of(config)


def test_weights_of_another_tokenizer_are_worth_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = imported(tmp_path / "release")
    config = run_config(tmp_path / "run", load_from=str(path))
    with caplog.at_level(logging.WARNING):
        start_of(config)
        assert not caplog.text
        start_of(config, replace(IDENTITY, tokenizer_fingerprint="e" * 64))
    assert "another tokenizer" in caplog.text


def shard(prefix: Path, *tokens: int) -> str:
    prefix.parent.mkdir(exist_ok=True)
    write_shard(str(prefix), [np.array(tokens)], "uint16")
    return str(prefix)


def test_data_is_identified_by_content_order_and_weight(tmp_path: Path) -> None:
    a, b = shard(tmp_path / "a", 1, 2, 3), shard(tmp_path / "b", 1, 2, 3, 4)
    shutil.copytree(tmp_path, tmp_path / "moved", ignore=shutil.ignore_patterns("moved"))

    def identity(*train: str, validation: tuple[str, ...] = ()) -> str:
        return data_fingerprint(DataConfig(train=train, validation=validation))

    assert identity(a, b) == identity(str(tmp_path / "moved" / "a"), str(tmp_path / "moved" / "b"))
    trains = ((a, b), (b, a), (a,), ("1", a, "1", b), ("1", a, "2", b))
    others = [*(identity(*train) for train in trains), identity(a, validation=(b,))]
    assert len(set(others)) == len(others)
    # Nothing is trained on validation data; only what it takes from the training shards counts.
    assert identity(a, validation=(b,)) == identity(a, validation=(a,))
    unsplit = DataConfig(train=(a,), validation_fraction=0.0)
    assert data_fingerprint(unsplit) == identity(a, validation=(b,))


@pytest.mark.parametrize(
    ("error", "cause", "code"),
    [
        (DataError("no such shard"), FileNotFoundError(2, "missing"), EXIT_USAGE),
        (CheckpointError("of another model"), None, EXIT_USAGE),
        (DataError("not a tokenizer.json"), ValueError("line 1"), EXIT_USAGE),
        # A restart may find the file system or the node mended.
        (DataError("no answer"), OSError(5, "Input/output error"), EXIT_FAILURE),
        (ReplicaError("differs"), None, EXIT_FAILURE),
    ],
)
def test_only_what_a_restart_would_repeat_is_final(
    error: MegatronDebertaError, cause: Exception | None, code: int
) -> None:
    with pytest.raises(type(error)) as raised, refusals():
        raise error from cause
    assert raised.value.exit_code == code
    assert type(error).exit_code == EXIT_FAILURE
