"""Faults in a checkpoint save (SIGKILL or an error at each system call) and damaged files."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megatron_deberta.checkpoint import store, writer
from megatron_deberta.checkpoint.layout import KINDS, leftovers, step_dir
from megatron_deberta.checkpoint.reader import CheckpointReader
from megatron_deberta.checkpoint.retention import Retention
from megatron_deberta.distributed.topology import single_process_groups
from megatron_deberta.errors import CheckpointError
from tests.distributed.test_background_save import Run
from tests.support.checkpoints import logical_states, metadata, save_alone
from tests.support.layout_matrix import Layout
from tests.support.ranks import RankPool

CALLS = (
    "openat", "write", "pwrite64", "ftruncate", "fsync", "fdatasync", "rename", "renameat",
    "renameat2", "unlink", "unlinkat", "mkdir", "mkdirat", "rmdir",
)  # fmt: skip
"""System calls of a save that change the disk."""
ERRORS = ("ENOSPC", "EIO", "EDQUOT")
OLD, NEW = 7, 14
DAMAGES = ("flip", "cut", "swap", "delete", "empty")
OWNERS = ("rank 0", "rank 1", "rank 2", "rank 3", "all")
SMALL_FILE_BYTES = 1000
"""Splits a tiny state into several files."""
_REFUSED = 3


class SaveCases:
    """Cases on checkpoints of a small state, saved by one process.

    Args:
        folder: working folder.
        context: fork server of the saving processes.
    """

    def __init__(self, folder: Path, context: ForkServerContext) -> None:
        self._run_dir = folder / "saves"
        self._context = context
        self._points: list[tuple[str, int]] = []

    def points(self) -> list[tuple[str, int]]:
        """Return the system calls of a save and the following deletion: name and count from 1."""
        if not self._points:
            self._begin()
            log = self._run_dir.with_name("calls.log")
            assert self._save_under_strace("-o", str(log)) == 0
            numbers = dict.fromkeys(CALLS, 0)
            for line in log.read_text().splitlines():
                match = re.search(r"\b(\w+)\(", line)
                if match and match[1] in numbers:
                    numbers[match[1]] += 1
                    self._points.append((match[1], numbers[match[1]]))
        return self._points

    def crash(self, seed: int) -> dict[str, Any]:
        """SIGKILL on entering a system call of a save; the seed selects the call."""
        call, number = self.points()[seed % len(self.points())]
        self._begin()
        code = self._save_under_strace("-e", f"inject={call}:signal=KILL:when={number}")
        step = self._resume_step()
        ok = code == -9 and step is not None and self._can_save_again()
        return {"ok": ok, "call": call, "number": number, "exit_code": code, "found": step}

    def failure(self, seed: int) -> dict[str, Any]:
        """A system call of a save fails like on a full or defective disk."""
        call, number = self.points()[seed % len(self.points())]
        error = ERRORS[seed % len(ERRORS)]
        self._begin()
        code = self._save_under_strace("-e", f"inject={call}:error={error}:when={number}")
        step = self._resume_step()
        # A failed deletion is only a warning.
        is_reported = code == _REFUSED or (code == 0 and step == NEW)
        files = [path.name for path in leftovers(self._run_dir)] if code == _REFUSED else []
        return {
            "ok": is_reported and step is not None and not files and self._can_save_again(),
            "call": call, "number": number, "error": error, "exit_code": code, "found": step,
            "left_over": files,
        }  # fmt: skip

    def damage(self, seed: int) -> dict[str, Any]:
        """Damage a file of the newest of two checkpoints; the older one must be used.

        Four ranks saved them. The damaged file is one that rank 0, 1, 2 or 3 wrote, or one that
        describes the whole checkpoint, in turn.
        """
        rng = random.Random(f"damage {seed}")
        kind = DAMAGES[seed % len(DAMAGES)]
        template = self._saved_by_four_ranks()
        shutil.rmtree(self._run_dir, ignore_errors=True)
        shutil.copytree(template, self._run_dir)
        newest = step_dir(self._run_dir, NEW)
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        owner = OWNERS[seed // len(DAMAGES) % len(OWNERS)]
        file = rng.choice([path for path in files if _owner(path) == owner])
        content = file.read_bytes()
        expected_names = [newest]
        if kind == "flip":
            bit = rng.randrange(8 * len(content))
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            file.write_bytes(changed)
        elif kind == "cut":
            os.truncate(file, rng.randrange(len(content)))
        elif kind == "swap":
            other = rng.choice([path for path in files if path.read_bytes() != content])
            file.write_bytes(other.read_bytes())
            other.write_bytes(content)
            expected_names.append(other)
        elif kind == "delete":
            file.unlink()
        else:
            os.truncate(file, 0)
        message = ""
        try:
            CheckpointReader(newest).verify()
        except CheckpointError as error:
            message = str(error)
        is_named = any(str(path) in message for path in expected_names)
        reader = store.choose_intact(self._run_dir, single_process_groups(torch.device("cpu")))
        step = None if reader is None else reader.metadata.step
        return {
            "ok": is_named and step == OLD,
            "damage": kind, "of": owner, "file": file.name,
            "refusal": message.replace(str(newest), "NEWEST"),
            "found": step,
        }  # fmt: skip

    def _saved_by_four_ranks(self) -> Path:
        """Return a run folder with two checkpoints saved by four ranks (TP 2 x DP 2, ZeRO-1)."""
        template = self._run_dir.with_name("saved_by_four")
        if not template.exists():
            unfinished = template.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            with RankPool(4) as ranks:
                ranks.run(_save_twice, str(unfinished))
            unfinished.rename(template)
        return template

    def _begin(self) -> None:
        """Start with the old checkpoint, copied from a first save."""
        template = self._run_dir.with_name("saved")
        if not template.exists():
            with mock.patch.object(writer, "FILE_BYTES", SMALL_FILE_BYTES):
                save_alone(template, OLD, seed=OLD)
        shutil.rmtree(self._run_dir, ignore_errors=True)
        shutil.copytree(template, self._run_dir)

    def _resume_step(self) -> int | None:
        """Return the step that a run would resume from, if its content is intact."""
        with suppress(CheckpointError):
            reader = store.choose_intact(self._run_dir, single_process_groups(torch.device("cpu")))
            if reader is not None and _holds(reader, logical_states(reader.metadata.step)):
                return reader.metadata.step
        return None

    def _can_save_again(self) -> bool:
        """Return whether the next save succeeds and removes leftovers."""
        save_alone(self._run_dir, NEW, seed=NEW, keep_last=1)
        return self._resume_step() == NEW and not leftovers(self._run_dir)

    def _save_under_strace(self, *options: str) -> int | None:
        """Save the new step and delete the old one under strace; return the exit code."""
        connection, child_connection = self._context.Pipe()
        arguments = (str(self._run_dir), child_connection)
        process = self._context.Process(target=_save_on_request, args=arguments)
        process.start()
        connection.recv_bytes()
        trace = ("-e", "trace=" + ",".join(CALLS), "-e", "signal=none")
        with subprocess.Popen(
            ["strace", "-f", "-p", str(process.pid), *trace, *options],
            stderr=subprocess.PIPE,
            text=True,
        ) as strace:
            assert strace.stderr is not None
            first = strace.stderr.readline()
            assert "attached" in first, first
            connection.send_bytes(b"save")
            strace.stderr.read()
        process.join(60)
        return process.exitcode


def _owner(file: Path) -> str:
    """Return the rank that wrote a file of a checkpoint; "all": it describes the whole."""
    found = re.match(r"part-0*(\d+)-", file.name)
    return f"rank {found[1]}" if found else "all"


def _save_twice(rank: int, run_dir: str) -> None:
    run = Run(Layout(2, 1, True, "none"), run_dir)
    for step in (OLD, NEW):
        run.step()
        run.saver.save(metadata(step, run.config), Retention())
    run.engine.destroy()


def _save_on_request(run_dir: str, connection: Connection) -> None:
    writer.FILE_BYTES = SMALL_FILE_BYTES
    # Late imports must not be counted as calls of the save.
    save_alone(Path(f"{run_dir}.first"), NEW, seed=NEW, keep_last=1)
    shutil.rmtree(f"{run_dir}.first")
    connection.send_bytes(b"ready")
    connection.recv_bytes()
    try:
        save_alone(Path(run_dir), NEW, seed=NEW, keep_last=1)
    except CheckpointError:
        os._exit(_REFUSED)
    # Without the interpreter's calls at exit.
    os._exit(0)


def _holds(reader: CheckpointReader, states: dict[str, dict[str, torch.Tensor]]) -> bool:
    return all(
        reader.tensor(name, kind).equal(states[name][kind]) for name in states for kind in KINDS
    )
