"""Merging of whole shards into one, resumable and on any executor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from megatron_deberta.data.shards.format import idx_path, refuse_duplicates, refuse_existing
from megatron_deberta.data.shards.manifest import ShardManifest
from megatron_deberta.data.shards.merge import (
    DamagedPartError,
    ShardHashes,
    open_compatible,
    read_shard_index,
    shard_part,
    sum_manifests,
)
from megatron_deberta.errors import ConfigError, DataError
from megatron_deberta.text.jobs.executors import RunOptions, local_engine
from megatron_deberta.text.jobs.folder import JobFolder, plan_digest
from megatron_deberta.text.jobs.shards import StagedShards


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
    folder.remove_leftovers()
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
    try:
        with folder.locked(), contextlib.ExitStack() as stack:
            folder.open(plan_digest(plan))
            if not run.force and not folder.is_recorded("manifests"):
                refuse_existing([output])
            folder.begin(plan)
            engine = run.engine or stack.enter_context(local_engine(run.workers))
            shard.merge(engine, run.advance, lambda _, hashes: sum_manifests(manifests, hashes))
            merged = sum_manifests(manifests, folder.recorded("hash-0", ShardHashes))
            folder.remove()
    except DamagedPartError as error:
        raise DataError(f"{error}; preprocess again") from error
    except OSError as error:
        raise DataError(f"{output}: cannot write the shard: {error}; is the disk full?") from error
    return merged
