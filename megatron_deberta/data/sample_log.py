"""Log of the samples that each step, rank and row read, to prove that none is lost or repeated.

One ``rank-XXXXX.jsonl`` per data-parallel rank. A record survives the death of the process once
``append`` has returned, and of the machine after ``sync``.
"""

from __future__ import annotations

import errno
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_deberta.data.batch import MicroBatch
from megatron_deberta.errors import DataError
from megatron_deberta.files import fsync_path, open_regular, write_atomically
from megatron_deberta.parsing import Count, parse_json


@dataclass(frozen=True, slots=True)
class _Record:
    """A line of the file."""

    step: Count
    rank: Count
    samples: list[Count]


class SampleLog:
    """Sample log of one data-parallel rank, written by its first tensor-parallel rank.

    Opening removes records beyond the step that the run resumes from. Rank 0 does so for files
    of ranks that this layout does not have.

    Args:
        directory: the run's ``ledger`` folder; created.
        dp_rank: data-parallel rank.
        dp_size: number of data-parallel ranks.
        completed_steps: records up to this step (counted from 1) are kept; 0: none.

    Raises:
        DataError: the folder cannot be written, or a record within those steps is damaged.
    """

    def __init__(
        self, directory: str | Path, dp_rank: int, dp_size: int, completed_steps: int
    ) -> None:
        """See the class."""
        folder = Path(directory)
        self._rank = dp_rank
        path = _rank_file(folder, dp_rank)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _cut(path, completed_steps)
            if dp_rank == 0:
                for other in sorted(folder.glob("rank-*.jsonl")):
                    if int(other.stem.removeprefix("rank-")) >= dp_size:
                        _cut(other, completed_steps)
            is_new = not path.exists()
            self._stream = path.open("ab", buffering=0)
            if is_new:
                # Otherwise a power failure may take the file away, flushed or not.
                fsync_path(folder)
        except OSError as error:
            raise DataError(f"{path}: cannot write the sample log: {error}") from error

    def append(self, step: int, batches: Sequence[MicroBatch]) -> None:
        """Record a step's rows in order.

        Args:
            step: counted from 1.
            batches: this rank's micro batches.

        Raises:
            DataError: the disk is full.
        """
        samples = [index for batch in batches for index in batch.sample_index.tolist()]
        record = {"step": step, "rank": self._rank, "samples": samples}
        line = json.dumps(record).encode() + b"\n"
        with self._errors():
            # A disk that becomes full takes a part of the line, without an error.
            if self._stream.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> None:
        """Flush to disk; call before a checkpoint commits.

        Raises:
            DataError: the disk is full or broken.
        """
        with self._errors():
            os.fsync(self._stream.fileno())

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(f"{self._stream.name}: cannot write the sample log: {error}") from error

    def close(self) -> None:
        """Flush and close."""
        try:
            self.sync()
        finally:
            self._stream.close()


def read_sample_log(directory: str | Path) -> dict[int, list[int]]:
    """Read and merge the files of all ranks.

    Returns:
        Samples by step, in the order of ranks and rows.

    Raises:
        DataError: there is no sample log, a line is damaged, or a rank has a step twice.
    """
    files = sorted(Path(directory).glob("rank-*.jsonl"))
    if not files:
        raise DataError(f"{directory}: no sample log; run with data.sample_log=true")
    parts: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for path in files:
        for line in _read(path).splitlines(keepends=True):
            step, rank, samples = _parse(path, line)
            if rank in parts[step]:
                raise DataError(f"{path}: rank {rank} has step {step} twice")
            parts[step][rank] = samples
    return {
        step: [sample for rank in sorted(ranks) for sample in ranks[rank]]
        for step, ranks in sorted(parts.items())
    }


def check_sample_log(
    directory: str | Path, global_batch_size: int | Sequence[int], num_steps: int
) -> None:
    """Check that steps 1..num_steps read every sample exactly once, in order.

    Args:
        directory: the run's ``ledger`` folder.
        global_batch_size: of every step, or of each step.
        num_steps: number of steps.

    Raises:
        DataError: a step is missing or after the last, or its samples are not those of the
            global batch.
    """
    steps = read_sample_log(directory)
    if list(steps) != list(range(1, num_steps + 1)):
        wrong = sorted({*steps} ^ {*range(1, num_steps + 1)})
        raise DataError(f"{directory}: steps {wrong[:5]} are missing or beyond {num_steps}")
    sizes = global_batch_size
    if isinstance(sizes, int):
        sizes = [sizes] * num_steps
    first = 0
    for (step, samples), size in zip(steps.items(), sizes, strict=True):
        if samples != list(range(first, first + size)):
            raise DataError(
                f"{directory}: step {step} read {samples[:5]}..., not samples {first} to "
                f"{first + size - 1}"
            )
        first += size


def _read(path: Path) -> bytes:
    with open_regular(path) as stream:
        return stream.read()


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.jsonl"


def _cut(path: Path, completed_steps: int) -> None:
    """Remove records beyond a step, and an incomplete last line."""
    if not path.exists():
        return
    kept = []
    for line in _read(path).splitlines(keepends=True):
        if line.endswith(b"\n") and _parse(path, line)[0] <= completed_steps:
            kept.append(line)
    write_atomically(path, b"".join(kept))


def _parse(path: Path, line: bytes) -> tuple[int, int, list[int]]:
    record = parse_json(line, _Record, path, "a damaged record", remedy=f"remove {line[:60]!r}")
    return record.step, record.rank, record.samples
