"""Signals that ask a run to stop at a safe point.

Owns the handlers of SIGTERM (SLURM's preemption, ``scancel``, Kubernetes), SIGUSR1 and SIGUSR2
(``sbatch --signal``) and the ranks' agreement on the step to stop at. Refuses to save or exit: the
loop does, when ``agree`` says so.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import FrameType, TracebackType

from megatron_deberta.parallel.agreement import any_rank
from megatron_deberta.parallel.topology import ProcessGroups

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What a scheduler sends ahead of SIGKILL."""


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

    def agree(self, groups: ProcessGroups) -> bool:
        """Whether any rank got a stop signal.

        Collective over all ranks, to be called at the same place of every step, so that all ranks
        stop after the same one; signals reach them at different times, and some only one rank.

        Args:
            groups: the rank grid.

        Returns:
            The same on every rank.
        """
        return any_rank(self.requested(), groups)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # Nothing but this: a handler runs between any two bytecodes of the step.
        if self._received is None:
            self._received = signal.Signals(number)
