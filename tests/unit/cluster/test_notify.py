"""Notifications reach programs and webhooks, and never end a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.cluster.notify import PROGRAMS, Notifier
from megatron_deberta.cluster.slurm.history import Decision
from megatron_deberta.cluster.watchdog.hang import Diagnosis
from megatron_deberta.config import load_config
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.errors import ConfigError


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which the user's program ``append`` writes its input."""
    monkeypatch.setenv("HOME", str(tmp_path))
    script = tmp_path / PROGRAMS / "append"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\ncat >> {tmp_path}/told\necho >> {tmp_path}/told\n")
    script.chmod(0o755)
    return tmp_path / "told"


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


def messages(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_program_and_webhook_get_the_message(
    program: Path, webhook: tuple[str, list[dict[str, Any]]]
) -> None:
    url, told = webhook
    Notifier(ClusterConfig(notify=("append", url)), "runs/base").send("rollback", "to step 7")
    assert messages(program) == told
    assert (told[0]["event"], told[0]["run"]) == ("rollback", "runs/base")
    assert told[0]["text"] == "runs/base: to step 7"


def test_only_chosen_events_are_sent(program: Path) -> None:
    config = ClusterConfig(notify=("append",), notify_events=("ended",))
    notifier = Notifier(config, "run")
    notifier.send("rollback", "to step 7")
    hang = Diagnosis("hang", (1,), ("node1",), "rank 1 hangs")
    notifier.send_attempt_end(hang, Decision(True, 75, "rank 1 hangs"))
    assert not program.exists()
    notifier.send_attempt_end(None, Decision(False, 93, "no new checkpoint"))
    assert messages(program)[0]["text"] == "run: no new checkpoint (exit code 93)"


def test_a_hang_is_told_and_a_requeue_is_not(program: Path) -> None:
    notifier = Notifier(ClusterConfig(notify=("append",)), "run")
    hang = Diagnosis("hang", (1,), ("node1",), "rank 1 hangs")
    notifier.send_attempt_end(hang, Decision(True, 75, "rank 1 hangs"))
    notifier.send_attempt_end(None, Decision(True, 75, "stopped with a checkpoint"))
    assert [message["event"] for message in messages(program)] == ["stalled"]


def test_a_failing_target_is_logged_without_its_secret(
    program: Path, caplog: pytest.LogCaptureFixture
) -> None:
    targets = ("http://127.0.0.1:9/services/SECRET", "absent", "append")
    Notifier(ClusterConfig(notify=targets), "run").send("ended", "finished")
    assert [message["event"] for message in messages(program)] == ["ended"]
    assert "127.0.0.1: URLError" in caplog.text
    assert "absent: FileNotFoundError" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.parametrize(
    "target", ["rm -rf x", "/bin/true", "../append", "a/b", "", "file:///etc/passwd", "-x"]
)
def test_a_config_contains_no_command(target: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"cluster": {"notify": [target]}}))
    with pytest.raises(ConfigError, match="neither a URL nor the name of a program"):
        load_config(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("notify_events", "[ended, strange]"),
        ("deadline", "tomorrow"),
        ("prometheus_port", "70000"),
        ("prometheus_file", "metrics.txt"),
    ],
)
def test_wrong_values_are_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.{key}"):
        load_config(None, [f"cluster.{key}={value}"])
