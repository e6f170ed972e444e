"""Two-phase writing of checkpoints: stage all files under a hidden name, then rename and commit.

A process that has lost the lock of its run folder cannot commit. Rank 0 checks the lock before each
commit. A process that is suspended between the check and the commit finds its staging folder
deleted: its name contains the number of the lock, and the next holder deletes the staging folders
of others before it reads the newest checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_deberta.checkpoint.layout import (
    COMMITTED_FILE,
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
from megatron_deberta.distributed.control import raise_on_all_ranks
from megatron_deberta.distributed.parallelize.plan import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import CheckpointError
from megatron_deberta.files import fsync_path, write_durably
from megatron_deberta.model.low_rank import is_trained

logger = logging.getLogger(__name__)

# Buffered bytes at which a rank writes a file; bounds its memory.
FILE_BYTES = 512 * 2**20
# Required free disk space, as a multiple of the checkpoint's size.
SPACE_MARGIN = 1.2

# State of a parameter that this rank writes, without padding.
OwnedState: TypeAlias = tuple[ParameterSpec, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Fence:
    """Lock under which a process writes to a run folder.

    Attributes:
        number: number of the lock, the same on every rank; 0: there is none.
        check: called on rank 0 before each commit; does not return if the lock has been lost.
    """

    number: int = 0
    check: Callable[[], None] = lambda: None


UNLOCKED = Fence()


@dataclass(frozen=True, slots=True)
class StagedCheckpoint:
    """A checkpoint that is being written and is not committed.

    Attributes:
        run_dir: the run folder.
        metadata: metadata of the checkpoint.
        kinds: kinds of tensors that are stored of each parameter.
        shapes: logical shape by canonical name, in the model's order.
        groups: process groups.
        fence: lock of the run folder.
        num_parts: ranks that write a part; 0: all ranks of ``groups``.
    """

    run_dir: str | os.PathLike[str]
    metadata: CheckpointMetadata
    kinds: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
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


def save(staged: StagedCheckpoint, write_part: Callable[[], None]) -> Path:
    """Stage, write and commit a checkpoint. Collective: all ranks.

    Args:
        staged: the checkpoint.
        write_part: writes this rank's files into the staging folder.

    Returns:
        The committed folder.

    Raises:
        CheckpointError: a rank failed to write; the staged files are deleted.
    """
    begin(staged)
    failure: Exception | None = None
    try:
        write_part()
    except (OSError, SafetensorError) as error:
        failure = error
    return commit(staged, failure)


def begin(staged: StagedCheckpoint) -> None:
    """Check free disk space and create the staging folder. Collective: all ranks.

    Raises:
        CheckpointError: there is too little space, or the folder cannot be created.
    """
    with _discard_on_failure(staged):
        if staged.groups.rank == 0:
            _prepare(staged)


def write(staged: StagedCheckpoint, states: Iterable[OwnedState]) -> None:
    """Write this rank's fragments and their index. Issues no collectives of its own.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    remaining, rank = iter(states), staged.groups.rank
    files: list[FileEntry] = []
    fragments: list[Fragment] = []
    try:
        for name, tensors, contained in tensor_files(remaining, rank, FILE_BYTES):
            files.append(FileEntry(name, *write_tensors(staged.staging / name, tensors)))
            fragments += contained
        index = part_index_json(files, fragments)
        write_durably(staged.staging / part_index_file(rank), index)
    finally:
        # After a failure, take part in the remaining exchanges: the other ranks wait in them.
        for _ in remaining:
            pass


def tensor_files(
    states: Iterable[OwnedState], rank: int, file_bytes: int
) -> Iterator[tuple[str, dict[str, Tensor], list[Fragment]]]:
    """Divide the states that a rank writes into files.

    Args:
        states: the states; their tensors must not be modified until the file is written.
        rank: the rank.
        file_bytes: bytes of tensors at which a file is complete.

    Yields:
        Name of the file, its tensors by key, and the fragments that they are.
    """
    tensors: dict[str, Tensor] = {}
    fragments: list[Fragment] = []
    number = num_bytes = 0
    for spec, state in states:
        name = tensor_file(rank, number)
        for kind, tensor in state.items():
            tensors[tensor_key(kind, spec.name)] = tensor
            num_bytes += tensor.nbytes
        fragments.append(Fragment(spec.name, name, spec.split_dim, spec.offset, spec.length))
        if num_bytes >= file_bytes:
            yield name, tensors, fragments
            tensors, fragments, number, num_bytes = {}, [], number + 1, 0
    if tensors:
        yield tensor_file(rank, number), tensors, fragments


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write and flush a new file in fp32, with the bytes of ``safetensors.torch.save_file``.

    A file that is read back for its hash would verify although it was corrupted on the way to the
    disk; this hash is of the tensors.

    Args:
        path: the file; must not exist.
        tensors: by name; any shape and device.

    Returns:
        Size of the file and its hexadecimal SHA-256.

    Raises:
        OSError: the disk is full or the folder not writable.
    """
    header = {}
    start = 0
    for name, tensor in sorted(tensors.items()):
        end = start + 4 * tensor.numel()
        shape = list(tensor.shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        start = end
    content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # The tensors begin at a multiple of 8.
    content += b" " * (-len(content) % 8)
    digest = hashlib.sha256()
    with path.open("xb") as stream:
        for piece in (len(content).to_bytes(8, "little"), content):
            digest.update(piece)
            stream.write(piece)
        for name in header:
            flat = tensors[name].detach().to("cpu", torch.float32).contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().data
            digest.update(data)
            stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return 8 + len(content) + start, digest.hexdigest()


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
    # Of frozen weights nothing else is stored.
    num_bytes = sum(
        4
        * math.prod(shape)
        * (len(staged.kinds) if is_trained(name, staged.metadata.lora_rank) else 1)
        for name, shape in staged.shapes.items()
    )
    free = shutil.disk_usage(folder).free
    if free < SPACE_MARGIN * num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{free / 2**20:,.0f} MiB free, {SPACE_MARGIN * num_bytes / 2**20:,.0f} MiB needed; "
            "free some or lower checkpoint.keep_last",
        )
    staged.staging.mkdir()


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
        staged.metadata, staged.kinds, dict(staged.shapes), tuple(files), tuple(fragments)
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
