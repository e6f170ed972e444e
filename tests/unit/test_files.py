"""Atomic writes: files are complete, have the right mode and replace old ones at the end."""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_deberta import files
from megatron_deberta.files import (
    FolderInUseError,
    did_you_mean,
    folder_writer,
    open_appending,
    published_folder,
    read_regular,
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
    with pytest.raises(OSError, match="No space") as caught:
        write_atomically(path, b"newer")
    # An error of writing has no name of its own.
    assert caught.value.filename == str(temporary_name(path))
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_processes_left_of_a_file_is_removed(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "a.b"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for each in (path, other):
            temporary_name(each).write_bytes(b"half")
        os.write(writer, b"1")
        signal.pause()
    assert os.read(reader, 1) == b"1"
    left, of_other = (
        Path(str(temporary_name(each)).replace(f".{os.getpid()}.", f".{child}."))
        for each in (path, other)
    )
    # Its process may just write it.
    write_atomically(path, b"new")
    assert set(tmp_path.iterdir()) == {path, left, of_other}
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    # The process with this number on another node may run.
    elsewhere = tmp_path / f"a.{child}.0123456789abcdef.tmp"
    elsewhere.touch()
    write_atomically(path, b"heartbeat", durable=False)
    assert left.exists()
    write_atomically(path, b"newer")
    assert set(tmp_path.iterdir()) == {path, of_other, elsewhere}
    assert path.read_bytes() == b"newer"
    for end in (reader, writer):
        os.close(end)


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


def killed_while_writing(out: Path, *, after_move: bool = False) -> Path:
    """Let a process be killed in `published_folder`; return what it leaves."""
    before = set(out.parent.iterdir())
    child = os.fork()
    if child == 0:
        try:
            with published_folder(out, replace=True) as folder:
                (folder / "half").write_text("of the model")
                if after_move:
                    out.rename(folder.parent / "old")
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (left,) = set(out.parent.iterdir()) - before
    return left


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "out.b"
    killed_while_writing(out)
    killed_while_writing(out)
    kept = killed_while_writing(other)
    unknown = tmp_path / ".out.abcd1234.tmp"
    unknown.mkdir()
    with published_folder(out) as folder:
        (folder / "a").touch()
    assert set(tmp_path.iterdir()) == {out, kept, unknown}
    assert folder_writer(other) == ""
    assert set(tmp_path.iterdir()) == {out, unknown}


def test_a_folder_that_was_about_to_be_replaced_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").write_text("first")
    killed_while_writing(out, after_move=True)
    assert not out.exists()
    assert folder_writer(out) == ""
    assert (out / "a").read_text() == "first"
    assert list(tmp_path.iterdir()) == [out]


def test_a_folder_that_a_process_writes_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with published_folder(out) as first:
        (first / "a").write_text("first")
        assert folder_writer(out) == f"process {os.getpid()} on {platform.node()}"
        with pytest.raises(FolderInUseError, match=f"is being written by process {os.getpid()}"):
            with published_folder(out, alone=True):
                raise AssertionError
        # Without ``alone``, as for caches, which have the same content.
        with published_folder(out, replace=True) as second:
            (second / "a").write_text("second")
        assert (first / "a").read_text() == "first"
        (out / "a").unlink()
    assert (out / "a").read_text() == "first"
    assert folder_writer(out) == ""
    assert list(tmp_path.iterdir()) == [out]


def test_of_several_that_start_at_once_one_writes(tmp_path: Path) -> None:
    """Within one tick of the clock that gives files their times, too."""
    for number in range(5):
        out, (reader, writer) = tmp_path / str(number), os.pipe()
        for _ in range(4):
            if not os.fork():
                code = 1
                try:
                    with published_folder(out, alone=True):
                        # Until all of them have tried.
                        os.read(reader, 1)
                        code = 0
                except FolderInUseError:
                    code = 2
                finally:
                    os._exit(code)
        codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(3)]
        os.write(writer, b"1")
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
        assert codes == [2, 2, 2, 0]
        os.close(reader)
        os.close(writer)
        assert [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == []


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


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError, match="Larger than 4 bytes"):
        read_regular(path, 4)
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="Not a regular file"):
            read_regular(name, 4)
    with pytest.raises(OSError, match="Not a regular file"):
        open_appending(tmp_path / "pipe")
    with open_appending(path) as stream:
        stream.write(b"6")
    assert path.read_bytes() == b"123456"


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
