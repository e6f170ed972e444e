"""Config changes on resume: permitted, permitted with the flag, or rejected."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.resume import (
    FLAG,
    FREE,
    WITH_FLAG,
    Identity,
    check_resume,
    check_same_architecture,
)
from megatron_deberta.checkpoint.store import save_weights
from megatron_deberta.config import RunConfig, config_to_dict
from megatron_deberta.config.schema import Phase
from megatron_deberta.errors import CheckpointError, ConfigError
from tests.support.checkpoints import metadata, save_alone

KEYS = [
    f"{section.name}.{key.name}"
    for section in fields(RunConfig)
    for key in fields(getattr(RunConfig(), section.name))
]


def mutated(key: str) -> RunConfig:
    """Return the default config with one value changed."""
    section_name, name = key.split(".")
    config = RunConfig()
    section: Any = getattr(config, section_name)
    # ``auto`` that nothing has resolved is fp32.
    value = "fp32" if key == "precision.dtype" else getattr(section, name)
    choices = get_args(get_type_hints(type(section))[name])
    other: Any
    if type(None) in choices:
        other = {str: "elsewhere", int: 7, float: 0.75}[choices[0]]
    elif isinstance(value, bool):
        other = not value
    elif isinstance(value, tuple):
        other = (Phase(steps=1),) if name == "phases" else ("elsewhere",)
    elif choices:
        other = next((choice for choice in choices if choice != value), "another")
    elif isinstance(value, str):
        other = "elsewhere"
    else:
        other = (value or 1.0) / 2 if isinstance(value, float) else value + 1
    return replace(config, **{section_name: replace(section, **{name: other})})


def test_a_run_folder_of_another_kind_is_named(reader: CheckpointReader) -> None:
    task = replace(
        RunConfig(),
        model=replace(RunConfig().model, head="classification", mask_decoder_passes=0),
        objective=replace(RunConfig().objective, name="classification"),
        finetune=replace(RunConfig().finetune, task="sst2"),
    )
    with pytest.raises(CheckpointError) as error:
        resume(reader, task)
    for part in (
        "train.run_dir=runs/default", "objective.name=mlm", "sst2", "choose another train.run_dir"
    ):  # fmt: skip
        assert part in str(error.value)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> CheckpointReader:
    return CheckpointReader(save_alone(tmp_path_factory.mktemp("run"), 8))


IDENTITY = Identity("/tokenizer", "t" * 64, "d" * 64)


def resume(
    reader: CheckpointReader, config: RunConfig, identity: Identity = IDENTITY, **options: bool
) -> list[str]:
    return check_resume(reader, config, identity, **options)


def test_the_cause_of_several_changes_is_named_first(reader: CheckpointReader) -> None:
    config = RunConfig()
    train, finetune = replace(config.train, steps=7), replace(config.finetune, epochs=0.5)
    match = r"^finetune\.epochs=0\.5 but the .* with None "
    with pytest.raises(CheckpointError, match=match) as error:
        resume(reader, replace(config, train=train, finetune=finetune))
    assert f"(also changed: train.steps); change it back or pass {FLAG}" in str(error.value)


def test_tables_name_existing_keys_only() -> None:
    assert set(KEYS) >= FREE | WITH_FLAG
    assert not FREE & WITH_FLAG


def policy_table() -> str:
    """The permitted changes as the Markdown table of docs/checkpoint-format.md."""
    lines = [f"| section | freely | with `{FLAG}` | not |", "|---|---|---|---|"]
    for section, values in config_to_dict(RunConfig()).items():
        cells: list[list[str]] = [[], [], []]
        for key in values:
            name = f"{section}.{key}"
            cells[0 if name in FREE else 1 if name in WITH_FLAG else 2].append(f"`{key}`")
        lines.append(f"| `{section}` | " + " | ".join(", ".join(cell) for cell in cells) + " |")
    return "\n".join(lines)


def test_the_page_has_the_policy_as_it_is() -> None:
    page = Path(__file__).parents[3] / "docs" / "checkpoint-format.md"
    assert policy_table() in page.read_text(), f"put this there:\n{policy_table()}"


def test_nothing_changed(reader: CheckpointReader) -> None:
    assert resume(reader, RunConfig()) == []


@pytest.mark.parametrize("key", KEYS)
def test_every_key(reader: CheckpointReader, key: str) -> None:
    config = mutated(key)
    if key in FREE:
        assert resume(reader, config)[0].startswith(f"{key}: ")
        return
    section, name = key.split(".")
    old, new = (config_to_dict(each)[section][name] for each in (RunConfig(), config))
    with pytest.raises(CheckpointError) as refusal:
        resume(reader, config)
    assert f"{key}={new!r}" in str(refusal.value)
    assert repr(old) in str(refusal.value)
    if key in WITH_FLAG:
        assert "--allow-config-change" in str(refusal.value)
        assert resume(reader, config, allow_change=True)
    else:
        with pytest.raises(CheckpointError, match=key):
            resume(reader, config, allow_change=True)


def test_auto_is_the_format_with_which_the_run_began(tmp_path: Path) -> None:
    """Training resolves it; ``doctor`` and ``submit`` compare the configuration as it is."""
    default = RunConfig()
    half, full = (
        replace(default, precision=replace(default.precision, dtype=dtype))
        for dtype in ("bf16", "fp32")
    )
    began_in_bf16 = CheckpointReader(save_alone(tmp_path, 8))
    began_in_bf16.metadata = metadata(8, half)
    assert resume(began_in_bf16, default) == ["precision.dtype: 'bf16' -> 'auto'"]
    with pytest.raises(CheckpointError, match="precision.dtype='fp32' but .* with 'bf16'"):
        resume(began_in_bf16, full)


@pytest.mark.parametrize("what", ["tokenizer_fingerprint", "data_fingerprint"])
def test_other_content_is_refused(reader: CheckpointReader, what: str) -> None:
    with pytest.raises(CheckpointError, match="fingerprint eeee"):
        resume(reader, RunConfig(), replace(IDENTITY, **{what: "e" * 64}))


def test_weights_alone_cannot_be_resumed(tmp_path: Path) -> None:
    weights = [("head.bias", torch.zeros(2))]
    path = save_weights(tmp_path, weights, {"head.bias": (2,)}, metadata(0))
    with pytest.raises(CheckpointError, match=r"checkpoint\.load_from"):
        resume(CheckpointReader(path), RunConfig())


@pytest.mark.parametrize("key", [key for key in KEYS if key.startswith("model.")])
def test_weights_of_another_architecture_are_refused(reader: CheckpointReader, key: str) -> None:
    config = mutated(key)
    training = ("hidden_dropout", "attention_dropout", "initializer_range", "conv_init")
    if key.removeprefix("model.") in training:
        check_same_architecture(reader, config)
    else:
        with pytest.raises(CheckpointError, match=key):
            check_same_architecture(reader, config)


def test_weights_of_a_masked_model_start_an_autoregressive_one(reader: CheckpointReader) -> None:
    causal = replace(RunConfig().model, head="autoregressive")
    check_same_architecture(reader, replace(RunConfig(), model=causal))


def test_a_saved_config_that_no_longer_fits_is_named(tmp_path: Path) -> None:
    path = save_alone(tmp_path, 1)
    reader = CheckpointReader(path)
    reader.metadata.config["model"]["no_such_key"] = 1
    with pytest.raises(ConfigError, match="no_such_key"):
        resume(reader, RunConfig())
