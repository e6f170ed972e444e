"""Index cache: built once, atomically, and taken over from dead builders."""

import errno
import io
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_deberta.data.dataset import index_cache
from megatron_deberta.data.dataset.index_cache import IndexCache
from megatron_deberta.errors import DataError

FORK = multiprocessing.get_context("fork")


def build_numbers():
    for begin in range(0, 50, 20):
        yield "numbers", np.arange(begin, min(begin + 20, 50))
    yield "halves", np.arange(3, dtype=np.float32) / 2
    yield "nothing", np.empty(0, np.int32)


@pytest.fixture(autouse=True)
def _keep_all(monkeypatch):
    monkeypatch.setattr(index_cache, "WORTH_KEEPING", 50)


def leftovers(folder):
    return [path.name for path in Path(folder).iterdir() if path.name.endswith((".lock", ".tmp"))]


def test_memory_and_disk_give_the_same(tmp_path):
    small = IndexCache(tmp_path / "unused").get("a", [1], 49, build_numbers)
    large = IndexCache(tmp_path).get("a", [1], 50, build_numbers)
    assert not (tmp_path / "unused").exists()
    assert small.keys() == large.keys()
    for name, array in small.items():
        assert array.dtype == large[name].dtype
        np.testing.assert_array_equal(array, large[name])
    assert leftovers(tmp_path) == []


def test_index_is_built_once_per_identity(tmp_path):
    built = []

    def build():
        built.append(1)
        yield from build_numbers()

    for _ in range(3):
        IndexCache(tmp_path).get("a", ["x", 1], 50, build)
    assert len(built) == 1
    IndexCache(tmp_path).get("a", ["x", 2], 50, build)
    IndexCache(tmp_path).get("b", ["x", 1], 50, build)
    assert len(built) == 3


def ask(folder, log, seconds, started=None):
    def build():
        with open(log, "a") as stream:
            stream.write("built\n")
        if started is not None:
            started.set()
        time.sleep(seconds)
        yield from build_numbers()

    found = IndexCache(folder).get("a", [1], 50, build)
    assert found["numbers"].tolist() == list(range(50))


def test_concurrent_processes_build_once(tmp_path):
    log = tmp_path / "log"
    ranks = [FORK.Process(target=ask, args=(tmp_path / "index", log, 0.3)) for _ in range(6)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
        assert rank.exitcode == 0
    assert log.read_text() == "built\n"
    assert leftovers(tmp_path / "index") == []


def test_a_dead_builder_is_replaced_at_once(tmp_path):
    log, started = tmp_path / "log", FORK.Event()
    folder = tmp_path / "index"
    builder = FORK.Process(target=ask, args=(folder, log, 60, started))
    builder.start()
    assert started.wait(20)
    waiter = FORK.Process(target=ask, args=(folder, log, 0))
    waiter.start()
    time.sleep(0.3)
    assert waiter.is_alive()
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    waiter.join(10)
    assert waiter.exitcode == 0
    assert log.read_text() == "built\n" * 2
    assert leftovers(folder) == []


def test_a_lock_file_without_its_process_does_not_block(tmp_path):
    IndexCache(tmp_path).get("a", [1], 50, build_numbers)
    (folder,) = tmp_path.iterdir()
    shutil.rmtree(folder)
    Path(f"{folder}.lock").write_text("elsewhere 4711 0123")
    (tmp_path / f".{folder.name}.0123.tmp").mkdir()
    IndexCache(tmp_path).get("a", [1], 50, build_numbers)
    assert list(tmp_path.iterdir()) == [folder]


def test_without_locks_every_process_builds(tmp_path, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fcntl.flock", no_locks)
    IndexCache(tmp_path).get("a", [1], 50, build_numbers)
    (folder,) = tmp_path.iterdir()
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    shutil.rmtree(folder)

    def build():
        # Another process finishes first.
        folder.mkdir()
        for name, content in kept.items():
            (folder / name).write_bytes(content)
        yield from build_numbers()

    assert IndexCache(tmp_path).get("a", [1], 50, build)["numbers"].tolist() == list(range(50))
    assert list(tmp_path.iterdir()) == [folder]
    assert "no locks" in caplog.text


def test_hashes_are_of_what_was_meant_to_be_written(tmp_path, monkeypatch):
    """A write that the disk corrupts is found when the index is opened."""
    opened = Path.open

    class Corrupting(io.FileIO):
        def write(self, content):
            return super().write(b"\xff" + bytes(content)[1:])

    def corrupting(path, mode="r", *args):
        return Corrupting(path, "x") if ".bin" in path.name else opened(path, mode, *args)

    monkeypatch.setattr(Path, "open", corrupting)
    with pytest.raises(DataError, match=r"numbers.bin is not what was written"):
        IndexCache(tmp_path).get("a", [1], 50, build_numbers)


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def fail():
        yield "numbers", np.arange(3)
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        IndexCache(tmp_path).get("a", [1], 50, fail)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "flip", "description", "other"])
def test_damage_is_named(tmp_path, damage):
    cache = IndexCache(tmp_path)
    cache.get("a", [1], 50, build_numbers)
    (folder,) = tmp_path.iterdir()
    if damage == "cut":
        os.truncate(folder / "numbers.bin", 9)
    elif damage == "flip":
        content = bytearray((folder / "numbers.bin").read_bytes())
        content[8] ^= 1
        (folder / "numbers.bin").write_bytes(content)
    elif damage == "description":
        (folder / "index.json").write_text("{")
    else:
        text = (folder / "index.json").read_text()
        (folder / "index.json").write_text(text.replace('"digest": "', '"digest": "0'))
    with pytest.raises(DataError, match="(damaged|not an) index .*remove the folder"):
        cache.get("a", [1], 50, build_numbers)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.index_cache"):
        IndexCache(tmp_path / "file").get("a", [1], 50, build_numbers)
