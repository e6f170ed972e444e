import json

import pytest

from benchmarks.gpu.record import Options, Record, note_crash, result_path


@pytest.fixture
def options(tmp_path):
    return Options("attention", tmp_path / "out", tmp_path / "work", "cpu", small=True, minutes=5)


def must_not_run():
    raise AssertionError("done already")


@pytest.mark.parametrize(
    ("change", "source", "value"),
    [({}, "", 1), ({"force": True}, "", 2), ({"small": False}, "", 2), ({}, "changed", 2)],
    ids=["finished", "forced", "another size", "other source"],
)
def test_items_of_other_settings_or_source_are_repeated(
    options, monkeypatch, change, source, value
):
    Record(options).run("a", lambda: {"value": 1})
    if source:
        monkeypatch.setattr("benchmarks.lib.provenance.source_digest", lambda: source)
    record = Record(Options(**{**vars(options), **change}))
    record.run("a", lambda: {"value": 2})
    assert record.items["a"]["value"] == value


def test_error_is_kept_and_the_item_repeated(options, capsys):
    record = Record(options)
    record.run("a", lambda: 1 / 0)
    record.run("b", lambda: {"value": 2})
    content = json.loads(result_path(options).read_text())
    assert content["items"]["a"]["error"] == "ZeroDivisionError: division by zero"
    assert content["items"]["b"]["value"] == 2
    again = Record(options)
    again.run("a", lambda: {"value": 1})
    assert "error" not in again.items["a"]
    capsys.readouterr()


def test_no_item_starts_after_the_deadline(options):
    record = Record(Options(**{**vars(options), "minutes": -1.0}))
    record.run("a", must_not_run)
    assert json.loads(result_path(options).read_text())["left"] == ["a"]


def test_crash_is_attributed_to_the_running_detail(options):
    record = Record(options)
    record.starting("a", "peer")
    assert note_crash(options, "ended with -11")
    again = Record(options)
    assert again.crashed == {"a": {"peer": "ended with -11"}}


@pytest.mark.parametrize(
    ("end", "lasting", "is_skipped"), [("ended with -9", True, True), ("too long", False, False)]
)
def test_crashed_item_is_skipped_and_one_that_took_too_long_repeated(
    options, end, lasting, is_skipped
):
    Record(options).starting("a")
    assert note_crash(options, end, lasting=lasting)
    again = Record(options)
    again.run("a", must_not_run if is_skipped else lambda: {"value": 1})
    assert again.items["a"].get("error") == (end if is_skipped else None)
    again.run("b", lambda: {"value": 2})
    assert again.items["b"]["value"] == 2
    assert not note_crash(options, "again, with nothing running")


def test_unusable_device_ends_the_process(options, monkeypatch, capsys):
    place = {"source": "s", "hardware": "h"}
    monkeypatch.setattr("benchmarks.gpu.record.provenance", lambda _: place)
    record = Record(Options(**{**vars(options), "device": "cuda"}))
    monkeypatch.setattr("benchmarks.gpu.record.device_works", lambda: False)
    with pytest.raises(SystemExit, match="does not respond"):
        record.run("a", lambda: 1 / 0)
    assert note_crash(record.options, "the process ended with 1")
    assert "ZeroDivisionError" in capsys.readouterr().err
