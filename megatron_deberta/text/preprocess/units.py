"""Cuts the input into units of work, the same ones for any number of processes.

Owns which unit is which part of which file, and which are still to be done. Refuses to read text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_deberta.text.preprocess.workfolder import WorkFolder
from megatron_deberta.text.readers.cutting import ENDLESS
from megatron_deberta.text.readers.sources import TABLES, Source
from megatron_deberta.text.readers.tables import count_groups

UNIT_BYTES = 1 << 26
_LEAST_UNIT_BYTES = 1 << 23
_USUAL_UNITS = 256
# How much longer a text is than its compressed file; only the units' sizes depend on it.
_USUAL_RATIO = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of one file: bytes of its text, or groups of its table.

    Attributes:
        source: index of the file.
        begin: first of the range.
        end: behind the last.
    """

    source: int
    begin: int = 0
    end: int = ENDLESS


class Segment(NamedTuple):
    """Units that follow one another.

    Attributes:
        pieces: of its only unit; or the one file that ``is_stream``.
        is_stream: the file can only be read from its beginning, and how long its text is shows
            at the end: its units are ``unit_bytes`` of text each, until one is the last.
        file_bytes: bytes on disk, for the progress display.
    """

    pieces: tuple[Piece, ...]
    is_stream: bool
    file_bytes: int


class WorkUnit(NamedTuple):
    """What one process does in one go.

    Attributes:
        segment: index of its segment.
        number: of the unit in the segment.
    """

    segment: int
    number: int

    @property
    def name(self) -> str:
        """Name of its files and records; names sort as units do."""
        return f"{self.segment:08d}-{self.number:06d}"


def usual_unit_bytes(sources: Sequence[Source]) -> int:
    """Return a size of units that gives many processes work, and few a short list of units."""
    size = sum(source.size_bytes for source in sources)
    return min(max(size // _USUAL_UNITS, _LEAST_UNIT_BYTES), UNIT_BYTES)


def plan_segments(sources: Sequence[Source], unit_bytes: int) -> list[Segment]:
    """Cut files into units of about ``unit_bytes`` of text; small files share one.

    Raises:
        DataError: a table is damaged, or pyarrow is missing.
    """
    segments: list[Segment] = []
    pieces: list[Piece] = []
    size = file_bytes = 0

    def close() -> None:
        nonlocal size, file_bytes
        if pieces:
            segments.append(Segment(tuple(pieces), False, file_bytes))
        pieces.clear()
        size = file_bytes = 0

    for index, source in enumerate(sources):
        if _is_stream(source, unit_bytes):
            close()
            segments.append(Segment((Piece(index),), True, source.size_bytes))
            continue
        for piece, piece_bytes in _pieces(index, source, unit_bytes):
            if pieces and size + piece_bytes > unit_bytes:
                close()
            pieces.append(piece)
            size += piece_bytes
            file_bytes += piece_bytes if source.compression == "none" else source.size_bytes
    close()
    return segments


def recorded_bytes(
    folder: WorkFolder, segments: Sequence[Segment], sources: Sequence[Source], unit_bytes: int
) -> int:
    """Say about how many bytes of the files all processes have done, for the progress display.

    Raises:
        OSError: the folder is gone.
    """
    units = Counter(int(name[:8]) for name in folder.records() if _names_unit(name))
    total = 0
    for index, done in units.items():
        segment = segments[index]
        text_bytes = done * unit_bytes if segment.is_stream else ENDLESS
        is_compressed = sources[segment.pieces[0].source].compression != "none"
        file_bytes = text_bytes // _USUAL_RATIO if is_compressed else text_bytes
        total += min(file_bytes, segment.file_bytes)
    return total


def _names_unit(record: str) -> bool:
    return len(record) == 15 and record[:8].isdigit()


def _is_stream(source: Source, unit_bytes: int) -> bool:
    if source.text_format in TABLES:
        return False
    if source.compression != "none":
        return source.size_bytes * _USUAL_RATIO > unit_bytes
    return source.text_format in ("file", "paragraph") and source.size_bytes > unit_bytes


def _pieces(index: int, source: Source, unit_bytes: int) -> list[tuple[Piece, int]]:
    if source.text_format in TABLES:
        return _table_pieces(index, count_groups(source), unit_bytes)
    if source.compression != "none":
        return [(Piece(index), source.size_bytes * _USUAL_RATIO)]
    if source.size_bytes <= unit_bytes:
        return [(Piece(index), source.size_bytes)]
    return [
        (Piece(index, begin, begin + unit_bytes), min(unit_bytes, source.size_bytes - begin))
        for begin in range(0, source.size_bytes, unit_bytes)
    ]


def _table_pieces(index: int, groups: list[int], unit_bytes: int) -> list[tuple[Piece, int]]:
    """Put small row groups together: a piece opens the file anew."""
    pieces: list[tuple[Piece, int]] = []
    for group, size in enumerate(groups):
        if pieces and pieces[-1][1] + size <= unit_bytes:
            piece, before = pieces.pop()
            pieces.append((Piece(index, piece.begin, group + 1), before + size))
        else:
            pieces.append((Piece(index, group, group + 1), size))
    return pieces


@dataclass(slots=True)
class _Progress:
    done: set[int] = field(default_factory=set)
    last: int | None = None
    limit: int = ENDLESS


class UnitQueue:
    """Units that are still to be done, as one process sees them.

    Args:
        folder: where records and claims are.
        segments: the plan.
        first_segment: where this process begins to look, so that processes start apart and each
            goes on in the file that it has open.
    """

    def __init__(self, folder: WorkFolder, segments: Sequence[Segment], first_segment: int) -> None:
        """See the class."""
        self._folder = folder
        self._segments = segments
        self._first = first_segment
        self._progress = [_Progress(limit=ENDLESS if each.is_stream else 1) for each in segments]
        self._unfinished = dict.fromkeys(range(len(segments)))
        self._seen: set[str] = set()
        self._busy: set[WorkUnit] = set()
        self.refresh()

    def refresh(self) -> None:
        """Look at what other processes have recorded."""
        self._busy.clear()
        for name in self._folder.records() - self._seen:
            self._seen.add(name)
            if not _names_unit(name):
                continue
            unit = WorkUnit(int(name[:8]), int(name[9:]))
            is_stream = self._segments[unit.segment].is_stream
            record = self._folder.recorded(name) if is_stream else {"last": True}
            self.mark(unit, is_last=bool(record and record["last"]))

    def mark(self, unit: WorkUnit, *, is_last: bool) -> None:
        """Take note that a unit is recorded."""
        progress = self._progress[unit.segment]
        progress.done.add(unit.number)
        if is_last:
            progress.last = unit.number
        if progress.last is not None and len(progress.done) > progress.last:
            self._unfinished.pop(unit.segment, None)

    def ends_before(self, unit: WorkUnit) -> None:
        """Take note that a stream has no such unit."""
        self._progress[unit.segment].limit = unit.number

    def take(self) -> WorkUnit | None:
        """Claim a unit; None where all are recorded or others have them."""
        for segment in sorted(self._unfinished, key=lambda index: (index < self._first, index)):
            progress = self._progress[segment]
            for number in range(progress.limit if progress.last is None else progress.last + 1):
                unit = WorkUnit(segment, number)
                if number in progress.done or unit in self._busy:
                    continue
                if not self._folder.claim(unit.name):
                    self._busy.add(unit)
                elif (record := self._folder.recorded(unit.name)) is not None:
                    # Another recorded it after the last look.
                    self._folder.release(unit.name)
                    self.mark(unit, is_last=record["last"])
                else:
                    self._first = segment
                    return unit
        return None

    def is_finished(self) -> bool:
        """Tell whether every unit is recorded."""
        return not self._unfinished

    def units(self) -> list[WorkUnit]:
        """All units in the order of the text, once all are recorded."""
        return [
            WorkUnit(segment, number)
            for segment, progress in enumerate(self._progress)
            for number in range((progress.last or 0) + 1)
        ]
