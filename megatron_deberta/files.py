"""Crash-safe files and folders: flushed to disk, and under their final name complete or absent."""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import tempfile
import time
import tokenize
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

MAX_RECORD_BYTES = 1 << 30
"""Largest file of records, such as ``metrics.jsonl``, that is read at once."""
_LOCK, _OWNER = "lock", "owner"
"""Files in the temporary folder of `published_folder`: held while its process runs, and who that
is."""
NPY_ERRORS = (
    OSError, ValueError, EOFError, TypeError, ArithmeticError, SyntaxError, MemoryError,
    tokenize.TokenError,
)  # fmt: skip
"""What ``numpy.load`` raises for a ``.npy`` file that is missing or damaged."""
_ENTER_SECONDS = 2.0
"""Time to wait for another process that begins to write a folder."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class HashedFile:
    """New file whose SHA-256 is computed from what is written, not read back.

    Args:
        final: name after ``commit``; the temporary name is unique to this attempt.
    """

    def __init__(self, final: Path) -> None:
        """See the class."""
        self._final = final
        self._temporary = temporary_path(final)
        self._file = self._temporary.open("xb")
        self._digest = hashlib.sha256()

    def write(self, content: bytes | memoryview) -> None:
        """Append to the file.

        Raises:
            OSError: the disk is full or broken.
        """
        self._digest.update(content)
        self._file.write(content)

    def take_digest(self) -> str:
        """Return the hexadecimal SHA-256 of what was written since the last call."""
        digest, self._digest = self._digest.hexdigest(), hashlib.sha256()
        return digest

    def commit(self) -> None:
        """Flush the file and give it its final name; the caller flushes the folder."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._temporary, self._final)

    def close(self) -> None:
        """Remove the file unless it was committed."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._temporary.unlink(missing_ok=True)


class FileLock:
    """``flock`` on a file that is created for it; the kernel releases it when the process ends.

    Args:
        path: the file; its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        """See the class."""
        self._path = path
        self._file = -1
        self.is_supported = True
        """Whether the file system has locks; without them ``acquire`` always succeeds."""

    def acquire(self, *, shared: bool = False) -> bool:
        """Try to take the lock, without waiting.

        Args:
            shared: exclude only processes that do not share.

        Raises:
            OSError: the file cannot be created.
        """
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                self.release()
                raise
            self.is_supported = False
            logging.getLogger(__name__).warning(
                "%s: the file system has no locks; start only one command at a time", self._path
            )
        if not self.is_held():
            self.release()
            return False
        return True

    def make_exclusive(self) -> bool:
        """Try to turn a shared lock into an exclusive one; it may be lost if this fails."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return self.is_held()

    def is_held(self) -> bool:
        """Return whether the lock is held, and its file still has its name."""
        try:
            return self._file >= 0 and os.path.samestat(os.fstat(self._file), self._path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock if it is held; the file stays."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def did_you_mean(path: Path, suffix: str = "") -> str:
    """Return ``; did you mean PATH?`` for a path that does not exist; empty: nothing is similar.

    One name of the path may be misspelled, that of the file or of a folder above it.

    Args:
        path: what was given.
        suffix: end of the names that can be meant.
    """
    if path.exists():
        # A pipe, or a file where a folder is wanted
        return ""
    for missing in (path, *path.parents):
        try:
            end = suffix if missing == path else ""
            names = [each.name for each in missing.parent.iterdir() if each.name.endswith(end)]
        except (OSError, ValueError):
            continue
        similar = difflib.get_close_matches(missing.name, names, 1)
        meant = missing.with_name(similar[0]) / path.relative_to(missing) if similar else missing
        return f"; did you mean {meant}?" if meant.exists() else ""
    return ""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading; a pipe or device, which may never end, is refused.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        reason = os.strerror(number) if stat.S_ISDIR(mode) else "Not a regular file"
        raise OSError(number, reason, os.fspath(path))
    return open(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a regular file.

    Args:
        path: the file.
        most: its maximum size in bytes.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"Larger than {most:,} bytes", os.fspath(path))
    return content


def open_appending(path: str | os.PathLike[str]) -> FileIO:
    """Open a file for reading and appending, unbuffered; a pipe, which may block, is refused.

    Raises:
        OSError: it cannot be opened, or is a pipe.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
    return open(descriptor, "a+b", buffering=0)


def sha256_file(path: str | Path) -> str:
    """Return the hexadecimal SHA-256 of a file's content.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def fsync_path(path: str | Path) -> None:
    """Flush a file's content, or the names inside a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def adopt_mode(path: Path) -> None:
    """Set the permissions of a file or folder to those of its parent, which follow the umask.

    safetensors and ``mkdtemp`` create files and folders for the owner only.
    """
    mode = path.parent.stat().st_mode
    path.chmod(mode & (0o777 if path.is_dir() else 0o666))


def temporary_name(final: str | Path) -> Path:
    """Return a temporary name beside ``final``, unique to this process on all nodes."""
    return Path(f"{final}.{os.getpid()}.{_NUMBERED_IN}.tmp")


def _process_numbering() -> str:
    """Identify the namespace in which process numbers are unique, among those of all nodes."""
    parts = [os.uname().nodename]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text())
        except OSError:
            parts.append(uuid.uuid4().hex)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


# Processes in containers, on one node or several, may have the same number.
_NUMBERED_IN = _process_numbering()


def temporary_path(final: Path) -> Path:
    """Return a hidden name beside ``final`` that no other attempt uses."""
    return final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")


def write_durably(path: Path, content: bytes) -> None:
    """Write a new file and flush it; the caller flushes its folder.

    Raises:
        OSError: the file exists, the disk is full or the folder not writable.
    """
    _write_new(path, content, durable=True)


def _write_new(path: Path, content: bytes, *, durable: bool) -> None:
    try:
        with path.open("xb") as stream:
            stream.write(content)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
    except OSError as error:
        # An error of writing, such as that of a full disk, names no file.
        error.filename = error.filename or str(path)
        raise


def write_atomically(final: str | Path, content: bytes, *, durable: bool = True) -> None:
    """Write ``content`` to ``final`` atomically; symbolic links are replaced, not followed.

    Args:
        final: the file.
        content: its new content.
        durable: flush it to disk, so that it outlives a power failure. Temporary files of
            ``final`` that killed processes have left since this machine was started are removed.

    Raises:
        OSError: the disk is full or the folder not writable; ``final`` is then unchanged.
    """
    temporary = temporary_name(final)
    # A killed process with the same id may have left one.
    temporary.unlink(missing_ok=True)
    if durable:
        remove_temporary_files(Path(final).parent, re.escape(Path(final).name))
    try:
        _write_new(temporary, content, durable=durable)
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    if durable:
        fsync_path(Path(final).parent)


def remove_temporary_files(folder: Path, name: str) -> None:
    """Remove temporary files left by processes of this machine that no longer run.

    Args:
        folder: their folder.
        name: regular expression of the final names, to which `temporary_name` was applied.
    """
    pattern = re.compile(rf"{name}\.(?P<pid>\d{{1,9}})\.{_NUMBERED_IN}\.tmp")
    with contextlib.suppress(OSError):
        for each in os.listdir(folder):
            if (found := pattern.fullmatch(each)) and not _is_running(int(found["pid"])):
                (folder / each).unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # Of another user.
        return True
    return True


class FolderInUseError(OSError):
    """Another process writes the same folder."""


@contextmanager
def published_folder(output: Path, *, replace: bool = False, alone: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``output`` if the block succeeds.

    Temporary folders that killed processes have left for the same ``output`` are removed.

    Args:
        output: the final name; must not exist or be an empty folder.
        replace: replace an existing folder, which is unchanged if anything fails.
        alone: refuse to start while another process writes ``output``.

    Raises:
        FolderInUseError: ``alone``, and another process writes ``output``.
        OSError: the disk is full, or ``output`` exists or cannot be created.
    """
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(output.parent):
        staging = Path(
            tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent)
        )
        fresh, old, lock = staging / "new", staging / "old", FileLock(staging / _LOCK)
        try:
            lock.acquire()
            # Written when the lock is held: a folder without it is not taken for one of a killed
            # process.
            (staging / _OWNER).write_text(f"process {os.getpid()} on {platform.node()}")
            owners = _owners(_remove_abandoned(output, staging))
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            lock.release()
            raise
    try:
        if alone and owners:
            raise FolderInUseError(errno.EBUSY, f"is being written by {owners[0]}", str(output))
        fresh.mkdir()
        yield fresh
        for path in sorted(fresh.rglob("*")):
            adopt_mode(path)
            fsync_path(path)
        fsync_path(fresh)
        if replace and output.exists():
            output.rename(old)
        fresh.rename(output)
        fsync_path(output.parent)
    finally:
        if old.exists() and not output.exists():
            old.rename(output)
        shutil.rmtree(staging, ignore_errors=True)
        lock.release()


def folder_writer(output: Path) -> str:
    """Return the process that writes a folder by `published_folder`; empty: none is known.

    Temporary folders that killed processes have left for the same ``output`` are removed.
    """
    output = output.absolute()
    try:
        return next(iter(_owners(_remove_abandoned(output))), "")
    except OSError:
        return ""


def _owners(folders: Sequence[Path]) -> list[str]:
    """Return the processes that write temporary folders, without those that have ended since."""
    owners = []
    for path in folders:
        with contextlib.suppress(FileNotFoundError):
            owners.append((path / _OWNER).read_text())
    return owners


def _remove_abandoned(output: Path, own: Path | None = None) -> list[Path]:
    """Remove the temporary folders of killed processes; return those of running ones.

    Where the file system has no locks, nothing is removed.

    Args:
        output: the folder that they were to become.
        own: temporary folder of this process, if it has one.
    """
    pattern = re.compile(re.escape(f".{output.name}.") + r"[a-z0-9_]{8}\.tmp")
    running = []
    for path in sorted(output.parent.iterdir()):
        if path == own or not pattern.fullmatch(path.name) or path.is_symlink():
            continue
        lock = FileLock(path / _LOCK)
        try:
            if not (path / _OWNER).is_file() or not (path / _LOCK).is_file():
                continue
            if not lock.acquire():
                running.append(path)
            elif lock.is_supported:
                if (path / "old").exists() and not output.exists():
                    (path / "old").rename(output)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            # Removed meanwhile, or of another user.
            continue
        finally:
            lock.release()
    return running


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let processes enter one after the other, so that of two the second one sees the first.

    Without locks on this file system, or while another program holds one, they are not kept apart.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _ENTER_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)
