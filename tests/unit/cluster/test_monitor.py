"""What the monitor of a run exports and tells."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, step_dir
from megatron_deberta.cluster.monitor import (
    PREFIX,
    Notifier,
    PrometheusExporter,
    RunMonitor,
    export_once,
    metrics_of,
)
from megatron_deberta.cluster.run_lock import Holder
from megatron_deberta.cluster.slurm.history import Decision, JobHistory
from megatron_deberta.cluster.slurm.status import gather
from megatron_deberta.cluster.watchdog.detection import Diagnosis
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.errors import ConfigError
from megatron_deberta.observe.metrics import FILE_NAME
from tests.support.jobs import ROOT, free_port
from tests.support.notify_program import NotifyProgram


class Run:
    """A run folder to which events are added."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history = JobHistory(folder)
        self.history.append("submit", links=1)
        self.history.append("start", link="1.0", step=0, nodes="here")
        (folder / "config.yaml").write_text("train: {steps: 100}\n")
        self.record("train", loss=2.5, tokens_per_second=1e4, seconds_left=50.0)
        committed = step_dir(folder, 10) / COMMITTED_FILE
        committed.parent.mkdir(parents=True)
        committed.touch()
        os.utime(committed, (time.time() - 30, time.time() - 30))

    def record(self, kind: str, **values: Any) -> None:
        with (self.folder / FILE_NAME).open("a") as stream:
            stream.write(json.dumps({"step": 20, "kind": kind, **values}) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    messages: list[tuple[str, str]] = []
    monkeypatch.setattr(Notifier, "send", lambda self, event, text: messages.append((event, text)))
    return messages


def test_rollbacks_are_told_once_each(run: Run, told: list[tuple[str, str]]) -> None:
    watching = RunMonitor(ClusterConfig(), run.folder)
    run.record("guard", event="rollback", skipped=3)
    watching.look()
    assert told == []
    for number in (2, 3):
        run.record("guard", event="rollback", skipped=3)
        watching.look()
        watching.look()
        assert told[-1] == ("rollback", f"rolled back, now at step 20 ({number} in all)")
    assert len(told) == 2


def test_an_eta_beyond_the_deadline_is_told_when_it_becomes_so(
    run: Run, told: list[tuple[str, str]]
) -> None:
    deadline = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600))
    watching = RunMonitor(ClusterConfig(deadline=deadline), run.folder)
    watching.look()
    assert told == []
    for seconds, count in ((7200.0, 1), (7300.0, 1), (60.0, 1), (9000.0, 2)):
        run.record("train", seconds_left=seconds)
        watching.look()
        assert len(told) == count
    assert told[0] == ("deadline", f"2:00:00 left, beyond the deadline {deadline}")


def test_a_stalled_run_is_told_once(run: Run, told: list[tuple[str, str]]) -> None:
    watching = RunMonitor(ClusterConfig(), run.folder)
    (run.folder / "chain.jsonl").write_text(
        '{"event": "start", "time": 1.0, "link": "1.0", "step": 0, "nodes": "here"}\n'
    )
    for path in (run.folder / FILE_NAME, step_dir(run.folder, 10) / COMMITTED_FILE):
        os.utime(path, (1, 1))
    lock = run.folder / "lock" / "00000001.json"
    lock.parent.mkdir()
    holder = replace(Holder.this_process(), since="2026-01-01T00:00:00+00:00")
    lock.write_bytes(holder.to_json())
    watching.look()
    watching.look()
    assert [event for event, _ in told] == ["stalled"]
    assert "no new record for" in told[0][1]


def test_without_anybody_to_tell_nothing_is_read(run: Run) -> None:
    with RunMonitor(ClusterConfig(), run.folder) as watching:
        assert watching._thread.ident is None


def test_a_damaged_run_folder_does_not_end_the_monitor(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    (run.folder / FILE_NAME).write_text("nonsense\n")
    with RunMonitor(ClusterConfig(notify=("absent",)), run.folder):
        pass
    assert "monitor: " in caplog.text


def test_file_and_endpoint_of_prometheus(run: Run) -> None:
    pytest.importorskip("prometheus_client")
    file, port = run.folder / "export" / "run.prom", free_port()
    with closing(PrometheusExporter(run.folder, str(file), port)) as exporter:
        exporter.update(gather(run.folder, ask_slurm=False))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            served = answer.read().decode()
    shown = {
        name: float(value)
        for name, value in re.findall(r"^(\w+)\{run=\"[^\"]*\"\} (\S+)$", file.read_text(), re.M)
    }
    assert shown[f"{PREFIX}_step"] == 20
    assert shown[f"{PREFIX}_loss"] == 2.5
    assert shown[f"{PREFIX}_tokens_per_second"] == 1e4
    assert shown[f"{PREFIX}_restarts_total"] == shown[f"{PREFIX}_faults_total"] == 0
    assert 30 <= shown[f"{PREFIX}_checkpoint_age_seconds"] < 60
    assert f'{PREFIX}_condition{{condition="running",run="{run.folder}"}} 1.0' in served
    assert {line.split("{")[0] for line in served.splitlines()} == {
        line.split("{")[0] for line in file.read_text().splitlines()
    }


def test_the_file_says_that_the_run_has_failed(run: Run) -> None:
    pytest.importorskip("prometheus_client")
    config = ClusterConfig(prometheus_file=str(run.folder / "run.prom"))
    export_once(ClusterConfig(), run.folder)
    assert not Path(config.prometheus_file).exists()
    run.history.end_attempt("1.0", Decision(False, 93, "no progress"), 1)
    export_once(config, run.folder)
    failed = f'{PREFIX}_condition{{condition="failed",run="{run.folder}"}} 1.0'
    assert failed in Path(config.prometheus_file).read_text()


def test_a_port_in_use_is_a_warning(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("prometheus_client")
    port = free_port()
    with RunMonitor(ClusterConfig(prometheus_port=port), run.folder):
        with RunMonitor(ClusterConfig(prometheus_port=port), run.folder):
            pass
    assert "no metrics for Prometheus" in caplog.text


def test_the_dashboard_shows_exported_metrics(run: Run) -> None:
    dashboard = json.loads((ROOT / "launch" / "grafana.json").read_text())
    shown = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(rf"{PREFIX}_(\w+)", target["expr"])
    }
    assert shown == {*metrics_of(gather(run.folder, ask_slurm=False)), "condition"}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NotifyProgram:
    monkeypatch.setenv("HOME", str(tmp_path))
    return NotifyProgram(tmp_path)


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """URL of a server, and the messages that it gets."""
    told: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", told
    server.shutdown()
    server.server_close()
    thread.join()


def test_program_and_webhook_get_the_message(
    program: NotifyProgram, webhook: tuple[str, list[dict[str, Any]]]
) -> None:
    url, told = webhook
    Notifier(ClusterConfig(notify=("append", url)), "runs/base").send("rollback", "to step 7")
    assert program.messages() == told
    assert (told[0]["event"], told[0]["run"]) == ("rollback", "runs/base")
    assert told[0]["text"] == "runs/base: to step 7"


def test_only_chosen_events_are_sent(program: NotifyProgram) -> None:
    hang = Diagnosis("hang", (1,), ("node1",), "rank 1 hangs")
    every = ClusterConfig(notify=("append",))
    notifier = Notifier(replace(every, notify_events=("ended",)), "run")
    notifier.send("rollback", "to step 7")
    notifier.send_attempt_end(hang, Decision(True, 75, "rank 1 hangs"))
    assert program.messages() == []
    notifier.send_attempt_end(None, Decision(False, 93, "no new checkpoint"))
    assert program.messages()[0]["text"] == "run: no new checkpoint (exit code 93)"
    # By default a hang is told, and a requeue is not.
    for diagnosis in (hang, None):
        Notifier(every, "run").send_attempt_end(diagnosis, Decision(True, 75, "goes on"))
    assert [message["event"] for message in program.messages()] == ["ended", "stalled"]


def test_a_failing_target_is_logged_without_its_secret(
    program: NotifyProgram, caplog: pytest.LogCaptureFixture
) -> None:
    targets = ("http://127.0.0.1:9/services/SECRET", "absent", "append")
    Notifier(ClusterConfig(notify=targets), "run").send("ended", "finished")
    assert [message["event"] for message in program.messages()] == ["ended"]
    assert "127.0.0.1: URLError" in caplog.text
    assert "absent: FileNotFoundError" in caplog.text
    assert "SECRET" not in caplog.text


NO_PROGRAMS = ("rm -rf x", "/bin/true", "../append", "a/b", "", "file:///etc/passwd", "-x")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("notify", json.dumps([target])) for target in NO_PROGRAMS),
        ("notify_events", "[ended, strange]"),
        ("deadline", "tomorrow"),
        ("prometheus_port", "70000"),
        ("prometheus_file", "metrics.txt"),
    ],
)
def test_wrong_values_are_refused(key: str, value: str) -> None:
    problem = ".*neither a URL nor the name of a program" * (key == "notify")
    with pytest.raises(ConfigError, match=f"cluster.{key}{problem}"):
        load_config(None, [f"cluster.{key}={value}"])
