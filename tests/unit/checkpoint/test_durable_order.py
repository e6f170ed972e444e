"""A committed checkpoint survives a power failure: everything is flushed before the commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_deberta.checkpoint import writer
from megatron_deberta.checkpoint.layout import checkpoints_dir
from tests.support.checkpoints import save_alone
from tests.support.disk_calls import DiskCalls


@pytest.mark.parametrize("background", [False, True])
def test_save_flushes_before_each_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    monkeypatch.setattr(writer, "FILE_BYTES", 1000)
    save_alone(tmp_path, 1)
    disk = DiskCalls(monkeypatch, checkpoints_dir(tmp_path))
    path = save_alone(tmp_path, 2, background=background)
    tensor_files = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(tensor_files) > 2
    staging = ".staging-step_00000002"
    written = [*tensor_files, "part-00000.json", "manifest.json", ".COMMITTED"]
    assert disk.calls == [
        *(f"fsync {staging}/{name}" for name in written),
        f"fsync {staging}",
        f"rename {staging} -> step_00000002",
        "fsync .",
        "rename step_00000002/.COMMITTED -> step_00000002/COMMITTED",
        "fsync step_00000002",
    ]
    disk.assert_flushed(path)


def test_first_save_flushes_the_name_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskCalls(monkeypatch, tmp_path)
    save_alone(tmp_path, 1)
    assert disk.calls[0] == "fsync ."


def test_old_checkpoint_is_deleted_after_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_alone(tmp_path, 1)
    disk = DiskCalls(monkeypatch, checkpoints_dir(tmp_path))
    save_alone(tmp_path, 2, keep_last=1)
    assert disk.calls[-2:] == [
        "fsync step_00000002",
        "rename step_00000001 -> .deleting-step_00000001",
    ]
