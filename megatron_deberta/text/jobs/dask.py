"""Executor of the workers of a Dask scheduler (``dask.distributed``, ``dask-jobqueue``)."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Executor
from typing import Any

from megatron_deberta.errors import ConfigError, DataError

_CONNECT_SECONDS = 30
_WORKERLESS_SECONDS = 300
_SECONDS_BETWEEN_LOOKS = 1.0


@contextlib.contextmanager
def dask_executor(scheduler: str, jobs: int) -> Iterator[tuple[Executor, Callable[[], int]]]:
    """Yield the executor and what counts its workers; a dead worker's units run elsewhere.

    Args:
        scheduler: address as ``tcp://host:8786``, path of a scheduler file, or ``slurm``: start
            workers with dask-jobqueue as its configuration file says.
        jobs: number of SLURM jobs to start for ``slurm``.

    Raises:
        ConfigError: Dask is missing, or the scheduler or its first worker cannot be reached.
        DataError: the scheduler died, a unit killed several workers, or no worker is left.
    """
    try:
        from distributed import Client, KilledWorker
    except ImportError as error:
        raise ConfigError(
            f"--executor dask: dask.distributed cannot be imported ({error}); pip install "
            "'megatron-deberta[dask]', or choose another executor"
        ) from error
    with contextlib.ExitStack() as stack:
        try:
            if scheduler == "slurm":
                from dask_jobqueue.slurm import SLURMCluster

                cluster = stack.enter_context(SLURMCluster())
                cluster.scale(jobs=jobs)
                client = stack.enter_context(Client(cluster))
                logging.getLogger(__name__).info(
                    "--dask slurm: waiting for the first of %d jobs", jobs
                )
            elif os.path.exists(scheduler):
                client = Client(scheduler_file=scheduler, timeout=_CONNECT_SECONDS)
            else:
                client = Client(scheduler, timeout=_CONNECT_SECONDS)
            stack.enter_context(client)
            client.wait_for_workers(1, timeout=None if scheduler == "slurm" else _CONNECT_SECONDS)
        except (ImportError, OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"--dask {scheduler}: no scheduler with a worker ({error}); start `dask scheduler` "
                "and `dask worker`"
            ) from error
        try:
            yield client.get_executor(pure=False), _WorkerCount(client, scheduler)
        except (KilledWorker, CancelledError) as error:
            raise DataError(_died(scheduler, error)) from error


def _died(scheduler: str, error: Exception) -> str:
    return (
        f"--dask {scheduler}: the scheduler died, or a unit's workers did "
        f"({str(error) or type(error).__name__}); run the same command again to go on"
    )


class _WorkerCount:
    """Counts the workers' threads; raises after ``_WORKERLESS_SECONDS`` without any."""

    def __init__(self, client: Any, scheduler: str) -> None:
        self._client = client
        self._scheduler = scheduler
        self._seen = time.monotonic()
        self._last_look = -_SECONDS_BETWEEN_LOOKS
        self._workers = 0

    def __call__(self) -> int:
        now = time.monotonic()
        if now - self._last_look >= _SECONDS_BETWEEN_LOOKS:
            self._last_look = now
            try:
                self._workers = sum(self._client.nthreads().values())
            except (OSError, ValueError, CancelledError) as error:
                raise DataError(_died(self._scheduler, error)) from error
        if self._workers:
            self._seen = now
        elif now - self._seen > _WORKERLESS_SECONDS:
            raise DataError(
                f"--executor dask: no worker for {_WORKERLESS_SECONDS} s; start workers and run "
                "the same command again to go on"
            )
        return self._workers
