"""Kill exports and imports of ``megatron-deberta convert`` at random times, in every format.

Half of the cases are killed at a random time of the command, half after it has begun to write. Then
its output is absent or complete, and the same command, started again, writes the files of an
undisturbed one and leaves nothing else behind. Each case appends one JSON line to the output; cases
with a line about the present code are skipped.

  python -m tests.faults.convert_kills
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.tables.faults import CONVERT_KILLS_CODE
from tests.faults.campaign import corpus_folder, run_numbered
from tests.faults.forked_ranks import Fork
from tests.support.jobs import run_rank
from tests.support.tiny_task import MODEL, write_task

CASES = 40
FORMATS: dict[str, tuple[str, ...]] = {
    "hf": ("--checkpoint", "{run}", "--to", "hf", "--dtype", "bf16"),
    "average": ("--checkpoint", "{run}", "--average", "2"),
    "every": ("--checkpoint", "{run}", "--every", "1"),
    "onnx": ("--checkpoint", "{run}", "--to", "onnx", "--no-timing"),
    "onnx int8": ("--checkpoint", "{task}", "--to", "onnx", "--dtype", "int8", "--no-timing"),
    "peft": ("--checkpoint", "{task}", "--to", "peft"),
    "import": ("--from", "hf", "{model}"),
    "published onnx": ("--from", "hf", "{model}", "--to", "onnx", "--dtype", "all", "--no-timing"),
}
"""Arguments of ``convert`` by name."""
LEFT_IN_OUTPUT = (".lock",)
"""Files that ``--every`` leaves in its folder."""
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A format's command that was not killed.

    Attributes:
        files: digest of every file by name.
        seconds: duration.
        first_write: seconds until something was in the output's folder.
    """

    files: dict[str, str]
    seconds: float
    first_write: float


class Command(Fork):
    """``megatron-deberta`` in a fork of this process, which has imported what it needs.

    Args:
        arguments: of the command.
        log: file that its output is appended to.
    """

    def __init__(self, arguments: list[str], log: Path) -> None:
        self._log = log
        self._begin = time.monotonic()
        pid = os.fork()
        if pid == 0:
            run_rank(dict(os.environ), arguments, str(log))
        super().__init__(pid)

    @property
    def seconds(self) -> float:
        """Return the time since the start."""
        return time.monotonic() - self._begin

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Wait for a state or the end of the process."""
        while not is_reached() and self.poll() is None:
            assert self.seconds < TIMEOUT_SECONDS, self.output()
            time.sleep(0.001)

    def output(self) -> str:
        """Return the end of what has been printed."""
        return self._log.read_text(errors="replace")[-2000:]


class Fixture:
    """Runs to convert, and what undisturbed commands write.

    Args:
        folder: with ``corpus``, from ``corpus_folder``.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        run, task, data = folder / "run", folder / "task", write_task(folder / "data")
        plain = ("parallel.engine=plain", "checkpoint.save_every=2", "train.device=cpu")
        small = ("train.steps=4", "optimizer.warmup_steps=0", "log.tensorboard=false")
        pretrain = ("pretrain", str(folder / "corpus" / "run.yaml"))
        finetune = (
            "finetune", str(data / "task.yaml"), "--model", str(MODEL), "--data", str(data),
            "finetune.lora_rank=2",
        )  # fmt: skip
        for arguments, run_dir in ((pretrain, run), (finetune, task)):
            # In a process of its own: the threads of a run would not survive a fork.
            training = self.start([*arguments, *plain, *small, f"train.run_dir={run_dir}"])
            assert training.wait() == 0, training.output()
        self._places = {"run": str(run), "task": str(task), "model": str(MODEL)}
        self._undisturbed: dict[str, Undisturbed] = {}

    def start(self, arguments: list[str]) -> Command:
        """Start a command."""
        return Command(arguments, self._folder / "log")

    def arguments(self, name: str, output: Path) -> list[str]:
        """Return the command of a format."""
        words = [word.format(**self._places) for word in FORMATS[name]]
        return ["convert", *words, "--output", str(output)]

    def undisturbed(self, name: str) -> Undisturbed:
        """Return what a format's command writes that is not killed, run once."""
        if name not in self._undisturbed:
            with self.place() as output:
                process = self.start(self.arguments(name, output))
                process.wait_until(lambda: bool(names(output.parent)))
                first_write = process.seconds
                assert process.wait() == 0, process.output()
                found = Undisturbed(digests(output), process.seconds, first_write)
            assert found.files
            self._undisturbed[name] = found
        return self._undisturbed[name]

    @contextmanager
    def place(self) -> Iterator[Path]:
        """Yield the output of a command, in a folder of its own.

        Always the same, because some files name it.
        """
        folder = self._folder / "place"
        folder.mkdir()
        try:
            yield folder / "out"
        finally:
            shutil.rmtree(folder)


def names(folder: Path) -> list[str]:
    """Return the names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def digests(output: Path) -> dict[str, str]:
    """Return the digest of every file below a folder by name; none if it is absent.

    Without those in temporary folders, as ``--every`` has them in its folder.
    """
    return {
        str(path.relative_to(output)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name not in LEFT_IN_OUTPUT and not temporary(path, output)
    }


def temporary(path: Path, output: Path) -> bool:
    """Return whether a path below the output, or a folder it is in, is a temporary one."""
    return any(part.endswith(".tmp") for part in path.relative_to(output).parts)


def wrong_files(found: dict[str, str], expected: dict[str, str], name: str) -> list[str]:
    """Return the files that should not be as they are after a kill.

    Args:
        found: digests of the files in the output.
        expected: those of an undisturbed command.
        name: the format. ``every`` writes one folder after another, and first their list.
    """
    if not found:
        return []
    whole: dict[str, dict[str, str]] = {}
    for file, digest in expected.items():
        unit = file.partition("/")[0] if name == "every" else ""
        whole.setdefault(unit, {})[file] = digest
    wrong = [file for file in found if file not in expected]
    for unit, files in whole.items():
        own = {file: digest for file, digest in found.items() if file in files}
        # The list of exports names those that have begun.
        if own and own != files and not unit.endswith(".json"):
            wrong += [file for file in files if own.get(file) != files[file]]
    return wrong


def run_case(fixture: Fixture, case: int) -> dict[str, Any]:
    """Kill one command, start it again and compare its files; return the result."""
    generator = random.Random(f"convert kills {case}")
    name = list(FORMATS)[case % len(FORMATS)]
    is_writing = bool(case // len(FORMATS) % 2)
    share = generator.uniform(0.02, 0.98)
    undisturbed, begin = fixture.undisturbed(name), time.monotonic()
    with fixture.place() as output:
        while True:
            process = fixture.start(fixture.arguments(name, output))
            if is_writing:
                process.wait_until(lambda: bool(names(output.parent)))
            left = undisturbed.seconds - is_writing * undisturbed.first_write
            wait_end = time.monotonic() + share * left
            process.wait_until(lambda: time.monotonic() >= wait_end)  # noqa: B023
            process.kill()
            if process.wait() == -signal.SIGKILL:
                break
            # It was faster than the undisturbed one.
            shutil.rmtree(output)
            share *= 0.8
        at_kill = names(output.parent)
        wrong = wrong_files(digests(output), undisturbed.files, name)
        if output.exists() and name != "every":
            # Complete, so that the command refuses to write it again.
            shutil.rmtree(output)
        again = fixture.start(fixture.arguments(name, output))
        code = again.wait()
        different = digests(output) != undisturbed.files
        left_over = [each for each in names(output.parent) if each != output.name]
        left_over += [str(path) for path in output.rglob("*") if temporary(path, output)]
        message = again.output() if code else ""
    return {
        "format": name, "is_writing": is_writing, "share": round(share, 3), "at_kill": at_kill,
        "wrong": wrong, "left_over": left_over, "is_different": different,
        "message": message, "seconds": round(time.monotonic() - begin, 1),
        "ok": code == 0 and not (wrong or left_over or different),
    }  # fmt: skip


@contextmanager
def open_cases() -> Iterator[Callable[[int], dict[str, Any]]]:
    """Yield the function that runs a case."""
    with corpus_folder("convert_kills.") as folder:
        yield partial(run_case, Fixture(folder))


def main() -> int:
    """Run the missing cases; return 1 if one failed."""
    assert __doc__
    return run_numbered(__doc__, "convert_kills", CASES, CONVERT_KILLS_CODE, open_cases)


if __name__ == "__main__":
    sys.exit(main())
