"""Lock and records of a job folder."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import DataError
from megatron_deberta.files import HashedFile
from megatron_deberta.text.jobs.folder import LOCK, BusyError, JobFolder

PLAN = {"--input": [["a.jsonl", 1, 2]]}


def test_only_one_process_merges(tmp_path: Path) -> None:
    mine, other = (JobFolder(tmp_path / "books") for _ in range(2))
    with mine.locked(shared=True), other.locked(shared=True):
        with pytest.raises(BusyError, match="another process works there"):
            with other.locked(seconds=0):
                pass
    with mine.locked():
        for shared in (True, False):
            with pytest.raises(BusyError), other.locked(shared=shared, seconds=0.1):
                pass
    with other.locked():
        other.check_lock()


def test_an_array_task_that_comes_late_leaves_no_folder(tmp_path: Path) -> None:
    mine, other = (JobFolder(tmp_path / "books") for _ in range(2))
    with mine.locked(shared=True):
        with other.locked(shared=True):
            pass
        # The first one may begin the job.
        assert (mine.path / LOCK).exists()
        mine.check_lock()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("again", [False, True])
def test_a_folder_that_was_removed_is_no_longer_locked(tmp_path: Path, again: bool) -> None:
    mine, other = (JobFolder(tmp_path / "books") for _ in range(2))
    with mine.locked():
        mine.begin(PLAN)
        shutil.rmtree(mine.path)
        if again:
            with other.locked():
                other.begin(PLAN)
        with pytest.raises(DataError, match="finished or restarted"):
            mine.check_lock()


def test_attempts_of_one_unit_do_not_share_a_name(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "books")
    with folder.locked():
        folder.begin(PLAN)
    final = folder.parts / "00000000-000000.0"
    first, second = HashedFile(final), HashedFile(final)
    for file in (first, second):
        file.write(b"same ")
        file.write(b"bytes")
    second.commit()
    second.close()
    assert final.read_bytes() == b"same bytes"
    first.commit()
    assert [path.name for path in folder.parts.iterdir()] == [final.name]
    assert first.take_digest() == hashlib.sha256(b"same bytes").hexdigest()


def test_a_killed_attempt_is_removed(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "books")
    with folder.locked():
        folder.begin(PLAN)
        HashedFile(folder.parts / "00000000-000000.0").write(b"part")
        folder.record("00000000-000000", {"last": True})
        folder.remove_attempts()
    assert list(folder.parts.iterdir()) == []
    assert folder.records() == {"00000000-000000"}


def test_interrupted_removals_of_any_job_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command of the job that was removed may never run again."""
    others = [tmp_path / name for name in (".books.unfinished.removed", "a.unfinished", ".x.tmp")]
    for other in others:
        other.mkdir()
    for name in ("books", "shards", "two\nlines"):
        folder = JobFolder(tmp_path / name)
        with folder.locked(), monkeypatch.context() as killed:
            folder.begin(PLAN)
            killed.setattr(shutil, "rmtree", lambda *_, **__: None)
            folder.remove()
    assert len(list(tmp_path.iterdir())) == 6
    arguments = ["--input", "nothing", "--tokenizer", "none", "--output", str(tmp_path / "new")]
    assert main(["preprocess", *arguments]) == 2
    assert sorted(tmp_path.iterdir()) == sorted(others)
