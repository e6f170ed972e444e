"""Show one view of a run's whole chain of jobs.

megatron-deberta status RUN_DIR
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import asdict

from megatron_deberta.cluster.slurm.status import RunStatus, gather
from megatron_deberta.errors import EXIT_DONE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    status = gather(args.run_dir)
    print(json.dumps(asdict(status), indent=1) if args.json else describe(status))
    return EXIT_DONE


def describe(status: RunStatus) -> str:
    """The view as text."""
    share = f" ({status.step / status.target_step:.1%})" if status.target_step else ""
    loss = "-" if status.loss is None else f"{status.loss:.4f}"
    speed = "-" if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f}"
    lines = [
        f"run      {status.run_dir}",
        f"queue    {status.state}" + (f", job {', '.join(status.jobs)}" if status.jobs else ""),
        f"trains   {status.holder or 'nobody'}",
        f"step     {status.step:,} of {status.target_step:,}{share}; checkpoint at "
        f"{status.committed_step:,}",
        f"loss     {loss}",
        f"tokens/s {speed}",
        f"ETA      {duration(status.seconds_left)}",
        f"restarts {max(0, len(status.links) - 1)}",
    ]
    if status.skipped_updates:
        plural = "s" if status.skipped_updates > 1 else ""
        backs = f", {status.rollbacks} roll-back{'s' if status.rollbacks > 1 else ''}"
        lines.append(
            f"guard    {status.skipped_updates} update{plural} skipped"
            + (backs if status.rollbacks else "")
        )
    lines += [f"slow     {text}" for text in status.slow_ranks]
    lines += [f"avoids   {text}" for text in status.bad_nodes]
    if status.over:
        lines.append(f"over     {status.over}")
    for link in status.links:
        end = "" if link.last_step is None else f" to {link.last_step:,}"
        lines.append(
            f"  {link.name:<12} {link.nodes:<20} step {link.first_step:,}{end}, "
            f"{duration(link.seconds)}: {link.outcome}"
        )
    return "\n".join(lines)


def duration(seconds: float | None) -> str:
    """``1 day, 2:03:04``; a dash for None."""
    return "-" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))
