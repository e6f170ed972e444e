"""Runs of a search on this machine, several at a time."""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from megatron_deberta.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_REQUEUE
from megatron_deberta.finetune.search import ConfiguredRun
from megatron_deberta.processes import die_with_parent

logger = logging.getLogger(__name__)


LOG_FILE = "search.log"
"""In the run folder: output of the run, one attempt after another."""


_POLL_SECONDS = 0.2


_MAX_FIRST_FAILURES = 3
"""Failures before the first success after which no further run is started."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a run's process.

    Attributes:
        run: the run.
        code: its exit code; negative: the signal that killed it.
        seconds: its duration.
    """

    run: ConfiguredRun
    code: int
    seconds: float

    @property
    def reason(self) -> str:
        """Last line of its output, for messages."""
        lines = (self.run.folder / LOG_FILE).read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


@dataclass(slots=True)
class StopRequest:
    """Signals that ask a search to stop.

    Attributes:
        numbers: the signals received.
    """

    numbers: list[int] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Exit code of the search after the first signal."""
        return EXIT_INTERRUPTED if self.numbers[0] == signal.SIGINT else EXIT_REQUEUE


@dataclass(slots=True)
class _Process:
    run: ConfiguredRun
    popen: subprocess.Popen[bytes]
    began: float
    slot: int


def run_all(
    runs: Sequence[ConfiguredRun],
    slots: Sequence[Mapping[str, str]],
    on_end: Callable[[Outcome], None],
    stop: StopRequest,
    command: Callable[[ConfiguredRun], Sequence[str]],
) -> bool:
    """Run processes in as many slots, until all have ended or a signal stops the search.

    The first signal lets the runs save a checkpoint and end, the second kills them. After
    ``_MAX_FIRST_FAILURES`` failures without a success, no further run is started.

    Args:
        runs: the runs, in order.
        slots: environment variables of each slot.
        on_end: called at the end of each run.
        stop: signals received.
        command: returns the command of a run.

    Returns:
        Whether all runs were started.
    """
    waiting, active = list(runs), list[_Process]()
    failures, signalled = 0, 0
    try:
        while active or (waiting and not stop.numbers and failures < _MAX_FIRST_FAILURES):
            free = sorted(set(range(len(slots))) - {process.slot for process in active})
            while waiting and free and not stop.numbers and failures < _MAX_FIRST_FAILURES:
                slot = free.pop(0)
                active.append(_start(waiting.pop(0), slots[slot], slot, command))
            for process in [p for p in active if p.popen.poll() is not None]:
                active.remove(process)
                code = process.popen.returncode
                # After a success, single failures do not end the search.
                failures = -len(runs) if code == EXIT_DONE else failures + (not stop.numbers)
                on_end(Outcome(process.run, code, time.monotonic() - process.began))
            if len(stop.numbers) > signalled:
                signalled = len(stop.numbers)
                _signal_all(active, signal.SIGTERM if signalled == 1 else signal.SIGKILL)
            time.sleep(_POLL_SECONDS if active else 0)
    finally:
        _signal_all(active, signal.SIGKILL)
    return not waiting


def run_command(run: ConfiguredRun, ranks: int) -> list[str]:
    """Return the command of a run: ``pretrain``, or ``launch`` for several ranks."""
    arguments = ["launch", "--ranks", str(ranks)] if ranks > 1 else ["pretrain"]
    return [sys.executable, "-m", "megatron_deberta", *arguments, str(run.write_config())]


def slot_environments(jobs: int, ranks: int, devices: Sequence[str]) -> list[dict[str, str]]:
    """Return the environment variables of each slot.

    Args:
        jobs: number of runs at a time.
        ranks: ranks per run.
        devices: names of the GPUs, of which each rank gets one; empty: CPU, whose cores are
            divided unless OMP_NUM_THREADS is set.
    """
    if devices:
        return [
            {"CUDA_VISIBLE_DEVICES": ",".join(devices[slot * ranks : (slot + 1) * ranks])}
            for slot in range(jobs)
        ]
    if os.environ.get("OMP_NUM_THREADS"):
        return [{} for _ in range(jobs)]
    cores = len(os.sched_getaffinity(0))
    return [{"OMP_NUM_THREADS": str(max(1, cores // (jobs * ranks)))} for _ in range(jobs)]


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    import torch

    count = torch.cuda.device_count()
    if named := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return [name.strip() for name in named.split(",")][:count]
    return list(map(str, range(count)))


@contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Record SIGINT and SIGTERM; the first one does not end the process."""
    stop = StopRequest()

    def record(number: int, frame: FrameType | None) -> None:
        stop.numbers.append(number)
        text = "saving checkpoints, then ending (again: end at once)"
        logger.warning("%s: %s", signal.Signals(number).name, text)

    before = {number: signal.signal(number, record) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    run: ConfiguredRun,
    environment: Mapping[str, str],
    slot: int,
    command: Callable[[ConfiguredRun], Sequence[str]],
) -> _Process:
    words = command(run)
    run.folder.mkdir(parents=True, exist_ok=True)
    with (run.folder / LOG_FILE).open("ab") as log:
        popen = subprocess.Popen(
            words,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C on a terminal reaches the search only.
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
    return _Process(run, popen, time.monotonic(), slot)


def _signal_all(processes: Sequence[_Process], number: int) -> None:
    for process in processes:
        if process.popen.poll() is None:
            process.popen.send_signal(number)
            if number == signal.SIGKILL:
                process.popen.wait()
