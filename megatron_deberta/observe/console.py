"""Output on the terminal: log lines of every process, and rank 0's records of training.

Modules log through ``logging.getLogger(__name__)``. Records are a live panel on terminals, and
lines elsewhere.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console, Group
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

from megatron_deberta.errors import MegatronDebertaError

LevelName = Literal["debug", "info", "warning"]
PACKAGE = "megatron_deberta"
HANDLER_NAME = "megatron_deberta"


def describe_record(
    record: Mapping[str, float], metrics: Mapping[str, float]
) -> list[tuple[str, str]]:
    """Format a record as labelled cells in display order; omits cells without information.

    Args:
        record: values of a record of kind ``train``, by key.
        metrics: further losses and accuracies of the objective, by name.
    """
    cells = [
        ("loss", f"{record['loss']:.4f}"),
        ("lr", f"{record['learning_rate']:.3e}"),
        ("grad norm", f"{record['grad_norm']:.3f}"),
    ]
    if record["loss_scale"] != 1:
        cells.append(("loss scale", f"{record['loss_scale']:g}"))
    for name, value in metrics.items():
        kind = name.rpartition("_")[2]
        label = name.removesuffix("_accuracy").removesuffix("_loss").replace("_", " ")
        if kind == "accuracy":
            cells.append((label, f"{value:.1%}"))
        elif f"{name.removesuffix('_loss')}_accuracy" not in metrics:
            cells.append((label, f"{value:.4f}"))
    cells.append(("tokens/s", f"{record['tokens_per_second']:,.0f}"))
    used, with_recomputation = record["utilization"], record["hardware_utilization"]
    if not math.isnan(used):
        rate = f"{record['matmul_flops_per_second'] / 1e12:,.3g} TFLOP/s"
        cells.append(("MFU", f"{used:.1%} of {rate}"))
        if with_recomputation > used:
            cells.append(("with recomputation", f"{with_recomputation:.1%}"))
    cells.append(("ETA", format_duration(record["seconds_left"])))
    return cells


def format_duration(seconds: float | None) -> str:
    """Format seconds as ``h:mm:ss``, preceded by days if any."""
    if seconds is None or not math.isfinite(seconds):
        return "unknown"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}"
    return f"{days}d {clock}" if days else clock


@dataclass
class LiveConsole:
    """Shows training records; a context manager, used by rank 0 only.

    Args:
        total_steps: last step of the run.
        first_step: steps completed before this process started.
        title: shown above the progress bar, such as the run folder.
        console: console to draw on; by default standard output.
    """

    total_steps: int
    first_step: int = 0
    title: str = ""
    console: Console = field(default_factory=lambda: Console(file=sys.stdout))
    _cells: list[tuple[str, str]] = field(default_factory=list, init=False)
    _note: str = field(default="", init=False)
    _live: Live | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Create the progress bar."""
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            expand=True,
        )
        self._task = self._progress.add_task(
            "train", total=self.total_steps, completed=self.first_step
        )

    def __enter__(self) -> LiveConsole:
        """Start the live panel, if the console is a terminal."""
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._draw, console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the live panel; its last state stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def advance(self, step: int) -> None:
        """Update the progress bar; prints nothing without a terminal."""
        self._progress.update(self._task, completed=step)

    def update(self, step: int, record: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Show the record of a step; other arguments as in ``describe_record``."""
        self._cells = describe_record(record, metrics)
        self.advance(step)
        if self._live is None:
            cells = " | ".join(f"{name} {value}" for name, value in self._cells)
            self._print(f"step {step}/{self.total_steps} | {cells}")

    def note(self, text: str) -> None:
        """Show a line, such as a validation result, until the next one."""
        self._note = text
        if self._live is None:
            self._print(text)

    def _print(self, line: str) -> None:
        # Not through rich, which would wrap the line at an assumed width.
        # The line is lost if standard output is on a full disk.
        with suppress(OSError):
            self.console.file.write(line + "\n")
            self.console.file.flush()

    def _draw(self) -> Group:
        parts: list[Table | Progress | str] = [self.title] if self.title else []
        if self._cells:
            table = Table.grid(padding=(0, 3))
            table.add_row(*(f"[dim]{name}[/dim]" for name, _ in self._cells))
            table.add_row(*(value for _, value in self._cells))
            parts.append(table)
        parts.append(self._progress)
        if self._note:
            parts.append(self._note)
        return Group(*parts)


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
