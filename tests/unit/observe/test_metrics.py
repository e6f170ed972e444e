"""Metrics files: appended, cut on resume, never half-written."""

from __future__ import annotations

import errno
import io
import json
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.axes import Axes

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.observe.metrics import (
    MetricsWriter,
    WandbWriter,
    plot_loss,
    read_metrics,
    terminal_loss_curve,
)


def write_steps(folder: Path, first: int, last: int, resume_step: int = 0) -> None:
    with closing(MetricsWriter(folder, resume_step=resume_step, tensorboard=False)) as writer:
        for step in range(first, last + 1):
            writer.write(step, {"loss": 10 / step})


def test_records_are_json_lines_in_order(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path / "run", tensorboard=False)) as writer:
        writer.write(1, {"loss": 2.5, "lr": 1e-4})
        writer.write(1, {"loss": 2.75}, kind="validation")
        lines = writer.path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "kind": "train", "loss": 2.5, "lr": 1e-4},
        {"step": 1, "kind": "validation", "loss": 2.75},
    ]


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path, tensorboard=False)) as writer:
        writer.write(1, {"grad_norm": float("inf"), "loss": float("nan")})
    nulls = {"grad_norm": None, "loss": None}
    assert read_metrics(writer.path)[0] == {"step": 1, "kind": "train", **nulls}


@pytest.mark.parametrize("value", ["0.9", True])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("train", "loss"), ("validation", "score"), ("minimal_pairs", "accuracy"), ("baseline", "f1")],
)
def test_text_is_no_metric(kind: str, name: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "kind": kind, name: value}) + "\n")
    with pytest.raises(DataError, match=f"{name}='?{value}"):
        read_metrics(path)


def test_resume_cuts_what_comes_again(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 10)
    write_steps(tmp_path, 7, 12, resume_step=6)
    steps = [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == list(range(1, 13))
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


class LostLock(BaseException):
    """Raised where a process that has lost the run folder's lock would exit."""


def test_loser_of_the_lock_writes_nothing(tmp_path: Path) -> None:
    held = [True]

    def check() -> None:
        if not held[0]:
            raise LostLock

    writer = MetricsWriter(tmp_path, tensorboard=False, check=check)
    writer.write(1, {"loss": 1.0})
    held[0] = False
    with pytest.raises(LostLock):
        writer.write(2, {"loss": 1.0})
    with pytest.raises(LostLock):
        MetricsWriter(tmp_path, tensorboard=False, check=check)
    assert [record["step"] for record in read_metrics(writer.path)] == [1]
    # What it wrote after its successor had started is in a file without a name.
    write_steps(tmp_path, 2, 3, resume_step=1)
    held[0] = True
    writer.write(2, {"loss": 9.0})
    writer.close()
    assert [record["step"] for record in read_metrics(writer.path)] == [1, 2, 3]


def test_a_torn_last_line_is_cut(tmp_path: Path) -> None:
    write_steps(tmp_path, 1, 3)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert [record["step"] for record in read_metrics(path)] == [1, 2]
    write_steps(tmp_path, 3, 4, resume_step=3)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("line", ["not json", "[1]", '{"loss": 1}', '{"step": "x"}'])
def test_foreign_lines_are_named_and_kept(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "kind": "train"}}\n{line}\n')
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a metrics record"):
        MetricsWriter(tmp_path, tensorboard=False)
    assert path.read_bytes() == before


def test_tensorboard_events_hold_the_same(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with closing(MetricsWriter(tmp_path)) as writer:
        writer.write(5, {"loss": 1.5})
        writer.write(5, {"loss": 1.75}, kind="validation")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(item.step, item.value) for item in events.Scalars("train/loss")] == [(5, 1.5)]
    assert events.Scalars("validation/loss")[0].value == 1.75


def test_loss_curve_is_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(MetricsWriter(tmp_path, tensorboard=False)) as writer:
        for step in (1, 2, 3):
            writer.write(step, {"loss": 5.0 / step})
        writer.write(3, {"loss": 2.0}, kind="validation")
    picture = tmp_path / "loss.png"
    labels: list[str] = []
    monkeypatch.setattr(Axes, "set_ylabel", lambda _, label: labels.append(label))
    plot_loss(writer.path, picture, unigram=6.5, unit="nats per predicted token")
    assert labels == ["loss (nats per predicted token)"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.tmp*"))
    drawn = terminal_loss_curve(writer.path, unigram=6.5, width=60)
    assert all(len(line) <= 60 for line in drawn.splitlines())
    assert all(word in drawn for word in ("train", "validation", "6.50", "optimizer step"))


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with closing(MetricsWriter(tmp_path, tensorboard=False)) as writer:
        writer.write(1, {"loss": float("nan")})
    with pytest.raises(DataError, match="no finite loss"):
        plot_loss(writer.path, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_records_survive_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class FullDisk(io.FileIO):
        """Writes part of the bytes and then fails, as a disk without space does."""

        free = 30

        def write(self, content: bytes) -> int:
            part = content[: self.free]
            self.free -= len(part)
            if content and not part:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(part)

    writer = MetricsWriter(tmp_path, tensorboard=False)
    writer._file.close()
    writer._file = disk = FullDisk(writer.path, "ab")
    for step in range(1, 4):
        writer.write(step, {"loss": 2.5})
        assert read_metrics(writer.path) == []
    assert caplog.text.count("training goes on") == 1
    disk.free = 1 << 20
    writer.write(4, {"loss": 2.25})
    assert [record["step"] for record in read_metrics(writer.path)] == [1, 2, 3, 4]
    disk.free = 0
    writer.write(5, {"loss": 2.0})
    writer.close()
    assert writer.path.read_bytes().count(b"\n") == 4


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


@pytest.mark.parametrize(
    ("kind", "values"),
    [("train", {"rates": [0.1]}), ("train", {"by_layer": {}}), ("mine", {"x": 1})],
)
def test_a_record_that_the_next_start_would_refuse_is_refused(
    tmp_path: Path, kind: Any, values: dict[str, Any]
) -> None:
    with closing(MetricsWriter(tmp_path, tensorboard=False)) as writer:
        with pytest.raises(DataError, match="step 3"):
            writer.write(3, values, kind=kind)
        writer.write(4, {"loss": 1.0})
    assert [record["step"] for record in read_metrics(writer.path)] == [4]
