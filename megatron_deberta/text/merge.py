"""Merging of the parts of a job, or of whole shards, into shards, resumable on any executor."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from megatron_deberta.data.shards.format import (
    bin_path,
    idx_path,
    manifest_path,
    refuse_duplicates,
    refuse_existing,
)
from megatron_deberta.data.shards.manifest import ShardManifest, encode_manifest
from megatron_deberta.data.shards.merge import (
    Call,
    DamagedPartError,
    ReadIndex,
    ShardHashes,
    ShardPart,
    merge_calls,
    open_compatible,
    read_shard_index,
    shard_layout,
    shard_part,
    sum_manifests,
)
from megatron_deberta.data.shards.writer import publish_shards, remove_indices, rename_staged
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.files import write_atomically
from megatron_deberta.text.jobs.executors import Engine, RunOptions, run_job, run_stage
from megatron_deberta.text.jobs.folder import JobFolder, plan_digest
from megatron_deberta.text.jobs.progress import Advance


def merge_shards(
    prefixes: Sequence[str], output: str, *, run: RunOptions | None = None
) -> ShardManifest:
    """Merge shards in the order given; return the manifest of the result.

    Completed copies are kept in ``{output}.unfinished`` until the shard is published; the same
    call resumes from them.

    Args:
        prefixes: shards with manifests, of one token type and tokenizer, either all of sentences
            or all of whole documents; each once.
        output: prefix of the result, none of ``prefixes``.
        run: how it is done.

    Raises:
        ConfigError: ``output`` exists or is one of the inputs, a shard is listed twice, or an
            unfinished merge was of other shards.
        DataError: a shard is damaged, has no manifest or differs from the first; the disk is full;
            a worker died; or another process writes ``output``. Nothing is published then.
    """
    run = run or RunOptions()
    refuse_duplicates(prefixes, "", "name each shard once, as part-*.idx")
    if os.path.realpath(idx_path(output)) in [os.path.realpath(idx_path(p)) for p in prefixes]:
        raise ConfigError(f"--output {output}: is one of the inputs; choose another name")
    folder = JobFolder(os.path.abspath(output))
    manifests = open_compatible(prefixes)
    parts = [shard_part(*each) for each in zip(prefixes, manifests, strict=True)]
    shard = StagedShards(
        folder=folder,
        prefixes=[os.path.abspath(output)],
        dtype=manifests[0].dtype,
        parts=[parts],
        read_index=read_shard_index,
    )
    plan = {"--input": [[part.name, *part.sha256] for part in parts]}

    def merge() -> ShardManifest:
        folder.open(plan_digest(plan))
        if not run.force and not folder.is_recorded("manifests"):
            refuse_existing([output])
        folder.begin(plan)
        with run.open_engine() as engine:
            shard.merge(engine, run.advance, lambda _, hashes: sum_manifests(manifests, hashes))
        return sum_manifests(manifests, folder.recorded("hash-0", ShardHashes))

    try:
        merged = run_job(folder, run, find_result=lambda: None, work=lambda: None, publish=merge)
    except DamagedPartError as error:
        raise DataError(f"{error}; preprocess again") from error
    except OSError as error:
        raise DataError(f"{output}: cannot write the shard: {error}; is the disk full?") from error
    assert merged is not None
    return merged


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
            left = [
                (_named, (name, *calls[name])) for name in order if not folder.is_recorded(name)
            ]

            def record(result: tuple[str, dict[str, Any]]) -> Counter[str]:
                folder.record(*result)
                return Counter({"text_bytes": result[1].get("text_bytes", 0)})

            run_stage(engine, "merge", len(calls), left, advance, record)
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


def _named(name: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    return name, function(*arguments)
