"""Merge the parts of a job into shards, with copies and hashes as units, and publish them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy.typing as npt

from megatron_deberta.data.shards.format import bin_path, idx_path, manifest_path
from megatron_deberta.data.shards.manifest import ShardManifest, encode_manifest
from megatron_deberta.data.shards.merge import (
    Call,
    ReadIndex,
    ShardHashes,
    ShardPart,
    merge_calls,
    shard_layout,
)
from megatron_deberta.data.shards.writer import publish_shards, remove_indices, rename_staged
from megatron_deberta.files import write_atomically
from megatron_deberta.text.jobs.executors import Engine, run_recorded
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.jobs.progress import Advance


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedShards:
    """Shards of a job.

    Attributes:
        folder: of the job; locked by this process.
        prefixes: final prefixes of the shards, in one folder.
        dtype: token type.
        parts: of each shard, in order.
        read_index: of a part.
        others: further files of the result: name in ``folder.staged``, and final path.
    """

    folder: JobFolder
    prefixes: Sequence[str]
    dtype: npt.DTypeLike
    parts: Sequence[Sequence[ShardPart]]
    read_index: ReadIndex
    others: Mapping[str, str] = field(default_factory=dict)

    @property
    def _staged(self) -> list[str]:
        return [str(self.folder.staged / str(number)) for number in range(len(self.prefixes))]

    def merge(
        self,
        engine: Engine,
        advance: Advance,
        describe: Callable[[int, ShardHashes], ShardManifest],
    ) -> None:
        """Copy the parts that are not copied yet, and publish; may be killed and called again.

        Args:
            engine: runs copies and hashes.
            advance: shows progress.
            describe: returns the manifest of a shard, from its number and hashes.

        Raises:
            DamagedPartError: a part is damaged.
            DataError: a worker died, or another process has finished or restarted the job.
            OSError: the disk is full, or a file cannot be read.
        """
        folder = self.folder
        if not folder.is_recorded("manifests"):
            allocated = folder.is_recorded("allocated")
            calls: dict[str, Call] = {}
            for number, (staged, parts) in enumerate(zip(self._staged, self.parts, strict=True)):
                files = bin_path(staged), idx_path(staged)
                if not allocated:
                    # A full disk is found before anything is copied.
                    shard_layout(self.dtype, parts).create(*files)
                calls |= merge_calls(str(number), files, self.dtype, parts, self.read_index)
            folder.record("allocated", {})
            # Hashes take longest: a single process computes each.
            order = sorted(calls, key=lambda name: name.startswith("copy"))
            run_recorded(engine, folder, {name: calls[name] for name in order}, "merge", advance)
            for number, staged in enumerate(self._staged):
                manifest = describe(number, folder.recorded(f"hash-{number}", ShardHashes))
                write_atomically(manifest_path(staged), encode_manifest(manifest))
            folder.record("manifests", {})
        folder.check_lock()
        if not folder.is_recorded("cleared"):
            remove_indices(self.prefixes)
            folder.record("cleared", {})
        for name, path in self.others.items():
            rename_staged(folder.staged / name, path)
        publish_shards(self._staged, self.prefixes)
