"""Saving on one grid and loading on another; fallback to intact checkpoints; failed saves."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_deberta.checkpoint import saver, store, writer
from megatron_deberta.checkpoint.layout import (
    COMMITTED_FILE,
    KINDS,
    MANIFEST_FILE,
    checkpoints_dir,
    committed_steps,
    step_dir,
)
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.distributed.topology import ProcessGroups
from megatron_deberta.errors import CheckpointError
from tests.support.checkpoints import (
    SCALARS,
    SHAPES,
    FakeEngine,
    assert_holds,
    grid_place,
    load_on,
    logical_states,
    metadata,
    on_threads,
    save_alone,
    save_on_grid,
    specs_of,
)

GRIDS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (2, 3)]


@pytest.mark.parametrize("saved_on", GRIDS)
@pytest.mark.parametrize("loaded_on", [1, 2, 4])
def test_any_layout_loads_what_any_other_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved_on: tuple[int, int], loaded_on: int
) -> None:
    paths = save_on_grid(monkeypatch, *saved_on, tmp_path, metadata(3))
    assert paths == [step_dir(tmp_path, 3)] * len(paths)
    for engine in on_threads(monkeypatch, loaded_on, 1, partial(load_on, path=paths[0])):
        assert_holds(engine, logical_states())
        assert engine.state_dict() == SCALARS


def test_work_is_shared_and_each_true_row_is_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_on_grid(monkeypatch, 2, 2, tmp_path, metadata(3))[0]
    ranks = {file.name[5:10] for file in path.glob("*.safetensors")}
    assert ranks == {"00000", "00001", "00002", "00003"}
    elements = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    data = 4 * len(KINDS) * elements
    headers = sum(file.stat().st_size for file in path.glob("*.safetensors")) - data
    assert 0 < headers < 1000 * len(ranks)


def test_every_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save_alone(tmp_path, 1)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}


def test_files_are_cut_to_bound_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 1000)
    path = save_alone(tmp_path, 1)
    assert len(list(path.glob("*.safetensors"))) > 2
    assert_holds(load_on(grid_place(0, 1, 1), path), logical_states())


def test_synchronous_save_copies_no_whole_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is for runs whose copies do not fit in memory."""
    monkeypatch.setattr(saver.StateCollector, "copy", lambda _: pytest.fail("copied"))
    path = save_alone(tmp_path, 1)
    assert_holds(load_on(grid_place(0, 1, 1), path), logical_states())


def test_metadata_comes_back(tmp_path: Path) -> None:
    reader = CheckpointReader(save_alone(tmp_path, 5))
    assert reader.metadata.step == 5
    assert reader.metadata.config == metadata(5).config
    assert reader.metadata.scalars == SCALARS
    assert reader.metadata.layout == {"tp_size": 1, "dp_size": 1}
    assert reader.shapes == SHAPES


def test_newest_is_found_by_looking(tmp_path: Path) -> None:
    assert store.find_newest(tmp_path) is None
    for step in (9, 100, 20):
        save_alone(tmp_path, step)
    assert store.find_newest(tmp_path) == step_dir(tmp_path, 100)
    (step_dir(tmp_path, 100) / COMMITTED_FILE).unlink()
    assert store.find_newest(tmp_path) == step_dir(tmp_path, 20)


def test_after_a_fallback_the_abandoned_future_is_not_counted(tmp_path: Path) -> None:
    for step in (7, 14):
        save_alone(tmp_path, step, keep_last=1)
    # Step 14 turned out damaged and there was another at 7: the run goes on from there.
    save_alone(tmp_path, 7)
    save_alone(tmp_path, 8, keep_last=1)
    assert committed_steps(tmp_path) == [8, 14]
    save_alone(tmp_path, 14, seed=1, keep_last=1)
    assert committed_steps(tmp_path) == [14]
    assert_holds(load_on(grid_place(0, 1, 1), step_dir(tmp_path, 14)), logical_states(1))


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "flipped bit": ("*.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 4])),
    "cut": ("*.safetensors", lambda content: content[:-1]),
    "empty": ("*.safetensors", lambda content: b""),
    "file missing": ("*.safetensors", lambda content: None),
    "manifest altered": (MANIFEST_FILE, lambda content: content.replace(b": 14,", b": 15,", 1)),
    "manifest missing": (MANIFEST_FILE, lambda content: None),
    "mark torn": (COMMITTED_FILE, lambda content: b""),
}
"""Files, and what each damage makes of the content of the first one; None: it is deleted."""


def damage(path: Path, how: str) -> None:
    files, change = DAMAGES[how]
    file = min(path.glob(files))
    content = file.read_bytes()
    changed = change(content)
    assert changed != content
    file.write_bytes(changed or b"")
    if changed is None:
        file.unlink()


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_checkpoint_is_refused_and_the_one_before_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    save_alone(tmp_path, 7)
    path = save_alone(tmp_path, 14)
    damage(path, how)

    def work(groups: ProcessGroups) -> Any:
        return store.choose_intact(tmp_path, groups)

    for reader in on_threads(monkeypatch, 2, 1, work):
        assert reader.metadata.step == 7
    assert "step_00000014" in caplog.text


@pytest.mark.parametrize("hashes", [True, False])
def test_every_file_is_in_the_share_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashes: bool
) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 1)
    path = save_on_grid(monkeypatch, 1, 3, tmp_path, metadata(3))[0]
    files = sorted(path.glob("*.safetensors"))
    assert len(files) >= 6

    def work(groups: ProcessGroups) -> Any:
        return store.open_intact(path, groups, hashes=hashes)

    for number, file in enumerate(files):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + (bytes([content[-1] ^ 1]) if hashes else b""))
        results = on_threads(monkeypatch, 1, 3, work)
        assert [isinstance(result, CheckpointError) for result in results] == [True] * 3
        finders = [rank for rank, error in enumerate(results) if file.name in str(error)]
        assert finders == [number % 3]
        file.write_bytes(content)
    assert not any(isinstance(result, Exception) for result in on_threads(monkeypatch, 1, 3, work))


def test_nothing_intact_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    damage(save_alone(tmp_path, 7), "cut")
    damage(save_alone(tmp_path, 14), "flipped bit")
    with pytest.raises(CheckpointError, match=r"all 2 checkpoints .* damaged"):
        store.choose_intact(tmp_path, grid_place(0, 1, 1))


def test_nothing_committed_is_a_fresh_start(tmp_path: Path) -> None:
    path = save_alone(tmp_path, 7)
    (path / COMMITTED_FILE).unlink()
    assert store.choose_intact(tmp_path, grid_place(0, 1, 1)) is None


def test_another_model_is_refused_before_the_engine_is_touched(tmp_path: Path) -> None:
    path = save_alone(tmp_path, 1)
    groups = grid_place(0, 1, 1)
    specs = specs_of(groups)
    del specs["head.bias"]
    engine: Any = FakeEngine(specs)
    with pytest.raises(
        CheckpointError, match=r"another model: head.bias has shape \(70,\) there and None"
    ):
        store.load(CheckpointReader(path), engine, specs)
    assert engine.states == {}


def test_weights_alone_start_a_new_run(tmp_path: Path) -> None:
    logical = logical_states()
    weights = ((name, kinds["weight"].to(torch.float64)) for name, kinds in logical.items())
    path = store.save_weights(tmp_path, weights, SHAPES, metadata(0))
    groups = grid_place(1, 2, 1)
    engine: Any = FakeEngine(specs_of(groups))
    reader = CheckpointReader(path)
    store.load(reader, engine, specs_of(groups), weights_only=True)
    zeros = torch.zeros
    assert_holds(
        engine,
        {
            name: {k: kinds[k] if k == "weight" else zeros(SHAPES[name]) for k in KINDS}
            for name, kinds in logical.items()
        },
    )
    assert engine.state_dict() == {}
    with pytest.raises(CheckpointError, match="no exp_avg"):
        store.load(reader, engine, specs_of(groups))


def assert_failed_save_left_nothing(run_dir: Path, results: list[Any]) -> None:
    for result in results:
        assert isinstance(result, CheckpointError), result
        assert "older checkpoints are intact" in str(result)
    assert [path.name for path in checkpoints_dir(run_dir).iterdir()] == ["step_00000003"]
    assert store.choose_intact(run_dir, grid_place(0, 1, 1)) is not None


def test_full_disk_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_alone(tmp_path, 3)
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000))
    results = save_on_grid(monkeypatch, 2, 1, tmp_path, metadata(4))
    assert "MiB needed" in str(results[0])
    assert_failed_save_left_nothing(tmp_path, results)


@pytest.mark.parametrize("function", ["write_tensors", "write_durably", "fsync_path"])
@pytest.mark.parametrize("call", [1, 2])
def test_failed_write_on_one_rank_fails_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, call: int
) -> None:
    save_alone(tmp_path, 3)
    original, calls = getattr(writer, function), []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    monkeypatch.setattr(writer, function, failing)
    results = save_on_grid(monkeypatch, 2, 1, tmp_path, metadata(4))
    assert_failed_save_left_nothing(tmp_path, results)
    # The next save finds nothing in its way.
    monkeypatch.setattr(writer, function, original)
    save_on_grid(monkeypatch, 2, 1, tmp_path, metadata(4))
    assert committed_steps(tmp_path) == [3, 4]


def test_safetensors_error_of_a_real_limit_is_ours(tmp_path: Path) -> None:
    save_alone(tmp_path, 3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(CheckpointError, match="not saved"):
            save_alone(tmp_path, 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert committed_steps(tmp_path) == [3]
    assert [path.name for path in checkpoints_dir(tmp_path).iterdir()] == ["step_00000003"]


def killed_save(run_dir: Path, call: int, background: bool) -> bool:
    """Save step 14 over steps 1 and 7 in a child that dies at the ``call``-th system call.

    Returns whether the save completed.
    """
    child = os.fork()
    if child == 0:
        left = [call]

        def dying(original: Callable[..., Any]) -> Callable[..., Any]:
            def function(*args: Any, **kwargs: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)
                return original(*args, **kwargs)

            return function

        try:
            for name in ("fsync", "rename", "mkdir", "unlink", "rmdir", "open"):
                setattr(os, name, dying(getattr(os, name)))
            writer.write_tensors = dying(writer.write_tensors)  # type: ignore[assignment]
            Path.rename = dying(Path.rename)  # type: ignore[method-assign]
            Path.unlink = dying(Path.unlink)  # type: ignore[method-assign]
            save_alone(run_dir, 14, seed=1, keep_last=2, background=background)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_kill_anywhere_in_a_save_leaves_a_good_checkpoint(
    tmp_path: Path, background: bool
) -> None:
    points = 0
    for step in (1, 7):
        save_alone(tmp_path / "before", step)
    for call in range(1, 1000):
        run_dir = tmp_path / str(call)
        shutil.copytree(tmp_path / "before", run_dir)
        completed = killed_save(run_dir, call, background)
        reader = store.choose_intact(run_dir, grid_place(0, 1, 1))
        assert reader is not None
        assert reader.metadata.step in (7, 14)
        assert_holds(
            load_on(grid_place(0, 1, 1), reader.path),
            logical_states(1 if reader.metadata.step == 14 else 0),
        )
        # The next save clears what is left and succeeds.
        save_alone(run_dir, 21, keep_last=1)
        assert [path.name for path in checkpoints_dir(run_dir).iterdir()] == ["step_00000021"]
        shutil.rmtree(run_dir)
        if completed:
            break
        points += 1
    assert points >= 20


def test_linked_checkpoints_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    save_alone(elsewhere, 1)
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(elsewhere / "checkpoints")
    with pytest.raises(CheckpointError, match="checkpoints is a symbolic link"):
        save_alone(run, 2, keep_last=1)
    with pytest.raises(CheckpointError, match="checkpoints is a symbolic link"):
        store.find_newest(run)
    assert [path.name for path in (elsewhere / "checkpoints").iterdir()] == ["step_00000001"]
