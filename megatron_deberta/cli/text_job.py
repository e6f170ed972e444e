"""Options, input and engine that the commands for text share."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_deberta.cli.arguments import number, refuse_options
from megatron_deberta.distributed.environment import read_environment
from megatron_deberta.errors import ConfigError
from megatron_deberta.text.jobs.executors import (
    KINDS,
    ONLY_TASK,
    ExecutorOptions,
    Kind,
    RunOptions,
    array_task,
    remote_engine,
)
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.jobs.progress import ProgressDisplay
from megatron_deberta.text.readers.checks import check_input
from megatron_deberta.text.readers.records import DEFAULT_ALLOW_BAD, ReadOptions
from megatron_deberta.text.readers.sources import (
    PLAN,
    SPOOLED_INPUT,
    STANDARD_INPUT,
    Source,
    find_sources,
)


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how text is read."""
    parser.add_argument(
        "--input", action="extend", nargs="+", required=True, metavar="FILE",
        help="JSONL or plain text, also .gz, .zst, .bz2 and .xz; Parquet; Hugging Face datasets; "
        "files, directories, globs, or - for standard input",
    )  # fmt: skip
    parser.add_argument(
        "--keys", "--input-key", action="extend", nargs="+", metavar="KEY",
        help="keys of the JSON objects, or columns, that hold text, separated by spaces or commas "
        "(default: text)",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=("auto", "jsonl", "text"), default="auto",
        help="format of the input; auto: by the suffix, else by the first character",
    )  # fmt: skip
    parser.add_argument(
        "--text-mode", choices=("auto", "file", "paragraph", "line"), default="auto",
        help="documents of plain text: whole files, paragraphs separated by blank lines, or lines; "
        "auto: the files of a directory, the paragraphs of other files",
    )  # fmt: skip
    parser.add_argument(
        "--normalize", choices=("none", "nfc", "nfkc"), default="none",
        help="Unicode normalization of the text",
    )  # fmt: skip
    parser.add_argument(
        "--max-document-mb", type=number(float, 1e-6), default=100.0, metavar="MB",
        help="leave out longer documents, and list them as unusable",
    )  # fmt: skip
    parser.add_argument(
        "--max-bad-fraction", type=number(float, 0, 1), metavar="FRACTION",
        help="accept up to this fraction of unusable records, and damaged files "
        f"(default: {DEFAULT_ALLOW_BAD:g}, and no damaged file; empty records do not count)",
    )  # fmt: skip


def add_rerun_arguments(parser: argparse.ArgumentParser, existing: str) -> None:
    """Declare what becomes of ``existing`` output, and of unfinished work."""
    parser.add_argument("--force", action="store_true", help=f"replace {existing}")
    parser.add_argument(
        "--restart", action="store_true", help="discard the work of an unfinished run"
    )


def add_executor_arguments(parser: argparse.ArgumentParser, *, array: bool = True) -> None:
    """Declare where the work is done, and ``--estimate``; with ``array`` also job arrays."""
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
    parser.add_argument(
        "--estimate", action="store_true",
        help="only print how much time, disk and memory it would take",
    )  # fmt: skip


def add_job_arguments(
    parser: argparse.ArgumentParser, existing: str, *, array: bool = True
) -> None:
    """Declare where the work is done, its estimate, and what becomes of earlier work.

    Args:
        parser: of the command.
        existing: what ``--force`` replaces.
        array: declare also the arguments of job arrays.
    """
    add_executor_arguments(parser, array=array)
    parser.add_argument(
        "--nodes", type=number(int, 1), metavar="N",
        help="with --estimate: nodes, each with --workers processes (default: 1)",
    )  # fmt: skip
    add_rerun_arguments(parser, existing)


@contextlib.contextmanager
def open_input(
    args: argparse.Namespace, *, is_folder: bool, is_first: bool = True
) -> Iterator[tuple[list[Source], ReadOptions]]:
    """Find the input files and check their first records.

    Standard input is kept in the folder of the unfinished work; a run that is refused before it
    began leaves nothing there.

    Args:
        args: arguments of the command, which writes ``args.output``.
        is_folder: the output is a folder, in which no input is searched.
        is_first: this is the first of several processes; only that one warns.

    Raises:
        ConfigError: a key is missing, or see ``find_sources`` and ``read_options``.
        DataError: see ``find_sources``.
    """
    output, options = Path(args.output), read_options(args)
    folder = JobFolder(output).path
    sources = find_sources(
        args.input,
        file_format=args.format,
        text_mode=args.text_mode,
        spool=folder / SPOOLED_INPUT,
        output=output if is_folder else None,
    )
    try:
        _refuse_unused(args, sources)
        check_input(
            sources,
            options,
            max_bad_fraction=args.max_bad_fraction,
            warn_short=is_first and args.text_mode == "auto",
        )
        yield sources, options
    except ConfigError:
        if STANDARD_INPUT in args.input and not (folder / PLAN).exists():
            os.unlink(sources[0].path)
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _refuse_unused(args: argparse.Namespace, sources: Sequence[Source]) -> None:
    """Reject options about a kind of input of which there is none.

    Raises:
        ConfigError: one is given.
    """
    plain = [source.text_format in ("file", "paragraph", "line") for source in sources]
    if args.text_mode != "auto" and not any(plain):
        raise ConfigError(
            f"--text-mode {args.text_mode} is for plain text, of which there is none; leave it out "
            "for JSON Lines and tables"
        )
    if args.keys and args.keys != ["text"] and all(plain):
        raise ConfigError(
            f"--keys {' '.join(args.keys)} is for JSON Lines and tables; the input is plain text"
        )


def read_options(args: argparse.Namespace) -> ReadOptions:
    """Return how to read the input.

    Raises:
        ConfigError: a key is empty.
    """
    keys = [key.strip() for entry in args.keys or ["text"] for key in entry.split(",")]
    if "" in keys:
        raise ConfigError(f"--keys {' '.join(args.keys)}: a key is empty")
    return ReadOptions(
        keys=tuple(dict.fromkeys(keys)),
        normalization=args.normalize,
        longest_bytes=round(args.max_document_mb * 1e6),
    )


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
        refuse_options(args, ["dask_jobs"], "is for --dask slurm")
    share = ONLY_TASK
    if hasattr(args, "array_task"):
        if kind not in (None, "slurm-array"):
            refuse_options(args, ["array_task"], f"is not for --executor {kind}")
        share = array_task(args.array_task, os.environ)
    if kind is None:
        if share.tasks > 1:
            kind = "slurm-array"
        else:
            # A meeting point is not needed.
            launched = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
            kind = "mpi" if read_environment(launched).world_size > 1 else "local"
    if kind in ("mpi", "dask"):
        refuse_options(args, ["workers"], f"is not for --executor {kind}, which has its own")
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


def not_published(output: str) -> str:
    """Return what an array task says that ends while others still work."""
    return (
        f"{output}: this task is done, but nothing is published yet: other tasks hold the lock, "
        "and the last one to end publishes; if none is running, start one again"
    )


@contextlib.contextmanager
def open_engine(args: argparse.Namespace, folder: JobFolder, title: str) -> Iterator[RunOptions]:
    """Open the engine and the progress display of a command, and discard work on ``--restart``.

    Args:
        args: arguments of the command.
        folder: of its unfinished work.
        title: its name.

    Yields:
        How the work is done.
    """
    refuse_options(args, ["nodes"], "is for --estimate")
    executor = executor_options(args)
    with remote_engine(executor) as engine:
        folder.remove_leftovers()
        folder.refuse_foreign()
        if args.restart and folder.path.exists():
            with folder.locked():
                folder.remove()
        with ProgressDisplay(
            title, lambda: engine.workers if engine else executor.workers
        ) as display:
            yield RunOptions(
                workers=executor.workers,
                engine=engine,
                share=executor.share,
                allow_bad=getattr(args, "max_bad_fraction", None),
                force=args.force,
                advance=display.advance,
            )


@contextlib.contextmanager
def open_work(
    args: argparse.Namespace, title: str, *, is_folder: bool = True
) -> Iterator[tuple[list[Source], ReadOptions, RunOptions]]:
    """Open the engine, the input and the progress display of a command.

    Args:
        args: arguments of the command, which writes ``args.output``.
        title: its name.
        is_folder: the output is a folder, in which no input is searched.

    Yields:
        Input files, what is read of them, and how the work is done.
    """
    with open_engine(args, JobFolder(Path(args.output)), title) as run_options:
        is_first = run_options.share.task == 0
        with open_input(args, is_folder=is_folder, is_first=is_first) as (sources, read):
            yield sources, read, run_options


def print_estimate(
    args: argparse.Namespace, estimate: Callable[..., str], *, is_folder: bool = True
) -> None:
    """Print the time, disk space and memory of a command, for ``--estimate``.

    Args:
        args: arguments of the command, which writes ``args.output``.
        estimate: formats them, of ``sources``, ``options``, ``nodes`` and ``workers`` per node.
        is_folder: the output is a folder, in which no input is searched.

    Raises:
        ConfigError: the input is standard input.
    """
    if STANDARD_INPUT in args.input:
        raise ConfigError("--input -: --estimate needs files")
    with open_input(args, is_folder=is_folder) as (sources, options):
        nodes, workers = args.nodes or 1, estimated_workers(args)
        print(estimate(sources=sources, options=options, nodes=nodes, workers=workers))


def estimated_workers(args: argparse.Namespace) -> int:
    """Return the worker processes per node, for ``--estimate``."""
    workers: int = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    return max(workers, 1)
