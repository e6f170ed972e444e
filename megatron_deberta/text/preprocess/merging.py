"""Puts the parts together and gives the shards their names.

Owns what happens once every unit is recorded: one process lays out the files, all copy parts to
their places, and one publishes. Each step is recorded, so that whoever comes next goes on; each
may be done twice with the same bytes. Refuses to publish what is above the bound of bad records.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_deberta.data.shards.format import bin_path, dtype_for_vocab, idx_path, manifest_path
from megatron_deberta.data.shards.manifest import ShardManifest, encode_manifest
from megatron_deberta.data.shards.writer import PartSize, ShardLayout
from megatron_deberta.errors import DataError
from megatron_deberta.files import fsync_path, write_durably
from megatron_deberta.parsing import parse_json
from megatron_deberta.text.preprocess import direct_io
from megatron_deberta.text.preprocess.progress import ProgressCounters
from megatron_deberta.text.preprocess.units import WorkUnit
from megatron_deberta.text.preprocess.worker import Job
from megatron_deberta.text.preprocess.workfolder import WorkFolder
from megatron_deberta.text.readers.checks import name_damaged
from megatron_deberta.text.readers.records import DAMAGED, DEFAULT_ALLOW_BAD

_TASK_BYTES = 1 << 28
_MOST_TASKS = 1024


def shard_prefixes(output: str, keys: Sequence[str], language: str) -> list[str]:
    """Return Megatron's names of the shards of all keys."""
    kind = "sentence" if language else "document"
    return [f"{output}_{key}_{kind}" for key in keys]


def quarantine_path(output: str) -> str:
    """Return the name of the list of records that were set aside."""
    return f"{output}.quarantine.jsonl"


class Merger:
    """Does the merge together with all other processes of the run.

    Args:
        job: what was encoded.
        units: all units in order.
        folder: where the parts are.
        board: where to say what is being done.
    """

    def __init__(
        self, job: Job, units: list[WorkUnit], folder: WorkFolder, board: ProgressCounters
    ) -> None:
        """See the class."""
        self._job = job
        self._units = units
        self._folder = folder
        self._board = board
        self._dtype = dtype_for_vocab(job.vocab_size)
        self._prefixes = shard_prefixes(job.output, job.options.keys, job.language)

    def run(self) -> None:
        """Merge and publish.

        Raises:
            DataError: too many records are bad, or a key has no text.
            OSError: the disk is full.
        """
        self._board.enter("merging")
        summary = self._once(["layout"], lambda _: self._lay_out())["layout"]
        self._refuse_bad(summary)
        layouts = [
            ShardLayout(self._dtype, [PartSize(*sizes[:3]) for sizes in each])
            for each in summary["sizes"]
        ]
        tasks = {f"copy-{first:08d}": (first, last) for first, last in self._tasks(layouts)}
        self._once(list(tasks), lambda name: self._copy(layouts, summary["sizes"], *tasks[name]))
        files = [f"hash-{index}.{end}" for index in range(len(layouts)) for end in ("bin", "idx")]
        hashes = self._once([*files, "hash-bad"], self._hash)
        self._once(["manifests"], lambda _: self._write_manifests(summary, layouts, hashes))
        self._board.enter("publishing")
        self._once(["cleared"], lambda _: self._clear())
        self._once(["published"], lambda _: self._publish())

    def _once(self, names: list[str], do: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
        """Have each of some tasks done, by this process or another, and return their records."""
        wait = 0.005
        while True:
            found = {name: self._folder.recorded(name) for name in names}
            if None not in found.values():
                return found
            for name in (name for name, record in found.items() if record is None):
                if not self._folder.claim(name):
                    continue
                try:
                    if self._folder.recorded(name) is None:
                        self._folder.record(name, do(name))
                        wait = 0.005
                finally:
                    self._folder.release(name)
            time.sleep(wait)
            # A fifth of the time waited so far: what took a moment is not waited for much longer.
            wait = min(1.2 * wait, 1.0)

    def _lay_out(self) -> dict[str, Any]:
        """Add everything up, set out the final files and list what was set aside."""
        keys = range(len(self._job.options.keys))
        sizes: list[list[list[int]]] = [[] for _ in keys]
        reasons: Counter[str] = Counter()
        documents = 0
        lines: Counter[int] = Counter()
        staged = self._folder.staged / "bad"
        with self._folder.appearing(staged) as path, path.open("wb") as quarantine:
            for unit in self._units:
                record = self._folder.recorded(unit.name)
                assert record is not None, unit
                for key in keys:
                    sizes[key].append(record["sizes"][key])
                reasons.update(record["reasons"])
                documents += record["documents"]
                bases = []
                for source, begin, piece_lines in record["pieces"]:
                    if begin == 0:
                        lines[source] = 0
                    bases.append(lines[source])
                    lines[source] += piece_lines
                if record["reasons"] or any(size[3] for size in record["sizes"]):
                    quarantine.writelines(self._quarantined(unit, bases))
            quarantine.flush()
            os.fsync(quarantine.fileno())
        for key in keys:
            layout = ShardLayout(self._dtype, [PartSize(*each[:3]) for each in sizes[key]])
            with (
                self._folder.appearing(self._staged(key, "bin")) as bin_file,
                self._folder.appearing(self._staged(key, "idx")) as idx_file,
            ):
                layout.create(bin_file, idx_file)
        return {"sizes": sizes, "reasons": reasons, "documents": documents}

    def _quarantined(self, unit: WorkUnit, bases: list[int]) -> Iterator[bytes]:
        with (self._folder.parts / f"{unit.name}.bad").open("rb") as stream:
            for entry in stream:
                source, piece, line, offset, reason, detail = parse_json(
                    entry, tuple[int, int, int, int, str, str], unit.name, "a bad record",
                    remedy="begin again with --restart",
                )  # fmt: skip
                content = {
                    "file": self._job.sources[source].name,
                    "line": bases[piece] + line,
                    "offset": offset if offset >= 0 else None,
                    "reason": reason,
                    "detail": detail,
                }
                yield json.dumps(content, ensure_ascii=False).encode("utf-8", "replace") + b"\n"

    def _refuse_bad(self, summary: dict[str, Any]) -> None:
        reasons = summary["reasons"]
        bad = sum(reasons.values())
        total = summary["documents"] + bad
        share = bad / max(total, 1)
        damaged = reasons.get(DAMAGED, 0)
        allowed = DEFAULT_ALLOW_BAD if self._job.allow_bad is None else self._job.allow_bad
        quarantine = self._folder.staged / "bad"
        listed = f"they are listed in {quarantine}"
        names = f"; damaged: {name_damaged(quarantine)}" if damaged else ""
        if share > allowed:
            found = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
            raise DataError(
                f"{bad} of {total} records are bad ({found}), {share:.2%} where "
                f"--max-bad-fraction is {allowed:.2%}{names}; {listed}; nothing was published"
            )
        if damaged and self._job.allow_bad is None:
            raise DataError(
                f"{damaged} input file(s) are truncated or damaged: {name_damaged(quarantine)}; "
                f"{listed}; replace them, or take what can be read of them with "
                "--max-bad-fraction FRACTION"
            )
        for key, sizes in zip(self._job.options.keys, summary["sizes"], strict=True):
            if not sum(size[0] for size in sizes):
                raise DataError(
                    f"no text under key {key!r} in {len(self._job.sources)} input file(s)"
                )

    def _tasks(self, layouts: list[ShardLayout]) -> Iterable[tuple[int, int]]:
        """Group units into copies that are worth a flush each."""
        total = sum(layout.bin_bytes + layout.idx_bytes for layout in layouts)
        tasks = max(1, min(len(self._units), total // _TASK_BYTES, _MOST_TASKS))
        return itertools.pairwise(len(self._units) * index // tasks for index in range(tasks + 1))

    def _copy(
        self, layouts: list[ShardLayout], sizes: list[list[list[int]]], first: int, last: int
    ) -> dict[str, Any]:
        buffers = direct_io.new_buffer(), direct_io.new_buffer()
        for key, layout in enumerate(layouts):
            files = [os.open(self._staged(key, end), os.O_WRONLY) for end in ("bin", "idx")]
            place = sum(size[0] for size in sizes[key][:first]) * self._dtype.itemsize
            try:
                for index in range(first, last):
                    self._board.enter("merging")
                    path = self._folder.parts / f"{self._units[index].name}.{key}"
                    token_bytes = sizes[key][index][0] * self._dtype.itemsize
                    if token_bytes < direct_io.BUFFER_BYTES:
                        with path.open("rb") as part:
                            layout.copy_tokens(files[0], index, part.fileno())
                    else:
                        direct_io.copy_direct(
                            path, token_bytes, self._staged(key, "bin"), place, buffers
                        )
                    place += token_bytes
                    layout.write_index(files[1], index, *self._index(path, sizes[key][index]))
                for descriptor in files:
                    os.fsync(descriptor)
            finally:
                for descriptor in files:
                    os.close(descriptor)
        return {}

    def _index(
        self, path: Path, size: list[int]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64] | None]:
        """Read what a part has behind its tokens: lengths, and where documents end."""
        tokens, sequences, documents, _ = size
        with path.open("rb") as part:
            part.seek(tokens * self._dtype.itemsize)
            lengths = np.frombuffer(part.read(4 * sequences), np.int32)
            counts = None
            if self._job.counts_sequences:
                counts = np.frombuffer(part.read(), np.int32)
        if lengths.size != sequences or (counts is not None and counts.size != documents):
            raise DataError(f"{path}: shorter than its record says; begin again with --restart")
        return lengths, None if counts is None else np.cumsum(counts, dtype=np.int64)

    def _hash(self, name: str) -> dict[str, Any]:
        return {"sha256": direct_io.sha256_direct(self._folder.staged / name.removeprefix("hash-"))}

    def _write_manifests(
        self, summary: dict[str, Any], layouts: list[ShardLayout], hashes: dict[str, Any]
    ) -> dict[str, Any]:
        quarantined = sum(summary["reasons"].values())
        for key, layout in enumerate(layouts):
            manifest = ShardManifest(
                tokenizer_fingerprint=self._job.tokenizer_fingerprint,
                tokenizer_path=self._job.tokenizer_path,
                vocab_size=self._job.vocab_size,
                dtype=self._dtype.name,
                num_documents=layout.total.documents,
                num_sequences=layout.total.sequences,
                num_tokens=layout.total.tokens,
                bin_sha256=hashes[f"hash-{key}.bin"]["sha256"],
                idx_sha256=hashes[f"hash-{key}.idx"]["sha256"],
                sources=tuple(source.name for source in self._job.sources),
                documents_in=summary["documents"] + quarantined,
                documents_empty=sum(size[3] for size in summary["sizes"][key]),
                documents_quarantined=quarantined,
                quarantine=dict(sorted(summary["reasons"].items())),
                quarantine_sha256=hashes["hash-bad"]["sha256"],
                plan_sha256=self._job.digest,
            )
            path = self._staged(key, "manifest.json")
            path.unlink(missing_ok=True)
            write_durably(path, encode_manifest(manifest))
        return {}

    def _clear(self) -> dict[str, Any]:
        """Take older shards' indices away, so that no old index ever meets new tokens."""
        for prefix in self._prefixes:
            for name in (idx_path(prefix), manifest_path(prefix)):
                Path(name).unlink(missing_ok=True)
        fsync_path(Path(self._job.output).parent)
        return {}

    def _publish(self) -> dict[str, Any]:
        """Give the files their names, each index last: without it a shard is none."""
        self._board.enter("publishing")
        folder = Path(self._job.output).parent
        _rename(self._folder.staged / "bad", quarantine_path(self._job.output))
        for end, name in (("bin", bin_path), ("manifest.json", manifest_path), ("idx", idx_path)):
            if end == "idx":
                fsync_path(folder)
            for key, prefix in enumerate(self._prefixes):
                _rename(self._staged(key, end), name(prefix))
        fsync_path(folder)
        return {}

    def _staged(self, key: int, end: str) -> Path:
        return self._folder.staged / f"{key}.{end}"


def _rename(staged: Path, final: str) -> None:
    # What is not there was named before this process was broken off.
    if staged.exists():
        os.replace(staged, final)
