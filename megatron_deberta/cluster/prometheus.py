"""Metrics of a run for Prometheus: a file for node_exporter, or an HTTP endpoint of localhost."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_deberta.cluster.slurm.condition import WORDS
from megatron_deberta.cluster.slurm.status import RunStatus, gather
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.errors import ConfigError, MegatronDebertaError

logger = logging.getLogger("supervisor")

PREFIX = "megatron_deberta"
HTTP_ADDRESS = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported number."""

    name: str
    """Without the prefix; names of counters end with ``_total``."""
    help: str
    value: float | None
    """None: unknown, and not exported."""


def metrics_of(status: RunStatus) -> list[Metric]:
    """Return the numbers that are exported about a run."""
    saved = status.checkpoint_time
    age = None if saved is None else max(0.0, time.time() - saved)
    return [
        Metric("step", "Completed optimizer steps", status.step),
        Metric("target_step", "Last step of the run", status.target_step),
        Metric("loss", "Mean training loss of the last record, in nats", status.loss),
        Metric("tokens_per_second", "Tokens per second of all ranks", status.tokens_per_second),
        Metric("seconds_left", "Estimated time to the last step", status.seconds_left),
        Metric("checkpoint_step", "Step of the newest checkpoint", status.committed_step),
        Metric("checkpoint_age_seconds", "Age of the newest checkpoint", age),
        Metric("restarts_total", "Job attempts after the first", max(0, len(status.attempts) - 1)),
        Metric("faults_total", "Attempts that failed, or were killed or lost", status.faults),
        Metric("rollbacks_total", "Rollbacks of the numeric guard", status.rollbacks),
        Metric("skipped_updates_total", "Updates that the guard skipped", status.skipped_updates),
        Metric("bad_nodes", "Excluded nodes", len(status.bad_nodes)),
    ]


class PrometheusExporter:
    """Exports the status of one run; a context manager.

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

    def __enter__(self) -> PrometheusExporter:
        """Return the exporter."""
        return self

    def __exit__(self, *_: object) -> None:
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
        from prometheus_client import metrics_core as core

        if self._status is None:
            return
        for metric in metrics_of(self._status):
            if metric.value is not None:
                is_counter = metric.name.endswith("_total")
                family = core.CounterMetricFamily if is_counter else core.GaugeMetricFamily
                yield self._filled(family(f"{PREFIX}_{metric.name}", metric.help, labels=["run"]),
                                   metric.value)  # fmt: skip
        states = core.GaugeMetricFamily(
            f"{PREFIX}_condition", "1 for the present condition", labels=["run", "condition"]
        )
        for word in WORDS:
            states.add_metric([self._run, word], float(word == self._status.condition))
        yield states

    def _filled(self, family: Any, value: float) -> Any:
        family.add_metric([self._run], value)
        return family


def export_once(config: ClusterConfig, run_dir: str | os.PathLike[str]) -> None:
    """Update the file for Prometheus after the end of an attempt, when no monitor runs."""
    if config.prometheus_file:
        try:
            with PrometheusExporter(run_dir, config.prometheus_file, port=None) as exporter:
                exporter.update(gather(run_dir, ask_slurm=False))
        except (OSError, MegatronDebertaError) as error:
            logger.warning("no metrics for Prometheus: %s", error)
