"""What entry points outside the command line share: log lines with times, and exit codes."""

from __future__ import annotations

import logging
from collections.abc import Callable

from megatron_deberta.errors import MegatronDebertaError


def log_times() -> None:
    """Log to standard error, each line with its time."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )


def run_logged(function: Callable[[], int], logger: logging.Logger) -> int:
    """Call a function and return its exit code; an error becomes one line in the log."""
    log_times()
    try:
        return function()
    except MegatronDebertaError as error:
        logger.error("error: %s", error)
        return error.exit_code
