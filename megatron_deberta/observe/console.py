"""The view of a running job: a live panel on a terminal, one clean line a record elsewhere.

Owns what rank 0 prints while training. Refuses to compute anything (``throughput.py``) and to keep
anything (``metrics.py``).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What is known of the steps since the last record."""

    step: int
    """Optimizer steps done."""
    loss: float
    """Mean loss over the steps since the last record, nats a masked token."""
    learning_rate: float
    """Learning rate of the last step."""
    grad_norm: float
    """Global gradient norm of the last step, before clipping."""
    loss_scale: float
    """Loss scale of the last step; 1 without fp16."""
    tokens_per_second: float
    """Tokens of all ranks, padding included."""
    utilization: float
    """MFU: model FLOPs over what the measured matrix rate allows; NaN where it was not measured."""
    hardware_utilization: float
    """The same with recomputed FLOPs."""
    flops_per_second: float
    """Model FLOP/s of all ranks."""
    matmul_flops_per_second: float
    """The matrix rate of all ranks, measured at start-up."""
    seconds_left: float
    """Time to the last step at the present rate."""
    next_sentence_loss: float | None = None
    """Mean loss of pairs in the last step, nats a pair; None where rows are not pairs."""
    next_sentence_accuracy: float | None = None
    """Share of the last step's pairs told right."""


def describe_record(record: StepRecord) -> list[tuple[str, str]]:
    """Put a record into labelled text, in the order it is shown; leaves out what says nothing."""
    cells = [
        ("loss", f"{record.loss:.4f}"),
        ("lr", f"{record.learning_rate:.3e}"),
        ("grad norm", f"{record.grad_norm:.3f}"),
    ]
    if record.loss_scale != 1:
        cells.append(("loss scale", f"{record.loss_scale:g}"))
    if record.next_sentence_accuracy is not None:
        cells.append(("next sentence", f"{record.next_sentence_accuracy:.1%}"))
    cells.append(("tokens/s", f"{record.tokens_per_second:,.0f}"))
    if not math.isnan(record.utilization):
        rate = f"{record.matmul_flops_per_second / 1e12:,.3g} TFLOP/s"
        cells.append(("MFU", f"{record.utilization:.1%} of {rate}"))
        if record.hardware_utilization > record.utilization:
            cells.append(("with recomputation", f"{record.hardware_utilization:.1%}"))
    cells.append(("ETA", format_duration(record.seconds_left)))
    return cells


def format_duration(seconds: float) -> str:
    """Write seconds as ``h:mm:ss``, with days in front where there are some."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02}:{second:02}"
    return f"{days}d {clock}" if days else clock


class LiveConsole:
    """Shows training records; a context manager, used by rank 0 only.

    Args:
        total_steps: optimizer steps of the run.
        first_step: steps done before this process started.
        title: shown over the bar, such as the run's folder.
        console: where to draw; None takes standard output.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        title: str = "",
        console: Console | None = None,
    ) -> None:
        self.console = console if console is not None else Console(file=sys.stdout)
        self._total_steps = total_steps
        self._title = title
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            expand=True,
        )
        self._task = self._progress.add_task("train", total=total_steps, completed=first_step)
        self._record: StepRecord | None = None
        self._note = ""
        self._live: Live | None = None

    def __enter__(self) -> LiveConsole:
        """Start drawing, if there is a terminal to draw on."""
        if self.console.is_terminal:
            self._live = Live(self._draw(), console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the last state on the screen and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def advance(self, step: int) -> None:
        """Move the bar to a step; prints nothing where there is no terminal."""
        self._progress.update(self._task, completed=step)

    def update(self, record: StepRecord) -> None:
        """Show a record."""
        self._record = record
        self.advance(record.step)
        if self._live is not None:
            self._live.update(self._draw())
            return
        cells = " | ".join(f"{name} {value}" for name, value in describe_record(record))
        self._print(f"step {record.step}/{self._total_steps} | {cells}")

    def note(self, text: str) -> None:
        """Show a line that stays until the next one, such as a validation or a checkpoint."""
        self._note = text
        if self._live is not None:
            self._live.update(self._draw())
        else:
            self._print(text)

    def _print(self, line: str) -> None:
        # Not through rich, which would wrap the line at the width it guesses for a file.
        self.console.file.write(line + "\n")
        self.console.file.flush()

    def _draw(self) -> Group:
        parts: list[Table | Progress | str] = [self._title] if self._title else []
        if self._record is not None:
            table = Table.grid(padding=(0, 3))
            cells = describe_record(self._record)
            table.add_row(*(f"[dim]{name}[/dim]" for name, _ in cells))
            table.add_row(*(value for _, value in cells))
            parts.append(table)
        parts.append(self._progress)
        if self._note:
            parts.append(self._note)
        return Group(*parts)
