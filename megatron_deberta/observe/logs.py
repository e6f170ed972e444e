"""Logging set-up by rank; modules log through ``logging.getLogger(__name__)``."""

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

    A later call replaces the previous set-up.

    Args:
        level: minimum level of this package on rank 0; other ranks and packages show warnings and
            errors only.
        rank: rank of this process.
        world_size: number of processes; above 1, each line starts with the rank.
        console: console of the live panel; on a terminal, messages are printed above it.
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
    for old in [item for item in root.handlers if item.get_name() == HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    shown = logging.getLevelName(level.upper())
    logging.getLogger(PACKAGE).setLevel(shown if rank == 0 else max(shown, logging.WARNING))
    if level != "debug":
        # DeepSpeed logs many information messages from every rank to standard output.
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
