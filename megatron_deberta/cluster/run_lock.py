"""Lock of a run folder (``lock/``): only one job at a time trains in it.

The lock is a numbered file, and the highest number counts. The file is created by ``link``, which
is atomic and exclusive on local disks and NFS, complete and already locked by ``flock``. It is
removed only once there is a higher one, so each number is taken once, and if two jobs find a dead
holder, one of them gets the lock. A holder is alive according to

- ``flock``, on the same machine and on file systems that share such locks. The kernel releases it
  with the process.
- the file's modification time, which the holder updates every ``HEARTBEAT_SECONDS``. Others check
  whether it *changes*, so clocks need not agree.
- SLURM, which knows whether the holder's job still runs.

A requeued job takes the lock from its own former attempt at once and waits until that is silent: a
holder that finds a higher number than its own ends its process.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

from megatron_deberta.cluster.slurm.commands import job_has_ended
from megatron_deberta.errors import EXIT_FAILURE, ConfigError
from megatron_deberta.files import write_atomically, write_durably

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
SILENT_SECONDS = 8.0
"""After this time without a heartbeat, a superseded holder has ended."""
DEAD_SECONDS = 30.0
"""After this time without a heartbeat, a holder on another machine is dead."""
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has the lock; the content of the file."""

    host: str
    boot: str
    """Boot identifier of its machine; containers share it."""
    pid: int
    since: str
    """When it took the lock, UTC."""
    job: str = ""
    """Its SLURM job; empty outside SLURM."""
    restarts: int = 0
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    released: bool = False

    @classmethod
    def this_process(cls) -> Holder:
        """Return the calling process."""
        return cls(
            host=socket.gethostname(),
            boot=_boot_id(),
            pid=os.getpid(),
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            job=os.environ.get("SLURM_JOB_ID", ""),
            restarts=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        )

    def __str__(self) -> str:
        """Return process, host, job and time, for messages."""
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def supersedes(self, other: Holder) -> bool:
        """Return whether the other is an earlier attempt of the same job."""
        return bool(self.job) and self.job == other.job and other.restarts < self.restarts

    def to_json(self) -> bytes:
        """Return the content of a lock file."""
        return json.dumps(asdict(self)).encode()


class RunLock:
    """Lock of a run folder; a context manager.

    Args:
        run_dir: folder of the run; created if it does not exist.

    Raises:
        ConfigError: on entering, if another live process has the lock.
        OSError: on entering, if the folder cannot be written.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._folder = Path(run_dir) / "lock"
        self._run_dir = run_dir
        self._holder = Holder.this_process()
        self._path: Path | None = None
        self._descriptor = -1
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._update, name="run-lock", daemon=True)

    def __enter__(self) -> RunLock:
        """Take the lock."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            path = newest_lock(self._folder)
            former = None if path is None else self._wait_for_holder(path)
            number = 1 if path is None else int(path.stem) + 1
            own = self._folder / f"{number:08d}.json"
            if self._create(own):
                break
        self._path = own
        # Forked loader processes would keep the lock after the holder's death.
        os.register_at_fork(after_in_child=self._close)
        self._thread.start()
        try:
            if path is not None and former is not None:
                self._wait_for_silence(path, former)
        except BaseException:
            self.__exit__()
            raise
        for stale in self._folder.glob("*.json"):
            if stale.name < own.name:
                stale.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        self._done.set()
        self._thread.join()
        if self._path is not None and newest_lock(self._folder) == self._path:
            write_atomically(self._path, replace(self._holder, released=True).to_json())
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _create(self, path: Path) -> bool:
        """Create the file, complete and locked; return False if another process was first."""
        draft = self._folder / f".{self._holder.token}.tmp"
        write_durably(draft, self._holder.to_json())
        try:
            descriptor = os.open(draft, os.O_RDWR | os.O_CLOEXEC)
            _lock(descriptor, fcntl.LOCK_EX)
            try:
                os.link(draft, path)
            except FileExistsError:
                os.close(descriptor)
                return False
        finally:
            draft.unlink()
        self._descriptor = descriptor
        return True

    def _wait_for_holder(self, path: Path) -> Holder | None:
        """Wait until it is known whether the present holder is alive.

        Returns:
            The holder if it is an earlier attempt of this job, which may be alive; else None.

        Raises:
            ConfigError: it is alive.
        """
        started = time.monotonic()
        heartbeat: int | None = None
        while True:
            holder = read_lock(path)
            if holder is None or holder.released:
                return None
            if self._holder.supersedes(holder):
                return holder
            if _is_locked(path):
                break
            if holder.boot == self._holder.boot:
                return None
            if heartbeat is None and holder.job and job_has_ended(holder.job):
                return None
            last, heartbeat = heartbeat, _heartbeat(path)
            if last is not None and heartbeat != last:
                break
            if time.monotonic() - started > DEAD_SECONDS:
                logger.warning("taking the lock of %s, silent for %.0f s", holder, DEAD_SECONDS)
                return None
            time.sleep(_POLL_SECONDS)
        raise _in_use(self._run_dir, holder)

    def _wait_for_silence(self, path: Path, holder: Holder) -> None:
        """Wait until a superseded holder has ended.

        Raises:
            ConfigError: it does not end.
        """
        started = changed = time.monotonic()
        heartbeat = _heartbeat(path)
        while heartbeat is not None and time.monotonic() - changed < SILENT_SECONDS:
            if holder.boot == self._holder.boot and not _is_locked(path):
                return
            if time.monotonic() - started > DEAD_SECONDS:
                raise ConfigError(
                    f"train.run_dir={self._run_dir} is still in use by an earlier attempt of "
                    f"this job, {holder}, which does not end; stop it"
                )
            time.sleep(_POLL_SECONDS)
            last, heartbeat = heartbeat, _heartbeat(path)
            if heartbeat != last:
                changed = time.monotonic()

    def _update(self) -> None:
        """Update the modification time until the release; exit if the lock has been taken."""
        while not self._done.wait(HEARTBEAT_SECONDS):
            assert self._path is not None
            try:
                os.utime(self._path)
                newest = newest_lock(self._folder)
            except FileNotFoundError:
                newest = None
            except OSError:
                # The file system is not available; check again later.
                continue
            if newest != self._path:
                taker = read_lock(newest) if newest is not None else None
                logger.error("%s was taken by %s; ending", self._path, taker)
                # An exception would not reach a main thread that waits in a collective.
                os._exit(EXIT_FAILURE)


def raise_if_locked(run_dir: str | os.PathLike[str]) -> None:
    """Check the lock early; it may still be taken later.

    Raises:
        ConfigError: a process known to this machine has it.
    """
    path = newest_lock(Path(run_dir) / "lock")
    holder = None if path is None else read_lock(path)
    if path is None or holder is None or holder.released:
        return
    if _is_locked(path) and not Holder.this_process().supersedes(holder):
        raise _in_use(run_dir, holder)


def _in_use(run_dir: str | os.PathLike[str], holder: Holder) -> ConfigError:
    return ConfigError(
        f"train.run_dir={run_dir} is in use by {holder}; wait for it, stop it, or name another "
        "train.run_dir"
    )


def newest_lock(folder: Path) -> Path | None:
    """Return the lock file with the highest number, None if there is none."""
    return max(folder.glob("[0-9]*.json"), default=None)


def read_lock(path: Path) -> Holder | None:
    """Read a lock file; None if it no longer exists.

    Raises:
        ConfigError: the file is not a lock.
    """
    try:
        return Holder(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a lock ({error}); remove it if no job uses the folder"
        ) from error


def _lock(descriptor: int, kind: int) -> bool:
    """Lock a file; return False if another process has it, True without support for locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.debug("flock: %s", error)
    return True


def _is_locked(path: Path) -> bool:
    """Return whether a process known to this kernel or file system has the lock."""
    try:
        with path.open("rb") as stream:
            # Shared, so that two processes that check at once do not see each other.
            return not _lock(stream.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False


def _heartbeat(path: Path) -> int | None:
    """Return the modification time in nanoseconds; None if the file no longer exists."""
    try:
        # Opening makes NFS ask its server; stat alone may be answered from a cache.
        with path.open("rb") as stream:
            return os.fstat(stream.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
