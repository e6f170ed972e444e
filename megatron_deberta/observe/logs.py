"""Logging that knows its rank: rank 0 speaks, the others only warn, and say who they are.

Owns handlers and their format; every module logs through ``logging.getLogger(__name__)``. Refuses
metrics (``metrics.py``) and the live view (``console.py``).
"""

from __future__ import annotations

import logging
import sys
from typing import Literal

from rich.console import Console
from rich.logging import RichHandler

LevelName = Literal["debug", "info", "warning"]

PACKAGE = "megatron_deberta"
HANDLER_NAME = "megatron_deberta"


def setup_logging(
    level: LevelName = "info", *, rank: int = 0, world_size: int = 1, console: Console | None = None
) -> None:
    """Send log records to the terminal, or as plain lines to standard error.

    May be called again, for instance once the rank is known: the last call counts.

    Args:
        level: least severe message of this package that rank 0 shows; other ranks and other
            packages show warnings and errors only.
        rank: this process.
        world_size: processes in all; above 1, each line starts with its rank.
        console: where the live view draws; on a terminal, messages are printed above it.
    """
    handler: logging.Handler
    prefix = f"[rank {rank}] " if world_size > 1 else ""
    if console is not None and console.is_terminal:
        handler = RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S")
        handler.setFormatter(logging.Formatter(f"{prefix}%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        line = f"%(asctime)s {prefix}%(levelname)s %(message)s"
        handler.setFormatter(logging.Formatter(line, datefmt="%Y-%m-%d %H:%M:%S"))
    handler.set_name(HANDLER_NAME)

    root = logging.getLogger()
    for old in [known for known in root.handlers if known.get_name() == HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    shown = logging.getLevelName(level.upper())
    logging.getLogger(PACKAGE).setLevel(shown if rank == 0 else max(shown, logging.WARNING))
    if level != "debug":
        # It greets from every rank, at length, on standard output.
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
