"""Training and validation documents, parted so that no copy of one is on the other side.

Owns the rule: the side is a hash of what a document says, or of what its cluster's first document
says. So it depends on nothing else: not on order, files, other documents or processes, and a
document keeps its side when the corpus grows.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from megatron_deberta.deduplicate.output import (
    CLUSTERS,
    concatenate,
    open_compressed,
    take_parts,
)
from megatron_deberta.deduplicate.pipeline import Advance, Compression, fill_folder
from megatron_deberta.deduplicate.shingles import digest_of
from megatron_deberta.deduplicate.units import Record, UnitReader, plan_units
from megatron_deberta.deduplicate.work import (
    Array,
    StageRunner,
    Work,
    load_array,
    make_plan,
    save_info,
)
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import sha256_file
from megatron_deberta.preprocess.reading import ReadOptions
from megatron_deberta.preprocess.records import EMPTY
from megatron_deberta.preprocess.sources import Source
from megatron_deberta.preprocess.units import UNIT_BYTES

SIDES = ("train", "validation")


def split(
    sources: Sequence[Source],
    output: Path,
    options: ReadOptions,
    *,
    fraction: float = 0.05,
    seed: int = 0,
    clusters: Path | None = None,
    workers: int = 0,
    compression: Compression = "none",
    unit_bytes: int = UNIT_BYTES,
    force: bool = False,
    advance: Advance = lambda *_: None,
) -> dict[str, Any]:
    """Write the input's documents into the folders ``train`` and ``validation`` of a new one.

    Resumable like ``deduplicate``.

    Args:
        sources: input files.
        output: folder that appears when everything is done.
        options: what of a record is read.
        fraction: share of validation documents, in (0, 1); met on average, as each document's
            side is its own.
        seed: another one gives another split.
        clusters: folder that ``deduplicate`` wrote from the same documents; then near duplicates
            of each other are on the same side. Without, only exact ones are.
        workers: processes; 0 works in this one.
        compression: of the files of documents.
        unit_bytes: size of the pieces that the input is worked on in.
        force: replace a folder that exists.
        advance: told (stage, tasks, done).

    Returns:
        The summary, as in ``summary.json``.

    Raises:
        ConfigError: ``fraction`` is out of range, or see ``deduplicate``.
        DataError: the clusters are not there, a side got no document, or see ``deduplicate``.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"--fraction {fraction}: must be between 0 and 1")
    parameters: dict[str, Any] = {"fraction": fraction, "seed": seed}
    if clusters is not None:
        path = clusters / CLUSTERS
        if not path.is_file():
            raise DataError(f"{path}: missing; give --clusters a folder that deduplicate wrote")
        parameters |= {"clusters": str(path.resolve()), "clusters_sha256": sha256_file(path)}
    units = plan_units(sources, unit_bytes)
    plan = make_plan(parameters, options, sources, units, compression)
    return fill_folder(output, plan, _run_stages, _gather, workers, force, advance)


def _run_stages(work: Work, runner: StageRunner) -> None:
    runner.run("write", _split_unit, len(work.units))


def _split_unit(work: Work, task: int, folder: Path) -> None:
    choose = _chooser(work)
    counts: Counter[str] = Counter()
    quarantined: Counter[str] = Counter()
    with (
        open_compressed(folder / "train.jsonl", work.compression) as train,
        open_compressed(folder / "validation.jsonl", work.compression) as validation,
        (folder / "quarantine.jsonl").open("wb") as quarantine,
    ):
        streams = {"train": train, "validation": validation}
        for record in UnitReader(work.units[task], work.sources, work.options):
            if isinstance(record, Record):
                digest = digest_of(record.text)
                if digest:
                    side = choose(digest)
                    counts[side] += 1
                    streams[side].write(record.content + b"\n")
                    continue
                number, offset, reason, detail = record.source, record.offset, EMPTY, "no words"
            else:
                number, (_, offset, reason, detail) = record
            quarantined[reason] += 1
            line = {"file": work.sources[number].name, "offset": offset}
            quarantine.write(orjson.dumps({**line, "reason": reason, "detail": detail}) + b"\n")
    save_info(folder, {**counts, "quarantined": quarantined})


def _chooser(work: Work) -> Callable[[bytes], str]:
    """Return the function that tells a document's side from its digest."""
    seed: int = work.parameters["seed"]
    bound = round(work.parameters["fraction"] * 2**64)
    path = work.parameters.get("clusters")
    clusters = None if path is None else load_array(Path(path))

    def choose(digest: bytes) -> str:
        if clusters is not None:
            digest = find_cluster(clusters, digest)
        drawn = hashlib.blake2b(digest, digest_size=8, key=seed.to_bytes(8, "little", signed=True))
        return SIDES[int.from_bytes(drawn.digest(), "little") < bound]

    # Copies often follow each other.
    return lru_cache(maxsize=1024)(choose)


def find_cluster(clusters: Array, digest: bytes) -> bytes:
    """Return the digest of the first document of a document's cluster, or its own.

    Args:
        clusters: [members, 4] uint64, as ``deduplicate`` writes it.
        digest: of the document.
    """
    high = int.from_bytes(digest[:8], "little")
    low = int.from_bytes(digest[8:], "little")
    place = bisect_left(
        range(len(clusters)),
        (high, low),
        key=lambda row: (int(clusters[row, 0]), int(clusters[row, 1])),
    )
    if place == len(clusters) or clusters[place, :2].tolist() != [high, low]:
        return digest
    return bytes(clusters[place, 2:].astype("<u8").tobytes())


def _gather(work: Work, staged: Path) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    quarantined: Counter[str] = Counter()
    units = range(len(work.units))
    for task in units:
        info = work.info("write", task)
        quarantined.update(info.pop("quarantined"))
        counts.update(info)
    for side in SIDES:
        if not counts[side]:
            raise DataError(
                f"no document is on the side of {side} ({sum(counts.values())} in all); set "
                "--fraction or --seed, or give more text"
            )
        (staged / side).mkdir(exist_ok=True)
        take_parts(work, f"{side}.jsonl", staged / side)
    quarantines = [work.task_folder("write", task) / "quarantine.jsonl" for task in units]
    concatenate(quarantines, staged / "quarantine.jsonl")
    return {
        "documents": sum(counts.values()) + sum(quarantined.values()),
        **{side: counts[side] for side in SIDES},
        "quarantined": dict(sorted(quarantined.items())),
        **work.parameters,
        "sources": [source.name for source in work.sources],
    }
