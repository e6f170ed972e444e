"""Parts of local checkpoints, and the pairing of ranks on neighbour nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_deberta.checkpoint.layout import COMMITTED_FILE, MANIFEST_FILE, commit_mark
from megatron_deberta.checkpoint.local.parts import (
    PartManifest,
    PartWriter,
    SaveId,
    delete_parts,
    held_parts,
    is_intact,
    make_private,
    part_dir,
    part_folders,
    within,
)
from megatron_deberta.checkpoint.local.saver import Nodes, node_name
from megatron_deberta.errors import CheckpointError
from tests.support.checkpoints import metadata

SAVE = SaveId(2, 14)


def manifest(writer: PartWriter, rank: int, *contents: bytes) -> bytes:
    files = tuple(writer.add(content) for content in contents)
    return PartManifest(SAVE, rank, 4, metadata(14), {"head.bias": (3,)}, files, ()).to_json()


def test_part_is_held_once_committed(tmp_path: Path) -> None:
    folder = tmp_path / "node" / "run"
    writer = PartWriter(folder, SAVE, 1)
    content = manifest(writer, 1, b"one", b"two")
    assert held_parts(folder) == []
    assert writer.commit(content)
    (part,) = held_parts(folder)
    assert (part.rank, part.save, part.metadata) == (1, SAVE, metadata(14))
    assert writer.num_bytes == 6 + len(content) + len(commit_mark(content))
    assert is_intact(folder, part)
    (part_dir(folder, SAVE, 1) / part.files[1].name).write_bytes(b"twO")
    assert not is_intact(folder, part)
    (part_dir(folder, SAVE, 1) / part.files[1].name).unlink()
    assert not is_intact(folder, part)


@pytest.mark.parametrize("name", [MANIFEST_FILE, COMMITTED_FILE])
def test_damaged_manifest_is_not_held(tmp_path: Path, name: str) -> None:
    writer = PartWriter(tmp_path / "run", SAVE, 0)
    writer.commit(manifest(writer, 0, b"one"))
    path = part_dir(tmp_path / "run", SAVE, 0) / name
    path.write_bytes(path.read_bytes()[:-1])
    assert held_parts(tmp_path / "run") == []


def test_part_under_another_name_is_not_held(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "run", SAVE, 0)
    writer.commit(manifest(writer, 0, b"one"))
    part_dir(tmp_path / "run", SAVE, 0).rename(part_dir(tmp_path / "run", SAVE, 1))
    assert held_parts(tmp_path / "run") == []


def test_files_must_be_those_of_the_manifest(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "run", SAVE, 0)
    content = manifest(writer, 0, b"one")
    writer.add(b"two")
    with pytest.raises(CheckpointError, match="differ"):
        writer.commit(content)
    assert part_folders(tmp_path / "run") == []


def test_other_saves_of_a_rank_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for save in (SaveId(1, 7), SAVE):
        for rank in (0, 1):
            PartWriter(folder, save, rank)
    delete_parts(folder, [1], SAVE)
    expected = [part_dir(folder, SaveId(1, 7), 0), *(part_dir(folder, SAVE, r) for r in (0, 1))]
    assert part_folders(folder) == expected


def test_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="symbolic link"):
        make_private(tmp_path / "run")
    assert PartWriter(tmp_path / "run", SAVE, 0).error is not None


@pytest.mark.parametrize(
    ("names", "targets"),
    [
        ("aabb", [2, 3, 0, 1]),
        ("abc", [1, 2, 0]),
        ("aab", [2, 2, 0]),
        ("aaa", [None, None, None]),
    ],
)
def test_each_rank_has_a_replica_on_the_next_node(names: str, targets: list[int | None]) -> None:
    nodes = [Nodes(rank, tuple(names), None) for rank in range(len(names))]
    assert [node.target for node in nodes] == targets
    for node in nodes:
        assert node.sources == [r for r, target in enumerate(targets) if target == node.rank]


def test_name_of_a_node_is_a_folder_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "../gpu 3.cluster")
    assert node_name() == "___gpu_3_cluster"


def test_call_that_hangs_is_given_up(tmp_path: Path) -> None:
    # Reading a FIFO that nothing writes to never returns.
    writer = PartWriter(tmp_path / "run", SAVE, 0)
    writer.commit(manifest(writer, 0, b"one"))
    path = part_dir(tmp_path / "run", SAVE, 0) / MANIFEST_FILE
    path.unlink()
    os.mkfifo(path)
    nothing: list[PartManifest] = []
    assert within(0.2, lambda: held_parts(tmp_path / "run"), nothing) is nothing
    # Ends the thread.
    path.write_bytes(b"")
    assert within(5.0, lambda: 3, 0) == 3
    with pytest.raises(OSError, match="full"):
        within(5.0, failing, 0)


def failing() -> int:
    raise OSError("full")
