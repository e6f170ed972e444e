"""Durable lines of events."""

from __future__ import annotations

from pathlib import Path

from megatron_deberta.cluster.event_log import append_event, read_events


def test_a_line_that_was_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_event(path, {"event": "first"})
    with path.open("a") as stream:
        stream.write('{"event": "se')
    append_event(path, {"event": "third"})
    append_event(path, {"event": "fourth"})
    assert [event["event"] for event in read_events(path, dict[str, str])] == [
        "first",
        "third",
        "fourth",
    ]
