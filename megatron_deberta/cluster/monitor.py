"""Whom to tell what about a run: programs and webhooks (``cluster.notify``), and Prometheus.

The monitor runs in a thread of the first node's supervisor and only reads the run folder. A config
may come from somebody else, so it does not contain commands: it names programs that the user has
put into a folder of the home directory.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from subprocess import SubprocessError
from typing import Any
from urllib.parse import urlsplit

from megatron_deberta.cluster.slurm.history import Decision
from megatron_deberta.cluster.slurm.status import WORDS, RunStatus, gather
from megatron_deberta.cluster.watchdog.detection import Diagnosis
from megatron_deberta.config.schema import ClusterConfig, NotifyEvent
from megatron_deberta.errors import ConfigError, MegatronDebertaError
from megatron_deberta.observe.console import format_duration

logger = logging.getLogger("monitor")

PROGRAMS = Path(".config", "megatron_deberta", "notify")
"""Folder of programs in the home directory."""
TIMEOUT_SECONDS = 10.0
"""Maximum duration of a program or a request."""
PREFIX = "megatron_deberta"
HTTP_ADDRESS = "127.0.0.1"
INTERVAL_SECONDS = 15.0


class Notifier:
    """Sends events of one run; a failure is logged and has no other effect.

    Args:
        config: targets and events.
        run_dir: folder of the run.
    """

    def __init__(self, config: ClusterConfig, run_dir: str | os.PathLike[str]) -> None:
        self._config = config
        self._run_dir = str(run_dir)

    def send(self, event: NotifyEvent, text: str) -> None:
        """Notify every target, as JSON with ``event``, ``run``, ``host``, ``time`` and ``text``."""
        if event not in self._config.notify_events:
            return
        message = {
            "event": event,
            "run": self._run_dir,
            "host": socket.gethostname(),
            "time": round(time.time(), 3),
            "text": f"{self._run_dir}: {text}",
        }
        for target in self._config.notify:
            try:
                _deliver(target, json.dumps(message).encode())
            # RuntimeError: there is no home directory.
            except (OSError, ValueError, RuntimeError, HTTPException, SubprocessError) as error:
                # Without its path, in which services put secrets.
                name = urlsplit(target).hostname if is_url(target) else target
                logger.warning("cluster.notify: %s: %s", name, type(error).__name__)

    def send_attempt_end(self, diagnosis: Diagnosis | None, decision: Decision) -> None:
        """Notify of a hang, and of the end of the run if no further attempt follows."""
        if diagnosis is not None and diagnosis.kind == "hang":
            self.send("stalled", diagnosis.reason)
        if not decision.continues:
            self.send("ended", f"{decision.reason} (exit code {decision.code})")


def is_url(target: str) -> bool:
    """Return whether a target is a webhook; otherwise it is the name of a program."""
    return target.startswith(("http://", "https://"))


def _deliver(target: str, content: bytes) -> None:
    """Post a message, or run a program of the user with the message on standard input."""
    if is_url(target):
        request = urllib.request.Request(
            target, data=content, headers={"Content-Type": "application/json"}, method="POST"
        )
        urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS).close()
        return
    subprocess.run(
        [Path.home() / PROGRAMS / target], input=content, timeout=TIMEOUT_SECONDS, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def metrics_of(status: RunStatus) -> dict[str, tuple[str, float | None]]:
    """Return the numbers that are exported about a run.

    Returns:
        Description and value by name without the prefix; names of counters end with ``_total``,
        and None is unknown and not exported.
    """
    saved = status.checkpoint_time
    age = None if saved is None else max(0.0, time.time() - saved)
    return {
        "step": ("Completed optimizer steps", status.step),
        "target_step": ("Last step of the run", status.target_step),
        "loss": ("Mean training loss of the last record, in nats", status.loss),
        "tokens_per_second": ("Tokens per second of all ranks", status.tokens_per_second),
        "seconds_left": ("Estimated time to the last step", status.seconds_left),
        "checkpoint_step": ("Step of the newest checkpoint", status.committed_step),
        "checkpoint_age_seconds": ("Age of the newest checkpoint", age),
        "restarts_total": ("Job attempts after the first", max(0, len(status.attempts) - 1)),
        "faults_total": ("Attempts that failed, or were killed or lost", status.faults),
        "rollbacks_total": ("Rollbacks of the numeric guard", status.rollbacks),
        "skipped_updates_total": ("Updates that the guard skipped", status.skipped_updates),
        "bad_nodes": ("Excluded nodes", len(status.bad_nodes)),
    }


class PrometheusExporter:
    """Exports the status of one run until it is closed.

    Args:
        run_dir: folder of the run, the label of all metrics.
        file: file for node_exporter's textfile collector; None: none.
        port: port of the HTTP endpoint; None: none.

    Raises:
        ConfigError: ``prometheus_client`` is not installed.
        OSError: the port is in use.
    """

    def __init__(self, run_dir: str | os.PathLike[str], file: str | None, port: int | None) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise ConfigError(
                "cluster.prometheus_file and cluster.prometheus_port need prometheus_client; "
                "install it"
            ) from None
        self._run = str(run_dir)
        self._file = file
        self._status: RunStatus | None = None
        self._registry: Any = CollectorRegistry()
        self._registry.register(self)
        self._server: Any = None
        if port:
            self._server, _ = start_http_server(port, HTTP_ADDRESS, self._registry)

    def close(self) -> None:
        """Stop the endpoint; the file remains."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def update(self, status: RunStatus) -> None:
        """Export a new status.

        Raises:
            OSError: the file cannot be written.
        """
        from prometheus_client import write_to_textfile

        self._status = status
        if self._file:
            Path(self._file).parent.mkdir(parents=True, exist_ok=True)
            write_to_textfile(self._file, self._registry)

    def collect(self) -> Iterator[Any]:
        """Yield the metric families; called by the library."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        if self._status is None:
            return
        for name, (description, value) in metrics_of(self._status).items():
            if value is not None:
                is_counter = name.endswith("_total")
                kind = CounterMetricFamily if is_counter else GaugeMetricFamily
                family = kind(f"{PREFIX}_{name}", description, labels=["run"])
                family.add_metric([self._run], value)
                yield family
        states = GaugeMetricFamily(
            f"{PREFIX}_condition", "1 for the present condition", labels=["run", "condition"]
        )
        for word in WORDS:
            states.add_metric([self._run, word], float(word == self._status.condition))
        yield states


def export_once(config: ClusterConfig, run_dir: str | os.PathLike[str]) -> None:
    """Update the file for Prometheus after the end of an attempt, when no monitor runs."""
    if config.prometheus_file:
        try:
            exporter = PrometheusExporter(run_dir, config.prometheus_file, port=None)
            exporter.update(gather(run_dir, ask_slurm=False))
        except (OSError, MegatronDebertaError) as error:
            logger.warning("no metrics for Prometheus: %s", error)


class RunMonitor:
    """Watches one run; a context manager. Without anybody to tell, it does nothing.

    Args:
        config: whom to tell what.
        run_dir: folder of the run.
    """

    def __init__(self, config: ClusterConfig, run_dir: str | os.PathLike[str]) -> None:
        self._config = config
        self._run_dir = run_dir
        self._notifier = Notifier(config, run_dir)
        self._exporter: PrometheusExporter | None = None
        self._rollbacks: int | None = None
        self._is_late = self._is_stalled = False
        self._last_error = ""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)

    def __enter__(self) -> RunMonitor:
        """Start the thread."""
        config = self._config
        if config.prometheus_file or config.prometheus_port:
            try:
                self._exporter = PrometheusExporter(
                    self._run_dir, config.prometheus_file, config.prometheus_port
                )
            except (OSError, MegatronDebertaError) as error:
                logger.warning("no metrics for Prometheus: %s", error)
        if self._exporter is not None or config.notify:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Check once more, then stop the thread."""
        self._end.set()
        if self._thread.ident is not None:
            # Not longer: the run folder may not answer.
            self._thread.join(timeout=2.0)
        if self._exporter is not None:
            self._exporter.close()

    def look(self) -> None:
        """Read the status, export it, and tell about changes.

        Raises:
            MegatronDebertaError, OSError: it cannot be read or written.
        """
        status = gather(self._run_dir, ask_slurm=False)
        self._tell(status)
        if self._exporter is not None:
            self._exporter.update(status)

    def _watch(self) -> None:
        ends = False
        while True:
            try:
                self.look()
                self._last_error = ""
            except (OSError, MegatronDebertaError) as error:
                if str(error) != self._last_error:
                    logger.warning("monitor: %s", error)
                self._last_error = str(error)
            if ends:
                return
            ends = self._end.wait(INTERVAL_SECONDS)

    def _tell(self, status: RunStatus) -> None:
        before = status.rollbacks if self._rollbacks is None else self._rollbacks
        self._rollbacks = status.rollbacks
        if status.rollbacks > before:
            total = f"{status.rollbacks} in all"
            self._notifier.send("rollback", f"rolled back, now at step {status.step:,} ({total})")
        is_stalled = status.condition == "stalled"
        if is_stalled and not self._is_stalled:
            self._notifier.send("stalled", status.reason)
        self._is_stalled = is_stalled
        is_late = self._exceeds_deadline(status)
        if is_late and not self._is_late:
            left = format_duration(status.seconds_left)
            self._notifier.send(
                "deadline", f"{left} left, beyond the deadline {self._config.deadline}"
            )
        self._is_late = is_late

    def _exceeds_deadline(self, status: RunStatus) -> bool:
        if not self._config.deadline or status.seconds_left is None:
            return False
        deadline = datetime.fromisoformat(self._config.deadline).timestamp()
        return time.time() + status.seconds_left > deadline
