"""Files of the result: kept and removed documents, quarantined records, and the summary."""

from __future__ import annotations

import os
import shutil
from bisect import bisect_right
from collections import Counter
from pathlib import Path
from typing import Any

import orjson

from megatron_deberta.errors import DataError
from megatron_deberta.parsing import read_json
from megatron_deberta.text.deduplicate.candidates import unit_starts
from megatron_deberta.text.deduplicate.resolve import EXACT, KEPT
from megatron_deberta.text.deduplicate.sign import map_signature
from megatron_deberta.text.deduplicate.units import Record, UnitReader
from megatron_deberta.text.deduplicate.work import TaskFolder, Work

CLUSTERS = "clusters.npy"
QUARANTINE = "quarantine.jsonl"
SUFFIXES = {"none": "", "gz": ".gz", "zst": ".zst"}


def write_unit(work: Work, task: int, folder: TaskFolder) -> None:
    """Read a unit again and write the documents kept, removed and quarantined.

    Arguments as in ``check_task``.
    """
    reporter = _Reporter(work, task)
    number = reporter.begin
    counts: Counter[str] = Counter()
    quarantined: Counter[str] = Counter()
    with (
        folder.open("kept.jsonl", work.compression) as kept,
        folder.open("removed.jsonl") as removed,
        folder.open(QUARANTINE) as quarantine,
    ):
        reader = UnitReader(work.units[task], work.sources, work.options)
        for record in reader:
            if isinstance(record, Record):
                if reporter.decision[number] == KEPT:
                    kept.write(record.content + b"\n")
                    counts["kept"] += 1
                else:
                    line = reporter.describe_removed(number, record)
                    counts[line["kind"]] += 1
                    removed.write(orjson.dumps(line) + b"\n")
                number += 1
                continue
            source, defect = record
            quarantined[defect.reason] += 1
            before = reporter.lines.get(str(source), 0)
            quarantine.write(defect.describe(work.sources[source].name, before))
    if number != reporter.end:
        raise DataError(
            f"{work.sources[work.units[task][0].source].name}: changed while it was read; remove "
            f"{work.folder} and start again"
        )
    folder.counts = reader.counts
    folder.save_json("info", {**counts, "quarantined": quarantined})


class _Reporter:
    """Describes documents that are removed."""

    def __init__(self, work: Work, unit: int) -> None:
        starts = unit_starts(work)
        self._work = work
        self._starts = starts.tolist()
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


def gather_output(work: Work, staged: Path) -> dict[str, Any]:
    """Put the units' files together in a folder, and return the summary.

    Raises:
        DataError: the documents do not add up.
    """
    summary = _summarise(work)
    take_parts(work, "kept.jsonl", staged)
    for name in ("removed.jsonl", QUARANTINE):
        concatenate(work, "write", name, staged)
    shutil.copyfile(work.task_folder("resolve", 0) / CLUSTERS, staged / CLUSTERS)
    return summary


def take_parts(work: Work, name: str, folder: Path) -> None:
    """Link the units' files of documents into the output; empty ones are left out.

    Args:
        work: the run.
        name: of the file in the folders of tasks.
        folder: of the output.
    """
    for task in range(len(work.units)):
        if work.info("write", task).get(Path(name).stem):
            target = folder / f"part-{task:06d}.jsonl{SUFFIXES[work.compression]}"
            os.link(work.task_folder("write", task) / name, target)


def concatenate(work: Work, stage: str, name: str, folder: Path) -> None:
    """Concatenate the units' files of one name.

    Args:
        work: the run.
        stage: whose tasks wrote the files.
        name: of the file in the folders of tasks, and of the result.
        folder: of the output.
    """
    with (folder / name).open("wb") as stream:
        for task in range(len(work.units)):
            with (work.task_folder(stage, task) / name).open("rb") as part:
                shutil.copyfileobj(part, stream)


def add_counts(work: Work) -> tuple[Counter[str], Counter[str]]:
    """Add up what the units wrote, and by reason what they set aside."""
    counts: Counter[str] = Counter()
    quarantined: Counter[str] = Counter()
    for task in range(len(work.units)):
        info = work.info("write", task)
        quarantined.update(info.pop("quarantined"))
        counts.update(info)
    return counts, quarantined


def _summarise(work: Work) -> dict[str, Any]:
    counts, quarantined = add_counts(work)
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
        "exact_only": work.settings.exact_only,
        "threshold": work.settings.threshold,
        "ngram": work.settings.ngram,
        "bands": work.settings.bands,
        "rows": work.settings.rows,
        "sources": [source.name for source in work.sources],
    }
