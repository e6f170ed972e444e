"""Phases, ramps and durations in tokens: the segments of a run, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_deberta.config import config_from_dict, config_to_dict, load_config, save_config
from megatron_deberta.config.loader import merge_layers
from megatron_deberta.config.phases import (
    Stage,
    describe_phases,
    segment_at,
    segments,
    steps_of_tokens,
)
from megatron_deberta.config.rules import validate_for_world
from megatron_deberta.config.schema import PHASE_KEYS, RunConfig
from megatron_deberta.errors import ConfigError

RUN = """
data: {sequence_length: 256}
optimizer: {warmup_steps: 2, schedule: wsd, decay_tokens: 9000}
train:
  global_batch_size: 16
  micro_batch_size: 4
  phases:
  - steps: 10
    data.sequence_length: 64
    objective.mask_probability: 0.3
    train.ramp_from: 4
    train.ramp_increment: 4
    train.ramp_steps: 7
  - tokens: 10_000
    data.sequence_length: 128
  - tokens: 20_480
    optimizer.learning_rate: 1e-5
    train.micro_batch_size: 2
"""


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return load_config(path)


def test_segments(run: RunConfig) -> None:
    rows = [
        (
            part.phase,
            part.first_step,
            part.steps,
            part.config.train.global_batch_size,
            part.config.data.sequence_length,
            part.first_sample,
            part.stage,
        )
        for part in segments(run)
    ]
    assert rows == [
        (0, 0, 2, 4, 64, 0, Stage()),
        (0, 2, 2, 8, 64, 8, Stage()),
        (0, 4, 3, 12, 64, 24, Stage()),
        (0, 7, 3, 16, 64, 60, Stage()),
        (1, 10, 5, 16, 128, 108, Stage(1, 108)),
        (2, 15, 5, 16, 256, 188, Stage(2, 188)),
    ]
    assert [part.config.objective.mask_probability for part in segments(run)] == [0.3] * 4 + [
        0.15
    ] * 2
    last = segments(run)[-1].config
    assert (last.optimizer.learning_rate, last.train.micro_batch_size) == (1e-5, 2)
    assert last.train.steps == run.train.steps == 20
    assert {part.phase_config.train.global_batch_size for part in segments(run)} == {16}
    # At least 9,000 of the last tokens: 3 steps of 4,096.
    assert run.optimizer.decay_steps == 3
    assert [segment_at(run, step).phase for step in (0, 9, 10, 19, 20)] == [0, 0, 1, 2, 2]


def test_a_phase_with_a_ramp_names_its_first_and_last_batch(run: RunConfig) -> None:
    first, second, _ = describe_phases(run)
    assert first.startswith("steps 1 to 10: 4 to 16 sequences of 64 tokens, masking 0.3")
    assert second.startswith("steps 11 to 15: 16 sequences of 128 tokens")


def test_config_survives_a_checkpoint(run: RunConfig, tmp_path: Path) -> None:
    stored = config_to_dict(run)
    assert config_from_dict(stored, "checkpoint") == run
    save_config(run, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == run
    # As earlier releases stored them.
    stored["train"]["phases"] = [
        "steps=10 data.sequence_length=64 objective.mask_probability=0.3 train.ramp_from=4 "
        "train.ramp_increment=4 train.ramp_steps=7",
        "tokens=10_000 data.sequence_length=128",
        "tokens=20_480 optimizer.learning_rate=1e-5 train.micro_batch_size=2",
    ]
    assert config_from_dict(stored, "checkpoint") == run


def test_phases_at_the_top_of_a_file_are_those_of_train(
    run: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "old.yaml"
    train, phases = RUN.split("  phases:\n")
    path.write_text(f"{train}phases:\n{phases}")
    assert load_config(path) == run
    assert [record.message for record in caplog.records] == [
        f"{path}: phases is now a key of train; write train: {{phases: ...}}"
    ]


def test_fractions_of_a_run() -> None:
    phases = "train.phases=[{fraction: 0.9, data.sequence_length: 128}, {fraction: 0.1}]"
    keys = [phases, "optimizer.warmup_steps=0", "train.global_batch_size=16"]
    config = load_config(None, [*keys, "train.steps=25"])
    assert [part.steps for part in segments(config)] == [22, 3]
    config = load_config(None, [*keys, "train.tokens=1_000_000"])
    assert [part.steps for part in segments(config)] == [440, 13]
    assert config.train.steps == 453


def test_short_rows_are_segments_of_one_phase() -> None:
    config = load_config(None, [
        "data.short_steps=30", "train.steps=40", "train.global_batch_size=4",
        "train.micro_batch_size=4", "optimizer.warmup_tokens=15360",
    ])  # fmt: skip
    short, full = segments(config)
    assert (short.stage, full.stage) == (Stage(0, 0, True), Stage(0, 120))
    assert (short.phase, full.phase) == (0, 0)
    lengths = [part.config.data.sequence_length for part in (short, full)]
    assert (lengths, short.phase_config.data.sequence_length) == ([128, 512], 512)
    assert config.optimizer.warmup_steps == 30
    assert len(segments(load_config(None, ["data.short_steps=200000"]))) == 1


def test_a_run_without_phases_is_one_segment() -> None:
    config = load_config(None, ["train.steps=70", "optimizer.warmup_steps=5"])
    (only,) = segments(config)
    assert (only.config, only.steps, only.stage) == (config, 70, Stage())


def test_a_duration_in_tokens() -> None:
    keys = ["train.tokens=1_000_000", "train.global_batch_size=16", "optimizer.warmup_tokens=10000"]
    config = load_config(None, keys)
    assert (config.train.steps, config.optimizer.warmup_steps) == (123, 2)
    ramp = ["train.ramp_from=8", "train.ramp_increment=4", "train.ramp_tokens=40960"]
    parts = segments(load_config(None, [*keys, *ramp]))
    assert [part.steps for part in parts] == [5, 4, 117]
    assert parts[-1].tokens + 40960 + 4096 >= 1_000_000
    assert steps_of_tokens(parts, 5 * 8 * 512) == 5


def test_data_order_continues_where_only_the_batch_changes() -> None:
    phases = '["steps=4", "steps=4 train.global_batch_size=8 objective.mask_probability=0.3"]'
    config = load_config(None, [f"train.phases={phases}", "optimizer.warmup_steps=0"])
    assert {part.stage for part in segments(config)} == {Stage()}


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (['train.phases=["data.sequence_length=8"]'], ["phases[0]", "steps, tokens, fraction"]),
        (['train.phases=["steps=1 tokens=5"]'], ["phases[0]", "steps, tokens, fraction"]),
        (['train.phases=["steps=-1"]'], ["phases[0]", "steps=-1"]),
        (['train.phases=["steps=010"]'], ["phases[0]", "steps=010"]),
        (['train.phases=["steps=１０"]'], ["phases[0]", "steps=１０"]),
        (['train.phases=["steps=4 model.num_layers=3"]'], ["model.num_layers", "cannot change"]),
        (['train.phases=["steps=4 data.sequence_lenth=3"]'], ["data.sequence_lenth"]),
        (['train.phases=["steps=4 data.sequence_length=x"]'], ["phases[0]", "wrong type"]),
        (
            ['train.phases=["steps=4 data.sequence_length=0"]'],
            ["phases[0]", "sequence_length=0", "above 0"],
        ),
        (['train.phases=["steps=4", "steps=4 data.sequence_length=513"]'], ["phase 1: ", "513"]),
        (['train.phases=["steps=4 data.train=b"]'], ["phase 0", "data.validation"]),
        (['train.phases=["steps=4"]', "train.steps=5"], ["train.steps=5", "4 steps", "exit_step"]),
        (['train.phases=["steps=4"]', "train.tokens=5"], ["train.tokens=5"]),
        (['train.phases=["steps=4"]', "data.short_steps=2"], ["data.short_steps=2"]),
        (["train.ramp_from=7"], ["ramp_from=7", "ramp_increment=None"]),
        (["train.phases=3"], ["train.phases=3", "list"]),
        (["train.phases=[3]"], ["train.phases[0]=3", "steps: 1000"]),
        (["train.phases=[{steps: 2, data: {a: 1}}]"], ["phases[0]", "data is a section"]),
        (["train.phases=[{fraction: 0.5}]"], ["fraction", "[0.5]"]),
        (["train.phases=[{fraction: 0.5}, {steps: 2}]"], ["fraction", "[0.5]", "2 phases"]),
        (["train.phases=[{fraction: 1.0e-9}, {fraction: 1}]"], ["phases[0]", "fraction=1e-09"]),
        (["train.ramp_from=128", "train.ramp_increment=64"], ["ramp_steps or train.ramp_tokens"]),
        (
            ["train.ramp_from=128", "train.ramp_increment=64", "train.ramp_steps=100000"],
            ["train.ramp_steps=100000"],
        ),
        (["train.tokens=-1"], ["train.tokens=-1"]),
        (["train.tokens=5", "train.global_batch_size=0"], ["global_batch_size=0"]),
        (["optimizer.schedule=wsd"], ["decay_steps=None", "decay_fraction"]),
        (["optimizer.decay_steps=5"], ["decay_steps=5", "schedule=wsd"]),
        (["optimizer.warmup_tokens=5", "optimizer.warmup_fraction=0.1"], ["warmup_tokens=5"]),
    ],
)
def test_refusals(overrides: list[str], parts: list[str]) -> None:
    steps = "optimizer.warmup_steps=0"
    with pytest.raises(ConfigError) as refusal:
        load_config(None, [steps, *overrides])
    assert all(part in str(refusal.value) for part in parts), refusal.value


def test_every_batch_must_divide(run: RunConfig) -> None:
    assert validate_for_world(run, 1).accumulation_steps == 1
    with pytest.raises(ConfigError, match="global_batch_size=4 is not a multiple"):
        validate_for_world(run, 2)


def test_phase_keys_exist() -> None:
    for name in PHASE_KEYS:
        section, key = name.split(".")
        value = getattr(getattr(RunConfig(), section), key)
        given = list(value) if isinstance(value, tuple) else value
        merge_layers([("test", {section: {key: given}})])
