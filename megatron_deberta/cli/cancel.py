"""Cancel the jobs of a run: save a checkpoint and end, or end at once.

Pending jobs are removed from the queue. The running job saves a checkpoint at the end of its step
and ends; it is not requeued. A later `submit` continues from the checkpoint.

Examples:
  megatron-deberta cancel runs/base
  megatron-deberta cancel runs/base --now
"""

from __future__ import annotations

import argparse

from megatron_deberta.cli.arguments import add_shared, run_folder
from megatron_deberta.cluster.slurm import commands as slurm
from megatron_deberta.cluster.slurm.history import JobHistory
from megatron_deberta.cluster.slurm.submit import SUBMISSIONS, JobSpec
from megatron_deberta.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_shared(parser, "run_dir")
    parser.add_argument("--now", action="store_true", help="end at once, without a checkpoint")


def run(args: argparse.Namespace) -> None:
    """Cancel all jobs of the run's last submission."""
    history = JobHistory(run_folder(args.run_dir))
    jobs = history.submitted_jobs()
    if not jobs:
        raise ConfigError(f"{args.run_dir}: no job was submitted for it; give the run's folder")
    newest = max((history.run_dir / SUBMISSIONS).glob("*/job.json"))
    signal = f"--signal={JobSpec.read(newest).stop_signal}"
    # First, so that the running job does not requeue itself.
    history.append("cancel", now=args.now)
    for job in jobs:
        slurm.cancel_pending(job)
        if slurm.job_info(job).get("JobState") != "RUNNING":
            continue
        slurm.call(["scancel", job] if args.now else ["scancel", signal, job])
        print(f"job {job}: {'cancelled' if args.now else 'saving, then ending'}")
    print(f"{args.run_dir}: no further job attempt will start")
