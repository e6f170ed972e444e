"""Monitor of a run on its first node: Prometheus metrics, and notifications of what happens to it.

It only reads the run folder, in a thread of the supervisor.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack
from datetime import datetime

from megatron_deberta.cluster.notify import Notifier
from megatron_deberta.cluster.prometheus import PrometheusExporter
from megatron_deberta.cluster.slurm.status import RunStatus, gather
from megatron_deberta.config.schema import ClusterConfig
from megatron_deberta.errors import MegatronDebertaError
from megatron_deberta.observe.console import format_duration

logger = logging.getLogger("supervisor")

INTERVAL_SECONDS = 15.0


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
        self._stack = ExitStack()
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
                self._exporter = self._stack.enter_context(
                    PrometheusExporter(
                        self._run_dir, config.prometheus_file, config.prometheus_port
                    )
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
        self._stack.close()

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
