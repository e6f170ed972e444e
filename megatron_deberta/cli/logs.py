"""Print or follow the log of a rank, across the job attempts of a run.

`launch` and `submit` write a log per rank and attempt; `pretrain` alone writes to its terminal.

Examples:
  megatron-deberta logs runs/base
  megatron-deberta logs -f runs/base --rank 3
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_deberta.cli.arguments import add_shared, run_folder
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.slurm.submit import LOGS
from megatron_deberta.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_shared(parser, "run_dir")
    parser.add_argument(
        "--rank", type=int, default=0, metavar="N", help="rank whose log is printed"
    )
    parser.add_argument(
        "--all-attempts", action="store_true",
        help="begin with the first job attempt instead of the newest",
    )  # fmt: skip
    parser.add_argument(
        "-f", "--follow", action="store_true", help="print new lines until the run ends"
    )


def run(args: argparse.Namespace) -> None:
    """Print the log."""
    run_dir = run_folder(args.run_dir)
    if not attempt_logs(run_dir / LOGS, args.rank) and not args.follow:
        ranks = sorted({int(log.stem[5:]) for log in (run_dir / LOGS).glob("*.*/rank_*.log")})
        remedy = (
            "pretrain without launch or submit writes to its terminal and metrics.jsonl only; "
            "otherwise wait, or use --follow"
        )
        if ranks:
            remedy = f"there are those of ranks {ranks[0]} to {ranks[-1]}"
        raise ConfigError(f"{run_dir / LOGS}: no log of rank {args.rank}; {remedy}")
    for text in read(run_dir, args.rank, follow=args.follow, all_attempts=args.all_attempts):
        sys.stdout.write(text)
        sys.stdout.flush()


def attempt_logs(folder: Path, rank: int) -> list[Path]:
    """Return the logs of a rank, one per job attempt, in order."""
    found = folder.glob(f"*.*/rank_{rank}.log")
    return sorted(found, key=lambda path: tuple(map(int, re.split("[._]", path.parent.name))))


def read(run_dir: Path, rank: int, *, follow: bool, all_attempts: bool) -> Iterator[str]:
    """Yield the text of a rank's logs, in pieces.

    Args:
        run_dir: the run folder.
        rank: rank whose logs are read.
        follow: wait for more text until the run ends.
        all_attempts: begin with the first job attempt instead of the last.
    """
    folder, history = run_dir / LOGS, JobHistory(run_dir)
    current: Path | None = None
    position = 0
    while True:
        # Before reading, so that the last lines of an attempt are read.
        ended = bool(history.end_reason()) and not history.unfinished_attempt()
        logs = attempt_logs(folder, rank)
        if current is None and logs:
            current = logs[0 if all_attempts else -1]
        if current is not None:
            with current.open("rb") as stream:
                stream.seek(position)
                text = stream.read()
            position += len(text)
            yield text.decode(errors="replace")
            later = logs[logs.index(current) + 1 :]
            if later:
                current, position = later[0], 0
                yield f"== {current}\n"
                continue
        if ended or not follow:
            return
        time.sleep(0.5)
