"""Training and validation documents without copies of each other.

The side is a hash of a document's text, or of its cluster's first document, and depends on nothing
else: a document keeps its side when the corpus grows.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import sha256_file
from megatron_deberta.parsing import read_json
from megatron_deberta.text.deduplicate.pipeline import CLUSTERS
from megatron_deberta.text.deduplicate.shingles import digest_of
from megatron_deberta.text.jobs.executors import RunOptions
from megatron_deberta.text.jobs.stages import (
    QUARANTINE,
    Array,
    Compression,
    NoDocumentsError,
    StageRunner,
    TaskFolder,
    Work,
    add_counts,
    concatenate,
    fill_folder,
    load_array,
    make_plan,
    refuse_inputs,
    take_parts,
)
from megatron_deberta.text.jobs.units import UNIT_BYTES
from megatron_deberta.text.readers.checks import SIDES
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import SUMMARY, Source

logger = logging.getLogger(__name__)


def split(
    sources: Sequence[Source],
    output: Path,
    options: ReadOptions,
    *,
    fraction: float = 0.05,
    seed: int = 0,
    clusters: Path | None = None,
    run: RunOptions | None = None,
    compression: Compression = "none",
    unit_bytes: int = UNIT_BYTES,
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
        run: how it is done.
        compression: of the files of documents.
        unit_bytes: size of the pieces that the input is worked on in.

    Returns:
        The summary, as in ``summary.json``; empty if other array tasks still work.

    Raises:
        ConfigError: ``fraction`` or ``seed`` is out of range, the clusters are of another reading
            or of exact duplicates only, or see ``deduplicate``.
        DataError: the clusters are not there, damaged or of other documents, a side got no
            document, or see ``deduplicate``.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"--fraction {fraction}: must be between 0 and 1")
    if not -(2**63) <= seed < 2**63:
        raise ConfigError(f"--seed {seed}: must fit 64 bits, sign included")
    refuse_inputs(output, sources)
    parameters: dict[str, Any] = {"fraction": fraction, "seed": seed}
    if clusters is not None:
        path = clusters / CLUSTERS
        _check_clusters(clusters, options)
        parameters |= {"clusters": str(path.resolve()), "clusters_sha256": sha256_file(path)}
    plan = make_plan(parameters, options, sources, unit_bytes, compression)
    return fill_folder(output, plan, _run_stages, _gather, run or RunOptions())


def _check_clusters(folder: Path, options: ReadOptions) -> None:
    path = folder / CLUSTERS
    try:
        summary = read_json(folder / SUMMARY, dict[str, Any], "a summary", remedy="remove it")
        clusters = load_array(path)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path}: missing or damaged ({error}); give --clusters a folder that deduplicate wrote"
        ) from error
    if clusters.ndim != 2 or clusters.shape[1] != 4 or clusters.dtype != np.uint64:
        raise DataError(f"{path}: damaged; give --clusters a folder that deduplicate wrote")
    if summary.get("exact_only"):
        raise ConfigError(
            f"--clusters {folder}: made with --exact-only, so near duplicates are not in it; run "
            "deduplicate without"
        )
    for name, mine in (("keys", list(options.keys)), ("normalization", options.normalization)):
        if summary.get(name, mine) != mine:
            raise ConfigError(
                f"--clusters {folder}: made with {name} {summary[name]} where this command has "
                f"{mine}; the texts must be the same"
            )


def _run_stages(work: Work, runner: StageRunner) -> None:
    runner.run("write", _split_unit, len(work.units))


def _split_unit(work: Work, task: int, folder: TaskFolder) -> None:
    choose = _chooser(work)
    counts: Counter[str] = Counter(members=0)
    sizes: Counter[str] = Counter()
    with (
        folder.open("train.jsonl", work.compression) as train,
        folder.open("validation.jsonl", work.compression) as validation,
        folder.open(QUARANTINE) as quarantine,
    ):
        streams = {"train": train, "validation": validation}
        reader = work.read(task, folder, quarantine)
        for record in reader:
            side, is_member = choose(digest_of(record.text))
            counts[side] += 1
            counts["members"] += is_member
            sizes[side] += len(record.content)
            streams[side].write(record.content + b"\n")
    info = {f"{side}_bytes": size for side, size in sizes.items()}
    folder.save_json("info", {**counts, **info, "quarantined": reader.reasons})


def _chooser(work: Work) -> Callable[[bytes], tuple[str, bool]]:
    """Return what tells, from a document's digest, its side and whether a cluster decides it."""
    seed: int = work.parameters["seed"]
    bound = round(work.parameters["fraction"] * 2**64)
    path = work.parameters.get("clusters")
    clusters = None if path is None else load_array(Path(path))

    def choose(digest: bytes) -> tuple[str, bool]:
        first = digest if clusters is None else find_cluster(clusters, digest)
        drawn = hashlib.blake2b(first, digest_size=8, key=seed.to_bytes(8, "little", signed=True))
        return SIDES[int.from_bytes(drawn.digest(), "little") < bound], first != digest

    # Copies often follow each other.
    return lru_cache(maxsize=1024)(choose)


def find_cluster(clusters: Array, digest: bytes) -> bytes:
    """Return the digest of the first document of a document's cluster, or its own.

    Args:
        clusters: [members, 4] uint64, as ``deduplicate`` writes it.
        digest: of the document.
    """
    sought = np.frombuffer(digest, "<u8").tolist()
    rows = range(len(clusters))
    place = bisect_left(rows, sought, key=lambda row: clusters[row, :2].tolist())
    if place == len(clusters) or clusters[place, :2].tolist() != sought:
        return digest
    return bytes(clusters[place, 2:].astype("<u8").tobytes())


def _compare_members(work: Work, found: int) -> None:
    """Compare how many documents a cluster decided with how many it knows."""
    path = Path(work.parameters.get("clusters", ""))
    known = len(load_array(path)) if "clusters" in work.parameters else 0
    if known and not found:
        raise NoDocumentsError(
            f"--clusters {path.parent}: none of its {known:,} documents is in --input; give the "
            "same corpus as to deduplicate (what that left holds no copies: split it without)"
        )
    if found < known:
        logger.warning(
            "%d of %d documents of --clusters are in --input; what is not in both may leak",
            found,
            known,
        )


def _gather(work: Work, staged: Path) -> dict[str, Any]:
    counts, quarantined = add_counts(work)
    _compare_members(work, counts.pop("members"))
    sizes = {f"{side}_bytes": counts.pop(f"{side}_bytes", 0) for side in SIDES}
    for side in SIDES:
        if not counts[side]:
            raise NoDocumentsError(
                f"no document is on the side of {side} ({counts.total()} in all); set "
                "--fraction or --seed, or give more text"
            )
        (staged / side).mkdir(exist_ok=True)
        take_parts(work, f"{side}.jsonl", staged / side)
    concatenate(work, "write", QUARANTINE, staged)
    return {
        "documents": counts.total() + quarantined.total(),
        **{side: counts[side] for side in SIDES},
        **sizes,
        "quarantined": dict(sorted(quarantined.items())),
        **work.parameters,
        "sources": [source.name for source in work.sources],
    }
