"""Executor of the ranks that mpirun or srun started (``mpi4py.futures``)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from megatron_deberta.errors import ConfigError


@contextlib.contextmanager
def mpi_executor() -> Iterator[tuple[Any, int]]:
    """Yield the executor and its number of workers on rank 0; other ranks run units and exit.

    A rank that dies is reported by the launcher, which ends the job.

    Raises:
        ConfigError: mpi4py or its MPI library is missing, or there is a single rank.
        SystemExit: all units are done, on ranks other than 0.
    """
    try:
        from mpi4py import MPI
        from mpi4py.futures import MPICommExecutor
    except (ImportError, RuntimeError) as error:
        # mpi4py without an MPI library raises a RuntimeError of many lines.
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--executor mpi: mpi4py cannot be imported ({reason}); pip install "
            "'megatron-deberta[mpi]' and an MPI library, or choose another executor"
        ) from error
    ranks = MPI.COMM_WORLD.Get_size()
    if ranks < 2:
        raise ConfigError(
            "--executor mpi: mpi4py sees a single rank, and needs one more than workers; start "
            "with mpirun -n N, or srun --mpi=pmix if mpi4py was built for it"
        )
    with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
        if executor is not None:
            yield executor, ranks - 1
    if executor is None:
        sys.exit(0)
