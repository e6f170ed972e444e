"""Old names and values of keys still load from files, overrides and checkpoints."""

import logging
from pathlib import Path

import pytest

from megatron_deberta.config import RunConfig, config_from_dict, config_to_dict, load_config
from megatron_deberta.config.loader import RENAMED_KEYS, RENAMED_SECTIONS
from megatron_deberta.config.phases import segments
from megatron_deberta.config.schema import (
    RENAMED_VALUES,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
)
from megatron_deberta.errors import ConfigError
from megatron_deberta.finetune.search import load_search
from megatron_deberta.tasks.task import load_task, packaged_file

OLD_VALUES = {
    "cluster.timeout_minutes": 3.0,
    "data.ledger": True,
    "guard.drift_every": 7,
    "precision.engine": "deepspeed",
    "precision.offload_optimizer": True,
    "precision.zero_stage": 2,
    "train.eval_steps": 5,
    "train.stop_after": 9,
}


def value_of(config: RunConfig, name: str) -> object:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def test_the_tables_lead_from_unknown_names_to_known_ones() -> None:
    known = {f"{s}.{k}" for s, values in config_to_dict(RunConfig()).items() for k in values}
    assert set(RENAMED_KEYS) == set(OLD_VALUES)
    assert not known & set(RENAMED_KEYS)
    assert set(RENAMED_KEYS.values()) <= known
    sections = config_to_dict(RunConfig()).keys()
    assert not sections & RENAMED_SECTIONS.keys()
    assert sections >= set(RENAMED_SECTIONS.values())


def test_old_names_load_with_one_warning_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sections: dict[str, dict[str, object]] = {}
    for name, value in OLD_VALUES.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(f"{section}: {values}" for section, values in sections.items()))
    overrides = [f"{name}={value}" for name, value in OLD_VALUES.items()]
    for config, source in (
        (load_config(path), str(path)),
        (load_config(None, overrides), "command line"),
        (config_from_dict(sections, "checkpoint"), "checkpoint"),
    ):
        for old, value in OLD_VALUES.items():
            assert value_of(config, RENAMED_KEYS[old]) == value
            message = f"{source}: {old} was renamed to {RENAMED_KEYS[old]}"
            assert sum(message in record.message for record in caplog.records) == 1
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert len(caplog.records) == 3 * len(OLD_VALUES)


def test_the_old_name_of_a_section_loads_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = config_from_dict({"guard": {"spike_sigmas": None, "max_skips": 3}}, "checkpoint")
    assert (found.stability.spike_sigmas, found.stability.max_skips) == (None, 3)
    assert [record.message for record in caplog.records] == [
        "checkpoint: guard was renamed to stability; use the new name"
    ]


def test_a_new_name_in_a_later_layer_overrides_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("train: {stop_after: 4}")
    path = tmp_path / "run.yaml"
    path.write_text("base: base.yaml\ntrain: {exit_step: 5}")
    assert load_config(path).train.exit_step == 5
    assert load_config(path, ["train.stop_after=6"]).train.exit_step == 6


def test_both_names_in_one_place_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("train: {exit_step: 4, stop_after: 4}")
    message = r"train\.stop_after is the old name of train\.exit_step; remove train\.stop_after"
    with pytest.raises(ConfigError, match=rf"run\.yaml: {message}"):
        load_config(path)
    with pytest.raises(ConfigError, match=f"command line: {message}"):
        load_config(None, ["train.stop_after=4", "train.exit_step=4"])
    with pytest.raises(ConfigError, match=r"precision\.zero_stage is the old name of parallel"):
        load_config(None, ["parallel.zero_stage=1", "precision.zero_stage=1"])
    with pytest.raises(ConfigError, match=r"guard\.max_skips is the old name of stability"):
        load_config(None, ["guard.max_skips=3", "stability.max_skips=3"])


@pytest.mark.parametrize(("key", "values"), RENAMED_VALUES.items())
def test_old_values_load_with_a_warning(
    key: str, values: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = values
    section, name = key.split(".")
    (tmp_path / "run.yaml").write_text(f"{section}: {{{name}: {old}}}")
    for config in (
        load_config(tmp_path / "run.yaml"),
        load_config(None, [f"{key}={old}"]),
        config_from_dict({section: {name: old}}, "checkpoint"),
    ):
        assert value_of(config, key) == new
    assert len(caplog.records) == 3
    assert all(f"{key}={old}" in record.message for record in caplog.records)
    kind = {"model": ModelConfig, "objective": ObjectiveConfig, "optimizer": OptimizerConfig}
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(kind[section](**{name: old}), name) == new


def test_old_values_load_in_phases(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "train: {phases: [{steps: 4, objective.masking: released}]}\noptimizer: {warmup_steps: 1}"
    )
    overrides = ['train.phases=["steps=4 objective.masking=released"]', "optimizer.warmup_steps=1"]
    for config in (load_config(path), load_config(None, overrides)):
        assert [part.config.objective.masking for part in segments(config)] == ["microsoft"]
    assert len(caplog.records) == 2


def test_old_names_load_in_tasks_and_searches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where they are keys of a mapping."""
    task = tmp_path / "task.yaml"
    # Of the packaged task, without the settings of the paper.
    text = packaged_file(Path("configs/tasks/sst2.yaml")).read_text().partition("\n")[2]
    text = text.partition("default_settings")[0]
    task.write_text(text + "settings: {mine: {guard.max_skips: 3}}\n")
    assert load_task(str(task)).settings == {"mine": {"stability.max_skips": 3}}
    search = tmp_path / "search.yaml"
    search.write_text(f"task: {task}\nmodel: m\ndata: d\ngrid: {{guard.max_skips: [2, 3]}}\n")
    found = load_search(str(search), ["precision.zero_stage=[1,2]"])
    assert found.grid == {"stability.max_skips": [2, 3], "parallel.zero_stage": [1, 2]}
    assert len(caplog.records) == 3


def test_two_old_names_of_a_key_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"guard\.replica_check_every is the old name"):
        load_config(None, ["guard.drift_every=3", "guard.replica_check_every=4"])


def test_text_of_a_user_in_a_message_is_no_key() -> None:
    overrides = ["model.labels=[$a.b,$train.c]", "finetune.class_weights=[1,2,3]"]
    task = ["objective.name=classification", "finetune.task=sst2"]
    with pytest.raises(ConfigError, match=r"\$a\.b, \$train\.c"):
        load_config(None, [*task, *overrides])
