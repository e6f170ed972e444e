"""Show the status of a run: condition, queue, step, loss, speed, ETA, last event and attempts.

Reads the run folder and SLURM's queue; works without SLURM, too. `next` is the command that one
would usually give next.

Example:
  megatron-deberta status runs/base
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from megatron_deberta.cli.arguments import add_shared, run_folder
from megatron_deberta.cluster.slurm.status import JobAttemptStatus, RunStatus, gather
from megatron_deberta.errors import printable
from megatron_deberta.observe.console import format_duration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_shared(parser, "run_dir", "--json")


def run(args: argparse.Namespace) -> None:
    """Print the status."""
    status = gather(run_folder(args))
    print(json.dumps(asdict(status), indent=1) if args.json else printable(describe(status)))


def describe(status: RunStatus) -> str:
    """Format the status as text, one ``name: value`` per line."""
    percent = f" ({status.step / status.target_step:.1%})" if status.target_step else ""
    speed = status.tokens_per_second
    rows = [
        ("run", status.run_dir),
        ("condition", _condition(status)),
        ("queue", status.state + (f", job {', '.join(status.jobs)}" if status.jobs else "")),
        ("running", status.holder or "no"),
        (
            "step",
            f"{status.step:,} of {status.target_step:,}{percent}; "
            + (
                f"checkpoint at {status.committed_step:,}"
                if status.committed_step
                else "no checkpoint"
            ),
        ),
        ("loss", "-" if status.loss is None else f"{status.loss:.4f}"),
        ("tokens/s", "-" if speed is None else f"{speed:,.0f}"),
        *([("ETA", format_duration(status.seconds_left))] if status.seconds_left else []),
        ("restarts", str(max(0, len(status.attempts) - 1))),
        *([("stop takes", f"up to {status.stop_time}")] if status.stop_time else []),
    ]
    if status.skipped_updates:
        rollbacks = f", rollbacks: {status.rollbacks}" if status.rollbacks else ""
        rows.append(("guard", f"skipped updates: {status.skipped_updates}{rollbacks}"))
    rows += [("straggler", text) for text in status.slow_ranks]
    rows += [("excluded nodes", text) for text in status.bad_nodes]
    if status.over:
        rows.append(("ended", status.over))
    rows.append(("last event", status.last_event or "none"))
    if status.next_command:
        rows.append(("next", status.next_command))
    lines = [f"{name + ':':<16}{value}" for name, value in rows]
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
