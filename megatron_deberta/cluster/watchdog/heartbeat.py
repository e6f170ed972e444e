"""Heartbeats of ranks: section, step, position, and the time that its own work takes.

A heartbeat is a file of 152 bytes in a node-local folder, mapped into memory, so that a beat costs
no disk access, collective or device synchronisation. The node's supervisor reads it. All ranks pass
the same section borders in the same order, so their number (``position``) shows which rank is
behind.

The file has two slots with checksums, written alternately: a reader finds an intact beat even if
the writer is writing, or was stopped while writing, the other one.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import shutil
import signal
import struct
import tempfile
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from megatron_deberta.errors import MegatronDebertaError
from megatron_deberta.observe.progress import ProgressObserver, Section

logger = logging.getLogger("supervisor")

MEMORY_FOLDER = "/dev/shm"
"""File system in memory."""
FOLDER_VARIABLE = "MEGATRON_DEBERTA_HEARTBEATS"
"""Environment variable with the folder of heartbeats; without it none are written."""
DUMP_SIGNAL = signal.SIGRTMIN + 6
"""Makes a rank write the stacks of its threads; no library used here handles it."""

_VALUES = struct.Struct("<9q")
_CHECKSUM = struct.Struct("<I")
_SLOT = _VALUES.size + _CHECKSUM.size
_TRIES = 10
"""More than one is needed if the reader was delayed between the two slots."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's last heartbeat; times in nanoseconds of the node's monotonic clock."""

    position: int
    """Number of borders passed; equal on all ranks at the same place of the program."""
    section: Section
    step: int
    time: int
    """Of the last border."""
    pid: int
    steps_timed: int = 0
    """Number of steps in the sums below."""
    data_time: int = 0
    forward_time: int = 0
    """Forward passes, without data-parallel collectives."""
    step_time: int = 0
    """Whole steps, including batches."""


class Heartbeat(ProgressObserver):
    """Writes a rank's signs of life; a context manager.

    Args:
        path: the file; None: write nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._beat = [0, int(Section.STARTUP), 0, 0, os.getpid(), 0, 0, 0, 0]
        self._map: mmap.mmap | None = None
        self._stacks: BinaryIO | None = None
        if path is None:
            return
        allocate_beat(path)
        with path.open("r+b") as stream:
            self._map = mmap.mmap(stream.fileno(), 2 * _SLOT)
        # Kept open, because a hanging rank cannot open files.
        self._stacks = stacks_path(path).open("wb")
        faulthandler.register(DUMP_SIGNAL, file=self._stacks, all_threads=True)
        self._write()

    @classmethod
    def of_this_rank(cls, rank: int) -> Heartbeat:
        """Return the heartbeat that this process's supervisor reads, if there is one."""
        folder = os.environ.get(FOLDER_VARIABLE)
        return cls(beat_path(Path(folder), rank) if folder else None)

    def __enter__(self) -> Heartbeat:
        """Return the heartbeat."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files; the last beat remains readable."""
        if self._stacks is not None and self._map is not None:
            faulthandler.unregister(DUMP_SIGNAL)
            self._stacks.close()
            self._map.close()
            self._stacks = self._map = None

    def enter(self, section: Section, step: int | None = None) -> None:
        """Enter a section.

        Args:
            section: the section.
            step: optimizer steps done; None: unchanged.
        """
        super().enter(section)
        self._beat[1] = int(section)
        if step is not None:
            self._beat[2] = step
        self.mark()

    def mark(self) -> None:
        """Record progress inside a section, such as a micro batch."""
        self._beat[0] += 1
        self._write()

    def add_times(self, *, steps: int = 0, data: int = 0, forward: int = 0, whole: int = 0) -> None:
        """Add steps, and nanoseconds of their parts; written with the next beat."""
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
    """Return the file of a rank's heartbeat."""
    return folder / f"rank_{rank}"


def allocate_beat(path: Path) -> None:
    """Create the file of a heartbeat with its memory.

    Without it, the first beat on a full ``/dev/shm`` would end the rank with SIGBUS.

    Raises:
        OSError: there is no space.
    """
    with path.open("ab") as stream:
        os.posix_fallocate(stream.fileno(), 0, 2 * _SLOT)


def beats_folder(ranks: Iterable[int]) -> Path:
    """Return a new folder with allocated heartbeats: in memory, or on disk if that is full.

    Args:
        ranks: ranks of this node.

    Raises:
        MegatronDebertaError: neither has space.
    """
    places = [MEMORY_FOLDER] if os.access(MEMORY_FOLDER, os.W_OK) else []
    numbers, errors = list(ranks), []
    for place in (*places, tempfile.gettempdir()):
        folder = None
        try:
            folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=place))
            for rank in numbers:
                allocate_beat(beat_path(folder, rank))
            return folder
        except OSError as error:
            errors.append(f"{place}: {error.strerror}")
            logger.warning("%s; no heartbeats there", errors[-1])
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
    raise MegatronDebertaError(f"no space for heartbeats ({', '.join(errors)}); free some")


def is_memory_full() -> bool:
    """Return whether ``/dev/shm`` is full, so that writes to shared memory end with SIGBUS."""
    with suppress(OSError):
        return shutil.disk_usage(MEMORY_FOLDER).free < mmap.PAGESIZE * 16
    return False


def stacks_path(path: Path) -> Path:
    """Return the file to which the rank with that heartbeat writes its stacks."""
    return path.with_suffix(".stacks")


def read_beat(path: Path) -> Beat | None:
    """Return a rank's last intact heartbeat; None if there is none yet."""
    for _ in range(_TRIES):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        if len(content) != 2 * _SLOT:
            return None
        beats = [beat for begin in (0, _SLOT) if (beat := _unpack(content[begin : begin + _SLOT]))]
        if beats:
            return max(beats, key=lambda beat: beat.position)
    return None


def _unpack(slot: bytes) -> Beat | None:
    """Read a slot; None if its checksum is wrong."""
    values = slot[: _VALUES.size]
    if _CHECKSUM.pack(zlib.crc32(values)) != slot[_VALUES.size :]:
        return None
    position, section, *others = _VALUES.unpack(values)
    if section not in set(Section):
        return None
    return Beat(position, Section(section), *others)
