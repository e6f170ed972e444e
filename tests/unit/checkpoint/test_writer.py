"""A committed checkpoint survives a power failure, and its hashes are those of the tensors."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_deberta.checkpoint import writer
from megatron_deberta.checkpoint.layout import COMMITTED_FILE, checkpoints_dir, read_mark
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.writer import write_tensors
from megatron_deberta.errors import CheckpointError
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


TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    "a/é": torch.randn(5),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "c": torch.randn(7),
}


def test_the_file_is_that_of_safetensors(tmp_path: Path) -> None:
    size, sha256 = write_tensors(tmp_path / "ours", TENSORS)
    content = (tmp_path / "ours").read_bytes()
    assert (len(content), hashlib.sha256(content).hexdigest()) == (size, sha256)
    found = load_file(tmp_path / "ours")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    for names in (["b"], ["c", "b", "a/é"], list(TENSORS)):
        tensors = {name: TENSORS[name].contiguous() for name in names}
        save_file(tensors, tmp_path / "theirs")
        write_tensors(tmp_path / "again", tensors)
        assert (tmp_path / "again").read_bytes() == (tmp_path / "theirs").read_bytes()
        (tmp_path / "again").unlink()


def test_a_file_that_is_corrupted_while_it_is_written_does_not_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, damaged = os.fsync, []

    def damage(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name.endswith(".safetensors") and not damaged:
            damaged.append(name)
            with open(name, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                last = file.read(1)[0]
                file.seek(-1, os.SEEK_END)
                file.write(bytes([last ^ 1]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", damage)
    path = save_alone(tmp_path, 1)
    monkeypatch.undo()
    assert damaged
    with pytest.raises(CheckpointError, match=Path(damaged[0]).name):
        CheckpointReader(path).verify()


def test_a_damaged_mark_is_that_of_no_manifest(tmp_path: Path) -> None:
    path = save_alone(tmp_path, 1)
    mark = read_mark(path)
    assert len(mark) == 64
    (path / COMMITTED_FILE).write_bytes(b"\xff" + mark[1:].encode())
    assert read_mark(path) == "\ufffd" + mark[1:]
