"""Lock of a run folder (``lock/``): only one job at a time trains in it.

The lock is a numbered file, and the highest number counts. The file is created by ``link``, which
is atomic and exclusive on local disks and NFS, complete and already locked by ``flock``. It is
removed only once there is a higher one, and its creator looks for a higher one before it goes on,
so if two jobs find a dead holder, one of them gets the lock. A holder is alive according to

- ``flock``, on the same machine. The kernel releases it with the process. A file server may keep
  the lock of a dead client, and some file systems have no such locks.
- SLURM, which knows whether the holder's job still runs.
- otherwise the file's modification time, which the holder updates every ``HEARTBEAT_SECONDS``.
  Others check whether it *changes*, so clocks need not agree.

A requeued job takes the lock from its own former attempt at once and waits until that is silent: a
holder that finds a higher number than its own ends its process. It looks before each commit
(``check``), and the new holder deletes what a former one has staged, so that of two processes only
the one with the higher number can commit (``checkpoint.writer.Fence``).
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from megatron_deberta.cluster.slurm.commands import current_job, job_has_ended
from megatron_deberta.cluster.slurm.history import (
    BadNodes,
    Event,
    JobHistory,
    JobNumber,
    ProgressEvent,
)
from megatron_deberta.errors import (
    EXIT_FAILURE,
    ConfigError,
    MegatronDebertaError,
    describe_error,
)
from megatron_deberta.files import remove_temporary_files, temporary_name, write_atomically
from megatron_deberta.parsing import IsoTime, read_json, whole_number

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
SILENT_SECONDS = 8.0
"""After this time without a heartbeat, a superseded holder has ended."""
DEAD_SECONDS = 30.0
"""After this time without a heartbeat, a holder is dead if ``flock`` does not say more."""
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that has the lock; the content of the file."""

    host: str
    boot: str
    """Boot identifier of its machine; containers share it."""
    pid: int
    since: IsoTime
    """When it took the lock, UTC."""
    job: JobNumber | Literal[""] = ""
    """Its SLURM job; empty outside SLURM."""
    restarts: int = 0
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    released: bool = False
    flocked: bool = True
    """Whether it has locked the file by ``flock``; not every file system can."""
    ended: str = ""
    """How its work ended: the name of the signal that stopped it, or its error; empty: as it
    should, or unknown."""

    @classmethod
    def this_process(cls) -> Holder:
        """Return the calling process."""
        return cls(
            host=socket.gethostname(),
            boot=_boot_id(),
            pid=os.getpid(),
            since=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            job=current_job(os.environ),
            restarts=whole_number(os.environ, "SLURM_RESTART_COUNT", 0),
        )

    def __str__(self) -> str:
        """Return process, host, job and time, for messages."""
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, since {self.since}"

    def supersedes(self, other: Holder) -> bool:
        """Return whether the other is an earlier attempt of the same job."""
        return bool(self.job) and self.job == other.job and other.restarts < self.restarts

    def knows_ended(self, other: Holder) -> bool:
        """Return whether SLURM reports that the other's job, if it has one, has ended."""
        return bool(other.job) and other.job != self.job and job_has_ended(other.job)

    def is_locked(self, other: Holder, path: Path) -> bool | None:
        """Return whether the other process holds ``flock``; None if that shows nothing.

        Only the kernel on which it runs knows: a file server may keep a dead client's lock.
        """
        return _is_locked(path) if other.flocked and other.boot == self.boot else None

    def to_json(self) -> bytes:
        """Return the content of a lock file."""
        fields = asdict(self)
        if not self.ended:
            # Earlier releases do not know the key.
            del fields["ended"]
        return json.dumps(fields).encode()


class RunLock:
    """Lock of a run folder; a context manager.

    Args:
        run_dir: folder of the run; created if it does not exist.
        received: returns the signal that stops the work; None: there is none.

    Raises:
        ConfigError: on entering, if another live process has the lock.
        OSError: on entering, if the folder cannot be written.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        received: Callable[[], signal.Signals | None] = lambda: None,
    ) -> None:
        self._received = received
        self._folder = Path(run_dir) / "lock"
        self._run_dir = run_dir
        self._holder = Holder.this_process()
        self._path: Path | None = None
        self._descriptor = -1
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._update, name="run-lock", daemon=True)

    @property
    def number(self) -> int:
        """Number of the lock, higher than those of all earlier holders; 0: not held."""
        return 0 if self._path is None else int(self._path.stem)

    def __enter__(self) -> RunLock:
        """Take the lock."""
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            path = newest_lock(self._folder)
            former = None if path is None else self._wait_for_holder(path)
            number = 1 if path is None else int(path.stem) + 1
            own = self._folder / f"{number:08d}.json"
            if not self._create(own):
                continue
            if newest_lock(self._folder) == own:
                break
            # Others have taken, used and removed this number since.
            own.unlink(missing_ok=True)
            self._close()
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

    def __exit__(self, *exception: object) -> None:
        """Release the lock."""
        self._done.set()
        self._thread.join()
        if self._path is not None and newest_lock(self._folder) == self._path:
            number = self._received()
            ended = number.name if number is not None else describe_error(*exception[1:2])
            released = replace(self._holder, released=True, ended=ended)
            try:
                write_atomically(self._path, released.to_json())
            except OSError as error:
                # The error that ended the run is the one to report; the kernel releases the lock.
                logger.warning("%s: not released: %s", self._path, error.strerror)
        self._close()

    def check(self) -> None:
        """End this process if another one has taken the lock; call it before each commit.

        Raises:
            OSError: the file system is not available.
        """
        newest = newest_lock(self._folder)
        if newest != self._path:
            taker = read_lock(newest) if newest is not None else None
            logger.error("%s was taken by %s; ending", self._path, taker)
            # An exception would not reach a main thread that waits in a collective.
            os._exit(EXIT_FAILURE)

    def record(self, event: ProgressEvent, *, step: int, samples: int, **measured: float) -> None:
        """Add the position of training to the job history, if the run has one.

        Args:
            event: what has happened.
            step: completed steps.
            samples: position in the data after those steps.
            measured: durations in seconds.
        """
        seconds = {name: round(value, 3) for name, value in measured.items()}
        self._add_to_history(event, step=step, samples=samples, **seconds)

    def record_fault(
        self, *, step: int, verdict: str, places: Sequence[Mapping[str, int | str]]
    ) -> None:
        """Add a verdict about devices to the job history, if the run has one.

        Args:
            step: at which they computed.
            verdict: its kind; later attempts exclude a node with a ``persistent`` fault.
            places: ``rank``, ``host`` and ``device`` of each suspect.
        """
        self._add_to_history("fault", step=step, verdict=verdict, places=list(places))
        has_history = JobHistory(self._run_dir).path.exists()
        nodes = {str(place["host"]) for place in places}
        if verdict == "persistent" and len(nodes) == 1 and has_history:
            device = ", ".join(f"rank {place['rank']}, {place['device']}" for place in places)
            text = f"wrong results in step {step} ({device})"
            # The limit of age applies when it is read.
            BadNodes(self._run_dir, math.inf).add(nodes.pop(), text, certain=True)

    def _add_to_history(self, event: Event, **values: Any) -> None:
        """Add an event to the job history, if the run has one and the disk is not full."""
        history = JobHistory(self._run_dir)
        try:
            if history.path.exists():
                self.check()
                history.append(event, **values)
        except OSError as error:
            logger.warning("%s; training goes on", error)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _create(self, path: Path) -> bool:
        """Create the file, complete and locked; return False if another process was first."""
        remove_temporary_files(self._folder, r"\.[0-9a-f]{16}")
        draft = temporary_name(self._folder / f".{self._holder.token}")
        try:
            with draft.open("xb") as stream:
                flocked = _lock(stream.fileno(), fcntl.LOCK_EX) is True
                self._holder = replace(self._holder, flocked=flocked)
                stream.write(self._holder.to_json())
                stream.flush()
                os.fsync(stream.fileno())
                os.link(draft, path)
                self._descriptor = os.dup(stream.fileno())
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        return True

    def _wait_for_holder(self, path: Path) -> Holder | None:
        """Wait until it is known whether the present holder is alive.

        Returns:
            The holder if its job has been requeued or has ended and its process may be alive; else
            None.

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
            is_locked = self._holder.is_locked(holder, path)
            if is_locked is False:
                return None
            if heartbeat is None and self._holder.knows_ended(holder):
                return holder if is_locked else None
            last, heartbeat = heartbeat, _heartbeat(path)
            if is_locked or (last is not None and heartbeat != last):
                raise _in_use(self._run_dir, holder)
            if time.monotonic() - started > DEAD_SECONDS:
                logger.warning("taking the lock of %s, silent for %.0f s", holder, DEAD_SECONDS)
                return None
            time.sleep(_POLL_SECONDS)

    def _wait_for_silence(self, path: Path, holder: Holder) -> None:
        """Wait until a former holder has ended.

        Raises:
            MegatronDebertaError: it does not end; a later attempt may find that it has.
        """
        started = changed = time.monotonic()
        heartbeat = _heartbeat(path)
        while heartbeat is not None and time.monotonic() - changed < SILENT_SECONDS:
            if self._holder.is_locked(holder, path) is False:
                return
            if time.monotonic() - started > DEAD_SECONDS:
                raise MegatronDebertaError(
                    f"train.run_dir={self._run_dir} is still in use by an earlier job attempt, "
                    f"{holder}, which does not end; stop it"
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
                with suppress(FileNotFoundError):
                    os.utime(self._path)
                self.check()
            except OSError:
                # The file system is not available; check again later.
                continue


def raise_if_locked(run_dir: str | os.PathLike[str]) -> None:
    """Check the lock early; it may still be taken later.

    Raises:
        ConfigError: a live process has it.
    """
    path = newest_lock(Path(run_dir) / "lock")
    holder = None if path is None else read_lock(path)
    if path is None or holder is None or holder.released:
        return
    own = Holder.this_process()
    if own.supersedes(holder) or own.knows_ended(holder):
        return
    is_locked = own.is_locked(holder, path)
    if is_locked or (is_locked is None and _beats(path)):
        raise _in_use(run_dir, holder)


def _beats(path: Path) -> bool:
    """Return whether a holder updates its file within ``SILENT_SECONDS``."""
    before, deadline = _heartbeat(path), time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        if (now := _heartbeat(path)) != before:
            return now is not None
    return False


def _in_use(run_dir: str | os.PathLike[str], holder: Holder) -> ConfigError:
    return ConfigError(
        f"train.run_dir={run_dir} is in use by {holder}; wait for it, stop it, or name another "
        "train.run_dir"
    )


def newest_lock(folder: Path) -> Path | None:
    """Return the lock file with the highest number, None if there is none."""
    return max(folder.glob(f"{'[0-9]' * 8}.json"), default=None)


def read_lock(path: Path) -> Holder | None:
    """Read a lock file; None if it no longer exists.

    Raises:
        ConfigError: the file is not a lock.
    """
    try:
        return read_json(
            path, Holder, "a lock", error=ConfigError, remedy="remove it if no job uses the folder"
        )
    except FileNotFoundError:
        return None


def _lock(descriptor: int, kind: int) -> bool | None:
    """Lock a file; return False if another process has it, None without support for locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.debug("flock: %s", error)
        return None
    return True


def _is_locked(path: Path) -> bool | None:
    """Return whether a process has locked a file; None without support for locks."""
    try:
        with path.open("rb") as stream:
            # Shared, so that two processes that check at once do not see each other.
            taken = _lock(stream.fileno(), fcntl.LOCK_SH)
    except FileNotFoundError:
        return False
    return None if taken is None else not taken


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
