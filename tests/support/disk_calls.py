"""Recorder of the calls that make writes durable: fsync and rename, in order, with real paths."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class DiskCalls:
    """Records the calls of this process on paths below a folder until the test ends.

    A process that is killed loses nothing that it has written; a machine that loses power keeps
    what was flushed before, which only the order of these calls shows.

    Args:
        monkeypatch: the test's.
        root: the folder; paths are recorded relative to it, with ``.`` for itself.

    Attributes:
        calls: ``fsync PATH`` and ``rename PATH -> PATH``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.calls: list[str] = []
        self._root = root.resolve()
        self._flushed: set[tuple[int, bytes]] = set()
        monkeypatch.setattr(os, "fsync", self._recording_fsync(os.fsync))
        for owner, name in ((os, "rename"), (os, "replace"), (Path, "rename"), (Path, "replace")):
            monkeypatch.setattr(owner, name, self._recording_rename(getattr(owner, name)))

    def assert_flushed(self, folder: Path) -> None:
        """Assert that the current content of every file in a folder was passed to fsync."""
        for path in folder.rglob("*"):
            if path.is_file():
                assert (path.stat().st_ino, path.read_bytes()) in self._flushed, path

    def _recording_fsync(self, fsync: Callable[[int], None]) -> Callable[[int], None]:
        def recorded(descriptor: int) -> None:
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_relative_to(self._root):
                self.calls.append(f"fsync {path.relative_to(self._root)}")
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode):
                    self._flushed.add((status.st_ino, path.read_bytes()))

        return recorded

    def _recording_rename(self, rename: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(source: Any, target: Any) -> Any:
            call = " -> ".join(str(Path(path).relative_to(self._root)) for path in (source, target))
            result = rename(source, target)
            # pathlib calls os.rename in some versions of Python.
            if self.calls[-1:] != [f"rename {call}"]:
                self.calls.append(f"rename {call}")
            return result

        return recorded
