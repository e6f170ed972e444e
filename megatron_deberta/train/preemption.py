"""Stop and save requests from outside: signals to any rank, and files in the run folder.

Signals are SIGTERM (SLURM preemption, ``scancel``, Kubernetes), SIGUSR1 and SIGUSR2
(``sbatch --signal``), and SIGINT (Ctrl-C).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from megatron_deberta.distributed.control import all_reduce_max
from megatron_deberta.distributed.topology import ProcessGroups

# Signals that a scheduler sends ahead of SIGKILL
PREEMPTION_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# File in the run folder: save and end; do not requeue
STOP_FILE = "stop"
# File in the run folder: save and continue
SAVE_FILE = "save"
_SHOW_CURSOR = b"\x1b[?25h"
_INTERRUPTED = b"\nCtrl-C: saving after this step; again to stop at once without saving\n"
_INTERRUPTED_LATE = _INTERRUPTED.replace(b"this step", b"the next step at the latest")


@dataclass(frozen=True, slots=True)
class Request:
    """Requests to any rank since the last step; the same on every rank.

    Attributes:
        preempt: save and end; another job resumes.
        interrupt: Ctrl-C: save and end; the user resumes.
        stop: save and end; do not requeue.
        save: save and continue.
    """

    preempt: bool = False
    interrupt: bool = False
    stop: bool = False
    save: bool = False


class SignalRecorder:
    """Records stop signals within its context; only for the main thread.

    Enter it before anything slow: until then these signals end the process at once. A signal that
    arrives inside a collective is noticed after it. A second SIGINT ends the process at once.

    Args:
        announces: print a line when SIGINT arrives.

    Attributes:
        received: the first stop signal of this process, or SIGINT if that has arrived, too.
        is_late: whether the step in progress has exchanged its requests, so that a signal that
            arrives now is noticed by the next one, unless another rank got it before.
    """

    def __init__(self, *, announces: bool = False) -> None:
        self._announces = announces
        self._previous: dict[signal.Signals, object] = {}
        self.received: signal.Signals | None = None
        self.is_late = False

    def __enter__(self) -> SignalRecorder:
        for number in (*PREEMPTION_SIGNALS, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None: a handler installed from C, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # type: ignore[arg-type]

    def _record(self, number: int, frame: FrameType | None) -> None:
        # As little as possible: a handler runs between any two bytecodes of the step.
        if self.received is None or number == signal.SIGINT:
            self.received = signal.Signals(number)
        if number == signal.SIGINT:
            # The default action ends also a process that waits in a collective.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if self._announces:
                line = _INTERRUPTED_LATE if self.is_late else _INTERRUPTED
                os.write(2, _SHOW_CURSOR * os.isatty(2) + line)


class Requests:
    """Collects requests from all ranks.

    Args:
        signals: stop signals of this process.
        run_dir: run folder; rank 0 looks for the request files there.
        groups: the rank grid.
    """

    def __init__(self, signals: SignalRecorder, run_dir: str, groups: ProcessGroups) -> None:
        self._signals = signals
        self._stop, self._save = Path(run_dir) / STOP_FILE, Path(run_dir) / SAVE_FILE
        self._groups = groups
        self._found: tuple[bool, bool] | None = None
        self._exchanged: Request | None = None

    def look_for_files(self) -> None:
        """Look for request files now, for the next ``own`` or ``poll``.

        Call it while the device computes: a look at a shared file system can take long.
        """
        is_first = self._groups.rank == 0
        self._found = is_first and self._stop.exists(), is_first and self._save.exists()

    def own(self) -> tuple[bool, ...]:
        """Return the requests to this rank, in the order of ``Request``."""
        if self._found is None:
            self.look_for_files()
        found, self._found = self._found, None
        # Set first: a signal between the two is announced too late, never too early.
        self._signals.is_late = True
        received = self._signals.received
        return received in PREEMPTION_SIGNALS, received is signal.SIGINT, *(found or ())

    def receive(self, flags: Iterable[bool]) -> None:
        """Set what the next ``poll`` returns: the requests to any rank, exchanged by a step."""
        self._exchanged = Request(*flags)

    def poll(self) -> Request:
        """Return the requests to any rank. Collective over all ranks.

        Called at the same places of the program, so that all ranks act after the same step:
        signals arrive at different times, and some on one rank only.
        """
        exchanged, self._exchanged = self._exchanged, None
        if exchanged is not None:
            self._signals.is_late = False
            return exchanged
        numbers = torch.tensor(self.own(), dtype=torch.int64, device=self._groups.device)
        self._signals.is_late = False
        return Request(*(bool(number) for number in all_reduce_max(numbers, self._groups).tolist()))

    def should_abort(self) -> bool:
        """Return whether a signal asks the process to end soon. Collective over all ranks."""
        request = self.poll()
        return request.preempt or request.interrupt

    def acknowledge(self, request: Request) -> None:
        """Remove the files of completed requests, on rank 0."""
        if self._groups.rank == 0:
            for requested, path in ((request.stop, self._stop), (request.save, self._save)):
                if requested:
                    path.unlink(missing_ok=True)
