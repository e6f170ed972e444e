"""Two jobs never write one run folder: whoever trains holds the folder's lock.

Owns ``lock/`` in the run folder. Refuses to know what is written there.

A lock is a numbered file, and the highest number counts. It appears by ``link``, which is atomic
and exclusive on local disks and NFS alike, whole and already locked by ``flock``. It is never
removed before there is a higher one, so a number is taken once only, and of two jobs that find a
dead holder one wins. Whether a holder lives is told by

- ``flock``, where it is seen: on the same machine, and on file systems that share such locks. The
  kernel drops it with the process, however that ends.
- the file's modification time, which the holder moves every ``HEARTBEAT_SECONDS``. A challenger
  watches whether it *changes*, so clocks need not agree.
- SLURM, which knows whether the holder's job still runs.

A requeued job takes the lock from its own former start at once and waits for that to fall silent:
a holder that finds a higher number than its own ends its process.
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
from types import TracebackType

from megatron_deberta.cluster.slurm.commands import job_has_ended
from megatron_deberta.errors import EXIT_FAILURE, ConfigError
from megatron_deberta.files import write_atomically, write_durably

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
SILENT_SECONDS = 8.0
"""After so long without a heartbeat, a superseded holder has ended itself."""
DEAD_SECONDS = 30.0
"""After so long without a heartbeat, a holder on another machine is dead."""
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has the lock."""

    host: str
    """Name of its machine."""
    boot: str
    """Identifies the machine's kernel since it started; containers share it."""
    pid: int
    """Its process there."""
    since: str
    """When it took the lock, by its own clock, UTC."""
    job: str = ""
    """Its SLURM job; empty outside SLURM."""
    restarts: int = 0
    """How often SLURM has requeued that job."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells this lock from every other."""
    released: bool = False
    """It gave the lock back."""

    @classmethod
    def this_process(cls) -> Holder:
        """The calling process."""
        return cls(
            host=socket.gethostname(),
            boot=_boot_id(),
            pid=os.getpid(),
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            job=os.environ.get("SLURM_JOB_ID", ""),
            restarts=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        )

    def __str__(self) -> str:
        """For errors: host, process, job and time."""
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def supersedes(self, other: Holder) -> bool:
        """Whether the other is an earlier start of this very job."""
        return bool(self.job) and self.job == other.job and other.restarts < self.restarts

    def to_json(self) -> bytes:
        """The content of a lock file."""
        return json.dumps(asdict(self)).encode()


class RunLock:
    """The right to write a run's folder, from entering to leaving the context.

    Args:
        run_dir: folder of the run; made if need be.

    Raises:
        ConfigError: on entering; another live process has it, which is named.
        OSError: on entering; the folder cannot be written.
    """

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self._folder = Path(run_dir) / "lock"
        self._run_dir = run_dir
        self._holder = Holder.this_process()
        self._path: Path | None = None
        self._descriptor = -1
        self._done = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="run-lock", daemon=True)

    def __enter__(self) -> RunLock:
        """Take the lock."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            path = newest_lock(self._folder)
            old = None if path is None else self._judge(path)
            number = 1 if path is None else int(path.stem) + 1
            mine = self._create(self._folder / f"{number:08d}.json")
            if mine is not None:
                break
        self._path = mine
        # Loader processes are forked and would hold the lock beyond the holder's death.
        os.register_at_fork(after_in_child=self._forget)
        self._heart.start()
        try:
            if path is not None and old is not None:
                self._await_silence(path, old)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        for stale in self._folder.glob("*.json"):
            if stale.name < mine.name:
                stale.unlink(missing_ok=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the lock back."""
        self._done.set()
        self._heart.join()
        if self._path is not None and newest_lock(self._folder) == self._path:
            write_atomically(self._path, replace(self._holder, released=True).to_json())
        self._forget()

    def _forget(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _create(self, path: Path) -> Path | None:
        """Make the file, whole and locked; None if another was first."""
        draft = self._folder / f".{self._holder.token}.tmp"
        write_durably(draft, self._holder.to_json())
        try:
            descriptor = os.open(draft, os.O_RDWR | os.O_CLOEXEC)
            _lock(descriptor, fcntl.LOCK_EX)
            try:
                os.link(draft, path)
            except FileExistsError:
                os.close(descriptor)
                return None
        finally:
            draft.unlink()
        self._descriptor = descriptor
        return path

    def _judge(self, path: Path) -> Holder | None:
        """See that the present holder is gone.

        Returns:
            The holder, if it may still live but has to give way to its own job's next start.

        Raises:
            ConfigError: it lives.
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

    def _await_silence(self, path: Path, holder: Holder) -> None:
        """Wait until a superseded holder has ended.

        Raises:
            ConfigError: it does not.
        """
        started = changed = time.monotonic()
        heartbeat = _heartbeat(path)
        while heartbeat is not None and time.monotonic() - changed < SILENT_SECONDS:
            if holder.boot == self._holder.boot and not _is_locked(path):
                return
            if time.monotonic() - started > DEAD_SECONDS:
                raise ConfigError(
                    f"train.run_dir={self._run_dir} is still in use by an earlier start of this "
                    f"job, {holder}, which does not end; stop it"
                )
            time.sleep(_POLL_SECONDS)
            last, heartbeat = heartbeat, _heartbeat(path)
            if heartbeat != last:
                changed = time.monotonic()

    def _beat(self) -> None:
        """Show life until the lock is given back; end the process if it was taken away."""
        while not self._done.wait(HEARTBEAT_SECONDS):
            assert self._path is not None
            try:
                os.utime(self._path)
                newest = newest_lock(self._folder)
            except FileNotFoundError:
                newest = None
            except OSError:
                # The file system is away; if the lock is taken meanwhile, we shall see it later.
                continue
            if newest != self._path:
                taker = read_lock(newest) if newest is not None else None
                logger.error("%s was taken by %s; ending", self._path, taker)
                # Not an exception in the main thread: that may wait in a collective for ever.
                os._exit(EXIT_FAILURE)


def refuse_if_held(run_dir: str | os.PathLike[str]) -> None:
    """A look at the lock before anything slow; only taking it makes sure.

    Args:
        run_dir: folder of the run.

    Raises:
        ConfigError: a process that this machine knows of holds it.
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
    """The lock file that counts, if there ever was one."""
    return max(folder.glob("[0-9]*.json"), default=None)


def read_lock(path: Path) -> Holder | None:
    """Who took a lock; None if the file is gone.

    Raises:
        ConfigError: the file is no lock.
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
    """Lock, or return False where another process holds it; True on file systems without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.debug("flock: %s", error)
    return True


def _is_locked(path: Path) -> bool:
    """Whether a process that this kernel or file system knows of holds the lock."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared: two challengers that look at once do not see each other.
        return not _lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _heartbeat(path: Path) -> int | None:
    """The last sign of life, as a number that changes; None if the file is gone."""
    try:
        # Opening makes NFS ask its server; stat alone may be answered from a cache for a minute.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return os.fstat(descriptor).st_mtime_ns
    finally:
        os.close(descriptor)


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
