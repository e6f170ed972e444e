"""Faults at chosen functions of a fine-tuning run, for ``tests.faults.finetune_faults``."""

from __future__ import annotations

import errno
import fnmatch
import functools
import os
import pkgutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True, slots=True)
class Point:
    """Function at which a fault comes.

    Attributes:
        place: its full name.
        steps: that reach it: ``all``, ``validated``, ``improved`` (with a better score than all
            before) or ``replaced`` (and the checkpoint before is deleted).
        is_after: after the function, not before it.
        file: pattern of the name of the path that is its first argument; empty: any call.
    """

    place: str
    steps: str = "improved"
    is_after: bool = False
    file: str = ""


_PACKAGE = "megatron_deberta"
_STEP = f"{_PACKAGE}.train.step.TrainStep.__call__"
_SHOW = f"{_PACKAGE}.train.callbacks.Validate.show"
_COLLECT = f"{_PACKAGE}.evaluate.splits.OutputCollector.add"
_RECORD = f"{_PACKAGE}.train.callbacks.record_selection"
_CHECKPOINT = f"{_PACKAGE}.checkpoint"
_WRITER = f"{_CHECKPOINT}.writer"
_KILL_POINTS = {
    "training": Point(_STEP, "all"),
    "validation": Point(_COLLECT, "validated", is_after=True),
    "validation, before its record": Point(_SHOW, "validated"),
    "between validation and save": Point(_SHOW, is_after=True),
    "save, staged": Point(f"{_WRITER}.begin", is_after=True),
    "save, tensors": Point(f"{_WRITER}.write_tensors", is_after=True, file="*"),
    "save, index": Point(f"{_WRITER}.write_durably", is_after=True, file="part-*"),
    "save, manifest": Point(f"{_WRITER}.write_durably", is_after=True, file="manifest.json"),
    "save, mark": Point(f"{_WRITER}.write_durably", is_after=True, file=".COMMITTED"),
    "save, renamed": Point(f"{_WRITER}.fsync_path", is_after=True, file="checkpoints"),
    "save, committed": Point(f"{_WRITER}.commit", is_after=True),
    "retention": Point(f"{_CHECKPOINT}.retention.delete", "replaced", is_after=True),
    "best.json, before": Point(_RECORD),
    "best.json, after": Point(_RECORD, is_after=True),
}
_FULL_POINTS = {
    "free space": Point("shutil.disk_usage", is_after=True, file="checkpoints"),
    "folder": Point("pathlib.Path.mkdir", file=".staging-*"),
    "flush": Point(f"{_WRITER}.fsync_path", file=".staging-*"),
    "best.json": Point(f"{_CHECKPOINT}.layout.write_atomically", file="best.json"),
}
POINTS: Mapping[str, Point] = _KILL_POINTS | _FULL_POINTS
NOT_IN_SAVES = (_STEP, _COLLECT, _SHOW)
OF_ALL_RANKS = (
    "training", "validation", "save, staged", "save, tensors", "save, index", "save, committed",
)  # fmt: skip
"""Points that not only rank 0 reaches."""
KILLED = tuple(_KILL_POINTS)
FULL = (
    "free space", "folder", "save, tensors", "save, index", "save, manifest", "save, mark", "flush",
    "best.json",
)  # fmt: skip


class Injection:
    """Brings a fault into this process, and writes the steps at which it came to a file.

    Args:
        fault: ``kind``, ``point``, first and ``last`` ``step``, ``killed_at`` and ``hits``.
    """

    def __init__(self, fault: Mapping[str, Any]) -> None:
        self._fault, self._point = fault, POINTS[fault["point"]]
        self._step = self._saving = 0
        _wrap(self._point.place, self._reach)
        _wrap(_STEP, self._begin_step)
        _wrap(f"{_WRITER}.begin", self._begin_save)
        if "full disk" in fault["kind"]:
            _wrap(f"{_CHECKPOINT}.saver.Saver.poll", self._join)

    def _begin_step(self, original: Callable[..., Any], *args: Any) -> Any:
        self._step = args[1] + 1
        if self._step == self._fault["killed_at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    def _begin_save(self, original: Callable[..., Any], staged: Any) -> Any:
        self._saving = staged.metadata.step
        return original(staged)

    @staticmethod
    def _join(original: Callable[..., Any], saver: Any) -> Any:
        # A save in the background fails before the next step, not before an unknown one.
        if saver.in_flight:
            saver._save[0].join()
        return original(saver)

    def _reach(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        point, fault, path = self._point, self._fault, Path()
        # That of a save is its own, which may be in the background.
        step = self._step if point.place in NOT_IN_SAVES else self._saving
        if point.file:
            path = Path(args[0])
        is_here = fault["step"] <= step <= fault["last"] and fnmatch.fnmatch(path.name, point.file)
        result = original(*args, **kwargs) if point.is_after or not is_here else None
        if not is_here:
            return result
        with open(fault["hits"], "a", encoding="utf-8") as stream:
            stream.write(f"{step}\n")
        if fault["kind"] == "preempt":
            os.kill(os.getpid(), signal.SIGTERM)
            return result if point.is_after else original(*args, **kwargs)
        if point.is_after and path.is_file():
            # Half of it was written.
            os.truncate(path, path.stat().st_size // 2)
        if fault["kind"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault["point"] == "free space":
            return SimpleNamespace(free=0)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _wrap(place: str, around: Callable[..., Any]) -> None:
    """Let ``around`` be called with a function, and its arguments, instead of the function."""
    owner_name, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)
