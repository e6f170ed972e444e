"""Notifications of a run's events to programs and webhooks (``cluster.notify``).

A config may come from somebody else, so it does not contain commands: it names programs that the
user has put into a folder of the home directory.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path
from subprocess import SubprocessError
from urllib.parse import urlsplit

from megatron_deberta.cluster.slurm.history import Decision
from megatron_deberta.cluster.watchdog.hang import Diagnosis
from megatron_deberta.config.schema import ClusterConfig, NotifyEvent

logger = logging.getLogger("notify")

PROGRAMS = Path(".config", "megatron_deberta", "notify")
"""Folder of programs in the home directory."""
TIMEOUT_SECONDS = 10.0
"""Maximum duration of a program or a request."""


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
                if is_url(target):
                    _post(target, json.dumps(message).encode())
                else:
                    _run(target, json.dumps(message).encode())
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


def _post(url: str, content: bytes) -> None:
    request = urllib.request.Request(
        url, data=content, headers={"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
        pass


def _run(name: str, content: bytes) -> None:
    """Run a program of the user with the message on standard input."""
    subprocess.run(
        [Path.home() / PROGRAMS / name], input=content, timeout=TIMEOUT_SECONDS, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
