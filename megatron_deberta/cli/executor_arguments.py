"""Command-line arguments that choose where the units of a job run."""

from __future__ import annotations

import argparse
import os

from megatron_deberta.cli.arguments import number, refuse_options
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.errors import ConfigError
from megatron_deberta.text.jobs.executors import (
    KINDS,
    ONLY_TASK,
    ExecutorOptions,
    Kind,
    array_task,
)
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.readers.sources import STANDARD_INPUT


def add_executor_arguments(parser: argparse.ArgumentParser, *, array: bool = True) -> None:
    """Declare the arguments; with ``array`` also those of job arrays."""
    kinds = [kind for kind in KINDS if array or kind != "slurm-array"]
    parser.add_argument(
        "--executor", choices=kinds,
        help="where the work is done: local, worker processes of this command; mpi, the ranks of "
        "mpirun or srun; dask, a Dask scheduler's workers"
        + ("; slurm-array, the tasks of a job array" if array else "")
        + " (default: by the launcher, else local)",
    )  # fmt: skip
    parser.add_argument(
        "--workers", type=number(int, 0), metavar="N",
        help="local and slurm-array: worker processes of this command; 0: use this process "
        "(default: the CPU cores)",
    )  # fmt: skip
    parser.add_argument(
        "--dask", metavar="ADDRESS",
        help="scheduler as tcp://HOST:8786, its scheduler file, or slurm: start workers with "
        "dask-jobqueue",
    )  # fmt: skip
    parser.add_argument(
        "--dask-jobs", type=number(int, 1), metavar="N",
        help="SLURM jobs to start with --dask slurm (default: 1)",
    )  # fmt: skip
    if array:
        parser.add_argument(
            "--array-task", metavar="K/N",
            help="task K (from 0) of N that share the work; in a SLURM job array this is known",
        )  # fmt: skip


def executor_options(args: argparse.Namespace) -> ExecutorOptions:
    """Return what the arguments and the launcher's environment variables choose.

    Raises:
        ConfigError: arguments contradict each other.
    """
    kind: Kind | None = args.executor or ("dask" if args.dask else None)
    if (kind == "dask") != bool(args.dask):
        raise ConfigError(
            "--executor dask needs --dask ADDRESS (or scheduler file, or slurm)"
            if kind == "dask"
            else f"--dask {args.dask}: only with --executor dask"
        )
    if args.dask != "slurm":
        refuse_options(args, {"dask_jobs": "--dask-jobs"}, "is for --dask slurm")
    share = ONLY_TASK
    if hasattr(args, "array_task"):
        if kind not in (None, "slurm-array"):
            refuse_options(args, {"array_task": "--array-task"}, f"is not for --executor {kind}")
        share = array_task(args.array_task, os.environ)
    if kind is None:
        kind = "local"
        if share.tasks > 1:
            kind = "slurm-array"
        elif _launched_ranks() > 1:
            kind = "mpi"
    if kind in ("mpi", "dask"):
        refuse_options(
            args, {"workers": "--workers"}, f"is not for --executor {kind}, which has its own"
        )
    workers = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    if kind != "slurm-array":
        share = ONLY_TASK
    if share.tasks > 1 and (args.restart or STANDARD_INPUT in args.input):
        what = "--restart" if args.restart else "--input -"
        raise ConfigError(f"{what} works in a single process only, not in one of {share.tasks}")
    return ExecutorOptions(
        kind=kind,
        workers=workers if kind in ("local", "slurm-array") else 0,
        share=share,
        dask=args.dask or "",
        dask_jobs=args.dask_jobs or 1,
    )


def _launched_ranks() -> int:
    # A meeting point is not needed.
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    return read_environment(environment).world_size


def restart(folder: JobFolder) -> None:
    """Discard unfinished work.

    Raises:
        DataError: another process works there.
    """
    if folder.path.exists():
        with folder.locked():
            folder.remove()
