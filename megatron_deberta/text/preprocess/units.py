"""Units of work: parts of the input, the same ones for any number of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from typing_extensions import TypedDict

from megatron_deberta.errors import DataError
from megatron_deberta.parsing import Count
from megatron_deberta.text.jobs.executors import Share, order_tasks
from megatron_deberta.text.jobs.folder import RESTART, JobFolder
from megatron_deberta.text.readers.cutting import ENDLESS
from megatron_deberta.text.readers.sources import TABLES, Source
from megatron_deberta.text.readers.tables import count_groups

UNIT_BYTES = 1 << 26
_LEAST_UNIT_BYTES = 1 << 23
_USUAL_UNITS = 256
# How much longer a text is than its compressed file; only the units' sizes depend on it.
_USUAL_RATIO = 4
_CALLS_PER_WORKER = 4


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


class Lane(NamedTuple):
    """Units of a segment that one call does: the ``first`` and every ``step``-th on."""

    segment: int
    first: int
    step: int


class UnitRecord(TypedDict):
    """Record of a unit.

    Attributes:
        last: it is its segment's last.
        documents: records without defects.
        text_bytes: of its records.
        file_bytes: that were read for it.
        reasons: number of quarantined records by reason.
        sizes: tokens, sequences, documents and empty documents per key.
        pieces: file index, begin and lines of each piece.
        sha256: hexadecimal digests of tokens and index per key, then of the quarantine list.
    """

    last: bool
    documents: Count
    text_bytes: Count
    file_bytes: Count
    reasons: dict[str, Count]
    sizes: list[tuple[Count, Count, Count, Count]]
    pieces: list[tuple[Count, Count, Count]]
    sha256: list[str]


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


def names_unit(record: str) -> bool:
    """Return whether a record is a unit's, by its name."""
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


def find_recorded(folder: JobFolder, segments: Sequence[Segment]) -> list[list[WorkUnit] | None]:
    """Return the units of each segment in order; None: some are not done.

    Raises:
        DataError: a record is damaged.
    """
    numbers: list[set[int]] = [set() for _ in segments]
    for name in filter(names_unit, folder.records()):
        numbers[int(name[:8])].add(int(name[9:]))
    found: list[list[WorkUnit] | None] = []
    for index, (segment, done) in enumerate(zip(segments, numbers, strict=True)):
        units = [WorkUnit(index, number) for number in sorted(done)]
        is_done = bool(units) and len(units) == units[-1].number + 1
        if is_done and segment.is_stream:
            is_done = bool(read_record(folder, units[-1])["last"])
        found.append(units if is_done else None)
    return found


def read_record(folder: JobFolder, unit: WorkUnit) -> UnitRecord:
    """Return the record of a unit that is done.

    Raises:
        DataError: it is damaged or gone.
    """
    record: UnitRecord | None = folder.recorded(unit.name, UnitRecord)
    if record is None:
        raise DataError(f"{folder.done}: the record of unit {unit.name} is gone; {RESTART}")
    return record


def plan_lanes(segments: Sequence[Segment], share: Share, workers: int) -> list[Lane]:
    """Divide units into calls, so that a stream is read by few processes and each one has work.

    Args:
        segments: of the input.
        share: array task that does the calls, see ``order_tasks``.
        workers: of each task.
    """
    workers *= share.tasks
    streams = sum(segment.is_stream for segment in segments)
    pieces = 1
    if streams and workers > 1:
        pieces = -(-(workers if workers >= streams else _CALLS_PER_WORKER * workers) // streams)
    lanes = [
        Lane(index, first, count)
        for index, segment in enumerate(segments)
        for count in [pieces if segment.is_stream else 1]
        for first in range(count)
    ]
    return [lanes[number] for number in order_tasks(len(lanes), share)]
