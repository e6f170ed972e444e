"""Signs of life of a rank: where it is, since when, and how long its own work takes.

Owns the file between a rank and its node's supervisor: 152 bytes in a node-local folder, mapped
into memory, so that a sign costs no write to a disk, no collective and no wait for a device.
Refuses to judge: ``hang.py`` and ``straggler.py`` do.

Every rank of a run passes the same borders in the same order, so the number of borders passed
(``position``) tells who is behind.

The file holds the last two signs, written in turn, each with a checksum: whoever reads while one is
being written, or after its writer was stopped halfway, finds the other one whole.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from megatron_deberta.observe.progress import ProgressObserver, Section

FOLDER_VARIABLE = "MEGATRON_DEBERTA_HEARTBEATS"
"""Names the folder to a rank; without it nobody watches, and nothing is written."""
DUMP_SIGNAL = signal.SIGRTMIN + 6
"""Makes a rank write the stacks of its threads; a number that no library here uses."""

_VALUES = struct.Struct("<9q")
_CHECKSUM = struct.Struct("<I")
_SLOT = _VALUES.size + _CHECKSUM.size
_TRIES = 10
"""A second one is for a reader that was kept waiting between the two signs."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One rank's last sign of life. Times are of the node's monotonic clock, in nanoseconds."""

    position: int
    """Borders passed; the same at the same place of the program on every rank."""
    section: Section
    step: int
    """Optimizer steps done."""
    time: int
    """When it passed the last border."""
    pid: int
    steps_timed: int = 0
    """Steps in the sums below."""
    data_time: int = 0
    """Waited for batches."""
    forward_time: int = 0
    """In forward passes: without the collectives of the batch's ranks."""
    step_time: int = 0
    """In whole steps, batches included."""


class Heartbeat(ProgressObserver):
    """Writes a rank's signs of life; a context manager.

    Args:
        path: the file; None: nobody watches.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._beat = [0, int(Section.STARTUP), 0, 0, os.getpid(), 0, 0, 0, 0]
        self._map: mmap.mmap | None = None
        self._stacks: BinaryIO | None = None
        if path is None:
            return
        with path.open("w+b") as stream:
            stream.truncate(2 * _SLOT)
            self._map = mmap.mmap(stream.fileno(), 2 * _SLOT)
        # Open for good: a rank that hangs can open nothing.
        self._stacks = stacks_path(path).open("wb")
        faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True)
        self._write()

    @classmethod
    def of_this_rank(cls, rank: int) -> Heartbeat:
        """The one that this process's supervisor looks at, if there is one."""
        folder = os.environ.get(FOLDER_VARIABLE)
        return cls(beat_path(Path(folder), rank) if folder else None)

    def __enter__(self) -> Heartbeat:
        """Nothing to do."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files; the last sign of life stays to be read."""
        if self._stacks is not None and self._map is not None:
            faulthandler.unregister(DUMP_SIGNAL)
            self._stacks.close()
            self._map.close()
            self._stacks = self._map = None

    def enter(self, section: Section, step: int | None = None) -> None:
        """Pass the border into a section.

        Args:
            section: what comes now.
            step: optimizer steps done; None: as before.
        """
        self._beat[1] = int(section)
        if step is not None:
            self._beat[2] = step
        self.mark()

    def mark(self) -> None:
        """Pass a border inside a section, such as a micro batch."""
        self._beat[0] += 1
        self._write()

    @contextmanager
    def section(self, section: Section) -> Iterator[None]:
        """Be in another section for a while."""
        before = Section(self._beat[1])
        self.enter(section)
        yield
        self.enter(before)

    def add_times(self, *, steps: int = 0, data: int = 0, forward: int = 0, whole: int = 0) -> None:
        """Count steps, and nanoseconds in their parts; written with the next border."""
        for index, value in enumerate((steps, data, forward, whole), start=5):
            self._beat[index] += value

    def _write(self) -> None:
        if self._map is None:
            return
        self._beat[3] = time.monotonic_ns()
        values = _VALUES.pack(*self._beat)
        begin = self._beat[0] % 2 * _SLOT
        self._map[begin : begin + _SLOT] = values + _CHECKSUM.pack(zlib.crc32(values))


def beat_path(folder: Path, rank: int) -> Path:
    """A rank's file."""
    return folder / f"rank_{rank}"


def stacks_path(path: Path) -> Path:
    """Where the rank of that file writes its stacks."""
    return path.with_suffix(".stacks")


def read_beat(path: Path) -> Beat | None:
    """A rank's last sign of life that is whole; None if there is none yet."""
    for _ in range(_TRIES):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(content) != 2 * _SLOT:
            return None
        signs = [sign for begin in (0, _SLOT) if (sign := _unpack(content[begin : begin + _SLOT]))]
        if signs:
            return max(signs, key=lambda sign: sign.position)
    return None


def _unpack(slot: bytes) -> Beat | None:
    """A sign; None if it is not whole."""
    values = slot[: _VALUES.size]
    if _CHECKSUM.pack(zlib.crc32(values)) != slot[_VALUES.size :]:
        return None
    position, section, *others = _VALUES.unpack(values)
    return Beat(position, Section(section), *others)
