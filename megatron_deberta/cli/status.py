"""Show the status of runs: condition, queue, step, loss, speed, ETA, last event and attempts.

Reads the run folders and SLURM's queue; works without SLURM, too. Of one run, everything; `next` is
the command that one would usually give next. Of several, a table with a row per run, in which
folders without a run are left out.

Examples:
  megatron-deberta status runs/base
  megatron-deberta status runs/*
  megatron-deberta status runs/* --json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from megatron_deberta.cli.arguments import add_shared, columns, run_folder
from megatron_deberta.cluster.slurm.status import JobAttemptStatus, RunStatus, gather
from megatron_deberta.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    ConfigError,
    MegatronDebertaError,
    printable,
)
from megatron_deberta.observe.console import format_duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR",
        help="folder of a run (train.run_dir of its configuration)",
    )  # fmt: skip
    add_shared(parser, "--json", help="print JSON; of several runs, a list")


def run(args: argparse.Namespace) -> int:
    """Print the status of one run, or a table of several."""
    if len(args.runs) == 1:
        status = gather(run_folder(args.runs[0]))
        print(json.dumps(asdict(status), indent=1) if args.json else printable(describe(status)))
        return EXIT_DONE
    statuses, damaged, refused = [], False, None
    for run_dir in args.runs:
        try:
            folder = run_folder(run_dir)
        except ConfigError as error:
            refused = error
            continue
        try:
            statuses.append(gather(folder))
        except (MegatronDebertaError, OSError) as error:
            print(printable(f"megatron-deberta: warning: {run_dir}: {error}"), file=sys.stderr)
            damaged = True
    if refused is not None and not statuses and not damaged:
        raise refused
    if args.json:
        print(json.dumps(list(map(asdict, statuses)), indent=1))
    else:
        print(printable(describe_runs(statuses)))
    return EXIT_FAILURE if damaged else EXIT_DONE


def describe_runs(statuses: Sequence[RunStatus]) -> str:
    """Format a table with a row per run."""
    rows = [("run", "state", "step", "tokens/s", "loss", "ETA", "last record", "attempts")]
    for status in statuses:
        speed, recorded = status.tokens_per_second, status.record_time
        age = None if recorded is None else max(0.0, time.time() - recorded)
        rows.append(
            (
                status.run_dir,
                status.condition,
                f"{status.step:,}/{status.target_step:,}",
                "-" if speed is None else f"{speed:,.0f}",
                "-" if status.loss is None else f"{status.loss:.4f}",
                format_duration(status.seconds_left) if status.seconds_left else "-",
                "-" if age is None else f"{format_duration(age)} ago",
                # There are none of `pretrain` without a supervisor.
                str(len(status.attempts) + len(status.earlier_attempts) or "-"),
            )
        )
    return "\n".join(columns(rows, left=2))


def describe(status: RunStatus) -> str:
    """Format the status as text, one ``name: value`` per line."""
    percent = f" ({status.step / status.target_step:.1%})" if status.target_step else ""
    saved = "no checkpoint"
    if status.committed_step:
        saved = f"checkpoint at {status.committed_step:,}"
    speed, rollbacks = status.tokens_per_second, ""
    if status.rollbacks:
        rollbacks = f", rollbacks: {status.rollbacks}"
    rows = [
        ("run", status.run_dir),
        ("condition", _condition(status)),
        ("queue", status.state + (f", job {', '.join(status.jobs)}" if status.jobs else "")),
        ("running", status.holder or "no"),
        ("step", f"{status.step:,} of {status.target_step:,}{percent}; {saved}"),
        ("loss", "-" if status.loss is None else f"{status.loss:.4f}"),
        ("tokens/s", "-" if speed is None else f"{speed:,.0f}"),
        ("ETA", status.seconds_left and format_duration(status.seconds_left)),
        ("restarts", str(max(0, len(status.attempts) - 1))),
        ("stop takes", status.stop_time and f"up to {status.stop_time}"),
        (
            "guard",
            status.skipped_updates and f"skipped updates: {status.skipped_updates}{rollbacks}",
        ),
        *(("straggler", text) for text in status.slow_ranks),
        *(("excluded nodes", text) for text in status.bad_nodes),
        ("ended", status.over),
        ("last event", status.last_event or "none"),
        ("next", status.next_command),
    ]
    lines = [f"{name + ':':<16}{value}" for name, value in rows if value]
    if status.earlier_attempts:
        lines.append("attempts of earlier submissions:")
        lines += map(_describe_attempt, status.earlier_attempts)
        lines.append("attempts of the last submission:" + " none yet" * (not status.attempts))
    lines += map(_describe_attempt, status.attempts)
    return "\n".join(lines)


def _condition(status: RunStatus) -> str:
    """Return the condition and its reason, which may begin with the same word."""
    if status.reason.startswith(status.condition):
        return status.reason
    return f"{status.condition}: {status.reason}".removesuffix(": ")


def _describe_attempt(attempt: JobAttemptStatus) -> str:
    end = "" if attempt.last_step is None else f" to {attempt.last_step:,}"
    spent = "" if attempt.seconds is None else f", {format_duration(attempt.seconds)}"
    return (
        f"  {attempt.name:<12} {attempt.nodes:<20} step {attempt.first_step:,}{end}{spent}: "
        f"{attempt.outcome}"
    )
