"""Two-phase writing of checkpoints: stage all files under a hidden name, then rename and commit."""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from megatron_deberta.checkpoint.fence import UNLOCKED, Fence
from megatron_deberta.checkpoint.layout import (
    COMMITTED_FILE,
    KINDS,
    MANIFEST_FILE,
    STAGING_PREFIX,
    UNCOMMITTED_FILE,
    CheckpointManifest,
    CheckpointMetadata,
    FileEntry,
    Fragment,
    checkpoints_dir,
    commit_mark,
    foreign_folders,
    part_index_file,
    part_index_json,
    read_part_index,
    step_dir,
    tensor_file,
    tensor_key,
)
from megatron_deberta.checkpoint.retention import delete, delete_leftovers
from megatron_deberta.checkpoint.tensor_writer import write_tensors
from megatron_deberta.distributed.control import raise_on_all_ranks
from megatron_deberta.distributed.parallelize.plan import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import CheckpointError
from megatron_deberta.files import fsync_path, write_durably

logger = logging.getLogger(__name__)

# Buffered bytes at which a rank writes a file; bounds its memory.
FILE_BYTES = 512 * 2**20
# Required free disk space, as a multiple of the checkpoint's size.
SPACE_MARGIN = 1.2

# Canonical name, and local tensors by kind, of every parameter.
States: TypeAlias = Iterable[tuple[str, Mapping[str, Tensor]]]
# State of a parameter that this rank writes, without padding.
OwnedState: TypeAlias = tuple[ParameterSpec, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """A checkpoint that is being written and is not committed.

    Attributes:
        num_parts: ranks that write a part; 0: all ranks of ``groups``.
    """

    run_dir: str | os.PathLike[str]
    metadata: CheckpointMetadata
    kinds: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    groups: ProcessGroups
    fence: Fence = UNLOCKED
    num_parts: int = 0

    @property
    def final(self) -> Path:
        """Folder of the committed checkpoint."""
        return step_dir(self.run_dir, self.metadata.step)

    @property
    def staging(self) -> Path:
        """Hidden folder used until the commit."""
        suffix = f".{self.fence.number}" if self.fence.number else ""
        return self.final.with_name(f"{STAGING_PREFIX}{self.final.name}{suffix}")


def begin(
    run_dir: str | os.PathLike[str],
    specs: Mapping[str, ParameterSpec],
    groups: ProcessGroups,
    metadata: CheckpointMetadata,
    kinds: tuple[str, ...] = KINDS,
    fence: Fence = UNLOCKED,
) -> StagedCheckpoint:
    """Check free disk space and create the staging folder. Collective: all ranks.

    Args:
        run_dir: the run folder.
        specs: this rank's part of every parameter, by canonical name.
        groups: process groups.
        metadata: metadata of the checkpoint.
        kinds: kinds of tensors that are stored of each parameter.
        fence: lock of the run folder.

    Raises:
        CheckpointError: there is too little space, or the folder cannot be created.
    """
    shapes = {name: spec.logical_shape for name, spec in specs.items()}
    staged = StagedCheckpoint(run_dir, metadata, kinds, shapes, groups, fence)
    prepare(staged)
    return staged


def prepare(staged: StagedCheckpoint) -> None:
    """Check free disk space and create the staging folder. Collective: all ranks.

    Raises:
        CheckpointError: see ``begin``.
    """
    with _discard_on_failure(staged):
        if staged.groups.rank == 0:
            _prepare(staged)


def owned_states(
    states: States, specs: Mapping[str, ParameterSpec], groups: ProcessGroups
) -> Iterator[OwnedState]:
    """Yield the states that this rank writes: replicated parameters go to the ranks in turn.

    Collective: data-parallel ranks, if ``states`` gathers; every rank must exhaust the iterator.

    Args:
        states: canonical name, and local tensors by kind, of every parameter, in the same order on
            every rank.
        specs: this rank's part of every parameter, by canonical name.
        groups: process groups.
    """
    for number, (name, tensors) in enumerate(states):
        spec = specs[name]
        dp_turn = number % groups.dp_size == groups.dp_rank
        tp_turn = spec.dim is not None or number % groups.tp_size == groups.tp_rank
        if dp_turn and tp_turn and spec.length:
            yield spec, {kind: spec.true_part(t).contiguous() for kind, t in tensors.items()}


def write(staged: StagedCheckpoint, states: Iterable[OwnedState]) -> None:
    """Write this rank's fragments and their index. Issues no collectives of its own.

    Raises:
        OSError, SafetensorError: the disk is full or cannot be written.
    """
    remaining = iter(states)
    try:
        writer = _FragmentWriter(staged.staging, staged.groups.rank)
        for spec, tensors in remaining:
            writer.add(spec, tensors)
        writer.finish()
    finally:
        # After a failure, take part in the remaining gathers: the other ranks wait in them.
        for _ in remaining:
            pass


def commit(staged: StagedCheckpoint, error: Exception | None) -> Path:
    """Publish the checkpoint after all ranks have written their parts. Collective: all ranks.

    Args:
        staged: the checkpoint.
        error: this rank's failure while writing, or None.

    Returns:
        The committed folder.

    Raises:
        CheckpointError: a rank failed to write, or the folder cannot be renamed; the staged files
            are deleted.
    """
    with _discard_on_failure(staged):
        if error is not None:
            raise error
    with _discard_on_failure(staged):
        if staged.groups.rank == 0:
            _publish(staged)
    return staged.final


@contextmanager
def _discard_on_failure(staged: StagedCheckpoint) -> Iterator[None]:
    """Raise a failure on any rank as ``CheckpointError`` on all of them. Collective: all ranks."""
    try:
        with raise_on_all_ranks(staged.groups):
            yield
    except Exception as error:
        # No rank writes any more: all have agreed on the failure.
        if staged.groups.rank == 0:
            with suppress(OSError):
                # Those of the next holder of the lock must stay.
                staged.fence.check()
                delete_leftovers(staged.run_dir)
        raise CheckpointError(
            f"{staged.final} was not saved: {error}; older checkpoints are intact"
        ) from error


def _prepare(staged: StagedCheckpoint) -> None:
    """Delete leftovers of killed saves, check free space, and create the staging folder."""
    folder = checkpoints_dir(staged.run_dir)
    staged.fence.check()
    folder.mkdir(parents=True, exist_ok=True)
    fsync_path(folder.parent)
    delete_leftovers(staged.run_dir)
    for path in foreign_folders(staged.run_dir):
        logger.warning(
            "%s has no %s and was left by no save, perhaps by an incomplete copy; it is kept and "
            "not used: complete the copy, or delete it",
            path,
            COMMITTED_FILE,
        )
    num_bytes = 4 * len(staged.kinds) * sum(map(math.prod, staged.shapes.values()))
    free = shutil.disk_usage(folder).free
    if free < SPACE_MARGIN * num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{free / 2**20:,.0f} MiB free, {SPACE_MARGIN * num_bytes / 2**20:,.0f} MiB needed; "
            "free some or lower checkpoint.keep_last",
        )
    staged.staging.mkdir()


class _FragmentWriter:
    """Buffers a rank's fragments and writes them to files of about ``FILE_BYTES``."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._buffer: dict[str, Tensor] = {}
        self._files: list[FileEntry] = []
        self._fragments: list[Fragment] = []

    def add(self, spec: ParameterSpec, tensors: Mapping[str, Tensor]) -> None:
        """Add a parameter's state by kind; the tensors must not be modified afterwards."""
        self._buffer |= {tensor_key(kind, spec.name): tensor for kind, tensor in tensors.items()}
        file = tensor_file(self._rank, len(self._files))
        self._fragments.append(Fragment(spec.name, file, spec.split_dim, spec.offset, spec.length))
        if sum(tensor.nbytes for tensor in self._buffer.values()) >= FILE_BYTES:
            self._flush()

    def finish(self) -> None:
        """Write the remaining fragments and the index."""
        self._flush()
        index = part_index_json(self._files, self._fragments)
        write_durably(self._folder / part_index_file(self._rank), index)

    def _flush(self) -> None:
        if not self._buffer:
            return
        path = self._folder / tensor_file(self._rank, len(self._files))
        size, sha256 = write_tensors(path, self._buffer)
        self._buffer = {}
        self._files.append(FileEntry(path.name, size, sha256))


def _publish(staged: StagedCheckpoint) -> None:
    """Merge the ranks' indices into the manifest, rename the folder, and commit it."""
    staging, final = staged.staging, staged.final
    files: list[FileEntry] = []
    fragments: list[Fragment] = []
    for rank in range(staged.num_parts or staged.groups.world_size):
        index = staging / part_index_file(rank)
        part_files, part_fragments = read_part_index(index)
        files += part_files
        fragments += part_fragments
        index.unlink()
    manifest = CheckpointManifest(
        staged.metadata, staged.kinds, staged.shapes, tuple(files), tuple(fragments)
    )
    content = manifest.to_json()
    # Commit only what can be read back.
    CheckpointManifest.from_json(content, staging / MANIFEST_FILE)
    write_durably(staging / MANIFEST_FILE, content)
    # Written before the rename, so that nothing after it needs disk space.
    write_durably(staging / UNCOMMITTED_FILE, commit_mark(content))
    fsync_path(staging)
    staged.fence.check()
    if (final / COMMITTED_FILE).exists():
        # The run fell back to an older checkpoint and has reached this step again.
        delete(final)
    elif os.path.lexists(final):
        _set_aside(final)
    staging.rename(final)
    fsync_path(final.parent)
    (final / UNCOMMITTED_FILE).rename(final / COMMITTED_FILE)
    fsync_path(final)


def _set_aside(path: Path) -> None:
    """Rename a foreign folder that has the name of a new checkpoint."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.aside-{number}")):
        number += 1
    path.rename(aside)
    logger.warning("%s was written by no save and was in the way; renamed to %s", path, aside)
