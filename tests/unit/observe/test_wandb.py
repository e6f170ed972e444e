"""Metrics to Weights & Biases: offline with the real package, and its failures."""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_deberta.errors import ConfigError
from megatron_deberta.observe.metrics import MetricsWriter, read_metrics
from megatron_deberta.observe.wandb_writer import WandbWriter


def write(folder: Path, first: int, last: int) -> None:
    wandb = WandbWriter(folder, "deberta", {"train": {"steps": 3}})
    writer = MetricsWriter(folder, resume_step=first - 1, tensorboard=False, wandb=wandb)
    with closing(writer):
        for step in range(first, last + 1):
            writer.write(step, {"loss": 10 / step, "skip": "text"})


def payloads(content: bytes) -> Iterator[bytes]:
    """Yield the records of an offline file, which has LevelDB's log format after seven bytes."""
    place, parts = 7, b""
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, length, kind = struct.unpack_from("<IHB", content, place)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def stored(folder: Path) -> tuple[list[dict[str, str]], set[str]]:
    """Read history records and run identifiers from the offline files."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, identifiers = [], set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in payloads(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): i.value_json for i in items})
            elif record.WhichOneof("record_type") == "run":
                identifiers.add(record.run.run_id)
    return rows, identifiers


def test_offline_run_and_its_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="extra [wandb] is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(tmp_path, 1, 3)
    write(tmp_path, 2, 2)
    deadline = time.monotonic() + 60
    # W&B's service process may still be writing its file when finish() returns.
    while len(stored(tmp_path)[0]) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    rows, identifiers = stored(tmp_path)
    values = [(int(row["step"]), float(row["train/loss"])) for row in rows]
    assert values == [(1, 10), (2, 5), (3, 10 / 3), (2, 5)]
    assert not any("skip" in key for row in rows for key in row)
    assert identifiers == {(tmp_path / "wandb_id").read_text()}


def test_failures_do_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def define_metric(self, *_: Any, **__: Any) -> None: ...

        def log(self, *_: Any) -> None:
            raise BrokenPipeError("service has ended")

        def finish(self) -> None:
            raise RuntimeError("service has ended")

    module: Any = ModuleType("wandb")
    module.init = lambda **_: Broken()
    monkeypatch.setitem(sys.modules, "wandb", module)
    write(tmp_path, 1, 2)
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "W&B: service has ended; training goes on"
    ]


def test_a_start_that_is_refused_names_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: Any) -> None:
        raise ValueError("no API\nkey")

    module: Any = ModuleType("wandb")
    module.init = refuse
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(ConfigError, match=r"^log\.wandb=p: no API key; run `wandb login`, or set"):
        WandbWriter(tmp_path, "p", {})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"^log\.wandb=p needs the package wandb"):
        WandbWriter(tmp_path, "p", {})
