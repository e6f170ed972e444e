"""First stage: MinHash sketches (rensa) and sorted runs of keys, by which duplicates are found.

``Settings`` has the defaults of Megatron-LM: Jaccard 0.7, runs of five words.

``digest``     [documents, 2] uint64, BLAKE2b of the normalised text
``sketch``     [documents, 128] uint32
``place``      [documents, 2] int64, number of the file and line in its piece
``exact_key``  uint64, ``exact_rest`` uint64, ``exact_document`` uint32: per run sorted by key
``band_key``   uint64, ``band_document`` uint32: per run and band sorted by key
``exact_starts`` [runs, 257], ``band_starts`` [runs, bands, 257] int64: offsets of 256 key ranges

Memory is bounded by one run's documents.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from rensa import RMinHash

from megatron_deberta.errors import ConfigError
from megatron_deberta.files import HashedFile
from megatron_deberta.text.deduplicate.shingles import Hashes, Shingler
from megatron_deberta.text.jobs.stages import TaskFolder, Work
from megatron_deberta.text.jobs.units import Record

PERMUTATIONS = 128
_LEAST_RECALL = 0.98
_MARGIN_SIGMAS = 4.0
# Ranges of keys into which sorted runs are divided.
RANGES = 256
_RUN_DOCUMENTS = 1 << 15
_RUN_HASHES = 1 << 22
_CHARACTERS_AT_ONCE = 1 << 20

# Each file's type, and columns.
_FILES: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {
    "digest": (np.uint64, (2,)),
    "sketch": (np.uint32, (PERMUTATIONS,)),
    "place": (np.int64, (2,)),
    "exact_key": (np.uint64, ()),
    "exact_rest": (np.uint64, ()),
    "exact_document": (np.uint32, ()),
    "band_key": (np.uint64, ()),
    "band_document": (np.uint32, ()),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How documents are compared.

    Attributes:
        threshold: least Jaccard similarity of two documents' sets of runs for a near duplicate.
        ngram: words in a run.
        seed: of the sketch.
        exact_only: remove only documents that are the same but for case and whitespace.

    Raises:
        ConfigError: a value cannot be.
    """

    threshold: float = 0.7
    ngram: int = 5
    seed: int = 1
    exact_only: bool = False

    def __post_init__(self) -> None:
        if not 0.3 <= self.threshold <= 1:
            raise ConfigError(
                f"--threshold {self.threshold}: must be in [0.3, 1]; below it, candidates are "
                "most pairs of documents"
            )
        if self.ngram < 1:
            raise ConfigError(f"--ngram {self.ngram}: must be at least 1")

    @property
    def rows(self) -> int:
        """Sketch values in a band.

        The most for which a pair at the threshold itself shares a band with a probability of
        98 %: 1 - (1 - t^rows)^bands. Candidates at lower similarities are then fewest.
        """
        rows = 1
        while (
            rows < PERMUTATIONS // 4
            and recall(self.threshold, rows + 1, PERMUTATIONS // (rows + 1)) >= _LEAST_RECALL
        ):
            rows += 1
        return rows

    @property
    def bands(self) -> int:
        """Bands of ``rows`` values each; values beyond the last are used for the estimate only."""
        return PERMUTATIONS // self.rows

    @property
    def least_estimate(self) -> float:
        """Share of equal sketch values below which a pair is not compared exactly.

        Four standard deviations of the share below the threshold: one pair in 30,000 at the
        threshold itself is lost by it.
        """
        deviation = math.sqrt(self.threshold * (1 - self.threshold) / PERMUTATIONS)
        return self.threshold - _MARGIN_SIGMAS * deviation


def recall(similarity: float, rows: int, bands: int) -> float:
    """Return the probability that two documents of a similarity share a band.

    Args:
        similarity: Jaccard similarity of the documents.
        rows: values per band.
        bands: number of bands.
    """
    missed: float = (1 - similarity**rows) ** bands
    return 1 - missed


def settings_of(work: Work) -> Settings:
    """Return how the documents of a run are compared."""
    return Settings(**work.parameters)


def sign_unit(work: Work, task: int, folder: TaskFolder) -> None:
    """Read a unit and write the keys and sketches of its documents.

    Arguments as in ``check_task``.
    """
    reader = work.read(task, folder)
    with _SignatureWriter(folder, settings_of(work)) as writer:
        for record in reader:
            writer.add(record)
        writer.flush()
        folder.save_array("exact_starts", np.array(writer.exact_starts, np.int64))
        folder.save_array("band_starts", np.array(writer.band_starts, np.int64))
        folder.save_json(
            "info",
            {
                "documents": writer.documents,
                "characters": writer.characters,
                "line_ends": {str(source): ends for source, ends in reader.line_ends.items()},
            },
        )


def map_signature(work: Work, unit: int, name: str) -> npt.NDArray[Any]:
    """Memory-map one of the files that ``sign_unit`` wrote.

    Args:
        work: the run.
        unit: number of the unit.
        name: of the file, such as ``sketch``.

    Returns:
        A read-only array; files of several values per entry have two dimensions.
    """
    path = work.task_folder("sign", unit) / f"{name}.raw"
    dtype, columns = _FILES[name]
    flat = np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
    return flat.reshape(-1, *columns)


@lru_cache(maxsize=1)
def unit_starts(work: Work) -> npt.NDArray[np.int64]:
    """Return [units + 1] numbers of the units' first documents, and of all documents.

    They are known, and stay what they are, once all units are signed.
    """
    counts = [work.info("sign", unit)["documents"] for unit in range(len(work.units))]
    return np.cumsum([0, *counts], dtype=np.int64)


def gather_signatures(work: Work, documents: npt.NDArray[np.int64], name: str) -> Any:
    """Return rows of a file that ``sign_unit`` wrote, of documents of any units.

    Args:
        work: the run.
        documents: their numbers, in any order.
        name: of the file: ``digest`` or ``sketch``.
    """
    dtype, columns = _FILES[name]
    starts = unit_starts(work)
    rows = np.empty((len(documents), *columns), dtype)
    order = np.argsort(documents, kind="stable")
    units = np.searchsorted(starts, documents[order], side="right") - 1
    for unit in np.unique(units):
        which = order[units == unit]
        rows[which] = map_signature(work, int(unit), name)[documents[which] - starts[unit]]
    return rows


class _SignatureWriter:
    """Collects documents and writes them run by run."""

    def __init__(self, folder: TaskFolder, settings: Settings) -> None:
        self._settings = settings
        self._folder = folder
        self._stack = ExitStack()
        self._streams: dict[str, HashedFile] = {}
        self._shingler = Shingler(settings.ngram)
        self._texts: list[str] = []
        self._waiting_characters = 0
        self.documents = self.characters = 0
        self.exact_starts: list[npt.NDArray[np.int64]] = []
        self.band_starts: list[npt.NDArray[np.int64]] = []
        self._clear()

    def __enter__(self) -> _SignatureWriter:
        for name in _FILES:
            self._streams[name] = self._stack.enter_context(self._folder.open(f"{name}.raw"))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, record: Record) -> None:
        """Take a document that has words."""
        self._texts.append(record.text)
        self._places.append((record.source, record.line))
        self._waiting_characters += len(record.text)
        if self._waiting_characters >= _CHARACTERS_AT_ONCE or len(self._texts) >= _RUN_DOCUMENTS:
            self._hash()
        if len(self._places) >= _RUN_DOCUMENTS or self._waiting_hashes >= _RUN_HASHES:
            self.flush()

    def _hash(self) -> None:
        """Turn waiting texts into digests and hashes."""
        texts, self._texts = self._texts, []
        self.characters += self._waiting_characters
        self._waiting_characters = 0
        for digest, hashes in self._shingler.many(texts):
            self._digests.append(digest)
            self._hashes.append(hashes)
            self._waiting_hashes += hashes.size

    def flush(self) -> None:
        """Write a run."""
        self._hash()
        if not self._digests:
            return
        digests = np.frombuffer(b"".join(self._digests), "<u8").reshape(-1, 2)
        count = len(digests)
        documents = np.arange(self.documents, self.documents + count, dtype=np.uint32)
        self._write("digest", digests)
        self._write("place", np.array(self._places, np.int64))
        order = np.lexsort((digests[:, 1], digests[:, 0]))
        self.exact_starts.append(_range_starts(digests[order, 0]) + self.documents)
        self._write("exact_key", digests[order, 0])
        self._write("exact_rest", digests[order, 1])
        self._write("exact_document", documents[order])
        if not self._settings.exact_only:
            self._write_bands(documents)
        self.documents += count
        self._clear()

    def _write_bands(self, documents: npt.NDArray[np.uint32]) -> None:
        sketches = make_sketches(self._hashes, self._settings.seed)
        self._write("sketch", sketches)
        rows, bands = self._settings.rows, self._settings.bands
        starts = np.empty((bands, RANGES + 1), np.int64)
        for band in range(bands):
            keys = _band_keys(sketches[:, band * rows : (band + 1) * rows])
            order = np.argsort(keys, kind="stable")
            written = self.documents * bands + band * len(documents)
            starts[band] = _range_starts(keys[order]) + written
            self._write("band_key", keys[order])
            self._write("band_document", documents[order])
        self.band_starts.append(starts)

    def _write(self, name: str, array: npt.NDArray[Any]) -> None:
        self._streams[name].write(np.ascontiguousarray(array, _FILES[name][0]).tobytes())

    def _clear(self) -> None:
        self._digests: list[bytes] = []
        self._hashes: list[Hashes] = []
        self._places: list[tuple[int, int]] = []
        self._waiting_hashes = 0


def make_sketches(hashes: list[Hashes], seed: int) -> npt.NDArray[np.uint32]:
    """Return the [documents, 128] MinHash sketches of sets of hashes.

    The share of equal values of two sketches estimates the sets' Jaccard similarity.
    """
    # rensa's number for what its sketches mean.
    if RMinHash.ALGORITHM_VERSION != 2:
        raise RuntimeError(f"rensa's sketches are of version {RMinHash.ALGORITHM_VERSION}, not 2")
    ends = np.cumsum([0, *(each.size for each in hashes)], dtype=np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        # A long document comes alone and need not be copied.
        hashes[0] if len(hashes) == 1 else np.concatenate(hashes),
        ends,
        PERMUTATIONS,
        seed,
    )
    return np.array(matrix.to_rows(), np.uint32)


def _band_keys(values: npt.NDArray[np.uint32]) -> Hashes:
    keys = np.zeros(len(values), np.uint64)
    for column in values.T:
        keys = (keys ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys


def _range_starts(keys: Hashes) -> npt.NDArray[np.int64]:
    """Return where in sorted keys each of the ranges begins, and their number at the end."""
    firsts = np.arange(RANGES, dtype=np.uint64) << np.uint64(56)
    return np.append(np.searchsorted(keys, firsts), len(keys)).astype(np.int64)
