"""Every engine writes the bytes of a single process."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_deberta.cli.main import main
from megatron_deberta.errors import DataError
from megatron_deberta.text.deduplicate import pipeline
from megatron_deberta.text.jobs.executors import Engine, Share, order_tasks
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.jobs.progress import Counts
from tests.support.duplicates import contents, run


@pytest.mark.parametrize("name", ["sign/000000/digest.raw", "write/000000/kept.jsonl"])
@pytest.mark.parametrize("when", ["before the check", "after it", "while publishing"])
def test_a_flipped_bit_is_found_before_publishing(
    corpus: list[str], tmp_path: Path, name: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def stop(stage: str, tasks: int, done: int, _: Counts) -> None:
        if stage == "check" and when == "before the check":
            interrupt()

    with monkeypatch.context() as patch:
        if when != "before the check":
            place = "take_parts" if when == "after it" else "concatenate"
            patch.setattr(pipeline, place, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(corpus, tmp_path / "out", advance=stop)
    (path,) = JobFolder(tmp_path / "out").path.glob(f"*/{name}")
    content = bytearray(path.read_bytes())
    content[5] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path.name}: is not what was written"):
        run(corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("checks", [1, 2])
def test_a_process_that_lost_its_folder_publishes_and_removes_nothing(
    corpus: list[str], tmp_path: Path, checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(corpus, tmp_path / "whole")
    check_lock, calls = JobFolder.check_lock, []

    def lose(folder: JobFolder) -> None:
        calls.append(0)
        if len(calls) == checks:
            monkeypatch.undo()
            # A file server that has given the lock to another node.
            os.rename(tmp_path / "out.unfinished", tmp_path / "lost")
            run(corpus, tmp_path / "out")
        check_lock(folder)

    monkeypatch.setattr(JobFolder, "check_lock", lose)
    with pytest.raises(DataError, match="finished or restarted"):
        run(corpus, tmp_path / "out", force=True)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_an_attempt_that_comes_late_leaves_nothing(corpus: list[str], tmp_path: Path) -> None:
    """A unit that starts after another driver has published creates no file."""
    calls: list[tuple[Any, ...]] = []

    class Suspended(ThreadPoolExecutor):
        def submit(self, function: Any, *arguments: Any, **named: Any) -> Any:
            calls.append((function, *arguments))
            raise KeyboardInterrupt

    engine = Engine(Suspended(1), 1)
    with pytest.raises(KeyboardInterrupt):
        run(corpus, tmp_path / "out", engine=engine)
    run(corpus, tmp_path / "out")
    before = sorted(tmp_path.rglob("*"))
    function, *arguments = calls[0]
    with pytest.raises((DataError, OSError)):
        function(*arguments)
    assert sorted(tmp_path.rglob("*")) == before


def test_tasks_of_an_array_share_a_stage() -> None:
    orders = [order_tasks(10, Share(task, 3)) for task in range(3)]
    assert orders[1] == [3, 4, 5, 2, 1, 0, 9, 8, 7, 6]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0][:3] + orders[1][:3] + orders[2][:4] == list(range(10))


@pytest.mark.parametrize("command", ["deduplicate", "split"])
def test_tasks_of_a_job_array_change_nothing(
    corpus: list[str], tmp_path: Path, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    call = [command, "--input", *corpus, "--output"]
    assert main([*call, str(tmp_path / "whole"), "--workers", "0"]) == 0
    capfd.readouterr()
    array = [*call, str(tmp_path / "out"), "--executor", "slurm-array", "--workers", "0"]
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "megatron_deberta", *array, "--array-task", f"{task}/3"]
        )
        for task in range(3)
    ]
    # The others do its share.
    tasks[1].kill()
    assert [task.wait(120) for task in tasks] == [0, -9, 0]
    assert "240 documents = " in capfd.readouterr().out
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not JobFolder(tmp_path / "out").path.exists()
    # A task that starts late finds the result.
    assert main([*array, "--array-task", "1/3"]) == 0
