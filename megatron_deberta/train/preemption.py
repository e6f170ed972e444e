"""What is asked of a run from outside: signals to any of its ranks, files in its folder.

Owns the handlers of SIGTERM (SLURM's preemption, ``scancel``, Kubernetes), SIGUSR1 and SIGUSR2
(``sbatch --signal``), the names of the files, and the ranks' agreement on the step at which to do
what is asked. Refuses to save or exit: the loop does.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import torch

from megatron_deberta.distributed.control import all_reduce_max
from megatron_deberta.distributed.topology import ProcessGroups

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler sends ahead of SIGKILL."""
STOP_FILE = "stop"
"""In the run folder: save and end, for good."""
SAVE_FILE = "save"
"""In the run folder: save and go on."""


@dataclass(frozen=True, slots=True)
class Request:
    """What any rank was asked for since the last step; the same on every rank."""

    interrupt: bool = False
    """Save and end; another job continues."""
    stop: bool = False
    """Save and end; no other job is wanted."""
    save: bool = False
    """Save."""


class StopSignal:
    """Remembers a stop signal between entering and leaving the context.

    Enter it before anything slow: until then these signals end the process at once. Only the main
    thread may. A signal that arrives inside a collective is noticed after it.

    Args:
        signals: which signals mean stop.
    """

    def __init__(self, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self._signals = tuple(signals)
        self._previous: list[object] = []
        self._received: signal.Signals | None = None

    def __enter__(self) -> StopSignal:
        self._previous = [signal.signal(number, self._remember) for number in self._signals]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in zip(self._signals, self._previous, strict=True):
            # None: installed from C, which Python cannot give back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    @property
    def received(self) -> signal.Signals | None:
        """The first stop signal this process got, for the log."""
        return self._received

    def requested(self) -> bool:
        """Whether this process got a stop signal; other ranks may not know yet."""
        return self._received is not None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # Nothing but this: a handler runs between any two bytecodes of the step.
        if self._received is None:
            self._received = signal.Signals(number)


class Requests:
    """Finds out, together with all ranks, what is asked of the run.

    Args:
        signals: remembers this process's signals.
        run_dir: folder of the run, where rank 0 looks for files.
        groups: the rank grid.
    """

    def __init__(self, signals: StopSignal, run_dir: str, groups: ProcessGroups) -> None:
        self._signals = signals
        self._stop, self._save = Path(run_dir) / STOP_FILE, Path(run_dir) / SAVE_FILE
        self._groups = groups

    def poll(self) -> Request:
        """What any rank was asked for.

        Collective over all ranks, to be called at the same place of every step, so that all ranks
        answer after the same one; signals reach them at different times, and some only one rank.
        """
        files = self._groups.rank == 0
        asked = (
            self._signals.requested(),
            files and self._stop.exists(),
            files and self._save.exists(),
        )
        numbers = torch.tensor(asked, dtype=torch.int64, device=self._groups.device)
        return Request(*(bool(number) for number in all_reduce_max(numbers, self._groups).tolist()))

    def acknowledge(self, asked: Request) -> None:
        """Take away the files of what has been done, on rank 0."""
        if self._groups.rank == 0:
            for wanted, path in ((asked.stop, self._stop), (asked.save, self._save)):
                if wanted:
                    path.unlink(missing_ok=True)
