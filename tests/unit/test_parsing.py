"""Validation of JSON that is read from files."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from typing_extensions import Required, TypedDict

from megatron_deberta.errors import CheckpointError, ConfigError, DataError, printable
from megatron_deberta.parsing import Count, Number, Seconds, conform, parse_json, whole_number


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    size: Count
    ratio: Number = 0.0
    shape: tuple[int, ...] = ()


class Event(TypedDict, total=False):
    time: Required[Seconds]


def parse(content: bytes | str) -> Entry:
    return parse_json(content, Entry, "a.json:3", "an entry", remedy="remove it")


def test_values_keep_their_types() -> None:
    assert parse('{"name": "x", "size": 3, "ratio": 1, "shape": [1, 2]}') == Entry(
        "x", 3, 1, (1, 2)
    )
    event = parse_json(b'{"time": 0.1, "x": [1]}', Event, "", "", remedy="", ignore_unknown=True)
    assert event == {"time": 0.1, "x": [1]}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "Invalid JSON"),
        (b'{"name": "\xff", "size": 1}', "invalid unicode"),
        ("[" * 100_000, "recursion limit"),
        ("[]", r"\[\]: input should be an object"),
        ('{"name": "x"}', "size is missing"),
        ('{"name": "x", "size": 1, "new": 2}', "new is unknown"),
        ('{"name": "x", "size": "1"}', "size='1': input should be a valid integer"),
        ('{"name": "x", "size": true}', "size=True"),
        ('{"name": "x", "size": 1.5}', "size=1.5"),
        ('{"name": "x", "size": -1}', "greater than or equal to 0"),
        ('{"name": "x", "size": 1e400}', "size=inf"),
        (f'{{"name": "x", "size": {10**30}}}', "less than or equal to"),
        (f'{{"name": "x", "size": 1{"0" * 9999}}}', "out of range"),
        ('{"name": "x", "size": 1, "ratio": NaN}', "finite"),
        ('{"name": "x", "size": 1, "ratio": Infinity}', "finite"),
        ('{"name": "\\ud800", "size": 1}', "hex escape"),
        ('{"name": null, "size": 1}', "name=None"),
        (f'{{"name": "x", "size": "{"y" * 10_000}"}}', r"size='y{59}\.\.\."),
        ('{"name": "x", "size": 1, "\\u001b[2J\\n": 2}', "\ufffd.2J is unknown"),
    ],
)
def test_wrong_content_is_named_in_one_line(content: bytes | str, problem: str) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        parse(content)
    text = str(caught.value)
    assert text.startswith("a.json:3: not an entry (")
    assert text.endswith("); remove it")
    assert len(text) < 300


def test_error_type_and_plain_data() -> None:
    with pytest.raises(CheckpointError, match=r"step: not an entry \(name=\[\]: .*\); save again"):
        conform(
            {"name": [], "size": 1}, Entry, "step", "an entry", remedy="save again",
            error=CheckpointError,
        )  # fmt: skip


@pytest.mark.parametrize("text", ["abc", "-1", "1.5", "1 ", "9" * 30, "\u0661"])
def test_variables_that_are_no_numbers_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_RESTART_COUNT="):
        whole_number({"SLURM_RESTART_COUNT": text}, "SLURM_RESTART_COUNT", 0)
    assert whole_number({"SLURM_RESTART_COUNT": "7"}, "SLURM_RESTART_COUNT", 0) == 7
    assert whole_number({}, "SLURM_RESTART_COUNT", 5) == 5


def test_control_characters_are_replaced() -> None:
    assert printable("é 1\n\x1b[2J\u202e\ud800\x9b") == "é 1\n\ufffd[2J\ufffd\ufffd\ufffd"
