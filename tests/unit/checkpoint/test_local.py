"""Parts, generations and schedule of local checkpoints, and the pairing of ranks on nodes."""

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
from megatron_deberta.checkpoint.local.recovery import FILE_NAME, History
from megatron_deberta.checkpoint.local.saver import Nodes, SaveSchedule, node_name
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


def test_saves_are_valid_up_to_the_step_of_a_later_start() -> None:
    history = History.new().began(0).began(20).began(7).began(12)
    assert history.generation == 4
    valid = {
        (generation, step)
        for generation in range(1, 5)
        for step in (7, 8, 12, 13, 20, 30)
        if history.is_valid(SaveId(generation, step))
    }
    of_first_two = {(1, 7), (2, 7)}
    of_third = {(3, 7), (3, 8), (3, 12)}
    of_present = {(4, step) for step in (7, 8, 12, 13, 20, 30)}
    assert valid == of_first_two | of_third | of_present


def test_rollback_voids_all_saves() -> None:
    history = History.new().began(0).began(0)
    assert not history.is_valid(SaveId(1, 5))


def test_file_is_read_back(tmp_path: Path) -> None:
    assert History.of_run(tmp_path) is None
    history, checks = History.new().began(3), []
    history.write(tmp_path, lambda: checks.append(1))
    assert History.of_run(tmp_path) == history
    assert checks == [1]
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match="delete it to resume"):
        History.of_run(tmp_path)


def lost_steps(every: int, durations: list[int], steps: int = 60) -> tuple[int, int]:
    """Train with saves that take some numbers of steps in turn, or end when they are waited for.

    Returns:
        The most steps that a failure would have lost, and the number of saves.
    """
    schedule, saving, most, saves = SaveSchedule(every, 0), None, 0, 0
    for step in range(1, steps + 1):
        # A failure now loses what is not saved completely.
        most = max(most, step - schedule.safe)
        if saving is not None and step >= saving[1]:
            schedule.finished(step, saving[0], is_complete=True)
            saving = None
        for is_second_look in (False, True):
            if saving is not None and schedule.must_wait(step):
                schedule.finished(step, saving[0], is_complete=True)
                saving = None
            if not is_second_look and saving is None and schedule.is_due(step):
                schedule.started(step)
                saving = step, step + durations[saves % len(durations)]
                saves += 1
    return most, saves


@pytest.mark.parametrize("every", [1, 2, 3, 10])
@pytest.mark.parametrize("durations", [[1], [2], [1, 7], [100]])
def test_no_failure_loses_more_steps(every: int, durations: list[int]) -> None:
    assert lost_steps(every, durations)[0] <= every


def test_short_saves_start_as_rarely_as_possible() -> None:
    # The first one after half the steps; a save that takes a step starts one step early.
    assert lost_steps(10, [1], steps=60)[1] == 1 + (60 - 5) // 9


def test_failed_saves_are_not_waited_for() -> None:
    schedule = SaveSchedule(4, 0)
    assert [step for step in range(1, 5) if schedule.is_due(step)][0] == 2
    schedule.started(2)
    assert schedule.must_wait(4)
    schedule.finished(4, 2, is_complete=False)
    assert not schedule.is_due(5)
    assert schedule.is_due(6)
    schedule.started(6)
    assert not schedule.must_wait(6)
    schedule.finished(7, 6, is_complete=True)
    assert (schedule.safe, schedule.must_wait(10), schedule.must_wait(9)) == (6, True, False)


def test_a_save_that_hangs_is_waited_for_once() -> None:
    schedule = SaveSchedule(3, 0)
    schedule.started(2)
    assert schedule.must_wait(3)
    schedule.give_up()
    assert not any(schedule.must_wait(step) for step in range(3, 50))
