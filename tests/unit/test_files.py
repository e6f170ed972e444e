"""Atomic writes: files are complete, have the right mode and replace old ones at the end."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_deberta import files
from megatron_deberta.files import (
    adopt_mode,
    did_you_mean,
    published_folder,
    sha256_file,
    temporary_name,
    write_atomically,
)
from tests.support.disk_calls import DiskCalls


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("runs/frst", "runs/first"),
        ("rusn/first", "runs/first"),
        ("rusn/first/config.yml", ""),  # two names are wrong
        ("runs/second", ""),
        ("elsewhere/first", ""),
    ],
)
def test_a_similar_path_is_suggested(
    given: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").touch()
    (tmp_path / "unrelated").mkdir()
    assert did_you_mean(tmp_path / given) == (meant and f"; did you mean {tmp_path / meant}?")
    monkeypatch.chdir(tmp_path)
    assert did_you_mean(Path(given)) == (meant and f"; did you mean {meant}?")


def test_only_a_file_of_the_wanted_kind_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "books.bin").touch()
    assert did_you_mean(tmp_path / "books.idx", ".idx") == ""
    (tmp_path / "bookz.idx").touch()
    assert did_you_mean(tmp_path / "books.idx", ".idx").endswith("/bookz.idx?")


@pytest.fixture(params=[0o022, 0o027, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_digest_of_more_than_one_block(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    (tmp_path / "a").write_bytes(content)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(content).hexdigest()


def test_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    write_atomically(path, b"old")
    # Left by a killed process with the same process id.
    temporary_name(path).write_bytes(b"x")
    write_atomically(path, b"new")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"newer")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_folder_follows_the_umask(tmp_path: Path, umask: int) -> None:
    with published_folder(tmp_path / "deep" / "out") as folder:
        (folder / "sub").mkdir(mode=0o700)
        (folder / "sub" / "a").write_text("")
        (folder / "sub" / "a").chmod(0o600)
        assert not (tmp_path / "deep" / "out").exists()
    out = tmp_path / "deep" / "out"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert mode_of(out) == mode_of(out / "sub") == 0o777 & ~umask
    assert mode_of(out / "sub" / "a") == 0o666 & ~umask


def test_file_mode_is_that_of_its_folder(tmp_path: Path, umask: int) -> None:
    (tmp_path / "sub").mkdir()
    path = tmp_path / "sub" / "a"
    path.touch(0o600)
    adopt_mode(path)
    assert mode_of(path) == 0o666 & ~umask


def test_existing_folder_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with published_folder(out) as folder:
        (folder / "a").write_text("first")

    def fill(*, replace: bool, fail: bool = False) -> None:
        with published_folder(out, replace=replace) as folder:
            (folder / "a").write_text("second")
            if fail:
                raise ValueError("no more")

    with pytest.raises(OSError, match="not empty"):
        fill(replace=False)
    with pytest.raises(ValueError, match="no more"):
        fill(replace=True, fail=True)
    assert (out / "a").read_text() == "first"
    fill(replace=True)
    assert (out / "a").read_text() == "second"
    assert list(tmp_path.iterdir()) == [out]


def test_atomic_write_flushes_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskCalls(monkeypatch, tmp_path)
    write_atomically(tmp_path / "a", b"content")
    temporary = temporary_name("a")
    assert disk.calls == [f"fsync {temporary}", f"rename {temporary} -> a", "fsync ."]
    disk.assert_flushed(tmp_path)


@pytest.mark.parametrize("replace", [False, True])
def test_published_folder_is_flushed_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    (tmp_path / "out").mkdir()
    disk = DiskCalls(monkeypatch, tmp_path)
    with published_folder(tmp_path / "out", replace=replace) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "a").write_text("content")
        fresh = folder.relative_to(tmp_path)
    assert disk.calls == [
        *(f"fsync {fresh / name}" for name in ("sub", "sub/a", ".")),
        *([f"rename out -> {fresh.with_name('old')}"] if replace else []),
        f"rename {fresh} -> out",
        "fsync .",
    ]
    disk.assert_flushed(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content"),
    [("/proc/self/ns/pid", "pid:[2]"), ("/proc/sys/kernel/random/boot_id", "2")],
)
def test_temporary_names_of_processes_with_one_number_differ(
    name: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of containers on two nodes, or on one, which write to one shared folder."""
    here = files._process_numbering()
    assert files._process_numbering() == here
    assert here in temporary_name("a").name
    readlink, read_text = os.readlink, Path.read_text
    monkeypatch.setattr(os, "readlink", lambda path: content if path == name else readlink(path))
    monkeypatch.setattr(
        Path, "read_text", lambda path: content if str(path) == name else read_text(path)
    )
    assert files._process_numbering() != here
