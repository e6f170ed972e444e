"""Train with several ranks on this machine, watched, and started again after a hang or a crash.

megatron-deberta launch RUN.yaml --ranks 8 [section.key=value ...]

Rank 0 writes to the terminal, the others to logs/ in the run's folder. A rank that hangs is named
and all are started again from the newest checkpoint. Ctrl-C and SIGTERM save first.
"""

from __future__ import annotations

import argparse
import logging
import signal

from megatron_deberta.checkpoint.resume import FLAG
from megatron_deberta.cli.arguments import add_run_arguments
from megatron_deberta.cluster.run_lock import refuse_if_held
from megatron_deberta.cluster.watchdog.local_job import LocalLink
from megatron_deberta.config import load_config, validate_for_world
from megatron_deberta.errors import ConfigError

DEFAULT_RESTARTS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run_arguments(parser)
    parser.add_argument("--ranks", type=int, required=True, help="one a GPU")
    parser.add_argument(
        "--restarts",
        type=int,
        default=DEFAULT_RESTARTS,
        help=f"how often to start again after a failure; default: {DEFAULT_RESTARTS}",
    )
    parser.add_argument(FLAG, action="store_true", help="passed on to pretrain")


def run(args: argparse.Namespace) -> int:
    """Start, watch, start again."""
    if args.ranks < 1 or args.restarts < 0:
        raise ConfigError(f"--ranks {args.ranks} --restarts {args.restarts}: at least 1 and 0")
    config = load_config(args.config, args.overrides)
    validate_for_world(config, args.ranks)
    refuse_if_held(config.train.run_dir)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    # As SIGTERM: the ranks save, and end with 75.
    signal.signal(signal.SIGINT, lambda *_: signal.raise_signal(signal.SIGTERM))
    options = [FLAG] if args.allow_config_change else []
    arguments = [args.config, *args.overrides, *options]
    return LocalLink(config, arguments, args.ranks, args.restarts).run()
