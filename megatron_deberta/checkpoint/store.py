"""Saves and loads the state of a run, so that no crash leaves less than the last checkpoint.

Owns the two phases of a save (everything under a hidden name first, then a rename and the mark
that commits it), who writes what and choosing what to resume from. Refuses to know what
an engine keeps where, and to decide what may change on resume (``resume.py``).
"""

from __future__ import annotations

import errno
import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_deberta.checkpoint.layout import (
    COMMITTED_FILE,
    KINDS,
    MANIFEST_FILE,
    STAGING_PREFIX,
    WEIGHT,
    CheckpointManifest,
    CheckpointMetadata,
    FileEntry,
    Fragment,
    checkpoints_dir,
    commit_mark,
    committed_steps,
    leftovers,
    part_index_file,
    part_index_json,
    read_part_index,
    step_dir,
    tensor_file,
    tensor_key,
)
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.retention import Retention, delete, delete_oldest
from megatron_deberta.distributed.control import all_reduce_any, broadcast_from_rank_zero
from megatron_deberta.distributed.parallelize.spec import ParameterSpec
from megatron_deberta.distributed.topology import ProcessGroups, single_process_groups
from megatron_deberta.engine.protocol import Engine, ParameterState
from megatron_deberta.errors import CheckpointError
from megatron_deberta.files import adopt_mode, fsync_path, sha256_file, write_durably

logger = logging.getLogger(__name__)

FILE_BYTES = 512 * 2**20
"""A rank begins another file once it holds this much: bounds its memory, not a file's size."""

SPACE_MARGIN = 1.2
"""Free space that a save wants, in sizes of the checkpoint."""

_UNCOMMITTED_FILE = f".{COMMITTED_FILE}"

_States = Iterable[tuple[str, Mapping[str, Tensor]]]
OwnState = tuple[ParameterSpec, Mapping[str, Tensor]]


def save(
    run_dir: str | os.PathLike[str],
    engine: Engine,
    specs: Mapping[str, ParameterSpec],
    groups: ProcessGroups,
    metadata: CheckpointMetadata,
    *,
    retention: Retention | None = None,
) -> Path:
    """Save and commit a checkpoint, then delete the oldest. Collective over all ranks.

    Each parameter is gathered over data-parallel ranks, which take turns in writing; each
    tensor-parallel rank writes its own part, without padding. Older checkpoints are untouched
    until the new one is committed.

    Args:
        run_dir: folder of the run, on a file system that all ranks share.
        engine: where the state is.
        specs: this rank's part of every parameter.
        groups: the rank grid.
        metadata: the run's; the engine's scalars and the layout are filled in here.
        retention: which older checkpoints stay; None keeps all.

    Returns:
        The committed folder.

    Raises:
        CheckpointError: the disk is full or cannot be written, on any rank; nothing of this save
            is left and older checkpoints are intact.
    """
    draft = begin(run_dir, specs, groups, complete(metadata, engine, groups))
    path = _write_and_commit(draft, own_states(engine_states(engine), specs, groups))
    if groups.rank == 0 and retention is not None:
        delete_oldest(run_dir, metadata.step, retention)
    return path


def save_weights(
    run_dir: str | os.PathLike[str],
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    metadata: CheckpointMetadata,
) -> Path:
    """Save a checkpoint without optimizer state, such as an imported model, from one process.

    Args:
        run_dir: folder that gets a ``checkpoints`` folder.
        weights: canonical name and logical tensor of every parameter, one at a time.
        shapes: their logical shapes, in the model's order.
        metadata: where the weights come from.

    Returns:
        The committed folder.

    Raises:
        CheckpointError: the disk is full or cannot be written.
    """
    specs = {
        name: ParameterSpec(name, tuple(shape), None, 0, shape[0], tuple(shape))
        for name, shape in shapes.items()
    }
    states = ((name, {WEIGHT: tensor.float()}) for name, tensor in weights)
    groups = single_process_groups(torch.device("cpu"))
    draft = begin(run_dir, specs, groups, metadata, (WEIGHT,))
    return _write_and_commit(draft, own_states(states, specs, groups))


def find_newest(run_dir: str | os.PathLike[str]) -> Path | None:
    """The newest committed checkpoint of a run, intact or not; None if there is none."""
    steps = committed_steps(run_dir)
    return step_dir(run_dir, steps[-1]) if steps else None


def choose_intact(
    run_dir: str | os.PathLike[str],
    groups: ProcessGroups,
    *,
    hashes: bool = True,
    up_to: float = math.inf,
) -> CheckpointReader | None:
    """Open the newest committed checkpoint that is not damaged. Collective over all ranks.

    Rank 0 looks; the ranks divide the reading.

    Args:
        run_dir: folder of the run.
        groups: the rank grid.
        hashes: compare SHA-256; otherwise only sizes and the manifest's hash.
        up_to: only checkpoints up to this step.

    Returns:
        The same checkpoint on every rank; None if nothing was ever committed.

    Raises:
        CheckpointError: all committed checkpoints are damaged.
    """
    found = committed_steps(run_dir) if groups.rank == 0 else []
    steps = [step for step in found if step <= up_to]
    num_steps = broadcast_from_rank_zero(len(steps), groups)
    for number in range(num_steps):
        step = broadcast_from_rank_zero(steps[-1 - number] if groups.rank == 0 else 0, groups)
        try:
            return open_intact(step_dir(run_dir, step), groups, hashes=hashes)
        except CheckpointError as error:
            logger.warning("%s; trying the checkpoint before it", error)
    if num_steps:
        raise CheckpointError(
            f"all {num_steps} checkpoints in {checkpoints_dir(run_dir)} are damaged; restore one, "
            "or start a new train.run_dir"
        )
    return None


def open_intact(path: Path, groups: ProcessGroups, *, hashes: bool = True) -> CheckpointReader:
    """Open a checkpoint and check its files, the ranks sharing the work. Collective over all ranks.

    Raises:
        CheckpointError: it is not committed or damaged, which any rank's share shows to all.
    """
    problem: CheckpointError | None = None
    if not hashes and groups.rank == 0:
        logger.warning("%s: tensor files are NOT compared with their SHA-256", path)
    try:
        reader = CheckpointReader(path)
        reader.verify(hashes=hashes, share=groups.rank, num_shares=groups.world_size)
    except CheckpointError as error:
        problem = error
    if all_reduce_any(problem is not None, groups):
        raise problem or CheckpointError(f"{path} is damaged, as another rank says")
    return reader


def load(
    reader: CheckpointReader,
    engine: Engine,
    specs: Mapping[str, ParameterSpec],
    *,
    weights_only: bool = False,
) -> None:
    """Set an engine's state from a checkpoint. Collective over all ranks.

    Any layout loads what any other saved: each rank reads its slices.

    Args:
        reader: the checkpoint.
        engine: a fresh engine.
        specs: this rank's part of every parameter.
        weights_only: leave moments at zero and scalars as they are, for a new run.

    Raises:
        CheckpointError: it is of another model, lacks optimizer state, or is damaged.
    """
    _check_shapes(reader, specs)
    kinds = (WEIGHT,) if weights_only else KINDS

    def fetch(name: str) -> ParameterState:
        return ParameterState(
            *(
                _local_part(reader, specs[name], kind)
                if kind in kinds
                else torch.zeros(specs[name].local_shape)
                for kind in KINDS
            )
        )

    engine.load_states(fetch)
    if not weights_only:
        engine.load_state_dict(reader.metadata.scalars)


def _local_part(reader: CheckpointReader, spec: ParameterSpec, kind: str) -> Tensor:
    stop = spec.offset + spec.length
    part = reader.tensor(spec.name, kind, spec.split_dim, spec.offset, stop)
    if part.shape == spec.local_shape:
        return part
    padded = torch.zeros(spec.local_shape)
    spec.true_part(padded).copy_(part)
    return padded


def _check_shapes(reader: CheckpointReader, specs: Mapping[str, ParameterSpec]) -> None:
    ours = {name: spec.logical_shape for name, spec in specs.items()}
    for name in (*ours, *reader.shapes):
        if ours.get(name) != reader.shapes.get(name):
            raise CheckpointError(
                f"{reader.path} is of another model: {name} is {reader.shapes.get(name)} there and "
                f"{ours.get(name)} in this config; give the config it was trained with"
            )


@dataclass(frozen=True, slots=True)
class Draft:
    """A save that has begun and is not committed."""

    run_dir: str | os.PathLike[str]
    metadata: CheckpointMetadata
    kinds: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    groups: ProcessGroups

    @property
    def final(self) -> Path:
        """The folder's name once it is committed."""
        return step_dir(self.run_dir, self.metadata.step)

    @property
    def staging(self) -> Path:
        """Its name until then."""
        return self.final.with_name(STAGING_PREFIX + self.final.name)


def begin(
    run_dir: str | os.PathLike[str],
    specs: Mapping[str, ParameterSpec],
    groups: ProcessGroups,
    metadata: CheckpointMetadata,
    kinds: tuple[str, ...] = KINDS,
) -> Draft:
    """See that there is space and make the hidden folder. Collective over all ranks.

    Raises:
        CheckpointError: there is not, or it cannot be made.
    """
    shapes = {name: spec.logical_shape for name, spec in specs.items()}
    draft = Draft(run_dir, metadata, kinds, shapes, groups)
    with _all_or_none(draft):
        if groups.rank == 0:
            _prepare(run_dir, draft.staging, 4 * len(kinds) * sum(map(math.prod, shapes.values())))
    return draft


def own_states(
    states: _States, specs: Mapping[str, ParameterSpec], groups: ProcessGroups
) -> Iterator[OwnState]:
    """The true parts of what this rank writes: ranks with copies of the same take turns.

    Gathering is collective over data-parallel ranks, so all of them must exhaust it.
    """
    for number, (name, tensors) in enumerate(states):
        spec = specs[name]
        turn_of_batch = number % groups.dp_size == groups.dp_rank
        turn_of_layer = spec.dim is not None or number % groups.tp_size == groups.tp_rank
        if turn_of_batch and turn_of_layer and spec.length:
            yield spec, {kind: spec.true_part(t).contiguous() for kind, t in tensors.items()}


def write(draft: Draft, states: Iterable[OwnState]) -> None:
    """Write this rank's fragments and an index of them. Without collectives of its own.

    Raises:
        OSError, SafetensorError: the disk is full or cannot be written.
    """
    left = iter(states)
    try:
        writer = _FragmentWriter(draft.staging, draft.groups.rank)
        for spec, tensors in left:
            writer.add(spec, tensors)
        writer.finish()
    finally:
        # After a failure go on gathering: the other ranks are in those collectives.
        for _ in left:
            pass


def commit(draft: Draft, problem: Exception | None) -> Path:
    """Give the checkpoint its name and the mark that makes it count. Collective over all ranks.

    Args:
        draft: what all ranks have stopped writing.
        problem: why this rank could not write it.

    Raises:
        CheckpointError: a rank could not write, or the folder cannot be renamed; nothing of this
            save is left.
    """
    with _all_or_none(draft):
        if problem is not None:
            raise problem
    with _all_or_none(draft):
        if draft.groups.rank == 0:
            _publish(draft)
    return draft.final


def engine_states(engine: Engine) -> _States:
    """Every parameter's state by kind, one at a time. Collective over data-parallel ranks."""
    for name, state in engine.gather_states():
        yield name, {kind: getattr(state, kind) for kind in KINDS}


def complete(
    metadata: CheckpointMetadata, engine: Engine, groups: ProcessGroups
) -> CheckpointMetadata:
    """Fill in the engine's scalars and the layout."""
    layout = {"tp_size": groups.tp_size, "dp_size": groups.dp_size}
    return replace(metadata, scalars=engine.state_dict(), layout=layout)


def _write_and_commit(draft: Draft, states: Iterable[OwnState]) -> Path:
    problem: Exception | None = None
    try:
        write(draft, states)
    except (OSError, SafetensorError) as error:
        problem = error
    return commit(draft, problem)


@contextmanager
def _all_or_none(draft: Draft) -> Iterator[None]:
    """Turn a failure of the body on any rank into a ``CheckpointError`` on all. Collective."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    if not all_reduce_any(problem is not None, draft.groups):
        return
    # All ranks have stopped writing: they have agreed on the failure.
    if draft.groups.rank == 0:
        for path in leftovers(draft.run_dir):
            shutil.rmtree(path, ignore_errors=True)
    reason = str(problem) if problem else "another rank failed and says why"
    raise CheckpointError(
        f"{draft.final} was not saved: {reason}; older checkpoints are intact"
    ) from problem


def _prepare(run_dir: str | os.PathLike[str], staging: Path, num_bytes: int) -> None:
    """Clear what killed saves have left, see that there is space, and make the staging folder."""
    checkpoints_dir(run_dir).mkdir(parents=True, exist_ok=True)
    for path in leftovers(run_dir):
        logger.info("removing %s, left by a save that was killed", path)
        shutil.rmtree(path)
    free = shutil.disk_usage(staging.parent).free
    if free < SPACE_MARGIN * num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{free / 2**20:,.0f} MiB free, {SPACE_MARGIN * num_bytes / 2**20:,.0f} MiB needed; "
            "free some or lower checkpoint.keep_last",
        )
    staging.mkdir()


class _FragmentWriter:
    """Collects a rank's fragments into files of about ``FILE_BYTES``."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._held: dict[str, Tensor] = {}
        self._files: list[FileEntry] = []
        self._fragments: list[Fragment] = []

    def add(self, spec: ParameterSpec, tensors: Mapping[str, Tensor]) -> None:
        """Take the true part of every kind of a parameter's state; it must not change any more."""
        for kind, tensor in tensors.items():
            self._held[tensor_key(kind, spec.name)] = tensor
        file = tensor_file(self._rank, len(self._files))
        self._fragments.append(Fragment(spec.name, file, spec.split_dim, spec.offset, spec.length))
        if sum(tensor.nbytes for tensor in self._held.values()) >= FILE_BYTES:
            self._flush()

    def finish(self) -> None:
        """Write what is held and the index."""
        self._flush()
        index = part_index_json(self._files, self._fragments)
        write_durably(self._folder / part_index_file(self._rank), index)

    def _flush(self) -> None:
        if not self._held:
            return
        path = self._folder / tensor_file(self._rank, len(self._files))
        save_file(self._held, path)
        self._held = {}
        adopt_mode(path)
        fsync_path(path)
        self._files.append(FileEntry(path.name, path.stat().st_size, sha256_file(path)))


def _publish(draft: Draft) -> None:
    """Merge the ranks' indices, give the checkpoint its name, and commit it."""
    staging, final = draft.staging, draft.final
    files: list[FileEntry] = []
    fragments: list[Fragment] = []
    for rank in range(draft.groups.world_size):
        index = staging / part_index_file(rank)
        part_files, part_fragments = read_part_index(index)
        files += part_files
        fragments += part_fragments
        index.unlink()
    manifest = CheckpointManifest(
        draft.metadata, draft.kinds, draft.shapes, tuple(files), tuple(fragments)
    )
    content = manifest.to_json()
    # What cannot be read back must not be committed.
    CheckpointManifest.from_json(content, staging / MANIFEST_FILE)
    write_durably(staging / MANIFEST_FILE, content)
    # Written now, so that nothing after the rename needs space.
    write_durably(staging / _UNCOMMITTED_FILE, commit_mark(content))
    fsync_path(staging)
    if final.exists():
        # The run fell back behind a damaged checkpoint and has come here again.
        delete(final)
    staging.rename(final)
    fsync_path(final.parent)
    (final / _UNCOMMITTED_FILE).rename(final / COMMITTED_FILE)
    fsync_path(final)
