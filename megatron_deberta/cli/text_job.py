"""Opening of the engine, input and progress display of the commands for text."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from megatron_deberta.cli.arguments import number, refuse_options
from megatron_deberta.cli.executor_arguments import executor_options, restart
from megatron_deberta.cli.text_input import open_input
from megatron_deberta.errors import ConfigError
from megatron_deberta.text.jobs.executors import RunOptions, remote_engine
from megatron_deberta.text.jobs.folder import JobFolder
from megatron_deberta.text.jobs.progress import ProgressDisplay
from megatron_deberta.text.readers.records import ReadOptions
from megatron_deberta.text.readers.sources import STANDARD_INPUT, Source


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
    refuse_options(args, {"nodes": "--nodes"}, "is for --estimate")
    executor = executor_options(args)
    with remote_engine(executor) as engine:
        folder.remove_leftovers()
        folder.refuse_foreign()
        if args.restart:
            restart(folder)
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
    args: argparse.Namespace, output: Path, title: str, *, is_folder: bool = True
) -> Iterator[tuple[list[Source], ReadOptions, RunOptions]]:
    """Open the engine, the input and the progress display of a command.

    Args:
        args: arguments of the command.
        output: what it writes.
        title: its name.
        is_folder: ``output`` is a folder, in which no input is searched.

    Yields:
        Input files, what is read of them, and how the work is done.
    """
    folder = JobFolder(output)
    own = output if is_folder else None
    with open_engine(args, folder, title) as run_options:
        is_first = run_options.share.task == 0
        with open_input(args, folder.path, output=own, is_first=is_first) as (sources, read):
            yield sources, read, run_options


def add_estimate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``--estimate`` and ``--nodes``."""
    parser.add_argument(
        "--estimate", action="store_true",
        help="only print how much time, disk and memory it would take",
    )  # fmt: skip
    parser.add_argument(
        "--nodes", type=number(int, 1), metavar="N",
        help="with --estimate: nodes, each with --workers processes (default: 1)",
    )  # fmt: skip


@contextlib.contextmanager
def estimated_input(
    args: argparse.Namespace, output: Path, *, is_folder: bool = True
) -> Iterator[tuple[list[Source], ReadOptions, int]]:
    """Open the input for ``--estimate``.

    Args:
        args: parsed arguments of the command.
        output: output of the command.
        is_folder: the output is a folder, which is no input.

    Yields:
        Input files, what is read of them, and the worker processes per node.

    Raises:
        ConfigError: the input is standard input.
    """
    if STANDARD_INPUT in args.input:
        raise ConfigError("--input -: --estimate needs files")
    own = output if is_folder else None
    with open_input(args, JobFolder(output).path, output=own) as (sources, read):
        yield sources, read, estimated_workers(args)


def estimated_workers(args: argparse.Namespace) -> int:
    """Return the worker processes per node, for ``--estimate``."""
    workers: int = len(os.sched_getaffinity(0)) if args.workers is None else args.workers
    return max(workers, 1)
