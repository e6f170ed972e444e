"""Train with several ranks on this machine, restarted after hangs and crashes.

Each rank writes to logs/ in the run folder, and rank 0 also to the terminal. If a rank hangs or
crashes, its name and the reason are logged and all ranks restart from the newest checkpoint. Ctrl-C
and SIGTERM save a checkpoint first.

Examples:
  megatron-deberta launch RUN.yaml --ranks 8 train.run_dir=runs/base
  megatron-deberta launch RUN.yaml --ranks 8 --dry-run
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_deberta.checkpoint.resume import FLAG
from megatron_deberta.cli.arguments import add_run_arguments, add_shared
from megatron_deberta.cluster.run_lock import raise_if_locked
from megatron_deberta.cluster.watchdog.supervisor import rank_command, run_local_job
from megatron_deberta.config import load_config, save_config, validate_for_world
from megatron_deberta.config.schema import RunConfig
from megatron_deberta.errors import EXIT_DONE
from megatron_deberta.observe.console import log_times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_arguments(parser)
    add_shared(
        parser, "--ranks", required=True,
        help="number of ranks (training processes) on this machine, one per GPU; submit starts a "
        "run on several nodes",
    )  # fmt: skip
    add_shared(parser, "--max-restarts")
    add_shared(
        parser, "--dry-run",
        help="print the resolved configuration, ranks, batch, parameters and the command of each "
        "rank, and exit",
    )  # fmt: skip
    add_shared(parser, "--allow-config-change")


def run(args: argparse.Namespace) -> int:
    """Start and supervise the ranks."""
    config = load_config(args.config, args.overrides)
    if args.dry_run:
        from megatron_deberta.cli.pretrain import describe_run

        print(describe_run(config, args.ranks))
        command = rank_command(_arguments(args, [args.config, *args.overrides]))
        print(
            f"starts {args.ranks} ranks, and up to {args.max_restarts} times again after a failure:"
        )
        print(f"  {shlex.join(command)}")
        return EXIT_DONE
    return launch(config, args, [args.config, *args.overrides], args.max_restarts)


def _arguments(args: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """Return the arguments of each rank's ``pretrain``."""
    return [*arguments, *([FLAG] if args.allow_config_change else [])]


def launch(
    config: RunConfig,
    args: argparse.Namespace,
    arguments: Sequence[str],
    restarts: int,
    run_file: Path | None = None,
) -> int:
    """Start and supervise the ranks of a run.

    Args:
        config: the run.
        args: ``ranks`` and ``allow_config_change``.
        arguments: of ``pretrain``, which each rank runs.
        restarts: most restarts after failures.
        run_file: where the run is saved before; None: nowhere.

    Returns:
        The exit code.
    """
    validate_for_world(config, args.ranks)
    raise_if_locked(config.train.run_dir)
    log_times()
    if run_file is not None:
        run_file.parent.mkdir(parents=True, exist_ok=True)
        save_config(config, run_file)
    return run_local_job(config, _arguments(args, arguments), args.ranks, restarts)
