"""Train with several ranks on this machine, restarted after hangs and crashes.

Rank 0 writes to the terminal, the others to logs/ in the run folder. If a rank hangs or crashes,
its name and the reason are logged and all ranks restart from the newest checkpoint. Ctrl-C and
SIGTERM save a checkpoint first.

Example:
  megatron-deberta launch RUN.yaml --ranks 8 train.run_dir=runs/base
"""

from __future__ import annotations

import argparse
import logging
import signal

from megatron_deberta.checkpoint.resume import FLAG
from megatron_deberta.cli.arguments import add_run_arguments
from megatron_deberta.cluster.run_lock import raise_if_locked
from megatron_deberta.cluster.watchdog.local_job import LocalJob
from megatron_deberta.config import load_config, validate_for_world
from megatron_deberta.errors import ConfigError

DEFAULT_RESTARTS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_arguments(parser)
    parser.add_argument(
        "--ranks", type=int, required=True, metavar="N", help="number of ranks, one per GPU"
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=DEFAULT_RESTARTS,
        metavar="N",
        help="restarts after failures (default: %(default)s)",
    )
    parser.add_argument(FLAG, action="store_true", help="passed on to pretrain")


def run(args: argparse.Namespace) -> int:
    """Start and supervise the ranks."""
    if args.ranks < 1 or args.restarts < 0:
        raise ConfigError(
            f"--ranks {args.ranks} must be at least 1 and --restarts {args.restarts} at least 0"
        )
    config = load_config(args.config, args.overrides)
    validate_for_world(config, args.ranks)
    raise_if_locked(config.train.run_dir)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    # As SIGTERM: the ranks save and exit with code 75.
    signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
    options = [FLAG] if args.allow_config_change else []
    arguments = [args.config, *args.overrides, *options]
    return LocalJob(config, arguments, args.ranks, args.restarts).run()
