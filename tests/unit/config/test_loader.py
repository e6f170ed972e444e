"""Reading configs: precedence, round trips, and one clear line for everything that is wrong."""

import os
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.resume import changes
from megatron_deberta.config import config_from_dict, config_to_dict, load_config, save_config
from megatron_deberta.config.phases import segments
from megatron_deberta.config.schema import RunConfig, TrainConfig
from megatron_deberta.errors import ConfigError


def write(folder: Path, text: str, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_defaults_then_base_then_file_then_overrides(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    write(tmp_path, "model: {num_layers: 3, hidden_size: 64, num_heads: 4}", "models/m.yaml")
    path = write(tmp_path, "base: models/m.yaml\nmodel: {num_layers: 5}\ntrain: {seed: 7}")
    config = load_config(path, ["train.seed=8", "train.seed=9"])
    assert (config.model.num_layers, config.model.hidden_size) == (5, 64)
    assert config.train.seed == 9
    assert config.train.steps == TrainConfig().steps


def test_later_bases_win_and_bases_have_bases(tmp_path: Path) -> None:
    write(tmp_path, "train: {seed: 1, steps: 20000}", "a.yaml")
    write(tmp_path, "base: a.yaml\ntrain: {seed: 2}", "b.yaml")
    write(tmp_path, "log: {every: 3}", "c.yaml")
    config = load_config(write(tmp_path, "base: [b.yaml, c.yaml]"))
    assert (config.train.seed, config.train.steps, config.log.every) == (2, 20000, 3)


@pytest.mark.parametrize(
    ("overrides", "head"),
    [
        (["objective.name=rtd"], "rtd"),
        (["objective.name=autoregressive"], "autoregressive"),
        (["objective.name=mlm+ar"], "mlm"),
        (["objective.name=retromae"], "mlm"),
        ([], "mlm"),
    ],
)
def test_the_head_follows_from_the_objective(
    tmp_path: Path, overrides: list[str], head: str
) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("model: {num_layers: 2}\n")
    config = load_config(run, overrides)
    assert (config.model.head, config.model.num_layers) == (head, 2)
    save_config(config, run)
    assert load_config(run) == config
    # What a file sets stays, and is refused where it does not fit.
    other = "mlm" if head != "mlm" else "rtd"
    run.write_text(f"model: {{head: {other}}}\n")
    with pytest.raises(
        ConfigError, match=f"does not fit model.head={other}; set model.head={head}"
    ):
        load_config(run, overrides)


def test_values_take_the_type_of_their_field() -> None:
    config = load_config(
        None, ["optimizer.learning_rate=1e-4", "data.train=[0.3, a, 0.7, b]", "train.run_dir=2024",
               "optimizer.warmup_steps=0", "model.hidden_dropout=0"],
    )  # fmt: skip
    assert config.optimizer.learning_rate == 1e-4
    assert (config.optimizer.warmup_steps, config.model.hidden_dropout) == (0, 0.0)
    assert config.data.train == ("0.3", "a", "0.7", "b")
    assert config.train.run_dir == "2024"


ODD_TEXTS = [
    "20241126_1530", "0123", "555_1", "12:30", "12:30:45", "2024-11-26", "2024-13-45", "1e5",
    "0x10", "1_000", "yes", "off", "true", "null", "~", "+5", ".5", ".inf", "=", "<<",
]  # fmt: skip
"""Strings that YAML 1.1 takes for something else."""


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_text_stands_as_it_is(tmp_path: Path, text: str) -> None:
    given = [f"train.run_dir={text}", f"model.labels=[{text}, b]"]
    file = write(tmp_path, f"train: {{run_dir: {text}}}\nmodel: {{labels: [{text}, b]}}")
    for config in (load_config(None, given), load_config(file)):
        assert (config.train.run_dir, config.model.labels) == (text, (text, "b"))
        saved = tmp_path / "saved.yaml"
        save_config(config, saved)
        assert load_config(saved) == config


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("[a]", "[a]"), ("{a}", "{a}"), ("a: b", "a: b"), ("a #b", "a #b"), ("*x", "*x"),
        ("!x", "!x"), ("it's", "it's"), ("東京", "東京"), (" a ", "a"), ("'0 1'", "0 1"),
        ('"a\\bc"', None), ('"\\ud83d\\ude00"', "\N{GRINNING FACE}"), ("a\x00", None),
    ],
)  # fmt: skip
def test_text_on_the_command_line_is_not_yaml(given: str, text: str | None) -> None:
    if text is None:
        assert "control characters" in refusal(None, f"train.run_dir={given}")
    else:
        assert load_config(None, [f"train.run_dir={given}"]).train.run_dir == text


def test_a_single_item_stands_for_a_list(tmp_path: Path) -> None:
    for text in ("shards/a", "20241126_1530", "12:30", "no", "*a"):
        assert load_config(None, [f"data.train={text}"]).data.train == (text,)
    file = write(tmp_path, "data: {train: 2024_1, validation: }")
    data = load_config(file).data
    assert (data.train, data.validation) == (("2024_1",), ())


def test_phases_keep_the_text(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "train:\n  phases:\n  - steps: 10\n    data.train: 0123\n"
        "  - steps: 10\n    data.train: [0.70, 2024_1]\n"
        "data: {validation: held_out}\noptimizer: {warmup_steps: 1}",
    )
    phases = segments(load_config(file))
    assert [phase.config.data.train for phase in phases] == [("0123",), ("0.70", "2024_1")]


def test_text_that_is_lost_is_refused() -> None:
    for value in (2024, 1.5, True):
        with pytest.raises(ConfigError, match=r"train\.run_dir=.* quote it"):
            config_from_dict({"train": {"run_dir": value}}, "task x")


@pytest.mark.parametrize("text", ["", "null", "~"])
def test_null_is_none(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["checkpoint.load_from", "checkpoint.save_every", "optimizer.clip_grad_norm"]
    path = write(
        tmp_path, f"checkpoint: {{load_from: {text}, save_every: {text}}}\noptimizer:\n"
        f"  clip_grad_norm: {text}\ndata: {{validation: {text}}}",
    )  # fmt: skip
    for config in (load_config(path), load_config(None, [f"{name}={text}" for name in names])):
        assert config.checkpoint.load_from is config.checkpoint.save_every is None
        assert config.optimizer.clip_grad_norm is None
        assert config.data.validation == ()
    assert not caplog.records
    assert load_config(None, ['checkpoint.load_from="null"']).checkpoint.load_from == "null"


def optional_keys() -> list[tuple[str, str, object]]:
    """Section, key and the old spelling of none, of every key that can be None."""
    return [
        (section.name, key.name, "" if str(key.type).startswith("str") else 0)
        for section in fields(RunConfig)
        for key in fields(getattr(RunConfig(), section.name))
        if str(key.type).endswith("| None")
    ]


def test_zero_and_empty_text_were_the_spelling_of_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = optional_keys()
    assert len(keys) > 40
    old: dict[str, dict[str, object]] = {}
    for section, key, none in keys:
        old.setdefault(section, {})[key] = none
    path = write(tmp_path, "\n".join(f"{section}: {values}" for section, values in old.items()))
    given = load_config(path)
    warned = [record.message.split(" ")[1].split("=")[0] for record in caplog.records]
    assert sorted(warned) == sorted(f"{section}.{key}" for section, key, _ in keys)
    # A checkpoint's config cannot be edited, so there is no warning.
    caplog.clear()
    config = config_from_dict(old, "checkpoint")
    assert not caplog.records
    assert changes(config, given) == {}
    for section, key, none in keys:
        assert getattr(getattr(config, section), key) is None
        sections = type(getattr(config, section))
        assert getattr(sections(**{key: none}), key) is None


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.step=5", ["train.step", "train.steps"]),
        ("train.learning_rate=3", ["train.learning_rate", "optimizer.learning_rate"]),
        ("modle.num_layers=1", ["modle", "'model'"]),
        ("train.steps=abc", ["train.steps='abc'", "int", "100000"]),
        ("train.steps=true", ["train.steps=True", "int"]),
        ("train.steps=1.5", ["train.steps=1.5", "int"]),
        ("train.steps=null", ["train.steps=None", "int"]),
        ("parallel.zero_stage=5", ["parallel.zero_stage=5 is none of its values; write", "0, 1"]),
        ("precision.dtype=float32", ["precision.dtype='float32'", "one of fp32, bf16, fp16, auto"]),
        ("model.position_terms=x", ["model.position_terms='x'", "c2p+p2c, c2p, p2c, none"]),
        ("data.train={a: b}", ["data.train={'a': 'b'}", "[first,second]"]),
        ("train.run_dir=${oc.env:HOME}", ["train.run_dir", "${"]),
        ("train.run_dir=???", ["train.run_dir", "???"]),
        ("data.train=[a, '${x}']", ["data.train", "${"]),
        ("train.steps=!!python/name:os.system x", ["tag", "not allowed"]),
        ("train.steps=[1", ["command line"]),
        ("train.steps=2001-99-01", ["train.steps=2001-99-01", "int"]),
        ("train.steps=0100", ["train.steps=0100", "int"]),
        ("train.steps=16:40", ["train.steps=16:40", "int"]),
        ("train.steps=１０００", ["train.steps='１０００'", "int"]),
        ("optimizer.learning_rate=1:30", ["optimizer.learning_rate=1:30", "float"]),
        ("data.sample_log=2", ["data.sample_log=2", "bool"]),
        ("steps=3", ["steps=3", "section.key=value"]),
        ("train.steps", ["train.steps", "section.key=value"]),
        ("train={}", ["train={}", "section.key=value"]),
    ],
)
def test_wrong_overrides_name_key_value_and_remedy(override: str, parts: list[str]) -> None:
    message = refusal(None, override)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("train: {steps: 1, steps: 2}", ["run.yaml:1", "'steps' is duplicated"]),
        ("train: {}\ntrain: {}", ["run.yaml:2", "'train' is duplicated"]),
        ("[train]: {}", ["run.yaml:1", "a list or mapping cannot be a key"]),
        ("train: {{steps: 1}: 2}", ["run.yaml:1", "a list or mapping cannot be a key"]),
        ('train: {run_dir: "a\\0b"}', ["run.yaml:1", "control characters"]),
        ('train: {run_dir: "a\\ud800"}', ["run.yaml:1", "surrogates"]),
        (f"optimizer: {{learning_rate: {10**400}}}", ["optimizer.learning_rate", "float"]),
        ("train: &x {steps: 1}\nlog: *x", ["run.yaml:1", "aliases"]),
        ("train: !!map {}", ["run.yaml:1", "tag"]),
        ("a: " + "[" * 25 + "]" * 25, ["run.yaml:1", "20 levels"]),
        ("- a", ["list"]),
        ("train:", ["train=None", "section"]),
        ("train: 3", ["train=3", "section"]),
        ("base: missing.yaml", ["missing.yaml", "No such file"]),
        ("base: run.yaml", ["extends itself"]),
        ("base: 3", ["base=3"]),
        ("base: {a: b}", ["base="]),
        ("1: 2", ["no section 1"]),
        ("train: {1: 2}", ["no key train.1"]),
        ("#" * 1_000_001, ["1,000,000 bytes"]),
        ("train: {steps: 0}", ["train.steps=0", "above 0"]),
    ],
)
def test_wrong_files_name_the_place(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refusal(write(tmp_path, text))
    for part in parts:
        assert part in message


def test_unreadable_files(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "absent.yaml")
    present = write(tmp_path, "train: {}")
    misspelled = present.with_name(present.name.replace("yaml", "yml"))
    assert refusal(misspelled).endswith(f"; did you mean {present}?")
    assert "directory" in refusal(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"train: \xff\xfe")
    assert "not UTF-8" in refusal(binary)
    control = tmp_path / "control.yaml"
    control.write_bytes(b"train: \x00")
    assert "not valid YAML" in refusal(control)
    # It has no end, and would be waited for.
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "Not a regular file" in refusal(tmp_path / "pipe.yaml")


def test_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == RunConfig()


def test_saved_and_plain_data_read_back_equal(tmp_path: Path) -> None:
    config = load_config(None, ["data.train=[a,b]", "model.layer_norm_eps=1e-12", "train.seed=3"])
    assert config_from_dict(config_to_dict(config), "checkpoint") == config
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    with pytest.raises(ConfigError, match=r"checkpoint: no key model\.num_layer; .*num_layers"):
        config_from_dict({"model": {"num_layer": 1}}, "checkpoint")


def test_every_attribute_of_the_schema_is_annotated() -> None:
    """Without annotation it would be no key, and invisible to YAML."""
    for section in fields(RunConfig):
        kind = type(getattr(RunConfig(), section.name))
        values = {name for name in vars(kind) if not name.startswith("_")}
        assert values == {key.name for key in fields(kind)}


def test_the_bare_name_of_a_packaged_run_names_its_file() -> None:
    for name in ("small", "small.yaml"):
        with pytest.raises(ConfigError, match=r"did you mean configs/runs/small\.yaml\?$"):
            load_config(name)


def test_a_packaged_config_is_found_outside_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/runs/small.yaml").train.steps == 4000
    file = write(tmp_path, "base: configs/models/small.yaml\ntrain: {steps: 20007}\n")
    assert load_config(file.name).train.steps == 20007
    # A local file takes precedence.
    (tmp_path / "configs/runs").mkdir(parents=True)
    write(tmp_path, "train: {steps: 20007}\n", "configs/runs/small.yaml")
    assert load_config("configs/runs/small.yaml").train.steps == 20007
    assert "configs/runs/absent.yaml" in refusal(Path("configs/runs/absent.yaml"))
