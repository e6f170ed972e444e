"""Deduplication of a corpus: its stages, and the files of the result."""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from megatron_deberta.errors import DataError
from megatron_deberta.parsing import read_json
from megatron_deberta.text.deduplicate import pairs
from megatron_deberta.text.deduplicate.resolve import EXACT, KEPT, resolve
from megatron_deberta.text.deduplicate.sign import (
    Settings,
    map_signature,
    settings_of,
    sign_unit,
    unit_starts,
)
from megatron_deberta.text.jobs.executors import RunOptions
from megatron_deberta.text.jobs.stages import (
    QUARANTINE,
    Compression,
    NoDocumentsError,
    StageRunner,
    TaskFolder,
    Work,
    add_counts,
    concatenate,
    fill_folder,
    make_plan,
    refuse_inputs,
    take_parts,
)
from megatron_deberta.text.jobs.units import UNIT_BYTES, Record
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import Source

CLUSTERS = "clusters.npy"
_RECORDED_SETTINGS = ("exact_only", "threshold", "ngram", "bands", "rows")


def deduplicate(
    sources: Sequence[Source],
    output: Path,
    settings: Settings,
    options: ReadOptions,
    *,
    run: RunOptions | None = None,
    compression: Compression = "none",
    unit_bytes: int = UNIT_BYTES,
) -> dict[str, Any]:
    """Write the input without exact and near duplicates into a new folder.

    Unfinished work is kept beside it as ``{output}.unfinished``; the same call goes on from there
    and gives the same bytes, whatever ``run`` was and is. Where the result of the same call is
    there already, nothing is done.

    Args:
        sources: input files, whose order says which of two documents is the first.
        output: folder that appears when everything is done.
        settings: what a duplicate is.
        options: what of a record is read.
        run: how it is done.
        compression: of the files of documents.
        unit_bytes: size of the pieces that the input is worked on in.

    Returns:
        The summary, as in ``summary.json``; empty if other array tasks still work.

    Raises:
        ConfigError: ``output`` exists, or unfinished work of another plan does.
        DataError: the input cannot be read or holds no document, too many records are bad, the
            disk is full, or a worker died.
    """
    plan = make_plan(asdict(settings), options, sources, unit_bytes, compression)
    refuse_inputs(output, sources)
    return fill_folder(output, plan, _run_stages, _gather, run or RunOptions())


def _run_stages(work: Work, runner: StageRunner) -> None:
    units = len(work.units)
    runner.run("sign", sign_unit, units)
    total = int(unit_starts(work)[-1])
    if not total:
        raise NoDocumentsError(
            f"no documents with words in {len(work.sources)} input file(s); check --input and "
            "--keys"
        )
    runner.run("exact", pairs.find_exact, pairs.num_parts(total))
    if not settings_of(work).exact_only:
        runner.run("mark", pairs.mark_exact, 1)
        runner.run("candidates", pairs.find_candidates, pairs.num_candidate_tasks(work))
        runner.run("estimate", pairs.estimate_pairs, units)
        runner.run("needed", pairs.mark_needed, 1)
        runner.run("collect", pairs.collect_runs, units)
        runner.run("verify", pairs.verify_pairs, units)
    runner.run("resolve", resolve, 1)
    runner.run("write", _write_unit, units)


def _write_unit(work: Work, task: int, folder: TaskFolder) -> None:
    """Read a unit again and write the documents kept, removed and quarantined.

    Arguments as in ``check_task``.
    """
    reporter = _Reporter(work, task)
    counts: Counter[str] = Counter()
    with (
        folder.open("kept.jsonl", work.compression) as kept,
        folder.open("removed.jsonl") as removed,
        folder.open(QUARANTINE) as quarantine,
    ):
        reader = work.read(task, folder, quarantine, reporter.lines)
        number = reporter.begin
        for record in reader:
            if reporter.decision[number] == KEPT:
                kept.write(record.content + b"\n")
                counts["kept"] += 1
            else:
                line = reporter.describe_removed(number, record)
                counts[line["kind"]] += 1
                removed.write(orjson.dumps(line) + b"\n")
            number += 1
    if number != reporter.end:
        raise DataError(
            f"{work.sources[work.units[task][0].source].name}: changed while it was read; remove "
            f"{work.folder} and start again"
        )
    folder.save_json("info", {**counts, "quarantined": reader.reasons})


class _Reporter:
    """Describes documents that are removed."""

    def __init__(self, work: Work, unit: int) -> None:
        self._work = work
        self._starts: list[int] = unit_starts(work).tolist()
        self._unit = unit
        self.begin, self.end = self._starts[unit], self._starts[unit + 1]
        self.decision, self._kept, self._jaccard = (
            work.load("resolve", 0, name) for name in ("decision", "kept", "jaccard")
        )
        path = work.task_folder("resolve", 0) / "lines.json"
        self._lines = read_json(path, list[dict[str, int]], "a list", remedy="remove its folder")
        self.lines = self._lines[unit]

    def describe_removed(self, number: int, record: Record) -> dict[str, Any]:
        """Say where a document was, why it goes and what stays in its place."""
        kept = int(self._kept[number])
        unit = bisect_right(self._starts, kept) - 1
        source, line = map_signature(self._work, unit, "place")[kept - self._starts[unit]].tolist()
        return {
            "document": number,
            **self._place(self._unit, record.source, record.line, record.offset),
            "kind": "exact" if self.decision[number] == EXACT else "near",
            "kept": {"document": kept, **self._place(unit, source, line)},
            "jaccard": round(float(self._jaccard[number]), 6),
        }

    def _place(self, unit: int, source: int, line: int, offset: int = -1) -> dict[str, Any]:
        before = self._lines[unit].get(str(source), 0)
        place = {"file": self._work.sources[source].name, "line": line + before}
        return place if offset < 0 else {**place, "offset": offset}


def _gather(work: Work, staged: Path) -> dict[str, Any]:
    """Put the units' files together in a folder, and return the summary.

    Raises:
        DataError: the documents do not add up.
    """
    take_parts(work, "kept.jsonl", staged)
    for name in ("removed.jsonl", QUARANTINE):
        concatenate(work, "write", name, staged)
    shutil.copyfile(work.task_folder("resolve", 0) / CLUSTERS, staged / CLUSTERS)
    counts, quarantined = add_counts(work)
    settings = settings_of(work)
    documents = int(unit_starts(work)[-1]) + quarantined.total()
    accounted = counts.total() + quarantined.total()
    if documents != accounted:
        raise DataError(f"{documents} documents were read but {accounted} accounted for")
    return {
        "documents": documents,
        "kept": counts["kept"],
        "removed": {"exact": counts["exact"], "near": counts["near"]},
        "quarantined": dict(sorted(quarantined.items())),
        "characters": sum(work.info("sign", u)["characters"] for u in range(len(work.units))),
        "keys": list(work.options.keys),
        "normalization": work.options.normalization,
        **{name: getattr(settings, name) for name in _RECORDED_SETTINGS},
        "sources": [source.name for source in work.sources],
    }
