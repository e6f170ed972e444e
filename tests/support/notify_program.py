"""A program for ``cluster.notify`` that appends its input to a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_deberta.cluster.monitor import PROGRAMS


class NotifyProgram:
    """The program ``append`` in a home directory.

    Args:
        home: the directory.
    """

    def __init__(self, home: Path) -> None:
        self.file = home / "told"
        script = home / PROGRAMS / "append"
        script.parent.mkdir(parents=True)
        script.write_text(f"#!/bin/sh\ncat >> {self.file}\necho >> {self.file}\n")
        script.chmod(0o755)

    def messages(self) -> list[dict[str, Any]]:
        """Return what it was told."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [json.loads(line) for line in lines]
